"""``Script``: a person's own Accelerate code becomes what the plan says, and the run says what it became."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate_scripts
import pytest
from tests.requirements import needs

torch = needs("torch")
needs("transformers")
needs("accelerate")

from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from run_helpers import make_plan  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.frameworks.accelerate import plugins  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402
from shardscope.runs.explain.exceptions import make_exception_record  # noqa: E402

LLAMA = ss.models["llama-3.1-8b"]
H100S = "8xh100-sxm-80gb"


def build_plan(layout: Any, cluster: str = H100S, **recipe: Any) -> ss.Plan:
    return ss.Plan(LLAMA, ss.Cluster.parse(cluster), ss.Recipe(global_batch_size=64, **recipe), layout)


def do_nothing() -> None:
    """Stand in for a script that need not run."""


# ---- refused before any rank starts


@pytest.mark.parametrize(
    ("layout", "engine"),
    [
        (ss.Layout.fsdp2(), "FSDP2 engine"),
        (ss.Layout.zero(), "ctx.engine"),
        (ss.Layout.megatron(), "ctx.engine"),
        (ss.Layout.megatron(cp=2), "Layout.ddp()"),
    ],
    ids=["fsdp2", "deepspeed", "megatron", "no engine either"],
)
def test_on_cpu_every_layout_but_ddp_raises(layout: Any, engine: str) -> None:
    plan = ss.Plan(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=64, precision="fp32", global_batch_size=4),
        layout,
    )
    with pytest.raises(ValueError, match="silently becomes DDP") as refusal:
        ss.Script(do_nothing).check(plan)
    trained = why_not_trained(plan) is None
    assert (engine if trained or "ddp" in engine else "Layout.ddp()") in str(refusal.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda: build_plan(ss.Layout.fsdp2(pp=2)), "no pipeline"),
        (lambda: build_plan(ss.Layout.fsdp2(reshard_after_forward=4)), "groups of 4"),
        (lambda: build_plan(ss.Layout.zero(1, pp=2)), "pipeline engine"),
        (lambda: build_plan(ss.Layout.megatron(tp=2)), "megatron.training"),
    ],
    ids=["fsdp2 pipeline", "groups", "zero pipeline", "megatron"],
)
def test_plans_that_accelerate_cannot_express_raise(plan: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ss.Script(do_nothing).check(plan())


def test_fp16_on_cpu_raises() -> None:
    plan = tiny_plan("ddp", 2, precision="fp16-mixed")
    with pytest.raises(ValueError, match="fp16 in fp32"):
        ss.Script(do_nothing).check(plan)


def test_sources_that_are_not_scripts_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        ss.Script(tmp_path / "none.py")
    with pytest.raises(ValueError, match="a folder"):
        ss.Script(tmp_path)
    for wrong in (3, None, dict):
        with pytest.raises(ValueError, match=r"Script\.source"):
            ss.Script(wrong)
    file = tmp_path / "train.py"
    file.write_text("import torch\nfor x in y\n    pass\n")
    with pytest.raises(ValueError, match="line 2"):
        ss.Script(file).check(make_plan(2))
    with pytest.raises(ValueError, match=r"\['--steps', '3'\]"):
        ss.Script(file, arguments="--steps 3")
    with pytest.raises(ValueError, match="arguments of"):
        ss.Script(accelerate_scripts.has_no_accelerator, arguments=(3,))
    assert ss.Script(file, arguments=["--steps", 3]).arguments == ("--steps", "3")


# ---- what Accelerate is told


@pytest.fixture
def set_plan_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets a plan's environment variables."""

    def set_variables(plan: ss.Plan) -> None:
        stale = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "ACCELERATE_MIXED_PRECISION": "fp16"}
        found = plugins.build_environment(plan, tmp_path, {**os.environ, **stale})
        for name in set(os.environ) | set(stale):
            if name not in found:
                monkeypatch.delenv(name, raising=False)
        for name, value in found.items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_accelerate_gets_only_precision_and_accumulation_for_ddp(set_plan_variables: Any) -> None:
    set_plan_variables(build_plan(ss.Layout.ddp()))
    found = {name: value for name, value in os.environ.items() if name.startswith(plugins.PREFIXES)}
    assert found == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
    }


