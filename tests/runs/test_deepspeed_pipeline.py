"""DeepSpeed's pipeline really training on gloo ranks, each plan beside the same model in plain torch."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, needs_installed, thorough, with_fp16_where_it_can_be

torch = needs("torch")
needs("transformers")
pytestmark = needs_installed("deepspeed")

from deepspeed_ranks import set_up_engine, take_rank_rows  # noqa: E402
from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from single_process import NUM_STEPS, ROWS, plain_torch, whole_batch  # noqa: E402

from shardscope import Architecture, Layout  # noqa: E402
from shardscope.frameworks.engines import before_fork  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402
from shardscope.machine.host import multiplies_in_fp16  # noqa: E402
from shardscope.training.checkpoints.folders import CHECKPOINTS, checkpoint_path, list_checkpoints  # noqa: E402

SAVED_AFTER = 2


def make_llama(*, tied: bool) -> Architecture:
    """Make three layers, so that stages differ, and small embeddings, so that layers weigh more."""
    made = tiny_llama(tie_word_embeddings=tied)
    return replace(made, num_hidden_layers=3, vocab_size=256)


def make_plan(num_ranks: int, *, stage: int, tied: bool = False, **recipe: Any) -> Any:
    """Two stages; all data-parallel ranks share the same four rows, in micro-batches of one."""
    fields = {"global_batch_size": ROWS, "micro_batch_size": 1, **recipe}
    layout = {"stage": stage, "pp": 2}
    return tiny_plan("zero", num_ranks, architecture=make_llama(tied=tied), layout=layout, **fields)


PLANS: dict[str, Any] = {
    "zero-0, tied": {"stage": 0, "tied": True},
    "zero-1": {"stage": 1},
    "zero-1 bf16": {"stage": 1, "precision": "bf16-mixed"},
    "zero-1 fp16, tied": {"stage": 1, "tied": True, "precision": "fp16-mixed"},
}
OVER_FOUR: dict[str, Any] = {
    "zero-1, tied, over four": {"stage": 1, "tied": True},
    "zero-0 over four": {"stage": 0},
}


def train_every_plan(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.training.accounting import memory_watch

    watched = memory_watch.WATCHED_STEPS
    results: dict[str, Any] = {}
    for name, fields in (PLANS if ctx.world_size == 2 else OVER_FOUR).items():
        if "fp16" in name and multiplies_in_fp16() is False:
            continue
        # The census looks at every operator: one kind of engine is enough.
        memory_watch.WATCHED_STEPS = watched if name == "zero-1" else ()
        engine = set_up_engine(ctx, make_plan(ctx.world_size, **fields))
        losses, norms = [], []
        for step in range(NUM_STEPS):
            losses.append(engine.step(take_rank_rows(engine, step)))
            norms.append(engine.grad_norm)
        results[name] = {
            "losses": losses,
            "norms": norms,
            "held": engine.held_at_update,
            "engine": ctx.records["engine"],
            "phases": ctx.records["memory"]["phases"] if memory_watch.WATCHED_STEPS else {},
        }
    if ctx.world_size == 2:
        results["kept"] = resume_and_export(ctx)
        results["other batch"] = refused_batch(ctx)
        results["held up"] = held_up(ctx)
    return results


def resume_and_export(ctx: StandInContext) -> dict[str, Any]:
    """Resume a checkpoint in a new engine, and open an export with transformers."""
    from transformers import AutoModelForCausalLM

    results: dict[str, Any] = {}
    for name in ("zero-0, tied", "zero-1 bf16"):
        plan = make_plan(2, **PLANS[name])
        engine = set_up_engine(ctx, plan)
        for step in range(SAVED_AFTER):
            engine.step(take_rank_rows(engine, step))
        wait = engine.begin_save(f"kept/{name}")
        went_on = engine.step(take_rank_rows(engine, SAVED_AFTER))
        wait()
        engine = set_up_engine(ctx, plan, seed=7)
        engine.load(f"kept/{name}")
        engine.export(f"exported/{name}")
        opened = AutoModelForCausalLM.from_pretrained(ctx.folder / "exported" / name)
        with torch.no_grad():
            loss = float(opened(**whole_batch(SAVED_AFTER)).loss)
        again = [engine.step(take_rank_rows(engine, step)) for step in range(SAVED_AFTER, NUM_STEPS)]
        results[name] = {"again": again, "went_on": went_on, "exported": loss, "type": str(opened.dtype)}
    return results


def held_up(ctx: StandInContext) -> dict[str, Any]:
    """Save a checkpoint whose writing is held up for a step, and one whose part a rank cannot write."""
    from shardscope.frameworks.deepspeed.engine import checkpointing
    from shardscope.frameworks.deepspeed.engine.checkpointing import StagedFiles

    plan, write, may_go_on = make_plan(2, **PLANS["zero-1"]), StagedFiles.write, threading.Event()

    def fail_on_rank_1(files: StagedFiles) -> None:
        if ctx.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail_for_no_disk(*_: Any) -> None:
        raise TypeError("not of the disk")

    engine, folder = set_up_engine(ctx, plan), ctx.folder / CHECKPOINTS
    engine.save(checkpoint_path(ctx.folder, 1))
    StagedFiles.write = lambda files: (may_go_on.wait(60), write(files))
    wait = engine.begin_save(checkpoint_path(ctx.folder, 2))
    engine.step(take_rank_rows(engine, 0))
    listed = [path.name for path in list_checkpoints(ctx.folder)]
    engine.load(checkpoint_path(ctx.folder, 1))
    may_go_on.set()
    wait()
    whole = [path.name for path in list_checkpoints(ctx.folder)]
    StagedFiles.write = fail_on_rank_1
    with pytest.raises(OSError, match="No space left") as refusal:
        engine.begin_save(checkpoint_path(ctx.folder, 3))()
    StagedFiles.write = write
    # An error that is not the disk's, of rank 0 alone: the others waited for it, and it for them.
    write_position, checkpointing.write_position = checkpointing.write_position, fail_for_no_disk
    with pytest.raises((TypeError, RuntimeError)):
        engine.begin_save(checkpoint_path(ctx.folder, 4))()
    checkpointing.write_position = write_position
    after = [path.name for path in list_checkpoints(ctx.folder)]
    torch.distributed.barrier()
    return {
        "listed": listed,
        "whole": whole,
        "after": after,
        "refusal": str(refusal.value),
        "left": sorted(path.name for path in folder.iterdir()),
    }


def refused_batch(ctx: StandInContext) -> str:
    with pytest.raises(ValueError, match="leave the others out") as refusal:
        ctx.engine.step({**take_rank_rows(ctx.engine, 0), "attention_mask": torch.ones(4, 64)})
    return str(refusal.value)


@pytest.fixture(scope="module")
def results_by_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The results of each rank, by plan."""
    by_plan: dict[str, list[dict[str, Any]]] = {}
    for num_ranks in (2, 4):
        plan = make_plan(num_ranks, stage=1)
        before_fork(plan, "cpu")
        ranks = on_ranks(num_ranks, plan, train_every_plan, tmp_path_factory.mktemp("pipeline"))
        by_plan |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return by_plan


