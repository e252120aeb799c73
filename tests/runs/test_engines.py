"""Engines on real gloo ranks: they train what the plan says, equally, and say what they really made."""

from __future__ import annotations

import gzip
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, sample, thorough

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from run_helpers import seconds_until  # noqa: E402
from single_process import take_steps  # noqa: E402

from shardscope import models  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402
from shardscope.memory.state.lora import count_adapter_parameters  # noqa: E402
from shardscope.runs.launch.launch import launch  # noqa: E402

NUM_STEPS = 5


def make_batch(ctx: StandInContext, step: int, global_rows: int = 4) -> dict[str, Any]:
    """This rank's rows of a global batch that does not depend on the number of ranks."""
    tokens = torch.randint(0, 64, (global_rows, 64), generator=torch.Generator().manual_seed(step))
    rows = tokens.chunk(ctx.world_size)[ctx.rank]
    return {"input_ids": rows, "labels": rows.clone()}


def set_up(ctx: StandInContext) -> None:
    from shardscope.training.model.model import build_model
    from shardscope.training.optimizers.optimizers import build_optimizer

    name = ctx.plan.recipe.optimizer
    ctx.engine.setup(lambda: build_model(ctx.plan.architecture), lambda p: build_optimizer(name, p, 1e-2))


def five_losses(ctx: StandInContext) -> dict[str, Any]:
    set_up(ctx)
    losses = [ctx.engine.step(make_batch(ctx, step)) for step in range(NUM_STEPS)]
    return {
        "losses": losses,
        "grad_norm": ctx.engine.grad_norm,
        "engine": ctx.records["engine"],
        "memory": ctx.engine.memory(),
    }


@pytest.fixture(scope="module")
def reference_result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses of one process: plain autograd through the DDP engine of one rank, the whole batch at once."""
    plan = tiny_plan("ddp", 1, micro_batch_size=4)
    return on_ranks(1, plan, five_losses, tmp_path_factory.mktemp("reference"))[0]


def close(losses: list[float], expected: list[float], tolerance: float = 1e-4) -> bool:
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < tolerance


def test_the_reference_losses_are_plain_torchs(reference_result: dict[str, Any]) -> None:
    """No engine at all gives the reference's losses."""
    from shardscope.training.model.model import build_model
    from shardscope.training.optimizers.optimizers import build_optimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model(tiny_llama())
    optimizer = build_optimizer("adamw", list(model.parameters()), 1e-2)
    ctx = StandInContext(rank=0, world_size=1, plan=None, folder=Path())
    losses, _ = take_steps(optimizer, (model(**make_batch(ctx, step)).loss for step in range(NUM_STEPS)))
    assert close(losses, reference_result["losses"], 1e-5)
    assert losses[-1] < losses[0]


def test_ddp_on_two_ranks(reference_result: dict[str, Any], tmp_path: Path) -> None:
    first, second = on_ranks(2, tiny_plan("ddp", 2), five_losses, tmp_path)
    assert close(first["losses"], reference_result["losses"])
    assert first["losses"] == second["losses"]
    assert first["engine"]["module"] == "DistributedDataParallel"
    assert first["engine"]["world_size"] == first["engine"]["data_parallel"] == 2
    assert first["engine"]["sentence"] == (
        "DDP: DistributedDataParallel over 2 ranks (gloo, cpu), 1 gradient bucket of 1.3 MiB, fp32 compute"
    )
    whole = 4 * tiny_llama().num_parameters
    assert sum(first["engine"]["bucket_bytes"]) == whole
    assert first["memory"]["parameters"] == first["memory"]["gradients"] == whole
    assert abs(first["memory"]["optimizer"] - 2 * whole) < 1000


