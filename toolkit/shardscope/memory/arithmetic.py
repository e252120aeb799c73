"""The few operations that must mean the same for a number and for an array of plans."""

from __future__ import annotations

from typing import Any

import numpy as np


def smallest(first: Any, second: Any) -> Any:
    """The smaller of two, element by element if either is an array."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.minimum(first, second)
    return first if first <= second else second


def ceil_div(amount: Any, parts: Any) -> Any:
    """``amount / parts`` rounded up: what the fullest of ``parts`` ranks holds."""
    return -(-amount // parts)


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """``then`` where the condition holds, element by element if it is an array."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, then, otherwise)
    return then if condition else otherwise
