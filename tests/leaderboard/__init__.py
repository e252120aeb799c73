"""Public estimators of memory and step time compared with Shardscope: ``make leaderboard``."""
