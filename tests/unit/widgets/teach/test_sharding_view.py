"""Tests of ``ShardingView``: its phases, its rows, and what it shows without a kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope_widgets import ShardingView

LLAMA = ss.models["llama-3.1-8b"]


def build_plan(layout: ss.Layout, cluster: str = "8xh100-sxm-80gb", batch: int = 16) -> ss.Plan:
    recipe = ss.Recipe(global_batch_size=batch, recompute="selective")
    return ss.Plan(LLAMA, ss.Cluster.parse(cluster), recipe, layout)


FSDP = build_plan(ss.Layout.fsdp2())


def read_words(view: ShardingView) -> str:
    return view.figure.words.replace("\N{NO-BREAK SPACE}", " ")


def find_step(view: ShardingView, name: str) -> int:
    assert view.shown is not None
    return [phase.name for phase in view.shown.phases].index(name)


def read_parts(view: ShardingView, column: int, *, own: bool) -> list[tuple[int, float, float]]:
    """Return (row, start, end) of the bars of a column at the shown step."""
    frame: Any = view.figure._frames[view.step]
    bars = frame["traces"][str(3 * column + 1 + own)]
    return [
        (row, base, base + length)
        for row, base, length in zip(bars["y"], bars["base"], bars["x"], strict=True)
    ]


def read_heads(view: ShardingView) -> str:
    frame: Any = view.figure._frames[view.step]
    heads = " | ".join(note["text"] for note in frame["layout"]["annotations"])
    return heads.replace("\N{NO-BREAK SPACE}", " ")


def test_fsdp2_gathers_a_layer_frees_it_and_scatters_its_gradients() -> None:
    view = ShardingView(FSDP)
    assert "Between steps" in read_words(view) and "104 MiB of parameters" in read_words(view)
    assert read_parts(view, 0, own=True) == [(rank, rank / 8, (rank + 1) / 8) for rank in range(8)]
    assert not read_parts(view, 1, own=True) and not read_parts(view, 0, own=False)
    view.step = find_step(view, "forward")
    assert "all-gather of 416 MiB over 8 ranks" in read_words(view)
    table = view.table.value.replace("\N{NO-BREAK SPACE}", " ")
    assert "<td>416 MiB</td>" in table and "<td>832 MiB</td>" in table, "as the words have it"
    assert read_parts(view, 0, own=False) == [(rank, 0, 1) for rank in range(8)]
    assert "104 MiB kept" in read_heads(view)
    assert "+ 416 MiB all-gathered" in read_heads(view)
    view.step = find_step(view, "between")
    assert "freed" in read_words(view) and not read_parts(view, 0, own=False)
    view.step = find_step(view, "backward")
    assert "832 MiB unreduced" in read_heads(view)
    view.step = find_step(view, "reduced")
    assert "reduce-scatter of 832" in read_words(view)
    assert read_parts(view, 1, own=True) == read_parts(view, 2, own=True)


def test_ddp_has_everything_on_every_rank_and_zero_1_keeps_optimizer_state_on_few() -> None:
    view = ShardingView(build_plan(ss.Layout.ddp()))
    assert read_parts(view, 2, own=True) == [(rank, 0, 1) for rank in range(8)]
    view.step = find_step(view, "reduced")
    assert "all-reduce of 832" in read_words(view)
    view.show(build_plan(ss.Layout.zero(1)), layer=16)
    view.step = 0
    assert len({row for row, *_ in read_parts(view, 2, own=True)}) <= 2
    assert "up to 2" in read_words(view)
    view.step = find_step(view, "updated")
    assert "all-gather of 416" in read_words(view)


def test_reshard_after_forward_false_keeps_the_layer_until_backward() -> None:
    view = ShardingView(build_plan(ss.Layout.fsdp2(reshard_after_forward=False)))
    view.step = find_step(view, "between")
    assert "416 MiB of the all-gathered copy stay" in read_words(view)
    view.step = find_step(view, "backward")
    assert "still whole" in read_words(view)


def test_pipeline_says_which_stage_holds_the_layer_and_tensor_parallelism_what_is_sent() -> None:
    view = ShardingView(build_plan(ss.Layout.megatron(tp=2, pp=4)), layer=17)
    assert "on pipeline stage 2 of 4" in view.heading.value and "over 2 ranks" in view.heading.value
    heads = read_heads(view)
    assert "stages 0 to 1, ranks 0 to 3: nothing of this layer" in heads
    assert "stage 3, ranks 6 to 7: nothing" in heads
    assert read_parts(view, 0, own=True) == [(1, 0, 0.5), (2, 0.5, 1)]
    view.step = find_step(view, "forward")
    # Sequence parallelism, Megatron's default, has a pair of collectives in place of the all-reduce.
    assert "tensor parallel: all-gather" in read_words(view)
    assert "tensor parallel: reduce-scatter" in read_words(view) and "all-reduce" not in read_words(view)
    assert "the stage's last layer on" in read_words(view)
    view = ShardingView(build_plan(ss.Layout.megatron(tp=2, pp=4, sequence_parallel=False)), layer=17)
    view.step = find_step(view, "forward")
    assert "tensor parallel: all-reduce" in read_words(view) and "all-gather" not in read_words(view)


def test_tensor_parallel_slices_say_what_data_parallelism_does_with_them() -> None:
    def read_heading(layout: ss.Layout) -> str:
        return ShardingView(build_plan(layout, batch=128)).heading.value

    alone = read_heading(ss.Layout.megatron(tp=8))
    assert "over 8 ranks (norms are whole on each). There is one data-parallel rank" in alone
    assert "distributed_optimizer" not in alone
    assert "distributed_optimizer=False" in read_heading(
        ss.Layout.megatron(tp=4, distributed_optimizer=False)
    )
    assert "on each). ZeRO-0 shards nothing" in read_heading(ss.Layout.zero(stage=0, tp=2))


def test_many_ranks_are_collapsed_with_a_line_that_says_so() -> None:
    view = ShardingView(build_plan(ss.Layout.fsdp2(), "8x8xh100-sxm-80gb", 128))
    assert len(read_parts(view, 0, own=True)) == 16
    assert "… ranks 12 to 59 in the same way" in read_heads(view)
    assert "48 ranks of 64 have no row" in view.heading.value
    labels = view.figure.layout.yaxis.ticktext
    assert labels[0].strip() == "rank 0" and labels[-1].strip() == "rank 63"


def test_another_layer_is_drawn_at_the_same_phase() -> None:
    view = ShardingView(build_plan(ss.Layout.zero(1)))
    view.step = 2
    view.choice.value = 0
    assert view.step == 2 and "layer 0 (of 0 to 31)" in view.heading.value
    assert view.shown is not None and view.shown.get_phase("rest").slices["optimizer"][0].own_bytes
    with pytest.raises(ValueError, match="layer"):
        view.show(FSDP, layer=99)


def test_offloaded_state_is_said_to_be_on_the_host() -> None:
    view = ShardingView(build_plan(ss.Layout.fsdp2(offload="cpu")))
    assert "in host memory" in read_heads(view) and "416" in read_words(view)
    assert read_parts(view, 2, own=True)


def test_one_rank_needs_no_collective() -> None:
    view = ShardingView(build_plan(ss.Layout.fsdp2(), "1xh100-sxm-80gb"))
    assert "No collective" in view.table.value
    for step in range(view.figure.num_steps):
        view.step = step
        assert read_words(view) and ", nothing." not in read_words(view)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_that_are_all_reduced_are_whole_before(stage: int) -> None:
    view = ShardingView(build_plan(ss.Layout.zero(stage)))
    view.step = find_step(view, "backward")
    assert "gradients of all weights on a rank, 416 MiB." in read_words(view)
    assert "416 MiB unreduced" in read_heads(view) or "416 MiB buffer" in read_heads(view)


def test_plan_whose_memory_has_no_formula_says_so() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = {"model_type": "stablelm", "vocab_size": 1000, "num_key_value_heads": 4, **sizes}
    unknown = ss.Architecture.from_hf(config, rehearse_only=True)
    plan = ss.Plan(unknown, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())
    view = ShardingView(plan)
    assert "cannot be drawn" in view.heading.value and view.figure.num_steps == 0
    view.show(FSDP)
    assert view.figure.num_steps == 6


def test_page_and_saved_notebook_need_no_kernel_and_no_network(tmp_path: Path) -> None:
    view = ShardingView(FSDP)
    view.step = 1
    html = view.to_html(tmp_path / "sharding.html").read_text()
    assert not re.search(r"(?:src|href)=['\"]?https?:", html)
    assert '"step": 1' in html and "reduce-scatter" in html
    static = view._repr_mimebundle_()["text/html"]
    assert static.count("<rect") >= 24 and "all-gather of" in static and "rank 7" in static
    assert not re.search(r"<script|https?://", static) and len(static) < 60_000