def test_accelerate_reads_an_fsdp2_plan(set_plan_variables: Any) -> None:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    set_plan_variables(
        build_plan(ss.Layout.fsdp2(replicate=2, reshard_after_forward=False, offload="cpu"), recompute="full")
    )
    plugin, sizes = FullyShardedDataParallelPlugin(), ParallelismConfig()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.activation_checkpointing
    assert (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size, sizes.cp_size) == (2, 4, 1, 1)


def test_accelerate_reads_a_deepspeed_plan(set_plan_variables: Any) -> None:
    needs("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    set_plan_variables(build_plan(ss.Layout.zero(3, offload_optimizer="cpu")))
    plugin = DeepSpeedPlugin()
    config = plugin.deepspeed_config
    assert (plugin.zero_stage, plugin.offload_optimizer_device) == (3, "cpu")
    assert plugin.zero3_init_flag
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 8)
    assert config["bf16"] == {"enabled": True}


def test_accelerate_reads_a_megatron_plan(set_plan_variables: Any) -> None:
    from accelerate.utils import MegatronLMPlugin

    set_plan_variables(build_plan(ss.Layout.megatron(tp=2, pp=2)))
    plugin = MegatronLMPlugin()
    assert (plugin.tp_degree, plugin.pp_degree, plugin.context_parallel_size) == (2, 2, 1)
    assert plugin.sequence_parallelism
    assert plugin.use_distributed_optimizer
    assert plugin.num_micro_batches == 64 // 2


# ---- a real run


@pytest.mark.usefixtures("bounded_time", "nothing_left")
def test_a_users_script_runs_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "train.py"
    file.parent.mkdir()
    file.write_text(accelerate_scripts.FILE)
    (file.parent / "beside.py").write_text(accelerate_scripts.BESIDE)
    recipe = ss.Recipe(seq_len=64, micro_batch_size=4, global_batch_size=16)
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    run = ss.launch(plan, ss.Script(file, arguments=["--steps", 3]), folder=tmp_path / "runs")
    assert run.wait(80) == "finished", run.error
    found = [run.engine_reports()[rank]["engine"] for rank in range(2)]
    for engine in found:
        assert engine["module"] == "DistributedDataParallel"
        assert (engine["data_parallel"], engine["mixed_precision"]) == (2, "bf16")
        assert engine["gradient_accumulation_steps"] == engine["micro_batches_per_step"] == 2
        assert engine["parameter_bytes"] == engine["gradient_bytes"] == 4 * 161
        assert engine["optimizer"] == "AdamW"
        assert "a model of 161 parameters" in engine["differs"][0]
    assert "DDP: DistributedDataParallel over 2 ranks (gloo, cpu)" in found[0]["sentence"]
    mine = {line["step"]: line["mine"] for line in run.metrics() if "mine" in line}
    logged = {line["step"]: line["loss"] for line in run.metrics() if line["rank"] == 0 and "loss" in line}
    assert logged == pytest.approx(mine)
    assert len(mine) == 3
    assert "my own script took 3 steps" in run.logs(0)
    assert not run.logs(1).strip()


# ---- what Accelerate really made, its other plugins included: on CPU ranks only as a test may have it


