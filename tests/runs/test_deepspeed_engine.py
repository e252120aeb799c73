"""ZeRO really training on gloo ranks: many plans in one spawn, each beside the same model in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, needs_installed, thorough, with_fp16_where_it_can_be

torch = needs("torch")
needs("transformers")
# make test has a parity row of this framework.
pytestmark = [needs_installed("deepspeed"), thorough()]

from finetuned_models import train_beside_single_process  # noqa: E402
from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from single_process import RATE, train_in_one_process  # noqa: E402

from shardscope import Layout  # noqa: E402
from shardscope.core.errors import FieldError  # noqa: E402
from shardscope.frameworks.deepspeed import extensions, limits  # noqa: E402
from shardscope.frameworks.deepspeed.layout import NVME_VARIABLE  # noqa: E402
from shardscope.frameworks.engines import before_fork  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402
from shardscope.machine.host import multiplies_in_fp16  # noqa: E402

NUM_STEPS = 4
SAVED_AFTER = 2
TIMES = 3
"""gloo's own thread lets go of a bucket a moment after the collective has ended: now and then the census
finds all gradients once more, so that the least of several runs is what a rank holds."""

PLANS: dict[str, dict[str, Any]] = {
    "zero-0": {"layout": {"stage": 0}},
    "zero-1": {"layout": {"stage": 1}},
    "zero-2, two micro-batches": {"layout": {"stage": 2}, "num_micro_batches": 2, "micro_batch_size": 1},
    "zero-3": {"layout": {"stage": 3}},
    "zero-3 recomputing": {"layout": {"stage": 3}, "recompute": "full"},
    "zero-3 bf16": {"layout": {"stage": 3}, "precision": "bf16-mixed"},
    "zero-0 bf16": {"layout": {"stage": 0}, "precision": "bf16-mixed"},
    "zero-1 fp16": {"layout": {"stage": 1}, "precision": "fp16-mixed"},
}
ON_HOST: dict[str, dict[str, Any]] = {
    "zero-2 on the host": {"layout": {"stage": 2, "offload_optimizer": "cpu"}},
    "zero-3 on the host": {"layout": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}},
}


def make_plan(name: str) -> Any:
    return tiny_plan("zero", 2, **{**PLANS, **ON_HOST}[name])


def whole_batch(step: int) -> Any:
    return torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(step))


def take_rank_rows(ctx: StandInContext, step: int) -> dict[str, Any]:
    rows = whole_batch(step).chunk(ctx.world_size)[ctx.rank]
    return {"input_ids": rows, "labels": rows.clone()}


def set_up_engine(ctx: StandInContext, plan: Any, seed: int = 0) -> Any:
    """Set up a new engine of ``plan`` in the same process."""
    from shardscope.training.model.model import build_model

    ctx.plan = plan
    engine = ctx.engine = type(ctx.engine)(ctx)
    engine.learning_rate, engine.seed = RATE, seed
    engine.setup(lambda: build_model(plan.architecture))
    return engine


def train_every_plan(ctx: StandInContext) -> dict[str, Any]:
    """Return every plan's losses, bytes and record, and those of plain torch."""
    from shardscope.training.accounting import memory_watch

    found: dict[str, Any] = {"reference": plain_torch()}
    names = [*PLANS, *(ON_HOST if extensions.is_built("cpu_adam") else ())]
    if multiplies_in_fp16() is False:
        names.remove("zero-1 fp16")
    found["at update"] = at_update(ctx)
    memory_watch.WATCHED_STEPS = ()  # The census looks at every operator.
    for name in names:
        engine = set_up_engine(ctx, make_plan(name))
        losses, norms = [], []
        for step in range(NUM_STEPS):
            losses.append(engine.step(take_rank_rows(ctx, step)))
            norms.append(engine.grad_norm)
        found[name] = {
            "losses": losses,
            "norms": norms,
            "held": engine.held_at_update,
            "engine": ctx.records["engine"],
        }
    found["kept"] = resume_and_export(ctx)
    found["adapters"] = train_adapters(ctx)
    found["contradiction"] = read_contradiction(ctx)
    found["types of parts"] = types_of_parts(ctx)
    found["from files"] = train_beside_single_process(ctx, "tied", Layout.zero(stage=3))
    return found


def at_update(ctx: StandInContext) -> int:
    """Return the working bytes of ZeRO-1's update: the least of ``TIMES`` runs."""
    seen = []
    for _ in range(TIMES):
        engine = set_up_engine(ctx, make_plan("zero-1"))
        for step in range(NUM_STEPS):
            engine.step(take_rank_rows(ctx, step))
        held = ctx.records["memory"]["phases"]["optimizer"]
        seen.append(held["optimizer"] + held["activations"])
    return min(seen)


