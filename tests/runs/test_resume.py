"""Checkpoints: a run that died goes on exactly where it was, over other ranks too, and ends as a model."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, skip_without, thorough

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402

from shardscope import Architecture  # noqa: E402
from shardscope.runs.launch.launch import launch  # noqa: E402
from shardscope.training.checkpoints.folders import checkpoint_path, is_complete, list_checkpoints  # noqa: E402

NAMES = ("step", "loss", "learning_rate", "grad_norm")
SCHEDULE: dict[str, Any] = {"learning_rate": 1e-3, "schedule": "linear", "warmup": 0.2}
"""Four of 20 steps rise from 0 and 16 fall to it: the run dies while they fall."""


def select_metrics(lines: list[dict[str, Any]]) -> list[list[Any]]:
    return [[line[name] for name in NAMES] for line in lines]


# ---------------------------------------------------------------------------- killed, launched again


def killed_after_step_12(ctx: Any) -> None:
    """Rank 1 dies without a word, once the checkpoint of step 10 is whole and before the next one.

    Megatron-core renames a checkpoint in a step of all ranks, so that waiting in one step is not enough.
    """
    from shardscope.training.tasks.pretrain import Pretrain

    log = ctx.log

    def log_or_die(step: int, **metrics: Any) -> None:
        log(step=step, **metrics)
        if step >= 12 and ctx.rank == 1:
            deadline = time.monotonic() + 10
            while not (is_saved := is_complete(checkpoint_path(ctx.folder, 10))):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            if is_saved or step == 14:
                os.kill(os.getpid(), signal.SIGKILL)

    ctx.log = log_or_die
    Pretrain(num_steps=20, save_every=5, keep_last=1, resume=True, **SCHEDULE)(ctx)


def resumed_then_straight(ctx: Any) -> None:
    """Run the remaining of 20 steps, and then all 20 again from the start, for comparison."""
    from shardscope.training.tasks.pretrain import Pretrain

    Pretrain(num_steps=20, save_every=5, keep_last=1, resume=True, export=True, **SCHEDULE)(ctx)
    ctx.__dict__["engine"] = type(ctx.engine)(ctx)
    Pretrain(num_steps=20, **SCHEDULE)(ctx)


RUNS = {
    "fsdp2": ("fsdp2", {}),
    "ddp": ("ddp", {}),
    "ZeRO-2": ("zero", {"stage": 2}),
    "ZeRO-3": ("zero", {"stage": 3}),
    "ZeRO pipeline": ("zero", {"stage": 1, "pp": 2}),
    "ZeRO experts": ("zero", {"stage": 2, "ep": 2}),
    "ZeRO tensors": ("zero", {"stage": 1, "tp": 2}),
    "FSDP2 pipeline": ("fsdp2", {"pp": 2}),
    "FSDP2 context": ("fsdp2", {"cp": 2}),
    "Megatron tp": ("megatron", {"tp": 2}),
    "Megatron pp": ("megatron", {"pp": 2}),
    "Megatron distributed optimizer": ("megatron", {}),
}
NEEDED = {"zero": "deepspeed", "megatron": "megatron"}
IN_EVERY_TEST = "fsdp2"
"""The others take two launches each as well: `make test-resume` runs them all."""


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.usefixtures("bounded_time", "nothing_left")
def test_fault_30_a_killed_run_resumes_exactly(run: str, tmp_path: Path) -> None:
    if run != IN_EVERY_TEST and os.environ.get("SHARDSCOPE_RESUME") != "all":
        pytest.skip("two launches more; `make test-resume` runs all engines")
    framework, layout = RUNS[run]
    skip_without(NEEDED.get(framework, "torch"))
    architecture = small_mixtral() if "ep" in layout else None
    count = 2 if "pp" in layout else 1
    plan = tiny_plan(framework, 2, num_micro_batches=count, architecture=architecture, layout=layout)
    first = launch(plan, killed_after_step_12, name="again", folder=tmp_path)
    assert first.wait() == "failed"
    assert "no checkpoint to resume from" in first.logs(0)
    kept = list_checkpoints(first.folder)
    left = checkpoint_path(first.folder, 10)
    # It died before it could forget the older one.
    assert kept == [checkpoint_path(first.folder, 5), left]
    second = launch(plan, resumed_then_straight, name="again", folder=tmp_path)
    assert second.wait() == "finished", second.error
    assert f"resumed from {left}: 10 steps done" in second.logs(0)
    lines = [select_metrics([line for line in second.metrics() if line["rank"] == rank]) for rank in (0, 1)]
    assert lines[0] == lines[1]
    resumed, straight = lines[0][:10], lines[0][10:]
    assert [row[0] for row in straight] == list(range(20))
    assert resumed == straight[10:]
    rates = [
        *(1e-3 * (step + 1) / 4 for step in range(4)),
        *(1e-3 * (20 - step) / 16 for step in range(4, 20)),
    ]
    assert [row[2] for row in straight] == pytest.approx(rates, rel=1e-12)
    before = select_metrics([line for line in first.metrics() if line["rank"] == 0])
    assert before[:12] == straight[:12]
    assert [path.name for path in list_checkpoints(second.folder)] == ["step-000020"]
    exported = sorted(path.name for path in (second.folder / "export").iterdir())
    assert exported == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


# ---------------------------------------------------------------------------- in one spawn of two ranks


def new_context(ctx: StandInContext, plan: Any, name: str, **more: Any) -> StandInContext:
    from shardscope.frameworks.engines import get_engine_class

    folder = ctx.folder / name
    context = StandInContext(ctx.rank, ctx.world_size, plan, folder, ctx.device, **more)
    context.engine = get_engine_class(plan)(context)
    return context


def train(ctx: StandInContext, plan: Any, name: str, *, stop: int | None = None, **task: Any) -> Any:
    from shardscope.training.tasks.pretrain import Pretrain

    context = new_context(ctx, plan, name, stop_at_look=stop)
    Pretrain(num_steps=5, learning_rate=1e-2, **task)(context)
    return context


EXACT = (
    ("ddp", {"precision": "fp16-mixed"}),
    ("ddp", {"optimizer": "muon"}),
    ("fsdp2", {"method": "lora", "lora_rank": 4, "precision": "bf16"}),
    ("fsdp2", {"precision": "bf16-mixed", "optimizer": "lion"}),
)


def run_every_case(ctx: StandInContext) -> dict[str, Any]:
    """Run every case on the same two ranks: starting ranks is what takes long."""
    exact = []
    for number, (framework, recipe) in enumerate(EXACT):
        plan = tiny_plan(framework, 2, **recipe)
        straight = train(ctx, plan, f"straight-{number}")
        # Asked to stop at its fourth look: three steps are done, and saved.
        stopped = train(ctx, plan, f"cut-{number}", stop=4, save_every=1, keep_last=2)
        kept = [path.name for path in list_checkpoints(stopped.folder)]
        resumed = train(ctx, plan, f"cut-{number}", resume=stopped.folder)
        exact.append(
            [
                select_metrics(straight.lines),
                select_metrics(stopped.lines),
                select_metrics(resumed.lines),
                kept,
            ]
        )
    return {
        "exact": exact,
        "beside": saved_beside_training(ctx),
        "random": random_numbers_go_on(ctx),
        "half": half_a_checkpoint(ctx),
        "of another optimizer": of_another_optimizer(ctx),
        "exports": compare_exports(ctx),
    }


def make_batch(ctx: Any, step: int) -> dict[str, Any]:
    tokens = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(ctx.world_size)[ctx.rank]
    return {"input_ids": mine, "labels": mine.clone()}


def set_up(ctx: Any) -> None:
    from shardscope.training.model.model import build_model

    ctx.engine.learning_rate = 1e-2
    ctx.engine.setup(lambda: build_model(ctx.plan.architecture))


def saved_beside_training(ctx: StandInContext) -> list[Any]:
    """Steps after ``begin_save`` are in no checkpoint; the second rank count to load it is another."""
    context = new_context(ctx, tiny_plan("fsdp2", 2), "beside")
    set_up(context)
    context.engine.step(make_batch(context, 0))
    wait = context.engine.begin_save("one")
    went_on = [context.engine.step(make_batch(context, step)) for step in (1, 2)]
    wait()
    again = new_context(ctx, tiny_plan("fsdp2", 2), "beside")
    again.engine.seed = 7
    set_up(again)
    again.engine.load("one")
    return [went_on, [again.engine.step(make_batch(again, step)) for step in (1, 2)]]


def draw_random_numbers() -> list[float]:
    import numpy

    return [float(torch.rand(())), random.random(), float(numpy.random.rand()), random.gauss(0, 1)]


def random_numbers_go_on(ctx: StandInContext) -> list[Any]:
    from shardscope.training.checkpoints import random_state

    folder = ctx.folder / "random"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(ctx.rank)
    draw_random_numbers()
    random_state.write_states(folder)
    expected = draw_random_numbers()
    torch.manual_seed(9)
    random.seed(9)
    restored = random_state.restore_states(folder)
    return [restored, expected, draw_random_numbers()]


def half_a_checkpoint(ctx: StandInContext) -> str:
    context = new_context(ctx, tiny_plan("ddp", 2), "half")
    set_up(context)
    (context.folder / "step-000001").mkdir(parents=True, exist_ok=True)
    with pytest.raises(FileNotFoundError) as refused:
        context.engine.load("step-000001")
    return str(refused.value)


def of_another_optimizer(ctx: StandInContext) -> list[str]:
    """Lion's one moment has the name of Adam's first: torch would load it without a word."""
    context = new_context(ctx, tiny_plan("ddp", 2), "adam")
    set_up(context)
    context.engine.step(make_batch(context, 0))
    context.engine.save("one")
    refused = []
    for optimizer in ("lion", "sgd"):
        again = new_context(ctx, tiny_plan("ddp", 2, optimizer=optimizer), "adam")
        set_up(again)
        with pytest.raises(ValueError) as error:
            again.engine.load("one")
        refused.append(str(error.value))
    alike = new_context(ctx, tiny_plan("ddp", 2, optimizer="adamw_foreach"), "adam")
    set_up(alike)
    alike.engine.load("one")
    return refused


def small_mixtral() -> Architecture:
    from shardscope.planner.cpu_trial import build_cpu_trial

    mixtral = __import__("shardscope").models["mixtral-8x7b"]
    small = build_cpu_trial(tiny_plan("ddp", 2, architecture=mixtral)).plan.architecture
    return replace(small, num_hidden_layers=2)


def compare_exports(ctx: StandInContext) -> list[Any]:
    """Compare the loss of the next step with that of the exported model, opened by transformers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from shardscope.training.model.model import build_model
    from shardscope.training.weights.pretrained import write_pretrained

    plans = {
        "tied": tiny_plan("fsdp2", 2, architecture=tiny_llama(tie_word_embeddings=True)),
        "experts": tiny_plan("fsdp2", 2, architecture=small_mixtral()),
        "bf16": tiny_plan("ddp", 2, precision="bf16"),
        "adapters": tiny_plan("fsdp2", 2, method="lora", lora_rank=4),
    }
    results = []
    both = [make_batch(replace(ctx, rank=rank), 1) for rank in (0, 1)]
    whole = {key: torch.cat([batch[key] for batch in both]) for key in ("input_ids", "labels")}
    for name, plan in plans.items():
        context = new_context(ctx, plan, f"export-{name}")
        out = context.folder / "out"
        set_up(context)
        context.engine.step(make_batch(context, 0))
        if name == "tied":
            tensors = context.engine.full_tensors()
            write_pretrained(out, context.engine.model, tensors, max_file_bytes=200_000)
        else:
            context.engine.export("out")
            context.engine.export("out")  # onto an older one
        expected = context.engine.step(make_batch(context, 1))
        if name == "adapters":
            torch.manual_seed(0)
            model = PeftModel.from_pretrained(build_model(plan.architecture), str(out))
        else:
            model = AutoModelForCausalLM.from_pretrained(out)
        with torch.no_grad():
            loss = float(model(**whole).loss)
        files = sorted(path.name for path in out.iterdir())
        kind = str(next(model.parameters()).dtype)
        results.append([name, expected, loss, files, model.config.architectures, kind])
    return results


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("resume")
    return on_ranks(2, tiny_plan("ddp", 2), run_every_case, folder), folder


