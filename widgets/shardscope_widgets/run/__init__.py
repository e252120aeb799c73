"""The run views: launching and watching runs, logs, and exported files."""