def plain_torch() -> dict[str, Any]:
    ids = [whole_batch(step) for step in range(NUM_STEPS)]
    return train_in_one_process(tiny_llama(), [{"input_ids": rows, "labels": rows} for rows in ids])


def moved_to_the_host(ctx: StandInContext) -> list[float]:
    """Return the losses of an optimizer on the host that resumes a checkpoint of one on the device."""
    engine = set_up_engine(ctx, make_plan("zero-2, two micro-batches"))
    for step in range(SAVED_AFTER):
        engine.step(take_rank_rows(ctx, step))
    engine.save("kept/on the device")
    engine = set_up_engine(ctx, make_plan("zero-2 on the host"), seed=7)
    engine.load("kept/on the device")
    return [engine.step(take_rank_rows(ctx, step)) for step in range(SAVED_AFTER, NUM_STEPS)]


def resume_and_export(ctx: StandInContext) -> dict[str, Any]:
    """Resume a checkpoint in a new engine, open an export with transformers, and collect refusals."""
    from transformers import AutoModelForCausalLM

    results: dict[str, Any] = {}
    for name in ("zero-1", "zero-3 bf16"):
        engine = set_up_engine(ctx, make_plan(name))
        for step in range(SAVED_AFTER):
            engine.step(take_rank_rows(ctx, step))
        engine.save(f"kept/{name}")
        engine = set_up_engine(ctx, make_plan(name), seed=7)
        engine.load(f"kept/{name}")
        engine.export(f"exported/{name}")
        opened = AutoModelForCausalLM.from_pretrained(ctx.folder / "exported" / name)
        ids = whole_batch(SAVED_AFTER)
        with torch.no_grad():
            loss = float(opened(input_ids=ids, labels=ids).loss)
        done = engine.num_steps_done
        again = [engine.step(take_rank_rows(ctx, step)) for step in range(SAVED_AFTER, NUM_STEPS)]
        results[name] = {"again": again, "done": done, "exported": loss, "type": str(opened.dtype)}
    if extensions.is_built("cpu_adam"):
        results["to the host"] = moved_to_the_host(ctx)
        engine = set_up_engine(ctx, make_plan("zero-3"))
    try:
        engine.load("kept/zero-1")
    except ValueError as refusal:
        results["refusal"] = str(refusal)
    return results


def train_adapters(ctx: StandInContext) -> dict[str, Any]:
    """Train adapters, check that a checkpoint has nothing else, and open their export with peft."""
    engine = set_up_engine(ctx, tiny_plan("zero", 2, layout={"stage": 3}, method="lora"))
    losses = [engine.step(take_rank_rows(ctx, 0)) for _ in range(3)]
    engine.save("kept/adapters")
    engine.export("exported/adapters")
    files = sorted(path.name for path in (ctx.folder / "exported" / "adapters").iterdir())
    whole = 4 * tiny_llama().num_parameters
    size = sum(
        path.stat().st_size for path in (ctx.folder / "kept" / "adapters").rglob("*") if path.is_file()
    )
    record = ctx.records["engine"]
    return {"losses": losses, "files": files, "is_small": size < whole, "engine": record}


def read_contradiction(ctx: StandInContext) -> str:
    """Return the error if DeepSpeed is configured with another stage than the plan's."""
    from shardscope.frameworks.deepspeed.engine import engine

    truth = engine.build_deepspeed_config

    def change_stage(plan: Any, **options: Any) -> dict[str, Any]:
        config = truth(plan, **options)
        config["zero_optimization"]["stage"] = 1
        return config

    engine.build_deepspeed_config = change_stage
    try:
        set_up_engine(ctx, make_plan("zero-2, two micro-batches"))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.build_deepspeed_config = truth
    return "it went on"