@thorough()
@pytest.mark.parametrize("name", with_fp16_where_it_can_be([*PLANS, *OVER_FOUR]))
def test_losses_equal_those_of_plain_torch(
    name: str, results_by_plan: dict[str, list[dict[str, Any]]]
) -> None:
    fields = {**PLANS, **OVER_FOUR}[name]
    expected, half = plain_torch(make_llama(tied=fields.get("tied", False))), "precision" in fields
    for rank in results_by_plan[name]:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=0.05 if half else 1e-4)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=0.1 if half else 1e-3)


@thorough()
@pytest.mark.parametrize("name", with_fp16_where_it_can_be([*PLANS, *OVER_FOUR]))
def test_measured_bytes_of_each_stage_equal_the_prediction(
    name: str, results_by_plan: dict[str, list[dict[str, Any]]]
) -> None:
    """To the byte, of the rank that holds most; what an update works with is no state."""
    fields, ranks = {**PLANS, **OVER_FOUR}[name], results_by_plan[name]
    stages = make_plan(len(ranks), **fields).memory().by_stage
    each = len(ranks) // len(stages)
    for number, report in enumerate(stages):
        own = [rank["held"] for rank in ranks[number * each : (number + 1) * each]]
        rest, update = report.at("rest").components, report.at("optimizer").components
        assert max(held["parameters"] for held in own) == rest["parameters"]
        assert max(held["gradients"] for held in own) == update["gradients"]
        assert max(held["optimizer"] for held in own) == rest["optimizer"]