def test_fsdp2_on_two_ranks(reference_result: dict[str, Any], tmp_path: Path) -> None:
    first, second = on_ranks(2, tiny_plan("fsdp2", 2), five_losses, tmp_path)
    assert close(first["losses"], reference_result["losses"])
    assert abs(first["grad_norm"] - reference_result["grad_norm"]) < 1e-4
    record = first["engine"]
    assert record["sentence"] == (
        "FSDP2: all 21 parameter tensors are DTensors, sharded over 2 ranks (gloo, cpu), fp32 compute"
    )
    assert record["mesh_shape"] == [2] and record["shard"] == 2 and record["replicate"] == 1
    assert record["num_sharded_tensors"] == len(record["sharded_names"]) == 21
    assert record["num_weights_here"] + second["engine"]["num_weights_here"] == tiny_llama().num_parameters
    assert record["placements"] == {"(Shard(dim=0),)": 21}
    assert abs(first["memory"]["parameters"] - 2 * tiny_llama().num_parameters) < 1000
    assert first["memory"]["gradients"] == 0


@sample(1)
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_gradient_accumulation_equals_the_large_batch(
    framework: str, reference_result: dict[str, Any], tmp_path: Path
) -> None:
    plan = tiny_plan(framework, 2, num_micro_batches=2, micro_batch_size=1)
    assert close(on_ranks(2, plan, five_losses, tmp_path)[0]["losses"], reference_result["losses"])


@thorough()
def test_hybrid_sharding_with_accumulation(reference_result: dict[str, Any], tmp_path: Path) -> None:
    """Two replicas of one shard each: the all-reduce is held back until the last micro-batch."""
    plan = tiny_plan("fsdp2", 2, num_micro_batches=2, micro_batch_size=1, layout={"replicate": 2})
    result = on_ranks(2, plan, five_losses, tmp_path)[0]
    assert close(result["losses"], reference_result["losses"])
    assert result["engine"]["mesh_shape"] == [2, 1]
    assert "sharded over 1 rank in each of 2 replicas (gloo, cpu)" in result["engine"]["sentence"]


@sample(1)
@pytest.mark.parametrize(
    ("framework", "recompute"),
    few(
        [(framework, recompute) for framework in ("ddp", "fsdp2") for recompute in ("full", "selective")],
        [("ddp", "selective"), ("fsdp2", "full")],
    ),
)
def test_recomputation_changes_no_loss(
    framework: str, recompute: str, reference_result: dict[str, Any], tmp_path: Path
) -> None:
    plan = tiny_plan(framework, 2, recompute=recompute)
    assert close(on_ranks(2, plan, five_losses, tmp_path)[0]["losses"], reference_result["losses"])


def uneven_labels(ctx: StandInContext) -> float:
    set_up(ctx)
    batch = make_batch(ctx, 0)
    rows = torch.arange(4).chunk(ctx.world_size)[ctx.rank]
    for row, number in enumerate(rows.tolist()):
        batch["labels"][row, : 15 * number] = -100
    return float(ctx.engine.step(batch))


def test_every_labelled_token_is_weighted_once(tmp_path: Path) -> None:
    expected = on_ranks(1, tiny_plan("ddp", 1, micro_batch_size=4), uneven_labels, tmp_path / "one")[0]
    plan = tiny_plan("fsdp2", 2, num_micro_batches=2, micro_batch_size=1)
    assert abs(on_ranks(2, plan, uneven_labels, tmp_path / "two")[0] - expected) < 1e-5


@sample(2)
@pytest.mark.parametrize(
    ("framework", "fields"),
    [
        ("ddp", {"precision": "bf16-mixed"}),
        ("fsdp2", {"precision": "bf16-mixed"}),
        ("ddp", {"precision": "fp16-mixed"}),
        ("fsdp2", {"precision": "fp16-mixed"}),
        ("fsdp2", {"precision": "bf16"}),
        ("fsdp2", {"layout": {"offload": "cpu"}}),
        ("fsdp2", {"layout": {"reshard_after_forward": False}}),
        ("fsdp2", {"layout": {"reshard_after_forward": 2}}),
    ],
)
def test_other_methods_and_precisions_train(
    framework: str, fields: dict[str, Any], reference_result: dict[str, Any], tmp_path: Path
) -> None:
    result = on_ranks(2, tiny_plan(framework, 2, **fields), five_losses, tmp_path)[0]
    assert close(result["losses"], reference_result["losses"], 0.15 if "precision" in fields else 1e-4)
    kept = "bfloat16" if fields.get("precision") == "bf16" else "float32"
    assert result["engine"]["parameter_dtypes"] == [kept]
    compute = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "bf16": "bf16"}.get(
        fields.get("precision", ""), "fp32"
    )
    assert result["engine"]["sentence"].endswith(f", {compute} compute")


