"""Static checks of the user's script or function, its data, and earlier runs. No user code is executed.

Other packages use ``findings.collect_findings`` (for a plan and its task) and ``findings.check_script`` (for
the text of a script).
"""
