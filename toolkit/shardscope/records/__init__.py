"""Files of run folders, which may be untrusted: paths, readers, writers, checks, masking of secrets.

``regular_files`` opens them, ``json_values`` parses them.
"""