@thorough()
def test_the_engine_record_names_the_pipeline_stage(results_by_plan: dict[str, list[dict[str, Any]]]) -> None:
    first, second = (rank["engine"] for rank in results_by_plan["zero-1"])
    assert first["sentence"].endswith(
        "over 1 rank (gloo, cpu); pipeline stage 1 of 2 with layers 0, 1, 1F1B, fp32 compute"
    )
    assert (first["layers"], second["layers"]) == ([0, 1], [2])
    assert first["module"] == "PipelineEngine" and first["schedule"] == "TrainSchedule"
    whole = make_llama(tied=False).num_parameters
    assert first["num_parameters"] + second["num_parameters"] == whole
    whole_on_each = results_by_plan["zero-0 over four"][2]["engine"]
    assert "gradients and optimizer state of its stage, 2 ranks" in whole_on_each["sentence"]
    assert whole_on_each["pipeline_stage"] == 1


@thorough()
def test_memory_is_recorded_in_each_phase_of_the_schedule(
    results_by_plan: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in results_by_plan["zero-1"]:
        assert {"forward", "backward", "optimizer"} <= set(rank["phases"])


@thorough()
@pytest.mark.parametrize("name", ["zero-0, tied", "zero-1 bf16"])
def test_a_new_engine_resumes_from_the_checkpoint(
    name: str, results_by_plan: dict[str, list[dict[str, Any]]]
) -> None:
    straight, of_kept = results_by_plan[name][0]["losses"], results_by_plan["kept"][0][name]
    # Steps taken while it was written are not in it.
    assert of_kept["went_on"] == pytest.approx(straight[SAVED_AFTER], abs=1e-6)
    assert of_kept["again"] == pytest.approx(straight[SAVED_AFTER:], abs=1e-6)
    assert of_kept["type"] == "torch.float32"
    exact = "bf16" not in name
    assert of_kept["exported"] == pytest.approx(straight[SAVED_AFTER], abs=1e-5 if exact else 0.03)


@thorough()
def test_a_checkpoint_is_listed_once_every_rank_has_written_its_shard(
    results_by_plan: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in results_by_plan["held up"]:
        assert rank["listed"] == ["step-000001"]
        assert rank["whole"] == rank["after"] == ["step-000001", "step-000002"]
        assert rank["left"] == ["step-000001", "step-000002"]
        assert "No space left" in rank["refusal"]


@thorough()
def test_a_batch_with_other_tensors_raises(results_by_plan: dict[str, list[dict[str, Any]]]) -> None:
    assert "batch has attention_mask, input_ids, labels" in str(results_by_plan["other batch"][0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "lora"}, "peft wraps the whole model"),
        ({"loss": "chunked"}, "DeepSpeed's schedule computes the loss"),
        ({"architecture": "gpt2"}, "cannot be split into stages"),
    ],
)
def test_models_without_pipeline_stages_raise_before_any_rank_starts(
    fields: dict[str, Any], words: str
) -> None:
    if "architecture" in fields:
        gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
        fields = {"architecture": Architecture.from_hf(gpt2)}
    refusal = why_not_trained(tiny_plan("zero", 2, layout={"stage": 1, "pp": 2}, **fields))
    assert refusal is not None and words in refusal and "Nearest fix" in refusal


def test_overlapped_reduction_with_pipeline_stages_raises() -> None:
    with pytest.raises(ValueError, match="reduces after backward"):
        Layout.zero(1, pp=2, overlap_comm=True)


@pytest.mark.parametrize(
    ("pp", "precision", "words"), [(1, "fp16-mixed", "#8393"), (2, "bf16-mixed", "only one rank's partition")]
)
def test_combinations_that_deepspeed_breaks_without_zero_raise(
    pp: int, precision: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without fp16 in the processor, the fix would be another precision.
    monkeypatch.setattr("shardscope.frameworks.deepspeed.limits.multiplies_in_fp16", lambda: True)
    refusal = why_not_trained(tiny_plan("zero", 2, layout={"stage": 0, "pp": pp}, precision=precision))
    assert refusal is not None and words in refusal and "stage=1" in refusal


def test_a_checkpoint_of_another_number_of_stages_raises(tmp_path: Path) -> None:
    from shardscope.frameworks.deepspeed.engine.checkpointing import _check_fits

    own = {"framework": "deepspeed", "stage": 1, "world_size": 4, "tp": 1, "pp": 2, "ep": 1}
    with pytest.raises(ValueError, match="the number of pipeline stages that saved"):
        _check_fits(tmp_path, {**own, "pp": 4}, own)
