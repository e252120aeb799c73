"""Rehearsal of DeepSpeed's own engine on fake tensors: one rank of any world size.

``deepspeed.initialize``, ``engine.backward``, ``engine.step``, partitions, buckets and all-gathers are
DeepSpeed's. Only reads of tensor values and compiled CUDA kernels are replaced (``fake_device.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from shardscope.core.errors import check_choice, refuse
from shardscope.families.registry import list_families_with
from shardscope.families.unknown import UnknownFamily
from shardscope.frameworks.deepspeed.layout import check_not_quantized, get_layout
from shardscope.frameworks.deepspeed.limits import check_experts, check_pipeline
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage_1_and_2 import find_peak_rank
from shardscope.frameworks.deepspeed.rehearsal.engine import (
    NUM_STEPS,
    build_config,
    build_model,
    build_world,
    initialize_engine,
    label_state,
)
from shardscope.frameworks.deepspeed.rehearsal.fake_device import import_deepspeed
from shardscope.frameworks.deepspeed.rehearsal.fake_files import FakeFiles, fake_files
from shardscope.frameworks.deepspeed.rehearsal.pipeline import rehearse_stages
from shardscope.memory.activations.head import resolve_loss
from shardscope.rehearsal.result import RehearsedStage
from shardscope.training.document_masks import add_document_mask

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.tracker import Tracker

MAX_MICRO_BATCHES = 2


def rehearse(plan: Plan, note_progress: Callable[[str, float], None]) -> list[RehearsedStage]:
    """Rehearse the one stage of ``plan``. Raises ``ValueError`` for plans that cannot be rehearsed."""
    check_plan(plan)
    note_progress("importing DeepSpeed", 0.05)
    deepspeed = import_deepspeed()
    if plan.degrees.pp > 1:
        return rehearse_stages(plan, deepspeed, note_progress)
    # Which rank has most is computed from the tensors' sizes, which only families with formulas have here: of
    # others it is the first, as with equal partitions. Tensor-parallel ranks are consecutive.
    has_formulas = not isinstance(plan.architecture, UnknownFamily)
    rank = plan.degrees.tp * find_peak_rank(plan) if has_formulas else 0
    with build_world(plan, deepspeed, rank) as (tracker, device), fake_files() as files:
        return [_run_steps(plan, deepspeed, tracker, note_progress, device, files)]


AUTOTP_FAMILIES = list_families_with("autotp_rehearsal")
"""Families that AutoTP shards by transformers' own plan for them."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that DeepSpeed's engine cannot run on fake tensors."""
    layout = get_layout(plan)
    # Limits that the engine has too.
    if layout.ep > 1:
        check_experts(plan)
    if layout.pp > 1:
        check_pipeline(plan)
    if layout.tp > 1 and (layout.pp > 1 or layout.ep > 1):
        field, what = ("pp", "pipeline stages") if layout.pp > 1 else ("ep", "DeepSpeed's experts")
        why = f"1 with {field} > 1 in a rehearsal: AutoTP shards complete transformers models, not {what}"
        refuse("Layout.tp", layout.tp, why, {"tp": 1})
    check_not_quantized(layout, "to be rehearsed: DeepSpeed quantizes in CUDA kernels")
    if layout.tp > 1 and plan.architecture.model_type not in AUTOTP_FAMILIES:
        refuse(
            "Architecture.model_type",
            plan.architecture.model_type,
            f"{', '.join(AUTOTP_FAMILIES)} with tp > 1: DeepSpeed's AutoTP shards no others",
            {"tp": 1},
        )
    # The kernels of FlashAttention, Liger and torch.compile need real tensors on a GPU.
    check_choice("Recipe.kernels", plan.kernels, ("transformers",))
    check_choice("Recipe.loss", resolve_loss(plan), ("full", "chunked"))
    check_choice("Recipe.attention", plan.recipe.attention, (None, "sdpa", "eager"))
    if resolve_loss(plan) == "chunked" and layout.stage == 3:
        refuse(
            "Recipe.loss",
            "chunked",
            "'full' in a rehearsal of stage 3, which all-gathers a weight when its module runs: a chunked "
            "loss does not run the head's",
            {"loss": "full"},
        )


def _run_steps(
    plan: Plan,
    deepspeed: ModuleType,
    tracker: Tracker,
    note_progress: Callable[[str, float], None],
    device: str,
    files: FakeFiles,
) -> RehearsedStage:
    # The second micro-batch adds to the gradients of the first; later ones have the same memory.
    num_micro_batches = min(plan.num_micro_batches, MAX_MICRO_BATCHES)
    config = build_config(plan, num_micro_batches, files.folder)
    note_progress("building the model", 0.1)
    with tracker.label_new_storages("parameters"), torch.device(device):
        model = build_model(plan, deepspeed, config, tracker)
    note_progress("deepspeed.initialize", 0.2)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, optimizer = initialize_engine(plan, deepspeed, model, config)
    label_state(tracker, engine, optimizer)
    shape = (plan.recipe.micro_batch_size, plan.recipe.seq_len)
    dtype = next(model.parameters()).dtype
    for step in range(NUM_STEPS):
        # Only the last step is reported: see NUM_STEPS.
        if step == NUM_STEPS - 1:
            tracker.restart()
        for index in range(num_micro_batches):
            done = 0.3 + 0.65 * (step * num_micro_batches + index) / (NUM_STEPS * num_micro_batches)
            note_progress(f"step {step + 1} of {NUM_STEPS}", done)
            with tracker.phase("forward"):
                ids = torch.zeros(shape, dtype=torch.int64, device=device)
                inputs = add_document_mask({"input_ids": ids, "labels": ids}, plan.recipe, dtype)
                loss = engine(**inputs).loss
            with tracker.phase("backward"):
                engine.backward(loss)
            del loss
            # Below stage 2 gradients are autograd's own tensors until the update.
            if get_layout(plan).stage < 2:
                tracker.label((p.grad for p in trained if p.grad is not None), "gradients")
            # engine.step only counts micro-batches until the last one.
            is_update = index == num_micro_batches - 1
            with tracker.phase("optimizer") if is_update else contextlib.nullcontext():
                engine.step()
            label_state(tracker, engine, optimizer)
    note = f"DeepSpeed {deepspeed.__version__}'s {type(optimizer).__name__}"
    if plan.degrees.ep > 1:
        note += "; every expert gets the same number of tokens"
    if plan.num_micro_batches > num_micro_batches:
        note += f"; {num_micro_batches} of {plan.num_micro_batches} micro-batches: the others repeat the last"
    stage = tracker.build_stage(0, plan.architecture.num_hidden_layers, note=note)
    return replace(stage, nvme_bytes=files.num_bytes)
