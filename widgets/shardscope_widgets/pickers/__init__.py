"""Pickers, one for each question of the Studio: ``.value`` is the object, errors are shown at their input."""

from shardscope_widgets.pickers.architecture import ArchitecturePicker
from shardscope_widgets.pickers.cluster import ClusterPicker
from shardscope_widgets.pickers.layout import LayoutPicker
from shardscope_widgets.pickers.recipe import RecipePicker
from shardscope_widgets.pickers.task import RunOptions, TaskPicker

__all__ = [
    "ArchitecturePicker",
    "ClusterPicker",
    "LayoutPicker",
    "RecipePicker",
    "RunOptions",
    "TaskPicker",
]
