"""The program ``shardscope``, for login nodes and CI: thin over the public interface.

``main.py`` has its parser and exit codes. Only the program itself imports from here.
"""
