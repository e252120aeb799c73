"""What the Megatron-core engine trains is refused or let through before any rank; CPU ranks stay on CPUs."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs_installed

import shardscope as ss
from shardscope.frameworks.megatron.engine import launching
from shardscope.frameworks.registry import why_not_trained

PACKAGE = Path(ss.__file__).parent


def plan(
    name: str = "llama-3.2-1b", layout: dict[str, Any] | None = None, gpus: int = 4, **recipe: Any
) -> ss.Plan:
    fields: dict[str, Any] = {"seq_len": 1024, "global_batch_size": 8, **recipe}
    return ss.Plan(
        ss.models[name],
        ss.Cluster.parse(f"{gpus}xcpu"),
        ss.Recipe(**fields),
        ss.Layout.megatron(**(layout or {})),
    )


@needs_installed("megatron")
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": False},
        {"pp": 2, "vpp": 2},
        {"tp": 2, "pp": 2},
        {"distributed_optimizer": False},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ],
)
def test_its_layouts_train(layout: dict[str, Any]) -> None:
    assert why_not_trained(plan(layout=layout)) is None


@needs_installed("megatron")
def test_experts_train() -> None:
    assert why_not_trained(plan("mixtral-8x7b", {"ep": 4})) is None


@needs_installed("megatron")
@pytest.mark.parametrize("biases", [(True, False), (False, True), (True, True), (False, False)])
def test_biases_of_attention_alone_are_refused_before_any_rank(biases: tuple[bool, bool]) -> None:
    """Megatron-core's one add_bias_linear is of attention's output and of the MLP."""
    attention, mlp = biases
    given = plan()
    arch = replace(
        given.architecture, attention_bias=attention, attention_output_bias=attention, mlp_bias=mlp
    )
    refused = why_not_trained(replace(given, architecture=arch))
    if attention == mlp:
        assert refused is None
    else:
        assert refused is not None
        assert f"mlp_bias is {mlp}; allowed: {attention}" in refused and "Layout.fsdp2()" in refused


@needs_installed("megatron")
def test_one_expert_whose_weight_would_always_be_1_is_refused_before_any_rank() -> None:
    given = plan("mixtral-8x7b", {"ep": 4})
    experts = given.architecture.mixture_of_experts
    assert experts is not None
    one = replace(given.architecture, mixture_of_experts=replace(experts, num_experts_per_tok=1))
    said = why_not_trained(replace(given, architecture=one))
    assert said is not None and "num_experts_per_tok is 1" in said


@needs_installed("megatron")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            plan(layout={"tp": 2, "tp_comm_overlap": True}),
            "Layout.tp_comm_overlap is True; allowed: False to train here: it is Transformer Engine's",
        ),
        (plan(loss="fused"), "Recipe.loss is 'fused'; allowed: None, 'full'"),
        (plan(dropout=0.1), "Recipe.dropout is 0.1; allowed: 0.0"),
        (plan("gemma-2-2b"), "Layout.fsdp2()"),
    ],
)
def test_what_it_does_not_train_is_refused_in_words(given: ss.Plan, words: str) -> None:
    said = why_not_trained(given)
    assert said is not None and words in said


def in_parts(cluster: str, **recipe: Any) -> ss.Plan:
    """A plan whose sequences are in parts."""
    fields = {"seq_len": 1024, "global_batch_size": 8, **recipe}
    return ss.Plan(
        ss.models["llama-3.2-1b"], ss.Cluster.parse(cluster), ss.Recipe(**fields), ss.Layout.megatron(cp=2)
    )


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is installed: its spec is found, and nothing imports it before there are ranks."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "transformer_engine" or found(name))


@needs_installed("megatron")
@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_is_imported_by_gpu_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of megatron-core: importing it may use CUDA, after which no forked rank can."""
    on_gpus, on_cpus, asked = in_parts("4xh100-sxm-80gb"), in_parts("4xcpu"), []
    monkeypatch.setenv(launching.ONE_CONNECTION, "1")  # so that it is undone
    monkeypatch.setattr(launching.importlib, "import_module", asked.append)
    launching.before_fork(on_gpus, "cuda")
    assert asked == []
    launching.before_fork(on_cpus, "cpu")
    assert "megatron.core.models.gpt" in asked


