"""Reading of profiler traces: files in chunks, events to columns, ranks on one time axis, caches.

``read_ranks`` of ``ranks.py`` is the interface: the columns of every rank of a file, a folder or a run.
"""
