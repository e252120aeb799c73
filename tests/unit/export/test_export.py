"""Tests of the files that ``plan.export`` writes and of reading them back as the same plan."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from exported_scripts import import_script
from hypothesis import given, settings
from random_plans import plans
from tests.requirements import examples, needs, sample

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.export.files import list_files
from shardscope.frameworks.formats.exported import Exported
from shardscope.training.engine import Engine
from shardscope.training.tasks.recommended_rate import ADAPTER_RATE, FULL_RATE

needs("accelerate")  # which brings PyYAML
needs("transformers")  # which spells the config in train.py

READERS: dict[str, Callable[..., ss.Plan]] = {
    "accelerate_config.yaml": ss.Plan.from_accelerate,
    "ds_config.json": ss.Plan.from_deepspeed,
    "megatron_arguments.txt": ss.Plan.from_megatron,
}
CONFIGURATIONS = (*READERS, "training_arguments.yaml", "fsdp2_arguments.json")
FAMILIES = ("ddp", "fsdp2", "deepspeed", "megatron")

SMALL = ss.Architecture.of_size("2m")


def build_small_plan(layout: Any, cluster: str = "2xcpu", **recipe: Any) -> ss.Plan:
    return ss.Plan(
        SMALL, ss.Cluster.parse(cluster), ss.Recipe(seq_len=64, global_batch_size=16, **recipe), layout
    )


def render_texts(plan: ss.Plan) -> dict[str, str]:
    return {file.name: file.text for file in list_files(plan)}


@sample(2)
@pytest.mark.parametrize("framework", FAMILIES)
def test_an_export_reads_back_as_the_same_plan(framework: str) -> None:
    @settings(deadline=None, max_examples=examples(60))
    @given(plan=plans(framework))
    def round_trip(plan: ss.Plan) -> None:
        with tempfile.TemporaryDirectory() as folder:
            written = plan.export(folder)
            assert [path.name for path in written] == [file.name for file in list_files(plan)]
            assert ss.Plan.from_json((Path(folder) / "plan.json").read_text()) == plan
            for name, read in READERS.items():
                if (Path(folder) / name).exists():
                    assert read(Path(folder) / name) == plan, name

    round_trip()


@sample(2)
@pytest.mark.parametrize("framework", FAMILIES)
def test_each_config_file_restores_its_layout_without_plan_json(framework: str) -> None:
    """A config file without plan.json is read as a plan whose export has the same text."""

    @settings(deadline=None, max_examples=examples(60))
    @given(plan=plans(framework))
    def check_files(plan: ss.Plan) -> None:
        files = render_texts(plan)
        for name, read in READERS.items():
            if name not in files:
                continue
            with tempfile.TemporaryDirectory() as folder:
                for other in {name, "ds_config.json"} & set(files):
                    (Path(folder) / other).write_text(files[other])
                carried = {"micro_batch_size": 1, "global_batch_size": 1} if name != CONFIGURATIONS[0] else {}
                recipe = replace(plan.recipe, **carried)
                parsed = read(
                    Path(folder) / name, architecture=plan.architecture, cluster=plan.cluster, recipe=recipe
                )
            assert parsed.degrees == plan.degrees
            assert parsed.recipe == plan.recipe or name == CONFIGURATIONS[0]
            assert render_texts(parsed)[name].partition("\n")[2] == files[name].partition("\n")[2]

    check_files()


FILES_WITH_RECIPE = ("accelerate_config.yaml", "ds_config.json")


@pytest.mark.parametrize("framework", ("ddp", "fsdp2", "deepspeed"))
def test_config_file_comments_restore_the_recipe_without_plan_json(framework: str) -> None:
    """Fields that the format cannot express are written to a comment of the file and read from it."""

    @settings(deadline=None, max_examples=examples(30))
    @given(plan=plans(framework))
    def check_files(plan: ss.Plan) -> None:
        files = render_texts(plan)
        for name in set(FILES_WITH_RECIPE) & set(files):
            with tempfile.TemporaryDirectory() as folder:
                for other in {name, "ds_config.json"} & set(files):
                    (Path(folder) / other).write_text(files[other])
                arguments: dict[str, Any] = {"architecture": plan.architecture, "cluster": plan.cluster}
                parsed = READERS[name](Path(folder) / name, **arguments)
                with_recipe = READERS[name](Path(folder) / name, **arguments, recipe=plan.recipe)
            assert parsed.recipe == plan.recipe, name
            assert with_recipe.layout == parsed.layout

    check_files()


def test_the_callers_recipe_has_priority_over_a_files_comment(tmp_path: Path) -> None:
    plan = build_small_plan(ss.Layout.fsdp2(), "8xh100-sxm-80gb", precision="bf16", method="lora")
    text = render_texts(plan)["accelerate_config.yaml"]
    (tmp_path / "a.yaml").write_text(text)
    arguments: dict[str, Any] = {"architecture": plan.architecture, "cluster": plan.cluster}
    assert ss.Plan.from_accelerate(tmp_path / "a.yaml", **arguments).recipe == plan.recipe
    full = replace(plan.recipe, method="full")
    assert ss.Plan.from_accelerate(tmp_path / "a.yaml", **arguments, recipe=full).recipe == full
    line = '#: method = "lora"'
    assert line in text
    broken_lines = (
        ("#: method = lora", "correct it"),
        ('#: methd = "lora"', "methd"),
        ('#: method = "x"', "method"),
    )
    for broken, why in broken_lines:
        (tmp_path / "a.yaml").write_text(text.replace(line, broken))
        with pytest.raises(ValueError, match=f"a.yaml.*{why}"):
            ss.Plan.from_accelerate(tmp_path / "a.yaml", **arguments)


DERIVED = frozenset({
    "shard", "etp", "sequence_parallel", "grad_reduce_in_fp32", "stage3_prefetch_bucket_size", "kernels",
    "offload_params_buffer_count", "offload_params_buffer_size", "reshard_after_forward",
})  # fmt: skip
"""Fields whose default is resolved to an explicit value, so that two unequal plans may be equivalent."""


@settings(deadline=None, max_examples=examples(120))
@given(plan=plans())
def test_every_changed_field_changes_the_exported_files(plan: ss.Plan) -> None:
    """Plans that differ in one field have different files: each has the field or lists it as missing."""
    files = render_texts(plan)
    for part in ("recipe", "layout"):
        for field in fields(getattr(plan, part)):
            try:
                changed = replace(plan, **{part: replace(getattr(plan, part), **{field.name: field.default})})
            except (FieldError, TypeError):
                continue
            same_loss = plan.kernels == "megatron" and field.name == "loss" and plan.recipe.loss == "full"
            if changed == plan or field.name in DERIVED or same_loss:
                continue
            others = render_texts(changed)
            for name in set(CONFIGURATIONS) & set(files) & set(others):
                # Some files refer to DeepSpeed's JSON for the options in it.
                one, other = (
                    written[name] + written.get("ds_config.json", "") for written in (files, others)
                )
                assert one != other, f"{name} does not depend on {field.name}"


@pytest.mark.parametrize(
    "plan",
    [
        build_small_plan(ss.Layout.ddp()),
        build_small_plan(ss.Layout.fsdp2()),
        ss.Plan(
            replace(SMALL, name="a; rm -rf $HOME `x` \"'"),
            ss.Cluster.parse("4x8xh100-sxm-80gb"),
            ss.Recipe(),
            ss.Layout.fsdp2(),
        ),
        ss.Plan(
            ss.models["llama-3.1-70b"], ss.Cluster.parse("4x8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.zero(3)
        ),
        ss.Plan(
            ss.models["deepseek-v3"],
            ss.Cluster.parse("32x8xh100-sxm-80gb"),
            ss.Recipe(global_batch_size=1024),
            ss.Layout.megatron(tp=8, ep=8),
        ),
    ],
    ids=["ddp", "fsdp2", "name", "zero", "megatron"],
)
def test_exported_scripts_are_valid_bash_and_executable(plan: ss.Plan, tmp_path: Path) -> None:
    for path in plan.export(tmp_path):
        if path.suffix not in (".sh", ".sbatch"):
            continue
        checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
        assert path.suffix == ".sbatch" or os.access(path, os.X_OK)
        if path.suffix == ".sbatch" and shutil.which("sbatch"):
            tested = subprocess.run(
                ["sbatch", "--test-only", path.name],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert "invalid" not in tested.stderr.lower(), tested.stderr


def list_launcher_arguments(folder: Path, command: str, *arguments: str, **environment: str) -> list[str]:
    """Return the arguments with which ``command`` calls torchrun or accelerate."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("torchrun", "accelerate", "ray"):
        fake = folder / "bin" / name
        fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
        fake.chmod(0o755)
    done = subprocess.run(
        [str(folder / command), *arguments],
        capture_output=True,
        text=True,
        env={"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment},
        cwd=folder / "bin",
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def test_launch_commands_on_several_nodes_have_rendezvous_arguments(tmp_path: Path) -> None:
    plan = ss.Plan(
        ss.models["llama-3.1-8b"], ss.Cluster.parse("4x8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp()
    )
    plan.export(tmp_path)
    arguments = list_launcher_arguments(tmp_path, "torchrun.sh", "--steps", "3 4", HEAD_NODE="node-0")
    assert arguments[arguments.index("--nnodes") + 1] == "4"
    assert arguments[arguments.index("--nproc-per-node") + 1] == "8"
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == "node-0:29500"
    assert arguments[-3:] == ["train.py", "--steps", "3 4"]
    # A second job on these nodes: at one endpoint the ranks of both would become one job.
    arguments = list_launcher_arguments(tmp_path, "torchrun.sh", HEAD_NODE="node-0", MASTER_PORT="29511")
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == "node-0:29511"
    with pytest.raises(RuntimeError, match="all 4 nodes"):
        list_launcher_arguments(tmp_path, "torchrun.sh")
    script = tmp_path / "bin" / "mine.py"
    script.write_text("")
    environment = {"HEAD_NODE": "node-0", "MACHINE_RANK": "2"}
    arguments = list_launcher_arguments(tmp_path, "accelerate_launch.sh", "mine.py", "--fast", **environment)
    assert arguments[:3] == ["launch", "--config_file", "accelerate_config.yaml"]
    assert arguments[arguments.index("--machine_rank") + 1] == "2"
    assert arguments[arguments.index("--main_process_ip") + 1] == "node-0"
    assert arguments[-2:] == [str(script), "--fast"], "relative paths of scripts start at the user's folder"
    assert "--main_process_port" not in arguments, "the configuration has one"
    environment["MASTER_PORT"] = "29511"
    arguments = list_launcher_arguments(tmp_path, "accelerate_launch.sh", "mine.py", **environment)
    assert arguments[arguments.index("--main_process_port") + 1] == "29511"
    with pytest.raises(RuntimeError, match="the path of a script"):
        list_launcher_arguments(tmp_path, "accelerate_launch.sh", **environment)


@pytest.mark.parametrize("layout", [ss.Layout.fsdp2(), ss.Layout.megatron(tp=2)], ids=["fsdp2", "megatron"])
def test_start_commands_in_files_md_run(layout: Any, tmp_path: Path) -> None:
    """FILES.md lists the start commands, which run in the folder once every ``<...>`` is filled in."""
    plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("2x8xh100-sxm-80gb"), ss.Recipe(), layout)
    plan.export(tmp_path)
    list_launcher_arguments(
        tmp_path, "torchrun.sh", HEAD_NODE="a", MEGATRON_LM="b"
    )  # creates the fake launchers
    started = {file.name: file for file in list_files(plan) if file.start_command}
    assert {"torchrun.sh", "job.sbatch"} <= set(started) and "train.py" not in started
    for file in started.values():
        assert f"- `{file.name}`: {file.what}: `{file.start_command}`" in (tmp_path / "FILES.md").read_text()
        assert file.start_command.count("<...>") == len(file.inputs)
        if file.is_command:
            line = file.start_command.replace("<...>", "train.py")
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            )
            assert done.returncode == 0 and "train.py" in done.stdout, done.stderr


def test_files_md_counts_one_rank_as_one() -> None:
    """A plan for one GPU started "all 1 ranks"."""
    for number, expected in ((1, "starts 1 rank"), (2, "starts all 2 ranks")):
        text = render_texts(build_small_plan(ss.Layout.ddp(), f"{number}xcpu"))["FILES.md"]
        assert f"- `job.sbatch`: {expected} as a job of Slurm" in text


def test_sbatch_on_gpus_requests_exclusive_nodes() -> None:
    """Slurm's usual default is one CPU for all ranks."""
    job = render_texts(build_small_plan(ss.Layout.zero(offload_optimizer="cpu"), "2x8xh100-sxm-80gb"))[
        "job.sbatch"
    ]
    assert "#SBATCH --gpus-per-node=8\n#SBATCH --exclusive\n#SBATCH --mem=0\n" in job
    assert "--exclusive" not in render_texts(build_small_plan(ss.Layout.ddp()))["job.sbatch"]


@pytest.mark.parametrize(("inherited", "expected"), [({}, "1"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8")])
def test_torchrun_script_keeps_cuda_device_max_connections_if_set(
    inherited: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """The default is 1, as in a run, so that kernels start in the order of their calls."""
    plan = ss.Plan(
        ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.megatron(tp=2)
    )
    plan.export(tmp_path)
    recorded = tmp_path / "told"
    list_launcher_arguments(tmp_path, "torchrun.sh", MEGATRON_LM="b")  # creates the fake launchers
    fake = tmp_path / "bin" / "torchrun"
    fake.write_text(f'#!/usr/bin/env bash\nprintf %s "$CUDA_DEVICE_MAX_CONNECTIONS" > "{recorded}"\n')
    subprocess.run(
        [str(tmp_path / "torchrun.sh")],
        check=True,
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "MEGATRON_LM": "b", **inherited},
    )
    assert recorded.read_text() == expected


def test_megatron_arguments_reach_pretrain_gpt_unchanged(tmp_path: Path) -> None:
    """bash splits the file into the arguments that argparse expects, without expanding asterisks."""
    plan = ss.Plan(
        ss.models["mixtral-8x7b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.megatron(ep=8)
    )
    plan.export(tmp_path)
    arguments = list_launcher_arguments(
        tmp_path, "torchrun.sh", "--train-iters", "5", MEGATRON_LM="/opt/Megatron-LM"
    )
    script = arguments.index("/opt/Megatron-LM/pretrain_gpt.py")
    assert arguments[arguments.index("--moe-layer-freq") + 1] == "([1]*32)"
    # Predictions are those of grouped matmuls: by default a rank's experts run one after the other.
    assert "--moe-grouped-gemm" in arguments
    assert arguments[-2:] == ["--train-iters", "5"]
    parsed = ss.Plan.from_megatron(
        arguments[script + 1 : -2], architecture=plan.architecture, cluster=plan.cluster
    )
    assert parsed == plan


@pytest.mark.parametrize("precision", ["bf16", "fp8-mixed", "fp16-mixed", "fp32"])
def test_megatrons_experts_are_grouped_in_bf16_alone(precision: str, tmp_path: Path) -> None:
    """validate_args asserts bf16 with --moe-grouped-gemm: other precisions ended in an AssertionError."""
    plan = ss.Plan(
        ss.models["mixtral-8x7b"],
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(precision=precision),  # type: ignore[arg-type]
        ss.Layout.megatron(pp=2),
    )
    text = render_texts(plan)["megatron_arguments.txt"]
    lines = text.splitlines()
    assert ("--moe-grouped-gemm" in lines) == ("--bf16" in lines) == (precision in ("bf16", "fp8-mixed"))
    assert ("takes --moe-grouped-gemm with bf16 alone" in " ".join(text.split())) == ("--bf16" not in lines)


@settings(deadline=None, max_examples=examples(40))
@given(plan=plans())
def test_files_md_explains_a_missing_train_py(plan: ss.Plan) -> None:
    files = render_texts(plan)
    assert ("train.py" in files) == ("config.json" in files)
    if "train.py" not in files:
        assert "`train.py`: " in files["FILES.md"]


@pytest.mark.parametrize(("cluster", "has_script"), [("2xcpu", False), ("8xh100-sxm-80gb", True)])
@pytest.mark.parametrize("field", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_quantized_communication_has_a_train_py_on_gpus_alone(
    field: str, cluster: str, has_script: bool
) -> None:
    """DeepSpeed has no quantization kernels for CPUs: the script ended with an error of its op builder."""
    files = render_texts(build_small_plan(ss.Layout.zero(3, **{field: True}), cluster))
    assert ("train.py" in files) == has_script
    assert (f"`train.py`: Layout.{field} is True" in files["FILES.md"]) != has_script


OWN_FILES = {
    "ddp": ss.Layout.ddp(),
    "fsdp2": ss.Layout.fsdp2(),
    "deepspeed": ss.Layout.zero(3),
    "megatron": ss.Layout.megatron(tp=2),
}
"""For each framework, a layout that its train.py supports."""
IMPORTED = {"torch", "transformers", "tokenizers", "numpy", "peft", "deepspeed", "megatron"}
BESIDE = {"megatron_model", "checkpoints", "script_options"}
"""Files of the export that ``train.py`` imports."""


SCRIPTS = [*((framework, "train.py") for framework in OWN_FILES), ("megatron", "megatron_model.py")]
CHECKPOINTS = [(framework, "checkpoints.py") for framework in OWN_FILES]


@pytest.mark.parametrize(("framework", "name"), [*SCRIPTS, *CHECKPOINTS])
def test_train_py_is_copied_and_imports_no_shardscope(framework: str, name: str) -> None:
    text = (Path(ss.__file__).parent / "frameworks" / framework / "files" / name).read_text()
    assert render_texts(build_small_plan(OWN_FILES[framework], "8xh100-sxm-80gb"))[name] == text
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    others = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert others <= IMPORTED | BESIDE
    files = render_texts(build_small_plan(OWN_FILES[framework], "8xh100-sxm-80gb"))
    assert all(f"{module}.py" in files for module in others & BESIDE)
    assert (50 if name == "checkpoints.py" else 150) <= len(text.splitlines()) <= 310


@pytest.mark.parametrize("framework", FAMILIES)
def test_train_py_ends_before_training_if_it_cannot_save(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would log an error after the training, and save nothing, where ``--save`` is a file."""
    script = import_script(framework)
    build_small_plan(ss.Layout.ddp(), "1xcpu").export(tmp_path)
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--save", str(tmp_path / "plan.json")])
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    # Megatron-core's layouts have this degree.
    monkeypatch.setattr(script, "read_plan", add_tensor_parallel(script.read_plan))
    with pytest.raises(FileExistsError):
        script.main()


@pytest.mark.parametrize("framework", FAMILIES)
def test_train_py_without_torchrun_ends_with_the_plans_ranks(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = import_script(framework)
    build_small_plan(ss.Layout.ddp()).export(tmp_path)
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(script, "read_plan", add_tensor_parallel(script.read_plan))
    with pytest.raises(SystemExit, match=r"the plan has 2 ranks, and 0 were started: see FILES\.md"):
        script.main()


def add_tensor_parallel(read_plan: Callable[[], Any]) -> Callable[[], Any]:
    def read() -> Any:
        plan = read_plan()
        plan.layout.tp = 1
        return plan

    return read


@pytest.mark.parametrize("framework", ["ddp", "fsdp2", "deepspeed"])
def test_train_py_applies_weight_decay_to_matrices_only(framework: str) -> None:
    torch = needs("torch")
    script = import_script(framework)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    model[1].weight.requires_grad_(False)
    option: Any = {"on_host": False} if framework == "deepspeed" else {"name": "adamw"}
    groups = script.build_optimizer(model, **option).param_groups
    decay_groups = [([id(one) for one in group["params"]], group["weight_decay"]) for group in groups]
    vectors = [model[0].bias, model[1].bias, model[2].weight, model[2].bias]
    assert decay_groups == [([id(model[0].weight)], 0.1), ([id(one) for one in vectors], 0.0)]


@pytest.mark.parametrize("framework", OWN_FILES)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b"])
def test_default_learning_rate_of_a_large_model_has_no_finding(framework: str, model: str) -> None:
    script = import_script(framework)
    plan = ss.Plan(
        ss.models[model],
        ss.Cluster.parse("64x8xh100-sxm-80gb"),
        ss.Recipe(global_batch_size=512),
        ss.Layout.megatron(tp=8, pp=4),
    )
    rate = script.choose_peak_rate(plan.architecture.num_parameters, None)
    task = ss.Pretrain(learning_rate=rate)
    assert "learning-rate-against-batch" not in {finding.name for finding in plan.findings(task=task)}


@pytest.mark.parametrize("framework", OWN_FILES)
def test_default_learning_rates_of_train_py_equal_those_of_the_tasks(framework: str) -> None:
    script = import_script(framework)
    assert script.choose_peak_rate(2_000_000, None) == ss.Pretrain.learning_rate
    assert script.choose_peak_rate(2_000_000, "folder") == FULL_RATE
    if (
        "lora"
        in importlib.import_module(f"shardscope.frameworks.{framework}.files").TRAINED_VALUES["Recipe.method"]
    ):
        assert script.choose_peak_rate(2_000_000, "folder", True) == ADAPTER_RATE


@pytest.mark.parametrize("stage", range(4))
def test_ds_config_has_the_gradient_clipping_of_the_engine(stage: int, tmp_path: Path) -> None:
    """The Trainer passes its own norm to DeepSpeed only if the file has "auto"."""
    plan = build_small_plan(ss.Layout.zero(stage=stage))
    arguments: Any = {"architecture": plan.architecture, "cluster": plan.cluster, "recipe": plan.recipe}
    text = render_texts(plan)["ds_config.json"]
    assert json.loads(text)["gradient_clipping"] == Engine.max_grad_norm == 1.0
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ss.Plan.from_deepspeed(file, **arguments).recipe == plan.recipe
    file.write_text(text.replace('"gradient_clipping": 1.0', '"gradient_clipping": 0.5'))
    with pytest.warns(UserWarning, match="not in the plan: gradient_clipping"):
        ss.Plan.from_deepspeed(file, **arguments)


def test_files_md_gives_the_reason_for_each_missing_file() -> None:
    cpu = render_texts(build_small_plan(ss.Layout.fsdp2()))
    assert "accelerate_config.yaml" not in cpu
    assert "silently trains with DDP" in cpu["FILES.md"]
    assert "training_arguments.yaml" not in {*cpu, *render_texts(build_small_plan(ss.Layout.zero(2)))}
    assert (
        "accelerate launch starts one process" in render_texts(build_small_plan(ss.Layout.ddp()))["FILES.md"]
    )
    pipeline = ss.Plan(SMALL, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2(pp=2))
    assert "pp=2" in render_texts(pipeline)["FILES.md"]
    only = "Only Shardscope's engine trains this: "
    neither = "Neither train.py nor Shardscope's engine trains this: "
    plans = {
        f"{neither}Recipe.optimizer is 'paged_adamw', and train.py supports 'adamw' or": build_small_plan(
            ss.Layout.ddp(), "8xh100-sxm-80gb", optimizer="paged_adamw"
        ),
        f"{neither}Recipe.precision is 'fp8-mixed'": build_small_plan(
            ss.Layout.fsdp2(), "8xh100-sxm-80gb", precision="fp8-mixed"
        ),
        f"{neither}Recipe.kernels is 'liger'": build_small_plan(
            ss.Layout.ddp(), "8xh100-sxm-80gb", kernels="liger"
        ),
        f"{neither}Recipe.quantization is 'nf4', and train.py supports None; Recipe.optimizer is "
        "'paged_adamw_8bit', which the engine does not train.": build_small_plan(
            ss.Layout.ddp(),
            "8xh100-sxm-80gb",
            method="lora",
            quantization="nf4",
            optimizer="paged_adamw_8bit",
        ),
        f"{only}Recipe.quantization is 'nf4'": build_small_plan(
            ss.Layout.ddp(), "8xh100-sxm-80gb", method="lora", quantization="nf4"
        ),
        f"{only}Recipe.loss is 'chunked'": build_small_plan(
            ss.Layout.ddp(), "8xh100-sxm-80gb", loss="chunked"
        ),
        f"{only}Layout.ep is 2": ss.Plan(
            ss.models["mixtral-8x7b"],
            ss.Cluster.parse("8xh100-sxm-80gb"),
            ss.Recipe(),
            ss.Layout.zero(1, ep=2),
        ),
        f"{only}Layout.pp is 2, and train.py supports 1": build_small_plan(ss.Layout.fsdp2(pp=2)),
        f"{only}Layout.cp is 2": build_small_plan(ss.Layout.megatron(cp=2), "8xh100-sxm-80gb"),
        f"{only}Recipe.attention is 'eager', and train.py supports None": build_small_plan(
            ss.Layout.megatron(tp=2), "8xh100-sxm-80gb", attention="eager"
        ),
        f"{only}train.py does not pad a vocabulary, and 2,047 tokens are not divisible by tp=2": ss.Plan(
            replace(SMALL, vocab_size=2047),
            ss.Cluster.parse("8xh100-sxm-80gb"),
            ss.Recipe(),
            ss.Layout.megatron(tp=2),
        ),
        f"{only}Megatron-core calls CUDA, and the plan has CPU ranks": build_small_plan(ss.Layout.megatron()),
        f"{only}Recipe.method is 'lora'": build_small_plan(ss.Layout.fsdp2(), method="lora"),
    }
    for reason, plan in plans.items():
        files = render_texts(plan)
        assert "train.py" not in files
        assert reason in files["FILES.md"]


def test_train_py_is_not_exported_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    files = render_texts(build_small_plan(ss.Layout.fsdp2()))
    assert "train.py" not in files
    assert 'pip install "shardscope[train]"' in files["FILES.md"]
    assert "SCRIPT" in files["torchrun.sh"]


def test_reading_yaml_without_pyyaml_raises_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = build_small_plan(ss.Layout.ddp(), "8xh100-sxm-80gb")
    plan.export(tmp_path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .shardscope\[train\]"):
        ss.Plan.from_accelerate(tmp_path / "accelerate_config.yaml")


def test_fields_that_a_format_cannot_express_are_in_comments() -> None:
    plan = build_small_plan(ss.Layout.ddp(), "8xh100-sxm-80gb", optimizer="sgd", recompute="selective")
    yaml = render_texts(plan)["training_arguments.yaml"]
    assert '#: optimizer = "sgd"' in yaml
    assert "optim:" not in yaml
    assert '#: recompute = "selective"' in yaml
    assert (
        "reduces gradients in bf16"
        in render_texts(build_small_plan(ss.Layout.fsdp2(), "8xh100-sxm-80gb"))[CONFIGURATIONS[0]]
    )


def test_exports_of_equal_plans_are_identical() -> None:
    plan = build_small_plan(ss.Layout.fsdp2())
    assert list_files(plan) == list_files(ss.Plan.from_json(plan.to_json()))
    assert all(isinstance(file, Exported) and file.text.endswith("\n") for file in list_files(plan))
