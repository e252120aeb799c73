"""Checks of plans for the Megatron-core engine before a launch; CUDA calls redirected on CPU ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs_installed, thorough

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
def test_supported_layouts_train(layout: dict[str, Any]) -> None:
    assert why_not_trained(plan(layout=layout)) is None


@needs_installed("megatron")
def test_experts_train() -> None:
    assert why_not_trained(plan("mixtral-8x7b", {"ep": 4})) is None


@needs_installed("megatron")
@pytest.mark.parametrize("biases", [(True, False), (False, True), (True, True), (False, False)])
def test_bias_of_attention_or_mlp_only_raises(biases: tuple[bool, bool]) -> None:
    """megatron-core has one ``add_bias_linear`` for attention's output and the MLP."""
    attention, mlp = biases
    base = plan()
    arch = replace(base.architecture, attention_bias=attention, attention_output_bias=attention, mlp_bias=mlp)
    message = why_not_trained(replace(base, architecture=arch))
    if attention == mlp:
        assert message is None
    else:
        assert message is not None
        assert f"mlp_bias is {mlp}; allowed: {attention}" in message and "Layout.fsdp2()" in message


@needs_installed("megatron")
def test_normalized_top_1_routing_raises() -> None:
    base = plan("mixtral-8x7b", {"ep": 4})
    experts = base.architecture.mixture_of_experts
    assert experts is not None
    one = replace(base.architecture, mixture_of_experts=replace(experts, num_experts_per_tok=1))
    message = why_not_trained(replace(base, architecture=one))
    assert message is not None and "num_experts_per_tok is 1" in message


@needs_installed("megatron")
@pytest.mark.parametrize(
    ("base", "expected"),
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
def test_unsupported_options_raise_with_the_allowed_values(base: ss.Plan, expected: str) -> None:
    message = why_not_trained(base)
    assert message is not None and expected in message


def build_cp_plan(cluster: str, **recipe: Any) -> ss.Plan:
    """Return a plan with context parallelism."""
    fields = {"seq_len": 1024, "global_batch_size": 8, **recipe}
    return ss.Plan(
        ss.models["llama-3.2-1b"], ss.Cluster.parse(cluster), ss.Recipe(**fields), ss.Layout.megatron(cp=2)
    )


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Transformer Engine is installed; nothing imports it in these tests."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "transformer_engine" or find_spec(name)
    )


@needs_installed("megatron")
@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_is_not_imported_before_gpu_ranks_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core imports it, which may initialize CUDA, and then forked ranks could not use CUDA."""
    on_gpus, on_cpus, imported = build_cp_plan("4xh100-sxm-80gb"), build_cp_plan("4xcpu"), []
    monkeypatch.setenv(launching.ONE_CONNECTION, "1")  # so that it is undone
    monkeypatch.setattr(launching.importlib, "import_module", imported.append)
    launching.before_fork(on_gpus, "cuda")
    assert imported == []
    launching.before_fork(on_cpus, "cpu")
    assert "megatron.core.models.gpt" in imported


@needs_installed("megatron")
@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("gpu", "layout", "inherited", "expected_value"),
    [
        ("h100-sxm-80gb", {"tp": 2}, None, "1"),
        ("h100-sxm-80gb", {"cp": 2}, None, "1"),
        ("h100-sxm-80gb", {"pp": 2}, None, None),
        ("h100-sxm-80gb", {"tp": 2}, "8", "8"),
        ("b200-sxm-180gb", {"tp": 2}, None, None),
    ],
)
def test_one_cuda_connection_is_set_before_blackwell_with_tp_or_cp(
    gpu: str,
    layout: dict[str, int],
    inherited: str | None,
    expected_value: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron-core's overlap of tp and cp needs it; a value that the user has set is kept."""
    # Set first, so that it is undone whatever before_fork does.
    monkeypatch.setenv(launching.ONE_CONNECTION, inherited or "")
    if inherited is None:
        monkeypatch.delenv(launching.ONE_CONNECTION)
    base = build_cp_plan(f"4x{gpu}")
    launching.before_fork(replace(base, layout=ss.Layout.megatron(**layout)), "cuda")
    assert os.environ.get(launching.ONE_CONNECTION) == expected_value


@thorough()
@needs_installed("megatron")
def test_megatron_core_is_imported_without_triton() -> None:
    """CPU builds of torch have no Triton, and macOS has none at all."""
    code = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import shardscope as ss
