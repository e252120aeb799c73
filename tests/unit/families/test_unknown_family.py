"""Tests of configs of families without formulas, which are supported in rehearsals only."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.requirements import needs

import shardscope as ss
from shardscope.families.unknown import UnknownFamily, build_meta_model, list_causal_language_models
from shardscope.memory.state.lora import find_adapter_targets
from shardscope.training.tasks.choices import choose_micro_batch

CONFIG = {
    "model_type": "stablelm",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


def build_plan(config: dict[str, object]) -> ss.Plan:
    architecture = ss.Architecture.from_hf(config, rehearse_only=True)
    recipe = ss.Recipe(seq_len=64, global_batch_size=4)
    return ss.Plan(architecture, ss.Cluster.parse("4xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())


def test_unknown_family_raises_and_suggests_rehearse_only() -> None:
    with pytest.raises(ValueError, match=r"model_type is 'stablelm'.*rehearse_only=True.*plan\.rehearse\(\)"):
        ss.Architecture.from_hf(CONFIG)


def test_known_family_has_its_formulas_with_rehearse_only() -> None:
    llama = ss.Architecture.from_hf({**CONFIG, "model_type": "llama"}, rehearse_only=True)
    assert type(llama) is ss.Architecture


def test_memory_and_shapes_of_unknown_families_raise() -> None:
    needs("transformers")
    plan = build_plan(CONFIG)
    for predict in (plan.memory, plan.architecture.layer_shapes, lambda: plan.architecture.parameter_groups):
        with pytest.raises(ValueError, match=r"stablelm.*plan\.rehearse\(\)"):
            predict(0) if predict == plan.architecture.layer_shapes else predict()


def test_plans_of_unknown_families_round_trip() -> None:
    needs("transformers")
    plan = build_plan(CONFIG)
    assert ss.Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan.architecture)) == plan.architecture
    assert UnknownFamily.from_json(plan.architecture.to_json()) == plan.architecture


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "vit"}, r"model_type is 'vit'; allowed: .*causal language model"),
        ({"model_type": "t5"}, r"model_type is 't5'; allowed: .*causal language model"),
        (
            {"model_type": "mamba", "num_attention_heads": None},
            r"num_attention_heads is None; allowed: a whole number.*'mamba' has none",
        ),
        (
            {"model_type": "llava", "text_config": CONFIG},
            r"model_type is 'llava'.*from_hf\(config\['text_config'\], rehearse_only=True\)",
        ),
        # AutoModelForCausalLM has a class of this type, which has the vision tower as well.
        (
            {"model_type": "gemma4", "text_config": {**CONFIG, "model_type": "gemma4_text"}},
            r"model_type is 'gemma4'.*from_hf\(config\['text_config'\], rehearse_only=True\)",
        ),
    ],
)
def test_configs_that_transformers_cannot_read_raise(change: dict[str, object], expected: str) -> None:
    needs("transformers")
    with pytest.raises(ValueError, match=expected):
        ss.Architecture.from_hf({**CONFIG, **change}, rehearse_only=True)


@pytest.mark.parametrize(("model_type", "widths"), [("gemma3n_text", [96, 64]), ("gemma3n_text", 64)])
def test_sizes_that_differ_among_layers_have_their_common_divisor(
    model_type: str, widths: int | list[int]
) -> None:
    needs("transformers")
    changes = {"model_type": model_type, "intermediate_size": widths}
    architecture = ss.Architecture.from_hf({**CONFIG, **changes}, rehearse_only=True)
    assert architecture.intermediate_size == (32 if isinstance(widths, list) else 64)


def test_parameters_are_counted_on_the_meta_device() -> None:
    transformers = needs("transformers")
    import torch

    config = transformers.AutoConfig.for_model(**CONFIG)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert build_plan(CONFIG).architecture.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"use_qkv_bias": True, "hidden_act": "gelu"},
        {"model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ],
)
def test_models_are_built_from_their_own_config(changes: dict[str, object]) -> None:
    """The sizes that degrees are checked against do not describe their layers."""
    needs("transformers")
    from shardscope.training.model.model import build_model

    config = {**CONFIG, "head_dim": 16, **changes}
    architecture = ss.Architecture.from_hf(config, rehearse_only=True)
    model = build_model(architecture, dropout=0.25)
    assert sum(parameter.numel() for parameter in model.parameters()) == architecture.num_parameters
    built = getattr(model, "config")  # noqa: B009  # torch.nn.Module has no such attribute.
    assert all(getattr(built, name) == value for name, value in config.items())
    assert built.attention_dropout == 0.25
    assert not built.use_cache


def test_megatron_core_refuses_layers_that_it_would_build_as_others() -> None:
    needs("transformers")
    plan = build_plan(CONFIG)
    with pytest.raises(ValueError, match=r"model_type is 'stablelm'.*only transformers knows.*Layout\.fsdp2"):
        ss.Plan(plan.architecture, plan.cluster, plan.recipe, ss.Layout.megatron()).rehearse()


def test_search_advice_and_checks_name_the_missing_formulas() -> None:
    """The search had "0 of 0 plans" without a reason, and the checks had no findings."""
    needs("transformers")
    plan = build_plan(CONFIG)
    ranking = ss.search(plan.architecture, plan.cluster, plan.recipe)
    for text in (repr(ranking), ranking._repr_html_()):
        assert "ddp, fsdp2, deepspeed: Architecture.model_type is" in text.replace("&#x27;", "'")
    assert ranking.alternative is None
    with pytest.raises(ValueError, match=r"stablelm.*plan\.rehearse\(\)"):
        ss.recommend(plan.architecture, plan.cluster, plan.recipe)
    assert [finding.name for finding in plan.findings()] == ["no-formulas"]


def test_language_models_of_transformers_are_listed_without_its_import() -> None:
    needs("torch")
    transformers = needs("transformers")
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    left_out = {"gemma3", "gemma4", "qwen3_5"} & (mapping.keys() - list_causal_language_models())
    assert list_causal_language_models() <= mapping.keys() and left_out == {"gemma3", "gemma4"}
    code = (
        "import sys, shardscope as ss\n"
        "try:\n    ss.Architecture.from_hf({'model_type': 'qwen3_5_text'})\n"
        "except ValueError as error:\n    assert 'rehearse_only' in str(error)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_that_transformers_cannot_build_raises_with_its_error() -> None:
    needs("transformers")
    architecture = ss.Architecture.from_hf({**CONFIG, "hidden_act": "no-such"}, rehearse_only=True)
    with pytest.raises(ValueError, match=r"model_type is 'stablelm'; allowed: .*KeyError: .*no-such"):
        _ = architecture.num_parameters


@pytest.mark.parametrize(
    ("model_type", "changes", "left_out"),
    [
        ("stablelm", {}, set()),
        # Its router is a Linear that returns two tensors.
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 64}, {"router"}),
        # peft would adapt the fused experts along with the shared one.
        ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 2}, {"gate_proj", "up_proj", "down_proj"}),
        # peft raises for a Mamba model.
        ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32}, {"out_proj"}),
        # A feed-forward of Linears that are named "0" and "2", as two of the layers are.
        ("ctrl", {"n_embd": 64, "n_head": 4, "n_layer": 3, "dff": 64}, {"0", "2"}),
    ],
)
def test_peft_adapts_each_linear_of_the_layers(
    model_type: str, changes: dict[str, object], left_out: set[str]
) -> None:
    needs("transformers")
    peft = needs("peft")
    import torch

    arch = ss.Architecture.from_hf({**CONFIG, **changes, "model_type": model_type}, rehearse_only=True)
    targets = {target for target, _ in arch.lora_shapes}
    model = copy.deepcopy(build_meta_model(arch))
    linears = {
        name: module.in_features + module.out_features
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    assert {name.rpartition(".")[2] for name in linears} - targets == left_out
    config = peft.LoraConfig(r=2, target_modules=list(targets), task_type="CAUSAL_LM")
    with torch.device("meta"):
        adapted = peft.get_peft_model(model, config)
    expected = sum(size for name, size in linears.items() if name.rpartition(".")[2] in targets)
    assert adapted.get_nb_trainable_parameters()[0] == 2 * expected


def test_exported_scripts_adapt_the_linears_of_the_plan(tmp_path: Path) -> None:
    """Their default is the attention of the first layer, which is linear attention in Qwen3.5."""
    needs("transformers")
    plan = build_plan(CONFIG)
    plan = replace(plan, recipe=replace(plan.recipe, method="lora"))
    plan.export(tmp_path)
    recipe = json.loads((tmp_path / "plan.json").read_text())["recipe"]
    assert recipe["lora_targets"] == list(find_adapter_targets(plan.architecture, plan.recipe))
    assert "up_proj" in recipe["lora_targets"]
    plan.export(tmp_path)  # Its own files are replaced.


def test_no_micro_batch_is_said_not_to_fit_without_a_prediction() -> None:
    needs("transformers")
    choice = choose_micro_batch(build_plan(CONFIG))
    assert choice.value == 1 and choice.why.startswith("No memory is predicted")