@thorough()
@pytest.mark.parametrize("number", range(len(EXACT)))
def test_a_resumed_run_equals_an_uninterrupted_one(number: int, rank_results: tuple[list[Any], Path]) -> None:
    straight, stopped, resumed, kept = rank_results[0][0]["exact"][number]
    assert kept == ["step-000002", "step-000003"], "of 1, 2 and 3 the last two"
    assert len(stopped) == 3 and len(straight) == 5
    assert stopped + resumed == straight


@thorough()
def test_steps_during_an_asynchronous_save_are_not_in_it(rank_results: tuple[list[Any], Path]) -> None:
    went_on, again = rank_results[0][0]["beside"]
    assert went_on == again


@thorough()
def test_random_states_resume_on_each_rank(rank_results: tuple[list[Any], Path]) -> None:
    for result in rank_results[0]:
        restored, expected, found = result["random"]
        assert restored and expected == found
    assert rank_results[0][0]["random"][1] != rank_results[0][1]["random"][1]


@thorough()
def test_fault_30_an_incomplete_checkpoint_raises(rank_results: tuple[list[Any], Path]) -> None:
    assert "is not a complete checkpoint: it has no position.json" in rank_results[0][0]["half"]


@thorough()
def test_a_checkpoint_of_another_optimizer_raises(rank_results: tuple[list[Any], Path]) -> None:
    for result in rank_results[0]:
        for name, words in zip(("Lion", "SGD"), result["of another optimizer"], strict=True):
            assert f"is '{name}'; allowed: 'AdamW'" in words and "Nearest fix: the same" in words