from shardscope.frameworks.engines import before_fork
plan = ss.Plan(
    ss.Architecture.of_size("2m"),
    ss.Cluster.parse("2xcpu"),
    ss.Recipe(seq_len=128, global_batch_size=4),
    ss.Layout.megatron(tp=2),
)
before_fork(plan, "cpu")
# As megatron-core 0.19 does, by default too.
from megatron.core.transformer.moe.ops.paged_stash import paged_stash_copy_kernel
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


INSTALL = 'pip install --no-build-isolation "transformer_engine[pytorch]"'


@needs_installed("megatron")
@pytest.mark.usefixtures("transformer_engine")
def test_cp_trains_on_gpus_with_transformer_engine() -> None:
    assert why_not_trained(build_cp_plan("4xh100-sxm-80gb")) is None
    assert why_not_trained(build_cp_plan("4xa100-sxm-80gb", precision="fp16-mixed")) is None


@needs_installed("megatron")
@pytest.mark.usefixtures("transformer_engine")
def test_cp_raises_on_cpu_ranks() -> None:
    base = build_cp_plan("4xcpu")
    message = why_not_trained(base)
    assert message is not None and message.endswith("Nearest fix: layout=Layout.fsdp2(cp=2).")
    assert (
        "Layout.cp is 2; allowed: 1 to train with Megatron-core on CPU ranks: its context parallelism is "
        f"Transformer Engine's attention, whose kernels for it need a GPU (there: {INSTALL}); fsdp2"
    ) in message
    assert why_not_trained(replace(base, layout=ss.Layout.fsdp2(cp=2))) is None


@needs_installed("megatron")
def test_cp_raises_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformer_engine" else find_spec(name)
    )
    message = why_not_trained(build_cp_plan("4xh100-sxm-80gb"))
    assert message is not None and message.startswith("Layout.cp is 2; allowed: 1 ")
    assert INSTALL in message and message.endswith("Nearest fix: layout=Layout.fsdp2(cp=2).")


@needs_installed("megatron")
def test_sliding_window_raises_if_the_sequence_is_longer() -> None:
    arch = replace(
        ss.models["llama-3.2-1b"], model_type="mistral", sliding_window=512, sliding_window_layers=16
    )
    base = plan()
    message = why_not_trained(replace(base, architecture=arch))
    assert message is not None and "window of 512 tokens" in message
    short = replace(base, architecture=arch, recipe=replace(base.recipe, seq_len=512))
    assert why_not_trained(short) is None


def test_checking_a_plan_imports_no_torch() -> None:
    code = (
        "import sys, shardscope as ss\n"
        "from shardscope.frameworks.registry import why_not_trained\n"
        "plan = ss.Plan(ss.models['llama-3.2-1b'], ss.Cluster.parse('2xcpu'), "
        "ss.Recipe(global_batch_size=2), ss.Layout.megatron(tp=2))\n"
        "why_not_trained(plan)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@needs_installed("megatron")
class TestOnCpuRanks:
    """megatron-core's CUDA calls inside of ``cpu_ranks``."""

    def test_a_process_that_uses_cuda_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from shardscope.frameworks.megatron.engine.cpu_ranks import cpu_ranks

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(RuntimeError, match="uses CUDA"), cpu_ranks():
            pass

    def test_an_engine_on_cuda_does_not_use_cpu_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from types import SimpleNamespace

        import torch

        from shardscope.frameworks.megatron.engine import engine

        monkeypatch.setattr(engine, "cpu_ranks", lambda: pytest.fail("a CUDA engine used cpu_ranks"))
        cuda_engine = engine.MegatronEngine(
            SimpleNamespace(plan=plan(), rank=0, device=torch.device("cuda", 0))  # type: ignore[arg-type]
        )
        with cuda_engine._on_device():
            assert torch.cuda.current_device.__module__ == "torch.cuda"

    def test_all_attributes_are_restored(self) -> None:
        import torch
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.tensor_parallel import random

        from shardscope.frameworks.megatron.engine.cpu_ranks import cpu_ranks

        names = ("current_device", "Stream", "synchronize", "manual_seed", "get_rng_state")
        before = {name: getattr(torch.cuda, name) for name in names}
        before_functions = param_and_grad_buffer._coalescing_manager, random._get_cuda_rng_state
        with cpu_ranks():
            assert torch.ones(2, device="cuda").cuda().sum().item() == 2
            assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
            # transformers' generation evaluates such annotations when it is imported, perhaps inside.
            assert torch.cuda.Stream | None and torch.cuda.Event | None
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert all(getattr(torch.cuda, name) is original for name, original in before.items())
        assert (param_and_grad_buffer._coalescing_manager, random._get_cuda_rng_state) == before_functions
