"""The course's exercises: checks with hints, learners' attempts, and progress of all learners.

``from shardscope import teach`` is cheap and imports no torch. ``notebooks/01_...`` and later use it.
"""

from shardscope.teach.attempts import leaderboard, progress
from shardscope.teach.checking import check
from shardscope.teach.feedback import Feedback, needs
from shardscope.teach.layout_puzzles import Puzzle, puzzles

__all__ = ["Feedback", "Puzzle", "check", "leaderboard", "needs", "progress", "puzzles"]
