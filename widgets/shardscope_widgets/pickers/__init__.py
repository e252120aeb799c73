"""Four questions, each a picker that stands alone: ``.value`` is the noun, errors stand at their input."""

from shardscope_widgets.pickers.architecture import ArchitecturePicker
from shardscope_widgets.pickers.cluster import ClusterPicker
from shardscope_widgets.pickers.layout import LayoutPicker
from shardscope_widgets.pickers.recipe import RecipePicker

__all__ = ["ArchitecturePicker", "ClusterPicker", "LayoutPicker", "RecipePicker"]
