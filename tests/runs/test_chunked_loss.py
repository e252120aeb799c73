"""The chunked loss: the same numbers as the plain one, and the memory that the formula says."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.operator_peak import Peak

from shardscope.memory.activations import head
from shardscope.memory.activations.modules.saved_tensors import Modules
from shardscope.training.model.loss import chunked_cross_entropy


@pytest.mark.parametrize("mode", ["bf16", "fp32", "autocast"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("vocab", "hidden", "chunk"), [(1000, 64, 128), (1000, 512, 128), (600, 256, 256)])
def test_loss_memory_is_as_predicted(
    monkeypatch: pytest.MonkeyPatch, mode: str, trained: bool, vocab: int, hidden: int, chunk: int
) -> None:
    tokens = 512
    monkeypatch.setattr(head, "LOSS_CHUNK_TOKENS", chunk)
    kind = torch.bfloat16 if mode == "bf16" else torch.float32
    states = torch.randn(tokens, hidden, dtype=kind, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=kind, requires_grad=trained)
    labels = torch.randint(0, vocab, (tokens,))
    modules = Modules(
        kernels="transformers",
        autocast=mode == "autocast",
        compute=4 if mode == "fp32" else 2,
        seq_len=tokens,
        targets=None if trained else ("q_proj",),
    )
    predicted = head.compute_chunked_loss(tokens, vocab, hidden, modules)
    # What autocast makes of the weight is counted with all such copies, and casts of the hidden states with
    # the activations.
    cast = vocab * hidden * 2 if mode == "autocast" else 0
    slack = 3 * chunk * hidden * states.element_size() + 64 * chunk
    casting = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else contextlib.nullcontext()
    watch = Peak([states, weight, labels])
    with watch, casting:
        loss = chunked_cross_entropy(states, weight, labels, chunk)
    # A frozen weight's copy is not kept past its product.
    assert abs(watch.most - cast * trained - predicted.forward) <= slack
    watch.most = 0
    with watch:
        loss.backward()
    assert abs(watch.most - cast - predicted.backward) <= slack


def test_chunked_loss_equals_the_plain_loss() -> None:
    torch.manual_seed(0)
    states = torch.randn(300, 32, requires_grad=True)
    weight = torch.randn(80, 32, requires_grad=True)
    labels = torch.randint(0, 80, (300,))
    labels[::7] = -100
    plain = F.cross_entropy(F.linear(states, weight), labels, reduction="sum")
    chunked = chunked_cross_entropy(states, weight, labels, 64)
    torch.testing.assert_close(chunked, plain)
    for one, other in zip(
        torch.autograd.grad(chunked, (states, weight)),
        torch.autograd.grad(plain, (states, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("formula", [head.compute_chunked_loss, head.compute_fused_loss])
def test_arrays_give_the_same_bytes_as_numbers(formula: Any) -> None:
    modules = Modules(kernels="liger", autocast=False, compute=2, seq_len=64)
    tokens = np.array([1, 7, 512, 4096, 40_000], dtype=np.int64)
    together = formula(tokens, 128_256, 4096, modules)
    for index, number in enumerate(tokens.tolist()):
        alone = formula(number, 128_256, 4096, modules)
        assert (together.forward[index], together.backward[index]) == tuple(alone)


def test_liger_loss_memory_equals_a_hand_count() -> None:
    """Llama-3.1-8B at 4,096 tokens: inc_factor 32, so chunks of 128 tokens, as Liger's own lines compute."""
    modules = Modules(kernels="liger", autocast=False, compute=2, seq_len=4096)
    found = head.compute_fused_loss(4096, 128_256, 4096, modules)
    kept = 2 * 4096 * (4096 + 128_256)
    assert found.backward == kept
    assert found.forward == kept + 2 * 128 * 128_256
