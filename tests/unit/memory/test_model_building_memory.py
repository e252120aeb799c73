"""Tests of host memory while ranks build their model, and of nodes that have too little of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from tests.launch_offers import offer_for, read_verdict
from tests.requirements import thorough

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.memory.report import Term
from shardscope.planner.memory_needs import find_shortages, fits, list_memory_needs
from shardscope.planner.repairs.repairs import describe_repairs

GIB = 2**30
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
LLAMA = ss.models["llama-3.1-8b"]
BUILDING_NEED = "host memory while the model is built"


def compute_building_bytes(layout: ss.Layout, model: str = "llama-3.1-8b", **recipe: Any) -> Term:
    plan = ss.Plan(ss.models[model], EIGHT, ss.Recipe(**recipe), layout)
    return frameworks[layout.framework].building_model().compute_host_memory(plan)


def test_unsharded_initialization_needs_the_model_in_fp32() -> None:
    for layout in (ss.Layout.ddp(), ss.Layout.zero(0), ss.Layout.zero(1), ss.Layout.zero(2)):
        for precision in ("bf16-mixed", "bf16", "fp32"):
            assert compute_building_bytes(layout, precision=precision).num_bytes == 4 * LLAMA.num_parameters
    assert (
        "8,030,261,248 parameters × 4 bytes = 29.9 GiB" in compute_building_bytes(ss.Layout.ddp()).explain()
    )


def test_adapters_add_their_own_bytes() -> None:
    adapters = (
        compute_building_bytes(ss.Layout.ddp(), method="lora", lora_rank=8).num_bytes
        - 4 * LLAMA.num_parameters
    )
    # q: 4096 + 4096, k and v: 4096 + 1024, o: 4096 + 4096; rank 8, 32 layers.
    assert adapters == 4 * 8 * 32 * (2 * 8192 + 2 * 5120)


def test_sharded_initialization_needs_no_host_memory() -> None:
    assert compute_building_bytes(ss.Layout.fsdp2()).num_bytes == 0
    assert compute_building_bytes(ss.Layout.zero(3)).num_bytes == 0
    assert compute_building_bytes(ss.Layout.megatron(tp=2)).num_bytes == 0
    assert "meta device" in compute_building_bytes(ss.Layout.fsdp2()).explain()


@pytest.mark.parametrize("layout", [ss.Layout.fsdp2(), ss.Layout.zero(3)], ids=["fsdp2", "zero-3"])
def test_small_models_are_built_unsharded_by_every_framework(layout: ss.Layout) -> None:
    small = ss.models["gpt2"]
    assert compute_building_bytes(layout, "gpt2", seq_len=1024).num_bytes == 4 * small.num_parameters


def test_deepspeed_pipeline_stages_build_only_their_layers() -> None:
    term = compute_building_bytes(ss.Layout.zero(1, pp=2))
    # Half of the layers, and the embedding of the first stage or the head of the last with the final norm.
    edge = LLAMA.vocab_size * LLAMA.hidden_size
    norm = LLAMA.hidden_size
    layers = LLAMA.num_parameters - 2 * edge - norm
    assert term.num_bytes == 4 * (layers // 2 + edge + norm)
    assert "of its own stage" in term.explain()


def test_stages_of_small_models_are_built_unsharded() -> None:
    small = "llama-3.2-1b"
    assert (
        compute_building_bytes(ss.Layout.zero(1, pp=2), small).num_bytes
        < compute_building_bytes(ss.Layout.zero(1), small).num_bytes
    )
    tiny = ss.Architecture.of_size("100m")
    plan = ss.Plan(tiny, EIGHT, ss.Recipe(seq_len=256), ss.Layout.zero(1, pp=2))
    term = frameworks["deepspeed"].building_model().compute_host_memory(plan)
    assert term.num_bytes == 4 * tiny.num_parameters


@pytest.mark.parametrize("layout", [ss.Layout.ddp(), ss.Layout.fsdp2()], ids=["ddp", "fsdp2"])
def test_a_quantized_base_is_packed_while_it_is_read(layout: ss.Layout) -> None:
    """4.1 bits per Linear weight with double quantization (Dettmers et al. 2023); bf16 embeddings."""
    edges = 2 * LLAMA.vocab_size * LLAMA.hidden_size
    expected = 2 * edges + (LLAMA.num_parameters - edges) * 4.127 / 8
    adapters = 4 * 16 * 32 * (2 * 8192 + 2 * 5120)
    # One feed-forward matrix in bf16, and three times in fp32 while it is packed.
    one = (2 + 12) * LLAMA.hidden_size * LLAMA.intermediate_size
    found = compute_building_bytes(layout, method="qlora", precision="bf16").num_bytes
    assert found == pytest.approx(expected + adapters + one, rel=0.002)


def test_cpu_ranks_have_no_separate_building_need() -> None:
    plan = ss.Plan(ss.models["gpt2"], ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=128), ss.Layout.ddp())
    assert BUILDING_NEED not in {place.name for place in list_memory_needs(plan, plan.memory())}


@thorough()
def test_measured_building_memory_of_transformers_is_fp32() -> None:
    """The resident memory of a new process grows by at most the model in fp32."""
    program = """