@thorough()
def test_exports_open_in_transformers(rank_results: tuple[list[Any], Path]) -> None:
    for name, expected, loss, files, architectures, kind in rank_results[0][0]["exports"]:
        assert abs(loss - expected) < (2e-2 if name == "bf16" else 1e-5), name
        assert kind == ("torch.bfloat16" if name == "bf16" else "torch.float32")
        if name == "tied":
            assert architectures == ["LlamaForCausalLM"]
            assert "model.safetensors.index.json" in files and len(files) > 3
        elif name == "adapters":
            assert files == ["adapter_config.json", "adapter_model.safetensors"]
        else:
            assert files == ["config.json", "model.safetensors"]


def loaded_on_one(ctx: StandInContext) -> list[float]:
    set_up(ctx)
    ctx.engine.load(ctx.folder.parent / "beside" / "one")
    return [ctx.engine.step(make_batch(ctx, step)) for step in (1, 2)]


@thorough()
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_fault_31_one_rank_resumes_a_run_of_two(framework: str, rank_results: tuple[list[Any], Path]) -> None:
    ranks, folder = rank_results
    plan = tiny_plan(framework, 1, micro_batch_size=4)
    (losses,) = on_ranks(1, plan, loaded_on_one, folder / "one-rank")
    assert losses == pytest.approx(ranks[0]["beside"][0], abs=1e-5)


def own_module_refused(ctx: StandInContext) -> str:
    ctx.engine.setup(lambda: torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="Linear") as refused:
        ctx.engine.export("out")
    return str(refused.value)


def test_exporting_a_users_own_module_raises(tmp_path: Path) -> None:
    (words,) = on_ranks(1, tiny_plan("ddp", 1), own_module_refused, tmp_path)
    assert "transformers model" in words and not (tmp_path / "out").exists()
