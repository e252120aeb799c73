"""Weights of transformers as those of Megatron's ``GPTModel``, and back: pure functions over tensors.

What goes where is in :mod:`~shardscope.frameworks.megatron.hf_names`; here it is cut and put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.frameworks.megatron.hf_names import Pair


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of the model one model chunk of one rank holds."""

    layers: tuple[int, ...]
    """Its decoder layers, counted from 0 through the whole model."""
    embedding: bool = True
    """Whether the embedding is here (``pre_process``)."""
    head: bool = True
    """Whether the final norm and the head are here (``post_process``)."""
    tp_rank: int = 0
    tp_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1


def hf_to_megatron(
    state: Mapping[str, torch.Tensor], arch: Architecture, part: Part
) -> dict[str, torch.Tensor]:
    """``GPTModel``'s parameters by name, of that part alone, from the whole model's state of transformers.

    Names count layers and experts from 0 within the part, as a chunk's own ``named_parameters()`` do.
    Raises ``KeyError`` for a parameter that ``state`` lacks.
    """
    raise NotImplementedError


def megatron_tensor(state: Mapping[str, torch.Tensor], arch: Architecture, pair: Pair) -> torch.Tensor:
    """One parameter of Megatron's, whole."""
    raise NotImplementedError


def hf_tensors(whole: torch.Tensor, arch: Architecture, pair: Pair) -> tuple[torch.Tensor, ...]:
    """What transformers has of one whole parameter of Megatron's, in the order of ``pair.hf``."""
    raise NotImplementedError


def cut(whole: torch.Tensor, pair: Pair, rank: int, size: int) -> torch.Tensor:
    """One rank's part of a whole parameter of Megatron's."""
    raise NotImplementedError


def join(parts: Sequence[torch.Tensor], pair: Pair) -> torch.Tensor:
    """The whole parameter of which ``parts``, in the order of their ranks, were cut."""
    raise NotImplementedError
