"""DDP layouts that a search evaluates: there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.ddp.layout import DdpLayout
from shardscope.frameworks.search_grid import Grid, combine_degrees

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.recipe import Recipe


def build_grids(arch: Architecture, cluster: Cluster, recipe: Recipe) -> list[Grid]:
    """Return the one grid: every rank is a replica."""
    return [Grid(layout=DdpLayout(), columns=combine_degrees(cluster, recipe, {}))]
