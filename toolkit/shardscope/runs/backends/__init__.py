"""Backends: launches on several nodes, through ``ss.Slurm`` (``slurm.py``) and ``ss.Ray`` (``ray.py``).

Each node starts ``node_process.py`` or ``ray_node.py``, which start the supervisor of ``runs/launch``.
"""
