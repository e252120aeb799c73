"""The files of run folders, which anybody may have written: paths, readers, writers, checks, masked
secrets.

``regular_files`` opens them, ``json_values`` parses them.
"""
