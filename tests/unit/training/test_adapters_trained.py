"""Tests of the layouts that train adapters, by base and precision; all others are rejected."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from tests.requirements import needs_installed

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.frameworks.registry import why_not_trained

FOUR = ss.Cluster.parse("4xcpu")
SMALL = replace(ss.Architecture.of_size("2m"), num_hidden_layers=4)
BASES: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "lora over nf4": {"method": "lora", "quantization": "nf4"},
    "lora over int8": {"method": "lora", "quantization": "int8"},
}
PRECISIONS = ("fp32", "bf16", "bf16-mixed", "fp16-mixed")
LAYOUTS: dict[str, ss.Layout] = {
    "ddp": ss.Layout.ddp(),
    "fsdp2": ss.Layout.fsdp2(),
    "hsdp": ss.Layout.fsdp2(shard=2, replicate=2),
    "fsdp2 offload": ss.Layout.fsdp2(offload="cpu"),
    "fsdp2 tp": ss.Layout.fsdp2(tp=2),
    "fsdp2 pp": ss.Layout.fsdp2(pp=2),
    **{f"zero-{stage}": ss.Layout.zero(stage=stage) for stage in range(4)},
    "zero-3 offload": ss.Layout.zero(stage=3, offload_optimizer="cpu", offload_params="cpu"),
    "zero-1 pp": ss.Layout.zero(stage=1, pp=2),
    "zero-1 tp": ss.Layout.zero(stage=1, tp=2),
    "megatron": ss.Layout.megatron(),
    "megatron tp": ss.Layout.megatron(tp=2),
}
ADAPTED = {name: {"lora": PRECISIONS} for name in ("zero-1", "zero-2", "zero-3", "zero-3 offload")}
WHOLE = dict.fromkeys(("lora", "qlora", "lora over nf4"), PRECISIONS)
TRAINED: dict[str, dict[str, tuple[str, ...]]] = {
    "ddp": {**WHOLE, "lora over int8": ("fp32", "bf16")},
    "fsdp2": WHOLE,
    "hsdp": WHOLE,
    "fsdp2 offload": {"lora": PRECISIONS},
    # In stage 0 DeepSpeed scales no loss.
    "zero-0": {"lora": ("fp32", "bf16", "bf16-mixed")},
    **ADAPTED,
}
"""All that trains: layout, base, precisions. Each combination that is not here is refused."""


@pytest.fixture(autouse=True)
def a_processor_with_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the processor has AVX512-FP16, which DeepSpeed needs to train in fp16."""
    monkeypatch.setattr("shardscope.frameworks.deepspeed.limits.multiplies_in_fp16", lambda: True)


def read_reason(layout: ss.Layout, **recipe: Any) -> str | None:
    """Return the reason why the plan cannot be trained; None if it can."""
    try:
        plan = ss.Plan(SMALL, FOUR, ss.Recipe(seq_len=64, global_batch_size=8, **recipe), layout)
    except FieldError as refusal:
        return str(refusal)
    return why_not_trained(plan)


@needs_installed("peft")
@needs_installed("bitsandbytes")
@needs_installed("deepspeed")
@needs_installed("megatron")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_base_and_precision_is_trained_or_refused_by_name(layout: str) -> None:
    for base, precision in product(BASES, PRECISIONS):
        why = read_reason(LAYOUTS[layout], precision=precision, **BASES[base])
        if precision in TRAINED.get(layout, {}).get(base, ()):
            assert why is None, (layout, base, precision, why)
            continue
        assert why is not None, (layout, base, precision)
        owner, _, field = why.partition(" is ")[0].partition(".")
        named = {"Recipe": ("method", "quantization"), "Layout": ("tp", "offload", "stage")}
        assert field in named[owner]
        assert "Nearest fix: " in why


@needs_installed("deepspeed")
@needs_installed("megatron")
@pytest.mark.parametrize("layout", ["zero-0", "zero-1", "zero-2", "zero-3", "zero-1 pp", "megatron"])
def test_the_fix_for_a_4_bit_base_is_an_engine_that_trains_it(layout: str) -> None:
    why = read_reason(LAYOUTS[layout], precision="bf16-mixed", method="qlora")
    assert why is not None and why.endswith("Nearest fix: layout=Layout.fsdp2().")
