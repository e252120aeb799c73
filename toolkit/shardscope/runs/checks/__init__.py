"""Checks of what will run: the user's script or function, its data, and earlier runs. A script is
only read.

Others use ``findings.findings`` (of a plan and its task) and ``findings.findings_in`` (of a script's text).
"""
