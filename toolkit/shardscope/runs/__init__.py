"""Real runs, each one folder on disk: launching, watching, stopping, explaining and comparing them;
merging and chatting with trained models; calibration.
"""