def types_of_parts(ctx: StandInContext) -> list[str]:
    """Return the type in which partitions are swapped, on a device with fp16 and on one without."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    results: list[str] = []
    truth, accelerator = deepspeed.zero.Init, get_accelerator()

    def record_types(**options: Any) -> Any:
        init = truth(**options)
        results.append(str(init.dtype))
        return init

    deepspeed.zero.Init = record_types
    try:
        for supported in (True, False):
            accelerator.is_fp16_supported = lambda supported=supported: supported
            for name in ("zero-3", "zero-3 bf16"):
                set_up_engine(ctx, make_plan(name))
    finally:
        deepspeed.zero.Init = truth
        del accelerator.is_fp16_supported
    return results


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    plan = make_plan("zero-1")
    before_fork(plan, "cpu")
    if extensions.is_built("cpu_adam"):
        extensions.load_extension("cpu_adam")
    return on_ranks(2, plan, train_every_plan, tmp_path_factory.mktemp("zero"))


def select_result(found: list[dict[str, Any]], name: str, rank: int = 0) -> dict[str, Any]:
    if name in ON_HOST and name not in found[rank]:
        pytest.skip(
            "DeepSpeed's Adam for the host compiles for a minute in a new environment: `make parity` runs it"
        )
    of_name: dict[str, Any] = found[rank][name]
    return of_name


@pytest.mark.parametrize("name", with_fp16_where_it_can_be([*PLANS, *ON_HOST]))
def test_losses_equal_those_of_plain_torch(name: str, rank_results: list[dict[str, Any]]) -> None:
    expected = rank_results[0]["reference"]
    of_plan = select_result(rank_results, name)
    assert of_plan["losses"] == select_result(rank_results, name, 1)["losses"]
    half = "precision" in {**PLANS, **ON_HOST}[name]
    assert of_plan["losses"] == pytest.approx(expected["losses"], abs=0.05 if half else 1e-4)
    assert of_plan["norms"] == pytest.approx(expected["norms"], rel=0.1 if half else 1e-3)


def test_stage_3_loads_pretrained_weights(rank_results: list[dict[str, Any]]) -> None:
    for rank in rank_results:
        assert rank["from files"]["losses"] == pytest.approx(rank["from files"]["alone"], abs=1e-4)


@pytest.mark.parametrize("name", with_fp16_where_it_can_be([*PLANS, *ON_HOST]))
def test_measured_bytes_equal_the_prediction(name: str, rank_results: list[dict[str, Any]]) -> None:
    """To the byte, of the rank that holds most; what an update works with is no state."""
    report = make_plan(name).memory()
    ranks = [select_result(rank_results, name, rank)["held"] for rank in range(2)]
    assert max(rank["parameters"] for rank in ranks) == report.at("rest")["parameters"]
    assert max(rank["gradients"] for rank in ranks) == report.at("optimizer")["gradients"]
    assert max(rank["optimizer"] for rank in ranks) == report.at("rest")["optimizer"]


def test_optimizer_step_memory_is_as_predicted(rank_results: list[dict[str, Any]]) -> None:
    """The engine's AdamW is fused: a plain one would need twice its part beside its moments."""
    predicted = make_plan("zero-1").memory().at("optimizer")["optimizer"]
    assert 0 <= max(rank["at update"] for rank in rank_results) - predicted < 4096


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "zero-0",
            "DeepSpeed ZeRO-0: every rank has all weights, gradients and optimizer state, 2 ranks "
            "(gloo, cpu), fp32 compute",
        ),
        ("zero-1", "DeepSpeed ZeRO-1: optimizer state is partitioned over 2 ranks (gloo, cpu), fp32 compute"),
        (
            "zero-3 bf16",
            "DeepSpeed ZeRO-3: weights, gradients and optimizer state are partitioned over 2 ranks "
            "(gloo, cpu), bf16 compute",
        ),
        (
            "zero-3 on the host",
            "DeepSpeed ZeRO-3: weights, gradients and optimizer state are partitioned over 2 ranks "
            "(gloo, cpu), optimizer state in host memory, weights in host memory, fp32 compute",
        ),
    ],
)
def test_the_engine_record_describes_the_run(
    name: str, sentence: str, rank_results: list[dict[str, Any]]
) -> None:
    record = select_result(rank_results, name)["engine"]
    assert record["sentence"] == sentence
    assert record["num_parameters"] == record["num_trained_parameters"] == tiny_llama().num_parameters
    assert record["stage"] == make_plan(name).layout.stage and record["data_parallel"] == 2
    halves = 1 if record["stage"] == 0 else 2
    assert record["num_weights_updated_here"] * halves == tiny_llama().num_parameters


@pytest.mark.parametrize("name", ["zero-1", "zero-3 bf16"])
def test_a_new_engine_resumes_from_the_checkpoint(name: str, rank_results: list[dict[str, Any]]) -> None:
    straight, of_kept = select_result(rank_results, name)["losses"], rank_results[0]["kept"][name]
    assert of_kept["done"] == SAVED_AFTER
    assert of_kept["again"] == pytest.approx(straight[SAVED_AFTER:], abs=1e-6)
    # Main copies are fp32, so is what is exported; forward reads them in bf16.
    assert of_kept["type"] == "torch.float32"
    assert of_kept["exported"] == pytest.approx(straight[SAVED_AFTER], abs=1e-5 if name == "zero-1" else 0.03)


def test_a_checkpoint_resumes_with_a_newly_offloaded_optimizer(rank_results: list[dict[str, Any]]) -> None:
    straight = select_result(rank_results, "zero-2 on the host")["losses"]
    assert rank_results[0]["kept"]["to the host"] == pytest.approx(straight[SAVED_AFTER:], abs=1e-5)


