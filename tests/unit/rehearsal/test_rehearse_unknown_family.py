"""Test of rehearsals from a config.json without formulas: a known family has the same result both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import needs, thorough

import shardscope as ss
from shardscope.families.unknown import UnknownFamily

needs("transformers")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}


@thorough()
def test_a_config_without_its_family_has_the_same_rehearsal() -> None:
    known = ss.Plan(
        ss.Architecture.from_hf(CONFIG),
        ss.Cluster.parse("2xh100-sxm-80gb"),
        ss.Recipe(seq_len=512, global_batch_size=2),
        ss.Layout.fsdp2(),
    )
    unknown = replace(known, architecture=UnknownFamily.from_config(CONFIG, "mine"))
    of_known, of_unknown = rehearse_in_this_process(known), rehearse_in_this_process(unknown)
    assert of_unknown.tier == "rehearsed"
    assert dict(of_unknown.components) == dict(of_known.components)
    rotary_tables = 2 * 4 * 64 // 2
    assert of_unknown.components["parameters"] == 4 * known.architecture.num_parameters // 2 + rotary_tables


@thorough()
def test_zero_2_rehearses_a_config_without_formulas() -> None:
    """The rank with most is computed from tensors' sizes, which are unknown here: it is the first."""
    architecture = ss.Architecture.from_hf({**CONFIG, "model_type": "stablelm"}, rehearse_only=True)
    recipe, layout = ss.Recipe(seq_len=128, global_batch_size=2), ss.Layout.zero(stage=2)
    report = rehearse_in_this_process(
        ss.Plan(architecture, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, layout)
    )
    assert report.components["parameters"] >= 2 * architecture.num_parameters


HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]},
}
"""A small Qwen3.5: three layers of gated delta rule and one of full attention."""


def rehearse_hybrid(layout: Any, **recipe: Any) -> ss.MemoryReport:
    arch = ss.Architecture.from_hf(HYBRID, rehearse_only=True)
    plan = ss.Plan(
        arch,
        ss.Cluster.parse("2xh100-sxm-80gb"),
        ss.Recipe(seq_len=128, global_batch_size=2, **recipe),
        layout,
    )
    return rehearse_in_this_process(plan)


@thorough()
def test_zero_3_rehearses_a_family_that_computes_initial_values() -> None:
    """Qwen3.5 copies computed values into its decays, which ZeRO-3 has partitioned by then."""
    arch = ss.Architecture.from_hf(HYBRID, rehearse_only=True)
    report = rehearse_hybrid(ss.Layout.zero(stage=3))
    assert report.at("rest")["optimizer"] >= 12 * arch.num_parameters // 2


@thorough()
def test_adapters_of_a_config_without_formulas_are_rehearsed() -> None:
    rank = 4
    targets = {"lora_targets": ("in_proj_qkv", "q_proj")}
    arch = ss.Architecture.from_hf(HYBRID, rehearse_only=True)
    report = rehearse_hybrid(ss.Layout.ddp(), method="lora", lora_rank=rank, precision="fp32", **targets)
    # Three layers have in_proj_qkv, from 64 to 2 * 2 * 16 + 4 * 16; one has q_proj, to 4 * 16 and a gate.
    adapters = rank * (3 * (64 + 128) + (64 + 128))
    assert report.components["gradients"] == 4 * adapters
    assert report.at("rest")["optimizer"] >= 2 * 4 * adapters
    assert report.components["parameters"] >= 4 * (arch.num_parameters + adapters)


def test_adapters_of_a_config_without_formulas_are_checked() -> None:
    arch = ss.Architecture.from_hf(HYBRID, rehearse_only=True)
    recipe = ss.Recipe(method="lora", lora_targets=("in_proj_qvk",), global_batch_size=2)
    with pytest.raises(ValueError, match=r"projections of .*lora_targets=\('in_proj_qkv',\)"):
        ss.Plan(arch, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, ss.Layout.ddp())


@thorough()
def test_installed_kernels_of_linear_attention_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would call them on fake tensors; the report says which code ran instead."""
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    kernels = "def chunk_gated_delta_rule(*args, **kwargs):\n    raise RuntimeError('a Triton kernel')\n"
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text(kernels)
    monkeypatch.syspath_prepend(str(tmp_path))
    arch = ss.Architecture.from_hf(HYBRID, rehearse_only=True)
    recipe = ss.Recipe(seq_len=64, global_batch_size=2)
    report = ss.Plan(arch, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, ss.Layout.ddp()).rehearse()
    assert "flash-linear-attention" in report.explain("activations")


@thorough()
def test_installed_kernels_of_mamba_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mamba_ssm" / "ops" / "triton" / "ssd_combined"
    package.mkdir(parents=True)
    names = ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")
    kernels = [f"def {name}(*args, **kwargs):\n    raise RuntimeError('a Triton kernel')\n" for name in names]
    for folder in (package, *list(package.parents)[:3]):
        (folder / "__init__.py").write_text("".join(kernels))
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = {name: HYBRID[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "falcon_h1", **sizes, **mamba, **heads}
    arch = ss.Architecture.from_hf(config, rehearse_only=True)
    recipe = ss.Recipe(seq_len=64, global_batch_size=2)
    report = ss.Plan(arch, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, ss.Layout.ddp()).rehearse()
    assert report.components["activations"] > 0
