"""The Studio: foldable questions on the left, the plan's answers on the right, one sentence above both.

``Studio`` is the only name that others use.
"""

from shardscope_widgets.studio.view import Studio

__all__ = ["Studio"]
