"""Options of Megatron-core that a row's own words or its source's published recipe choose."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tests.accuracy.layouts import Framework
from tests.accuracy.own_code import is_bridge, is_moonlight_recipe
from tests.accuracy.rows import Row, join_fields

import shardscope as ss

_HALF = r"(?:bf16|bfloat16)"
_PRECISION_AWARE = re.compile(r"(?:use[-_ ])?precision[-_ ]aware(?:[-_ ]optimizer)?")
_MOMENTS_IN_BF16 = re.compile(
    rf"(?:moments?|states?|exp_avg\w*)[-_ =:]*(?:in|as|dtype)?[-_ =:]*{_HALF}|{_HALF} (?:moments?|states?)"
)
_GRADIENTS_IN_BF16 = re.compile(
    rf"grad[-_ ]reduce[-_ ]in[-_ ]{_HALF}|grad_reduce_in_fp32[ =:]*false"
    rf"|(?:grads?|gradients?) (?:reduced? )?in {_HALF}"
)


def megatron_options(row: Row, kind: Framework) -> tuple[Row, dict[str, Any]]:
    """The row without its words for these options, and the options by name; none of another framework.

    Megatron-Bridge's fast recipes (perf_recipes/_common.py, ``_benchmark_common``, and
    recipes/moonlight/h100/moonlight_16b.py): ``grad_reduce_in_fp32 = False`` and
    ``cross_entropy_fusion_impl = "te"``; that of Moonlight keeps both moments in bf16. Where its
    configuration names an fp8 recipe, Megatron-core keeps whole fp32 weights and gradients beside
    (``optimizer_config.py``); the pages do not say, and calibration rows, 13 GB below that, chose.
    """
    if kind.family != "megatron" or kind.name == "nanotron":
        return row, {}
    said, options = join_fields(row, "optimizer"), dict[str, Any]()
    if is_moonlight_recipe(row) or _PRECISION_AWARE.search(said):
        options["use_precision_aware_optimizer"] = True
        if is_moonlight_recipe(row) or _MOMENTS_IN_BF16.search(said):
            options.update(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    is_fast_recipe = is_bridge(row) and (
        "ep overlap" in join_fields(row, "table") or is_moonlight_recipe(row)
    )
    if is_fast_recipe or _GRADIENTS_IN_BF16.search(join_fields(row, "optimizer", "precision")):
        options["grad_reduce_in_fp32"] = False
    if is_fast_recipe:
        options["cross_entropy_fusion_impl"] = "te"
    patterns = [_GRADIENTS_IN_BF16]
    if "use_precision_aware_optimizer" in options:
        # Other frameworks' and plain Adam's moments in bf16 are words that nobody here knows.
        patterns += [_MOMENTS_IN_BF16, _PRECISION_AWARE]
    return {
        **row,
        **{key: _remove_options(row, key, patterns) for key in ("optimizer", "precision")},
    }, options


def with_options(what: ss.Recipe, spread: ss.Layout, options: dict[str, Any]) -> tuple[ss.Recipe, ss.Layout]:
    """A recipe and a layout with them."""
    if "cross_entropy_fusion_impl" in options:
        what = replace(what, loss="fused")
    return what, replace(spread, **options)


def _remove_options(row: Row, key: str, patterns: list[re.Pattern[str]]) -> Any:
    found = row.get(key)
    if not isinstance(found, str):
        return found
    for pattern in patterns:
        found = pattern.sub(" ", found.lower()) if pattern.search(found.lower()) else found
    return found.strip(" ,;+") or None
