"""Host memory while ranks make their model: what the engines do, and that a node has room for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from tests.launch_offers import offer_for, verdict
from tests.requirements import thorough

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.memory.report import Term
from shardscope.planner.memory_needs import find_shortages, fits, list_memory_needs
from shardscope.planner.repairs.repairs import describe_repairs

GIB = 2**30
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
LLAMA = ss.models["llama-3.1-8b"]
MAKING = "host memory while the model is made"


def on_host(layout: ss.Layout, model: str = "llama-3.1-8b", **recipe: Any) -> Term:
    plan = ss.Plan(ss.models[model], EIGHT, ss.Recipe(**recipe), layout)
    return frameworks[layout.framework].building_model().compute_host_memory(plan)


def test_ranks_that_build_whole_hold_the_model_in_fp32() -> None:
    for layout in (ss.Layout.ddp(), ss.Layout.zero(0), ss.Layout.zero(1), ss.Layout.zero(2)):
        for precision in ("bf16-mixed", "bf16", "fp32"):
            assert on_host(layout, precision=precision).num_bytes == 4 * LLAMA.num_parameters
    assert "8,030,261,248 parameters × 4 bytes = 29.9 GiB" in on_host(ss.Layout.ddp()).explain()


def test_adapters_come_on_top() -> None:
    adapters = on_host(ss.Layout.ddp(), method="lora", lora_rank=8).num_bytes - 4 * LLAMA.num_parameters
    # q: 4096 + 4096, k and v: 4096 + 1024, o: 4096 + 4096; rank 8, 32 layers.
    assert adapters == 4 * 8 * 32 * (2 * 8192 + 2 * 5120)


def test_what_is_built_in_parts_needs_no_host() -> None:
    assert on_host(ss.Layout.fsdp2()).num_bytes == 0
    assert on_host(ss.Layout.zero(3)).num_bytes == 0
    assert on_host(ss.Layout.megatron(tp=2)).num_bytes == 0
    assert "meta device" in on_host(ss.Layout.fsdp2()).explain()


@pytest.mark.parametrize("layout", [ss.Layout.fsdp2(), ss.Layout.zero(3)], ids=["fsdp2", "zero-3"])
def test_a_small_model_is_built_whole_by_those_too(layout: ss.Layout) -> None:
    small = ss.models["gpt2"]
    assert on_host(layout, "gpt2", seq_len=1024).num_bytes == 4 * small.num_parameters


def test_a_stage_of_deepspeeds_pipeline_draws_its_own_layers() -> None:
    found = on_host(ss.Layout.zero(1, pp=2))
    # Half of the layers, and the embedding of the first stage or the head of the last with the final norm.
    edge = LLAMA.vocab_size * LLAMA.hidden_size
    norm = LLAMA.hidden_size
    layers = LLAMA.num_parameters - 2 * edge - norm
    assert found.num_bytes == 4 * (layers // 2 + edge + norm)
    assert "of its own stage" in found.explain()


def test_a_stage_of_a_small_model_is_cut_from_a_whole_one() -> None:
    small = "llama-3.2-1b"
    assert on_host(ss.Layout.zero(1, pp=2), small).num_bytes < on_host(ss.Layout.zero(1), small).num_bytes
    tiny = ss.Architecture.of_size("100m")
    plan = ss.Plan(tiny, EIGHT, ss.Recipe(seq_len=256), ss.Layout.zero(1, pp=2))
    found = frameworks["deepspeed"].building_model().compute_host_memory(plan)
    assert found.num_bytes == 4 * tiny.num_parameters


@pytest.mark.parametrize("layout", [ss.Layout.ddp(), ss.Layout.fsdp2()], ids=["ddp", "fsdp2"])
def test_a_quantised_base_is_packed_as_it_is_read(layout: ss.Layout) -> None:
    """4.1 bits a weight of a Linear with double quantisation (Dettmers et al. 2023), embeddings in bf16."""
    edges = 2 * LLAMA.vocab_size * LLAMA.hidden_size
    expected = 2 * edges + (LLAMA.num_parameters - edges) * 4.127 / 8
    adapters = 4 * 16 * 32 * (2 * 8192 + 2 * 5120)
    # One of the feed-forward's in bf16, and three times in fp32 while it is packed.
    one = (2 + 12) * LLAMA.hidden_size * LLAMA.intermediate_size
    found = on_host(layout, method="qlora", precision="bf16").num_bytes
    assert found == pytest.approx(expected + adapters + one, rel=0.002)


def test_cpu_ranks_train_it_where_they_made_it() -> None:
    plan = ss.Plan(ss.models["gpt2"], ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=128), ss.Layout.ddp())
    assert MAKING not in {place.name for place in list_memory_needs(plan, plan.memory())}


@thorough()
def test_transformers_takes_that_much_to_make_one() -> None:
    """In a process of its own: what its resident memory grows by at most is the model in fp32."""
    program = """
import resource, psutil, torch, transformers
import shardscope as ss
from shardscope.training.model.model import build_model
build_model(ss.Architecture.of_size("2m"))  # what the first model loads of libraries is none of it
architecture = ss.Architecture.of_size("400m")
before = psutil.Process().memory_info().rss
model = build_model(architecture).to(torch.bfloat16)
grown = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown / (4 * architecture.num_parameters))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert 0.9 < float(done.stdout) < 1.15


# ----------------------------------------------------------------------------------------- and the node


@pytest.fixture
def crowded() -> ss.Plan:
    """Fits on the card; eight ranks that each make 29.9 GiB do not fit into the node."""
    node = replace(EIGHT, host_memory_bytes=128 * GIB)
    return ss.Plan(LLAMA, node, ss.Recipe(), ss.Layout.zero(2))


def test_a_node_without_room_to_make_it_does_not_fit(crowded: ss.Plan) -> None:
    report = crowded.memory()
    assert report.fits and not fits(crowded, report)
    (short,) = find_shortages(crowded, report)
    assert (short.name, short.needed_bytes) == (MAKING, 8 * 4 * LLAMA.num_parameters)
    said = verdict(crowded, report)
    assert all(fact in said for fact in ("Does not fit", "239 GiB", "host memory", "128"))


def test_stage_3_mends_it(crowded: ss.Plan) -> None:
    (repair,) = crowded.repairs()
    assert repair.plan.layout.stage == 3  # type: ignore[attr-defined]
    assert repair.bytes_won == 8 * 4 * LLAMA.num_parameters
    assert "saves 239 GiB a node" in describe_repairs(crowded, [repair])[0]
    assert fits(repair.plan, repair.plan.memory())


def test_the_launch_refuses_it_with_the_numbers() -> None:
    node = replace(EIGHT, host_memory_bytes=128 * GIB)
    plan = ss.Plan(LLAMA, node, ss.Recipe(recompute="full", method="lora"), ss.Layout.ddp())
    offer = offer_for(plan, node, plan.memory())
    assert all(fact in offer.note for fact in ("240 GiB of host memory", "has 128"))
