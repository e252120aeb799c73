"""The command ``shardscope``, for login nodes and CI: thin over the public interface.

``main.py`` has the parser and the exit codes. Nobody imports from here but the command itself.
"""
