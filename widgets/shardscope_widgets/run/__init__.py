"""The run views: launching, watching, logs, and files for training elsewhere."""