def test_a_checkpoint_of_another_zero_stage_raises(rank_results: list[dict[str, Any]]) -> None:
    words = rank_results[0]["kept"]["refusal"]
    assert "the ZeRO stage that saved zero-1" in words and "fsdp2 and ddp resume" in words


def test_only_adapters_are_trained_and_saved(rank_results: list[dict[str, Any]]) -> None:
    of_adapters = rank_results[0]["adapters"]
    assert of_adapters["losses"][-1] < of_adapters["losses"][0]
    assert of_adapters["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert of_adapters["is_small"]
    assert of_adapters["engine"]["num_trained_parameters"] < tiny_llama().num_parameters / 2


def test_dtypes_are_the_plans_whatever_the_processor_supports(rank_results: list[dict[str, Any]]) -> None:
    """Given it as ``dtype``, zero.Init took bf16 where the device has no fp16."""
    assert rank_results[0]["types of parts"] == ["torch.float32", "torch.bfloat16"] * 2


def test_a_contradiction_fails_the_run(rank_results: list[dict[str, Any]]) -> None:
    assert rank_results[0]["contradiction"] == "the plan's stage: 2; DeepSpeed built: 1"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layout": {"stage": 3}, "loss": "chunked"}, "fsdp2 runs it"),
        ({"layout": {"stage": 2}, "optimizer": "adamw_8bit"}, "'adamw', 'sgd', 'adafactor' for this engine"),
    ],
)
def test_unsupported_plans_raise_before_any_rank_starts(fields: dict[str, Any], words: str) -> None:
    refusal = why_not_trained(tiny_plan("zero", 2, **fields))
    assert refusal is not None and words in refusal and "Nearest fix" in refusal


def test_fp16_raises_without_processor_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any rank starts, and not by DeepSpeed in the midst of its setup."""
    plan = tiny_plan("zero", 2, layout={"stage": 1}, precision="fp16-mixed")
    monkeypatch.setattr(limits, "multiplies_in_fp16", lambda: False)
    refusal = why_not_trained(plan)
    assert refusal is not None and refusal.startswith("Recipe.precision is 'fp16-mixed'; allowed: ")
    assert (
        "without AVX512-FP16" in refusal and "Nearest fix: precision='bf16-mixed', or DDP, FSDP2" in refusal
    )
    monkeypatch.setattr(limits, "multiplies_in_fp16", lambda: None)
    assert why_not_trained(plan) is None


def test_processor_features_equal_torchs(tmp_path: Path) -> None:
    found = multiplies_in_fp16()
    assert found is None or found is bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    assert multiplies_in_fp16(tmp_path / "nowhere") is None
    for flags, expected in (
        ("fpu avx512_bf16", False),
        ("fpu avx512_fp16 amx_tile", True),
        ("avx_ne_convert", True),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
        assert multiplies_in_fp16(tmp_path / "cpuinfo") is expected
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert multiplies_in_fp16(tmp_path / "cpuinfo") is None


def test_nvme_offloading_raises_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "find_library", lambda name: None)
    with pytest.raises(FieldError, match="apt install libaio-dev"):
        limits._check_nvme()
    monkeypatch.setattr(limits, "find_library", lambda name: f"lib{name}.so")
    monkeypatch.setattr(extensions, "is_built", lambda name: True)
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(FieldError, match="is no folder"):
        limits._check_nvme()
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    limits._check_nvme()
    assert list(tmp_path.iterdir()) == [], "it was tried, and nothing is left of that"
    assert limits.find_nvme_folder(Path("runs/one")) == tmp_path / "one"
    if Path("/proc/self").exists():
        # Where nobody makes a folder, and root is told that it may.
        monkeypatch.setenv(NVME_VARIABLE, "/proc")
        with pytest.raises(FieldError, match="cannot be written"):
            limits._check_nvme()
    monkeypatch.delenv(NVME_VARIABLE)
    assert limits.find_nvme_folder(Path("runs/one")) == Path("runs/one/nvme")


def test_missing_build_tools_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "is_built", lambda name: False)
    monkeypatch.setattr(limits.shutil, "which", lambda tool: None if tool == "ninja" else f"/usr/bin/{tool}")
    plan = tiny_plan("zero", 2, layout={"stage": 2, "offload_optimizer": "cpu"})
    refusal = why_not_trained(plan)
    assert refusal is not None and "this machine has no ninja" in refusal


def test_compiled_extensions_have_a_folder_per_version_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = extensions.find_library_file("cpu_adam")
    assert library.is_relative_to(tmp_path / "shardscope" / "extensions")
    assert "deepspeed-" in str(library) and "torch-" in str(library)
    assert not extensions.is_built("cpu_adam")
