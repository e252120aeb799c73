"""Public estimators of memory and step time, and ours, on the same rows: ``make leaderboard``."""
