"""What a transformers config says beside sizes, in the words of ``TransformerConfig`` and ``GPTModel``."""

from __future__ import annotations

from typing import Any


def core_numbers(hf_config: Any) -> dict[str, Any]:
    """Arguments of ``TransformerConfig`` that make a ``GPTModel`` compute what transformers does.

    Norm epsilon, activation function, router's order of softmax and choice, no auxiliary loss.
    """
    raise NotImplementedError


def model_numbers(hf_config: Any) -> dict[str, Any]:
    """Arguments of ``GPTModel``: the base of the rotary angles and their scaling.

    Raises ``ValueError`` for angles that megatron-core cannot scale so.
    """
    raise NotImplementedError
