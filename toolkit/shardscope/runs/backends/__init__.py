"""Backends: launches on several nodes, through ``ss.Slurm`` (``slurm.py``) and ``ss.Ray`` (``ray.py``).

Each node starts ``node_process.py`` or ``ray/node.py``, which start the supervisor of ``runs/launch``.
"""