def save_and_go_on(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.frameworks.ddp.engine.engine import DdpEngine

    set_up(ctx)
    for step in range(3):
        ctx.engine.step(make_batch(ctx, step))
    path = ctx.folder / "checkpoints" / "three"
    ctx.engine.save(path)
    ctx.engine.save(path)  # onto an older one
    went_on = [ctx.engine.step(make_batch(ctx, step)) for step in (3, 4)]
    ctx.engine = type(ctx.engine)(ctx)
    ctx.engine.seed = 7
    set_up(ctx)
    ctx.engine.load(path)
    done = ctx.engine.num_steps_done
    again = [ctx.engine.step(make_batch(ctx, step)) for step in (3, 4)]
    ctx.engine = DdpEngine(ctx)
    ctx.engine.seed = 7
    set_up(ctx)
    ctx.engine.load(path)
    other = [ctx.engine.step(make_batch(ctx, step)) for step in (3, 4)]
    left = sorted(child.name for child in path.parent.iterdir())
    return {"went_on": went_on, "again": again, "ddp": other, "done": done, "left": left}


@sample(1)
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_a_checkpoint_continues_exactly(framework: str, tmp_path: Path) -> None:
    result = on_ranks(2, tiny_plan(framework, 2), save_and_go_on, tmp_path)[0]
    assert result["again"] == result["went_on"]
    assert result["done"] == 3
    assert close(result["ddp"], result["went_on"])
    assert result["left"] == ["three"]


def train_adapters(ctx: StandInContext) -> dict[str, Any]:
    set_up(ctx)
    from shardscope.training.optimizers.gradients import local_shard

    before = {name: local_shard(p.detach()).clone() for name, p in ctx.engine.model.named_parameters()}
    losses = [ctx.engine.step(make_batch(ctx, 0)) for _ in range(NUM_STEPS)]
    after = {name: local_shard(p.detach()) for name, p in ctx.engine.model.named_parameters()}
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    ctx.engine.save(ctx.folder / "adapter")
    expected = ctx.engine.step(make_batch(ctx, 1))
    ctx.engine = type(ctx.engine)(ctx)
    set_up(ctx)
    ctx.engine.load(ctx.folder / "adapter")
    return {
        "losses": losses,
        "changed": changed,
        "pair": [expected, ctx.engine.step(make_batch(ctx, 1))],
        "num_trained_parameters": ctx.records["engine"]["num_trained_parameters"],
        "dtypes": {
            trains: sorted({str(p.dtype) for p in ctx.engine.model.parameters() if p.requires_grad == trains})
            for trains in (True, False)
        },
        "held": ctx.engine.peak_tensor_bytes,
        "rest": ctx.engine.memory(),
    }


@sample(1)
@pytest.mark.parametrize(
    ("framework", "precision"),
    few(
        [(framework, how) for framework in ("ddp", "fsdp2") for how in ("fp32", "bf16-mixed", "fp16-mixed")],
        [("ddp", "bf16-mixed"), ("fsdp2", "fp16-mixed")],
    ),
)
def test_lora_trains_only_adapters(framework: str, precision: str, tmp_path: Path) -> None:
    """The base never updates, so mixed precision keeps no fp32 original of it; of adapters it does."""
    needs("peft")
    targets = ("q_proj", "v_proj")
    plan = tiny_plan(framework, 2, method="lora", lora_rank=4, lora_targets=targets, precision=precision)
    result = on_ranks(2, plan, train_adapters, tmp_path)[0]
    frozen = {"bf16-mixed": "torch.bfloat16", "fp16-mixed": "torch.float16", "fp32": "torch.float32"}
    # JSON knows no other keys than words.
    assert result["dtypes"] == {"true": ["torch.float32"], "false": [frozen[precision]]}
    # Beside what is planned there are step counters and the table of angles.
    planned, at_rest = (plan.memory().at(phase) for phase in ("optimizer", "rest"))
    state = ("parameters", "gradients", "optimizer")
    assert result["held"] == pytest.approx(sum(planned[name] for name in state), abs=500)
    for name in state:
        assert result["rest"][name] == pytest.approx(at_rest[name], abs=500)
    assert result["num_trained_parameters"] == count_adapter_parameters(plan.architecture, plan.recipe)
    assert len(result["changed"]) == 2 * 2 * 2
    assert all("lora_" in name for name in result["changed"])
    assert result["losses"][-1] < result["losses"][0]
    assert result["pair"][0] == result["pair"][1]
    size = sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
    assert size < tiny_llama().num_parameters


def read_refusal(ctx: StandInContext) -> str:
    try:
        set_up(ctx)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no refusal"


def test_unsupported_fsdp2_plans_raise(tmp_path: Path) -> None:
    """The error is the one that is raised before a launch."""
    plan = tiny_plan("fsdp2", 2, layout={"cp": 2}, recompute="offload")
    words = why_not_trained(plan)
    assert words is not None and "with cp > 1" in words
    assert on_ranks(2, plan, read_refusal, tmp_path) == [f"FieldError: {words}"] * 2


def without_sharding(ctx: StandInContext) -> str:
    from shardscope.frameworks.fsdp2.engine import engine

    engine.fully_shard = lambda module, **_: module
    return read_refusal(ctx)


def with_half_the_mesh(ctx: StandInContext) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    from shardscope.frameworks.fsdp2.engine import engine

    engine.init_device_mesh = lambda kind, shape, mesh_dim_names: init_device_mesh(
        kind, (2, 1), mesh_dim_names=("replicate", "shard")
    )["shard"]
    return read_refusal(ctx)


def without_ddp(ctx: StandInContext) -> str:
    from shardscope.frameworks.ddp.engine import engine

    class Bare(torch.nn.Module):
        def __init__(self, module: Any, **_: Any) -> None:
            super().__init__()
            self.module = module

    engine.DistributedDataParallel.__new__ = lambda cls, *a, **k: Bare(*a)  # type: ignore[method-assign]
    return read_refusal(ctx)


@sample(1)
@pytest.mark.parametrize(
    ("framework", "body", "words"),
    [
        ("fsdp2", without_sharding, "not DTensors"),
        ("fsdp2", with_half_the_mesh, "the plan shards over a mesh of (2,)"),
        ("ddp", without_ddp, "the plan says DDP, and the module is Bare"),
    ],
)
def test_a_contradiction_fails_the_run(framework: str, body: Any, words: str, tmp_path: Path) -> None:
    for message in on_ranks(2, tiny_plan(framework, 2), body, tmp_path):
        assert message.startswith("RuntimeError") and words in message


def built_on_meta(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.memory.overheads import building

    building.HOST_BUILD_BYTES = 0
    ctx.engine.fresh_weights = True
    return five_losses(ctx)


@sample(1)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_initialized_from_meta_do_not_depend_on_world_size(tied: bool, tmp_path: Path) -> None:
    llama = tiny_llama(tie_word_embeddings=tied)
    single = tiny_plan("fsdp2", 1, micro_batch_size=4, architecture=llama)
    alone = on_ranks(1, single, built_on_meta, tmp_path)[0]
    pair = on_ranks(2, tiny_plan("fsdp2", 2, architecture=llama), built_on_meta, tmp_path)[0]
    assert alone["engine"]["built_on"] == "meta"
    assert close(pair["losses"], alone["losses"])
    assert abs(alone["losses"][0] - 7.62) < 0.1  # ln 2048: fresh weights know nothing
    assert alone["losses"][-1] < alone["losses"][0]
    assert pair["engine"]["num_parameters"] == llama.num_parameters


def own_weights(ctx: StandInContext) -> dict[str, Any]:
    def build() -> Any:
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        return module

    def build_empty() -> Any:
        with torch.device("meta"):
            return torch.nn.Linear(8, 8)

    ctx.engine.setup(build)
    weights = [p.full_tensor() for p in ctx.engine.model.parameters()]
    other = type(ctx.engine)(ctx)
    try:
        other.setup(build_empty)
    except ValueError as error:
        words = str(error)
    return {
        "values": sorted({value for weight in weights for value in weight.flatten().tolist()}),
        "built_on": ctx.records["engine"]["built_on"],
        "words": words,
    }


@thorough()
def test_a_models_own_weights_are_kept_under_a_large_plan(tmp_path: Path) -> None:
    """How a model is built hangs on what the task says of its weights, not on the plan's size alone."""
    plan = tiny_plan("fsdp2", 2, architecture=models["llama-3.2-1b"])
    for result in on_ranks(2, plan, own_weights, tmp_path):
        assert result["values"] == [0.5] and result["built_on"] == "host"
        assert "2 parameters on the meta device" in result["words"]


def pretrained_from_meta(ctx: StandInContext) -> str:
    from shardscope.memory.overheads import building
    from shardscope.training.tasks.pretrain import Pretrain

    building.HOST_BUILD_BYTES = 0
    Pretrain(num_steps=1)(ctx)
    return str(ctx.records["engine"]["built_on"])


@thorough()
def test_pretraining_a_large_plan_never_builds_the_whole_model(tmp_path: Path) -> None:
    assert on_ranks(2, tiny_plan("fsdp2", 2), pretrained_from_meta, tmp_path) == ["meta"] * 2


def no_labels(ctx: StandInContext) -> str:
    set_up(ctx)
    batch = make_batch(ctx, 0)
    if ctx.rank == 1:
        batch["labels"][:] = -100
    try:
        ctx.engine.step(batch)
    except ValueError as error:
        return str(error)
    return ""


def test_a_micro_batch_without_labels_raises_on_every_rank(tmp_path: Path) -> None:
    for message in on_ranks(2, tiny_plan("ddp", 2), no_labels, tmp_path):
        assert "no labelled token" in message


def stepped_freely(ctx: StandInContext) -> dict[str, Any]:
    """Measure one step of plain SGD with clipping: its length is the learning rate times the norm."""
    moved, norms = [], []
    for longest in (1.0, 0.25, None):
        ctx.engine = type(ctx.engine)(ctx)
        assert ctx.engine.max_grad_norm == 1.0
        ctx.engine.max_grad_norm = longest

        def build() -> Any:
            class Line(torch.nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.weight = torch.nn.Parameter(torch.zeros(4, 1))

                def forward(self, x: Any) -> Any:
                    return (x @ self.weight).mean()

            return Line()

        ctx.engine.setup(build, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        ctx.engine.step({"x": torch.full((2, 4), 3.0)})
        (weight,) = ctx.engine.model.parameters()
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        moved.append(float(whole.norm()))
        norms.append(ctx.engine.grad_norm)
    return {"moved": moved, "norms": norms}


@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_clipping_can_be_set_and_left_out(framework: str, tmp_path: Path) -> None:
    result = on_ranks(2, tiny_plan(framework, 2), stepped_freely, tmp_path)[0]
    assert result["moved"] == pytest.approx([1.0, 0.25, 6.0], rel=1e-4)
    assert result["norms"] == pytest.approx([6.0] * 3)


def saved_beside(ctx: StandInContext) -> int:
    set_up(ctx)
    ctx.engine.step(make_batch(ctx, 0))
    ctx.engine.save("kept/one")
    again = type(ctx.engine)(ctx)
    ctx.engine = again
    set_up(ctx)
    again.load("kept/one")
    return int(again.num_steps_done)


def test_relative_checkpoints_are_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert on_ranks(2, tiny_plan("fsdp2", 2), saved_beside, tmp_path / "run") == [1, 1]
    assert (tmp_path / "run" / "kept" / "one" / "position.json").is_file()
    assert not list(elsewhere.iterdir())


def train_classifier(ctx: StandInContext) -> list[float]:
    """Take three steps of a classifier whose labels are one class a row, some of them left out."""

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, features: Any, labels: Any) -> Any:
            scores = self.head(torch.tanh(self.body(features)))
            return torch.nn.functional.cross_entropy(scores, labels)

    ctx.engine.setup(Classifier, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(8, 8, generator=generator)
    labels = torch.randint(0, 4, (8,), generator=generator)
    labels[[1, 4, 6]] = -100
    share = {
        name: whole.chunk(ctx.world_size)[ctx.rank]
        for name, whole in (("features", features), ("labels", labels))
    }
    return [ctx.engine.step(share) for _ in range(3)]


@sample(1)
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_classification_loss_weights_every_label_once(
    framework: str, num_micro_batches: int, tmp_path: Path
) -> None:
    whole = tiny_plan("ddp", 1, micro_batch_size=8)
    expected = on_ranks(1, whole, train_classifier, tmp_path / "one")[0]
    plan = tiny_plan(
        framework, 2, num_micro_batches=num_micro_batches, micro_batch_size=4 // num_micro_batches
    )
    assert close(on_ranks(2, plan, train_classifier, tmp_path / "two")[0], expected, 1e-5)


def labelled_singly(ctx: StandInContext) -> list[float]:
    """One label a row and one row a micro-batch: cutting a label off would leave none."""
    from shardscope.training.micro_batches import LossWeights

    labels = torch.tensor([3])
    return [LossWeights([{"features": torch.zeros(1, 8), "labels": labels}])[0]]


def test_a_batch_with_a_single_label_trains(tmp_path: Path) -> None:
    assert on_ranks(2, tiny_plan("ddp", 2), labelled_singly, tmp_path) == [[1.0], [1.0]]


def pretrain(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.training.tasks.pretrain import Pretrain

    printed = io.StringIO()
    with redirect_stdout(printed):
        Pretrain(num_steps=40, learning_rate=3e-3, save_checkpoint=True)(ctx)
    return {"lines": ctx.lines, "records": ctx.records, "printed": printed.getvalue().splitlines()}


@pytest.mark.parametrize("framework", few(["ddp", "fsdp2"], ["fsdp2"]))
def test_pretraining_learns_real_text(framework: str, tmp_path: Path) -> None:
    plan = tiny_plan(framework, 2, micro_batch_size=8)
    first, second = on_ranks(2, plan, pretrain, tmp_path)
    losses = [line["loss"] for line in first["lines"]]
    assert len(losses) == 40 and losses == [line["loss"] for line in second["lines"]]
    assert losses[0] > 7.5 and losses[-1] < losses[0] - 1.0
    for line in first["lines"]:
        assert line["tokens_per_second"] == pytest.approx(8 * 64 / line["step_seconds"])
        assert line["tokens_per_second_all_ranks"] == pytest.approx(2 * line["tokens_per_second"])
        assert line["rss_bytes"] > line["peak_memory_bytes"] >= line["memory_bytes"] > 0
        assert line["grad_norm"] > 0
    what, schedule, *told, saved = first["printed"]
    assert re.fullmatch(
        r"training tiny \(336,192 parameters\) on moby_dick.txt: [\d,]+ windows of 64 tokens, "
        r"8 per step on this rank",
        what,
    )
    assert schedule.startswith("learning rate: "), schedule
    assert [line.split(":")[0] for line in told] == [f"step {n} of 40" for n in (1, *range(4, 41, 4))]
    assert saved == "saved checkpoints/step-000040"
    assert re.fullmatch(r"step 40 of 40: loss \d\.\d+, [\d,]+ tokens/s", told[-1])
    seen = [set(result["records"]["data"]["samples_seen"]) for result in (first, second)]
    assert all(len(windows) == 40 * 8 for windows in seen)
    assert not seen[0] & seen[1]
    assert (tmp_path / "checkpoints" / "step-000040" / "position.json").is_file()


def stopped_then_resumed(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.training.tasks.pretrain import Pretrain

    stopping = StandInContext(ctx.rank, ctx.world_size, ctx.plan, ctx.folder, ctx.device, stop_at_look=4)
    stopping.engine = type(ctx.engine)(stopping)
    Pretrain(num_steps=6)(stopping)
    ctx.engine = type(ctx.engine)(ctx)
    Pretrain(num_steps=6, resume=ctx.folder / "checkpoints" / "step-000003")(ctx)
    resumed = ctx.lines
    ctx.lines, ctx.engine = [], type(ctx.engine)(ctx)
    Pretrain(num_steps=6)(ctx)
    names = ("step", "loss", "learning_rate")
    return {
        "parts": [[line[name] for name in names] for line in [*stopping.lines, *resumed]],
        "whole": [[line[name] for name in names] for line in ctx.lines],
    }


def test_a_stopped_run_resumes_at_its_last_step(tmp_path: Path) -> None:
    result = on_ranks(2, tiny_plan("fsdp2", 2), stopped_then_resumed, tmp_path)[0]
    assert result["parts"] == result["whole"]


def train_counting_control_reads(ctx: Any) -> None:
    """Train, and log how often this rank read the control file."""
    from shardscope.training.tasks.pretrain import Pretrain

    Pretrain(num_steps=100_000, learning_rate=1e-4)(ctx)
    ctx.log(num_looks=ctx._feed._num_polls)


def recorded_steps(run: Any, rank: int) -> int:
    trace = json.loads(gzip.decompress((run.folder / "traces" / f"rank-{rank}.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"] if "name" in event}
    return sum(name.startswith("ProfilerStep#") for name in names)


@thorough()
@pytest.mark.usefixtures("bounded_time", "nothing_left")
def test_a_run_obeys_commands_at_the_same_step(tmp_path: Path) -> None:
    run = launch(tiny_plan("fsdp2", 2), train_counting_control_reads, folder=tmp_path)
    seconds_until(lambda: len(run.metrics()) > 10 or run.status == "failed")
    for steps in ("many", 2):
        run.send("profile", steps=steps)
    run.send("dance")
    run.send("checkpoint")
    checkpoints = run.folder / "checkpoints"
    seconds_until(lambda: run.status == "failed" or list(checkpoints.glob("step-*/position.json")))
    seconds_until(lambda: run.status == "failed" or len(list((run.folder / "traces").glob("*.gz"))) == 2)
    (asked,) = checkpoints.glob("step-*")
    run.stop(checkpoint=True)
    assert run.wait(20) == "stopped", run.error
    assert [recorded_steps(run, rank) for rank in range(2)] == [2, 2]
    losses = [line["step"] for line in run.metrics() if "loss" in line and line["rank"] == 0]
    looks = [line["num_looks"] for line in run.metrics() if "num_looks" in line]
    assert looks == [len(losses) + 1] * 2  # one a step, and the one that saw the stop
    assert int(asked.name.removeprefix("step-")) < len(losses)
    assert (checkpoints / f"step-{len(losses):06d}" / "position.json").is_file()
    for rank in range(2):
        log = run.logs(rank)
        assert "ignored a command: profile steps is 'many'; allowed: " in log
        assert "ignored a command: command is 'dance'; allowed: " in log
        assert f"saved checkpoints/{asked.name}" in log


@pytest.mark.usefixtures("bounded_time", "nothing_left")
@pytest.mark.parametrize(("num_steps", "expected"), few([(1, 1), (2, 1), (3, 2)], []))
def test_short_runs_record_the_expected_number_of_steps(
    num_steps: int, expected: int, tmp_path: Path
) -> None:
    from shardscope.training.tasks.pretrain import Pretrain

    run = launch(tiny_plan("ddp", 2), Pretrain(num_steps=num_steps, profile=True), folder=tmp_path)
    assert run.wait(120) == "finished", run.error
    assert [recorded_steps(run, rank) for rank in range(2)] == [expected] * 2
