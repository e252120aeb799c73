"""Checks of what will be run: the user's script or function, and earlier runs. A script is only read.

Others use ``findings.findings`` (of a plan and its task) and ``findings.findings_in`` (of a script's text).
"""