@needs_installed("megatron")
@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("gpu", "layout", "inherited", "wanted"),
    [
        ("h100-sxm-80gb", {"tp": 2}, None, "1"),
        ("h100-sxm-80gb", {"cp": 2}, None, "1"),
        ("h100-sxm-80gb", {"pp": 2}, None, None),
        ("h100-sxm-80gb", {"tp": 2}, "8", "8"),
        ("b200-sxm-180gb", {"tp": 2}, None, None),
    ],
)
def test_gpu_ranks_start_kernels_in_the_order_of_their_calls(
    gpu: str,
    layout: dict[str, int],
    inherited: str | None,
    wanted: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What megatron-core's overlap of tp and cp counts on, as in an export; what is set already stays."""
    # Set first, so that it is undone whatever before_fork does.
    monkeypatch.setenv(launching.ONE_CONNECTION, inherited or "")
    if inherited is None:
        monkeypatch.delenv(launching.ONE_CONNECTION)
    given = in_parts(f"4x{gpu}")
    launching.before_fork(replace(given, layout=ss.Layout.megatron(**layout)), "cuda")
    assert os.environ.get(launching.ONE_CONNECTION) == wanted


INSTALL = 'pip install --no-build-isolation "transformer_engine[pytorch]"'


@needs_installed("megatron")
@pytest.mark.usefixtures("transformer_engine")
def test_parts_of_sequences_train_on_gpus_with_transformer_engine() -> None:
    assert why_not_trained(in_parts("4xh100-sxm-80gb")) is None
    assert why_not_trained(in_parts("4xa100-sxm-80gb", precision="fp16-mixed")) is None


@needs_installed("megatron")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            in_parts("4xcpu"),
            "Layout.cp is 2; allowed: 1 to train with Megatron-core on CPU ranks: its context "
            f"parallelism is Transformer Engine's attention, whose kernels for it need a GPU "
            f"(there: {INSTALL}); fsdp2",
        ),
        (
            in_parts("4xv100-sxm-32gb", precision="fp16-mixed"),
            "on v100-sxm-32gb: its context parallelism is "
            "Transformer Engine's attention, whose kernels for it need Ampere (sm80) or newer; fsdp2",
        ),
    ],
    ids=["on CPU ranks", "before Ampere"],
)
@pytest.mark.usefixtures("transformer_engine")
def test_parts_of_sequences_are_refused_where_their_attention_has_no_kernels(
    given: ss.Plan, words: str
) -> None:
    said = why_not_trained(given)
    assert said is not None and words in said
    assert said.endswith("Nearest fix: layout=Layout.fsdp2(cp=2).")
    assert why_not_trained(replace(given, layout=ss.Layout.fsdp2(cp=2))) is None


@needs_installed("megatron")
@pytest.mark.usefixtures("transformer_engine")
def test_parts_of_sequences_are_refused_in_32_bits() -> None:
    said = why_not_trained(in_parts("4xh100-sxm-80gb", precision="fp32"))
    assert said is not None and said.startswith("Recipe.precision is 'fp32'; allowed: 'bf16-mixed', ")
    assert "16 bits" in said
    assert "precision='bf16-mixed', or FSDP2, which trains it" in said


@needs_installed("megatron")
def test_parts_of_sequences_are_refused_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformer_engine" else found(name)
    )
    said = why_not_trained(in_parts("4xh100-sxm-80gb"))
    assert said is not None and said.startswith("Layout.cp is 2; allowed: 1 ")
    assert INSTALL in said and said.endswith("Nearest fix: layout=Layout.fsdp2(cp=2).")


@needs_installed("megatron")
def test_windows_are_refused_where_a_sequence_is_longer() -> None:
    arch = replace(
        ss.models["llama-3.2-1b"], model_type="mistral", sliding_window=512, sliding_window_layers=16
    )
    given = plan()
    said = why_not_trained(replace(given, architecture=arch))
    assert said is not None and "window of 512 tokens" in said
    short = replace(given, architecture=arch, recipe=replace(given.recipe, seq_len=512))
    assert why_not_trained(short) is None


def test_asking_imports_no_torch() -> None:
    code = (
        "import sys, shardscope as ss\n"
        "from shardscope.frameworks.registry import why_not_trained\n"
        "plan = ss.Plan(ss.models['llama-3.2-1b'], ss.Cluster.parse('2xcpu'), "
        "ss.Recipe(global_batch_size=2), ss.Layout.megatron(tp=2))\n"
        "why_not_trained(plan)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_only_the_engine_calls_the_cpu_ranks() -> None:
    """And on CPU ranks alone."""
    importing = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if "cpu_ranks" in (getattr(node, "module", None) or ""):
                importing.add(file.relative_to(PACKAGE).as_posix())
    assert importing == {"frameworks/megatron/engine/engine.py"}


@needs_installed("megatron")
class TestOnCpuRanks:
    """Megatron-core's CUDA calls."""

    def test_a_process_that_uses_cuda_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from shardscope.frameworks.megatron.engine.cpu_ranks import cpu_ranks

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(RuntimeError, match="uses CUDA"), cpu_ranks():
            pass

    def test_an_engine_on_cuda_never_comes_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from types import SimpleNamespace

        import torch

        from shardscope.frameworks.megatron.engine import engine

        monkeypatch.setattr(engine, "cpu_ranks", lambda: pytest.fail("a CUDA engine asked for CPU ranks"))
        made = engine.MegatronEngine(
            SimpleNamespace(plan=plan(), rank=0, device=torch.device("cuda", 0))  # type: ignore[arg-type]
        )
        with made._on_device():
            assert torch.cuda.current_device.__module__ == "torch.cuda"

    def test_nothing_is_left_behind(self) -> None:
        import torch
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.tensor_parallel import random

        from shardscope.frameworks.megatron.engine.cpu_ranks import cpu_ranks

        names = ("current_device", "Stream", "synchronize", "manual_seed", "get_rng_state")
        before = {name: getattr(torch.cuda, name) for name in names}
        others = param_and_grad_buffer._coalescing_manager, random._get_cuda_rng_state
        with cpu_ranks():
            assert torch.ones(2, device="cuda").cuda().sum().item() == 2
            assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
            # As transformers' generation says it when it is imported, which may be inside.
            assert torch.cuda.Stream | None and torch.cuda.Event | None
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert all(getattr(torch.cuda, name) is was for name, was in before.items())
        assert (param_and_grad_buffer._coalescing_manager, random._get_cuda_rng_state) == others
