"""Backends: launches on several nodes by ``ss.Slurm`` (``slurm.py``) and ``ss.Ray`` (``ray/target.py``).

Each node starts ``node_process.py`` or ``ray/node.py``, which start the supervisor of ``runs/launch``.
"""