import psutil, torch, transformers
import shardscope as ss
from shardscope.training.model.model import build_model
build_model(ss.Architecture.of_size("2m"))  # what the first model loads of libraries is none of it
architecture = ss.Architecture.of_size("400m")
before = psutil.Process().memory_info().rss
model = build_model(architecture).to(torch.bfloat16)
# Not getrusage: its ru_maxrss has the size of the process that forked this one.
status = open("/proc/self/status").read()
grown = 1024 * int(status.partition("VmHWM:")[2].split()[0]) - before
print(grown / (4 * architecture.num_parameters))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert 0.9 < float(done.stdout) < 1.15


# ----------------------------------------------------------------------------------------- nodes


@pytest.fixture
def plan_with_little_host_memory() -> ss.Plan:
    """Plan that fits on the GPU, on a node too small for eight ranks that build 29.9 GiB each."""
    node = replace(EIGHT, host_memory_bytes=128 * GIB)
    return ss.Plan(LLAMA, node, ss.Recipe(), ss.Layout.zero(2))


def test_a_node_too_small_to_build_the_model_does_not_fit(plan_with_little_host_memory: ss.Plan) -> None:
    report = plan_with_little_host_memory.memory()
    assert report.fits and not fits(plan_with_little_host_memory, report)
    (shortage,) = find_shortages(plan_with_little_host_memory, report)
    assert (shortage.name, shortage.needed_bytes) == (BUILDING_NEED, 8 * 4 * LLAMA.num_parameters)
    text = read_verdict(plan_with_little_host_memory, report)
    assert all(fact in text for fact in ("Does not fit", "239 GiB", "host memory", "128"))


def test_zero_3_fixes_the_shortage(plan_with_little_host_memory: ss.Plan) -> None:
    (repair,) = plan_with_little_host_memory.repairs()
    assert repair.plan.layout.stage == 3  # type: ignore[attr-defined]
    assert repair.bytes_won == 8 * 4 * LLAMA.num_parameters
    assert "saves 239 GiB a node" in describe_repairs(plan_with_little_host_memory, [repair])[0]
    assert fits(repair.plan, repair.plan.memory())


def test_the_launch_offer_names_the_missing_host_memory() -> None:
    node = replace(EIGHT, host_memory_bytes=128 * GIB)
    plan = ss.Plan(LLAMA, node, ss.Recipe(recompute="full", method="lora"), ss.Layout.ddp())
    offer = offer_for(plan, node, plan.memory())
    assert all(fact in offer.note for fact in ("240 GiB of host memory", "has 128"))
