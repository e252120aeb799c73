"""Files of run folders, which anybody may have written.

``regular_files`` opens them, ``json_values`` parses them.
"""