def as_if_on_gpus() -> None:
    """Accelerate takes CPU ranks over gloo for GPUs, and leaves its plugins in force. No run may do this."""
    from accelerate import DistributedType
    from accelerate.state import PartialState

    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def find_case(
    ctx: StandInContext, plan: ss.Plan, function: Any, *arguments: Any
) -> tuple[StandInContext, dict[str, Any]]:
    """Run one script on this rank as a run of its own. Return its context, and its error if it failed."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    own = replace(ctx, plan=plan, lines=[], records={})
    own.memory_metrics = dict  # type: ignore[attr-defined]
    try:
        ss.Script(function, arguments=arguments)(own)
    except Exception as error:
        return own, make_exception_record(error)
    return own, {}


def several_scripts(ctx: StandInContext) -> dict[str, Any]:
    """Run every case in one spawn of ranks. Return the records of each."""
    os.environ.update(RANK=str(ctx.rank), LOCAL_RANK=str(ctx.rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="1")
    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu")
    ddp, arch = tiny_plan("ddp", 2, seq_len=16), tiny_llama()
    results: dict[str, Any] = {}

    def record_script(name: str, plan: ss.Plan, function: Any, *arguments: Any) -> None:
        own, error = find_case(ctx, plan, function, *arguments)
        results[name] = {"engine": own.records.get("engine", {}), "lines": own.lines, "error": error}

    record_script("ddp", ddp, accelerate_scripts.train_llama, arch)
    four = tiny_plan("ddp", 2, num_micro_batches=4)
    record_script("no accumulation", four, accelerate_scripts.never_accumulates)
    record_script(
        "recomputes", tiny_plan("ddp", 2, seq_len=16, recompute="full"), train_with_recomputation, arch
    )
    record_script("another recipe", tiny_plan("ddp", 2, recompute="full"), with_another_recipe, arch)
    record_script(
        "no adapters", tiny_plan("ddp", 2, seq_len=16, method="lora"), accelerate_scripts.train_llama, arch
    )
    record_script("some weights", ddp, some_weights, arch)
    record_script("trains nothing", ddp, accelerate_scripts.trains_nothing)
    record_script("no accelerator", ddp, accelerate_scripts.has_no_accelerator)
    record_script("fails", ddp, accelerate_scripts.fails_in_a_helper)
    record_script("other precision", ddp, in_bf16, arch)
    plugins.check_plan = lambda plan: None
    del os.environ["ACCELERATE_USE_CPU"]
    as_if_on_gpus()
    mixed = tiny_plan("fsdp2", 2, precision="bf16-mixed")
    record_script("fsdp2", mixed, accelerate_scripts.train_llama, arch)
    record_script(
        "fsdp2 kept",
        tiny_plan("fsdp2", 2, layout={"reshard_after_forward": False}),
        accelerate_scripts.train_llama,
        arch,
    )
    record_script("plan is ddp, script fsdp", ddp, brings_a_plugin, arch)
    # DeepSpeed is the last: it keeps its groups for the process.
    for stage in (1, 3):
        zero = tiny_plan("zero", 2, precision="bf16-mixed", layout={"stage": stage})
        record_script(f"zero-{stage}", zero, zero_llama, arch)
    return results


def in_bf16(architecture: Any) -> None:
    accelerate_scripts.train_llama(architecture, mixed_precision="bf16")


def train_with_recomputation(architecture: Any) -> None:
    accelerate_scripts.train_llama(architecture, recomputes=True)


def with_another_recipe(architecture: Any) -> None:
    accelerate_scripts.train_llama(architecture, optimizer="SGD", rows=8)


def some_weights(architecture: Any) -> None:
    accelerate_scripts.train_llama(architecture, optimizer="Adam", recomputes=True, frozen="mlp")


def brings_a_plugin(architecture: Any) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerate_scripts.train_llama(architecture, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def zero_llama(architecture: Any) -> None:
    """Nothing is compiled: gloo does without DeepSpeed's shared-memory collectives."""
    # By this name: deepspeed.comm.torch is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    accelerate_scripts.train_llama(architecture)


@pytest.fixture(scope="module")
def script_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    needs("deepspeed")
    return on_ranks(2, tiny_plan("ddp", 2), several_scripts, tmp_path_factory.mktemp("scripts"))


def test_the_record_of_a_ddp_script_describes_ddp(script_results: list[dict[str, Any]]) -> None:
    for rank in script_results:
        assert not rank["ddp"]["error"], rank["ddp"]["error"]
        engine = rank["ddp"]["engine"]
        assert engine["sentence"].startswith("train_llama through Accelerate ")
        assert engine["num_parameters"] == tiny_llama().num_parameters
        assert engine["differs"] == []
        assert engine["parameter_bytes"] == engine["gradient_bytes"] == 4 * tiny_llama().num_parameters
        assert len(rank["ddp"]["lines"]) == 3
        assert (engine["batch_shape"], engine["recomputes"]) == ([2, 16], False)


