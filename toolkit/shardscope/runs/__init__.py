"""Real runs, each one folder on disk: launching (on Slurm and Ray too: ``backends/``), watching, stopping,
explaining and comparing them; merging, chatting with and publishing trained models; calibration.
"""
