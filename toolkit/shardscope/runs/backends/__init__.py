"""Backends: where a run's nodes come from. ``slurm.py`` has ``ss.Slurm``; a run of this machine needs none.

Every node runs ``node_process.py``, and in it the supervisor of ``runs/launch``.
"""