def test_differences_between_script_and_recipe_are_reported(script_results: list[dict[str, Any]]) -> None:
    for rank in script_results:
        told = {name: case["engine"].get("differs") for name, case in rank.items()}
        assert not any(rank[name]["error"] for name in ("recomputes", "another recipe", "no adapters"))
        assert told["recomputes"] == [] and rank["recomputes"]["engine"]["recomputes"]
        assert told["another recipe"] == [
            "micro-batches of 8 x 16 tokens, the plan's are 2 x 64",
            "the optimizer SGD, the plan's is 'adamw'",
            "no recomputation, the plan's is 'full'",
        ]
        assert "no recomputation" in rank["another recipe"]["engine"]["sentence"]
        every = f"{tiny_llama().num_parameters:,}"
        assert told["no adapters"] == [f"{every} of {every} parameters to train, the plan's method is 'lora'"]
        some, recomputes = told["some weights"]
        assert some.endswith(f" of {every} parameters to train, the plan's method is 'full'")
        assert recomputes == "recomputation, the plan's is 'none'"


def test_the_record_of_an_fsdp2_script_describes_fsdp2(script_results: list[dict[str, Any]]) -> None:
    weights = 0
    for rank in script_results:
        assert not rank["fsdp2"]["error"], rank["fsdp2"]["error"]
        engine = rank["fsdp2"]["engine"]
        assert engine["distributed_type"] == "FSDP"
        assert engine["mesh_shape"] == [2]
        assert "sharded over 2 ranks" in engine["sentence"]
        assert (engine["param_dtype"], engine["reduce_dtype"]) == ("bfloat16", "float32")
        assert engine["reshard_after_forward"]["True"] >= 2
        weights += engine["num_weights_here"]
        assert "True" not in rank["fsdp2 kept"]["engine"]["reshard_after_forward"]
        assert not rank["fsdp2 kept"]["error"]
    assert weights == tiny_llama().num_parameters


def test_the_record_of_a_deepspeed_script_describes_deepspeed(script_results: list[dict[str, Any]]) -> None:
    for rank in script_results:
        for stage in (1, 3):
            case = rank[f"zero-{stage}"]
            assert not case["error"], case["error"]
            assert case["engine"]["module"] == "DeepSpeedEngine"
            assert case["engine"]["stage"] == stage
            assert case["engine"]["num_parameters"] == tiny_llama().num_parameters
            assert f"DeepSpeed ZeRO-{stage}: " in case["engine"]["sentence"]
            assert case["engine"]["data_parallel"] == 2


def test_a_contradiction_of_the_plan_fails_at_its_line(script_results: list[dict[str, Any]]) -> None:
    for rank in script_results:
        wrong = rank["other precision"]["error"]["summary"]
        assert "mixed_precision='bf16'" in wrong
        assert "(test_accelerate_scripts.py, line " in wrong
        wrong = rank["plan is ddp, script fsdp"]["error"]["summary"]
        assert "the plan has DDP" in wrong
        assert "the script has FSDP" in wrong


def test_an_error_names_the_scripts_own_line(script_results: list[dict[str, Any]]) -> None:
    lines = Path(accelerate_scripts.__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "torch.ones(5, 4)" in line)
    for rank in script_results:
        error = rank["fails"]["error"]
        assert f"(accelerate_scripts.py, line {number}: torch.nn.functional.linear(" in error["summary"]
        assert "runpy" not in error["traceback"]
        assert json.dumps(error)


def test_settings_of_the_script_are_reported_without_error(script_results: list[dict[str, Any]]) -> None:
    for rank in script_results:
        case = rank["no accumulation"]
        assert not case["error"], case["error"]
        assert case["engine"]["gradient_accumulation_steps"] == 1
        assert any("the plan's takes 4" in words for words in case["engine"]["differs"])
        nothing = rank["trains nothing"]
        assert not nothing["error"] and "nothing was trained" in nothing["engine"]["sentence"]
        assert "ended without creating an Accelerator()" in rank["no accelerator"]["error"]["summary"]
