"""Tests of the config.json of a fine-tuned model: the model is built from that file and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from tests.weights_folders import LLAMA, write_folder

import shardscope as ss
from shardscope.training.weights.weights_folder import WeightsFolder

OTHER = {"rms_norm_eps": 0.5, "hidden_act": "relu", "rope_theta": 7.0}
"""Values that do not change the number of parameters."""
SAME_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-3, "rope_theta": 500.0, "torch_dtype": "bfloat16"},
    "an older rope_scaling": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, windows on some layers": {
        "model_type": "mistral",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def make_plan(folder: Path) -> ss.Plan:
    arch = ss.Architecture.from_hf(str(folder))
    return ss.Plan(
        arch, ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=32, global_batch_size=4), ss.Layout.ddp()
    )


def built_from(said: dict[str, Any]) -> Any:
    from shardscope.training.model.model import build_from_config

    return build_from_config(said, ss.Architecture.from_hf({**said, "_name_or_path": "model"}))


def test_fault_32_a_config_that_names_another_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", configuration_files=["config.4.0.0.json"])
    (tmp_path / "outside.json").write_text(json.dumps({**LLAMA, **OTHER}))
    (folder / "config.4.0.0.json").symlink_to(tmp_path / "outside.json")
    words = r"^Finetune\.weights/config\.json configuration_files is .*; allowed: none: config\.json alone"
    with pytest.raises(ValueError, match=words):
        ss.Finetune(weights=folder).check(make_plan(folder))


def test_the_checked_config_is_built_even_if_it_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("transformers")
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "config.4.0.0.json"):
        (tmp_path / name).write_text(json.dumps({**LLAMA, **OTHER}))
    said = {**LLAMA, "configuration_files": ["config.4.0.0.json"], "_name_or_path": str(tmp_path)}
    before = json.dumps(said)
    config = built_from(said).config
    assert (config.rms_norm_eps, config.hidden_act) == (1e-6, "silu")
    assert config.rope_parameters["rope_theta"] == 10_000
    assert json.dumps(said) == before


@pytest.mark.parametrize("what", SAME_SIZES)
def test_a_config_is_read_as_transformers_reads_it(what: str, tmp_path: Path) -> None:
    transformers = needs("transformers")
    folder = write_folder(tmp_path / "model", **SAME_SIZES[what])
    model = built_from(dict(WeightsFolder.open(folder, "weights").config))
    theirs = transformers.AutoConfig.from_pretrained(folder)
    ours = model.config
    told = ("rope_parameters", "rms_norm_eps", "hidden_act", "sliding_window", "layer_types")
    assert type(ours) is type(theirs)
    for name in told:
        assert getattr(ours, name, None) == getattr(theirs, name, None), name


# ---- values that training overrides and an export restores

MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.3,
    "attention_dropout": 0.2,
    "output_router_logits": True,
    "use_cache": False,
    "torch_dtype": "bfloat16",
    "architectures": ["SomebodysMixtral"],
    "auto_map": {"AutoModelForCausalLM": "theirs.SomebodysMixtral"},
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 2048,
    "attn_pdrop": 0.2,
    "resid_pdrop": 0.3,
}


def test_routers_have_no_noise_while_training() -> None:
    torch, transformers = needs("torch"), needs("transformers")
    tokens = torch.arange(32).view(1, 32)
    said = {**LLAMA, **MIXTRAL}
    model = built_from(said).train()
    losses = [model(input_ids=tokens, labels=tokens).loss.item() for _ in range(2)]
    assert losses[0] == losses[1] == model.eval()(input_ids=tokens, labels=tokens).loss.item()
    noisy = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{**said, "attention_dropout": 0.0, "output_router_logits": False})
    )
    noisy.load_state_dict(model.state_dict())
    assert noisy.train()(input_ids=tokens, labels=tokens).loss.item() != losses[0], "the measure sees noise"


@pytest.mark.parametrize("said", [{**LLAMA, **MIXTRAL}, GPT2], ids=["mixtral", "gpt2"])
def test_an_exported_config_has_the_folders_values(said: dict[str, Any], tmp_path: Path) -> None:
    torch, transformers = needs("torch"), needs("transformers")
    from shardscope.training.weights.pretrained import write_pretrained

    folder, out = write_folder(tmp_path / "model"), tmp_path / "export"
    (folder / "config.json").write_text(json.dumps(said))
    # The ids that end an answer are in it; transformers does not save a temperature without do_sample.
    generation = '{"eos_token_id": [1, 2], "temperature": 0.6}'
    (folder / "generation_config.json").write_text(generation)
    model = built_from(said)
    alone = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=alone, rank=0, world_size=1)
    try:
        write_pretrained(out, model, model.named_parameters())
    finally:
        torch.distributed.destroy_process_group()
    ss.Finetune(weights=folder).complete_export(out, make_plan(folder))
    record = json.loads((out / "config.json").read_text())
    own = {"mixtral": "MixtralForCausalLM", "gpt2": "GPT2LMHeadModel"}[said["model_type"]]
    left = {name: value for name, value in said.items() if name not in ("torch_dtype", "auto_map")}
    assert record == left | {"architectures": [own], "dtype": "float32"}
    assert {entry.name for entry in out.iterdir()} >= {"config.json", "tokenizer.json"}
    assert (out / "generation_config.json").read_text() == generation
    assert not list(out.glob(".*"))
    opened = transformers.AutoConfig.from_pretrained(out)
    assert all(getattr(opened, name) == said[name] for name in said if name.endswith(("_pdrop", "_noise")))


@pytest.mark.parametrize(
    ("path", "base"),
    [("model", None), ("models--org--whale/snapshots/12ab", "org/whale")],
    ids=["folder", "hub cache"],
)
def test_adapters_are_exported_without_a_config(path: str, base: str | None, tmp_path: Path) -> None:
    needs("transformers")
    folder, out = write_folder(tmp_path / path), tmp_path / "export"
    out.mkdir()
    (out / "adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": null}')
    plan = make_plan(folder)
    recipe = ss.Recipe(seq_len=32, global_batch_size=4, method="lora")
    ss.Finetune(weights=folder).complete_export(
        out, ss.Plan(plan.architecture, plan.cluster, recipe, plan.layout)
    )
    assert (out / "tokenizer.json").exists() and not (out / "config.json").exists()
    # By its name peft finds the base; a path of this machine is nobody else's business.
    assert json.loads((out / "adapter_config.json").read_text()) == {"r": 8, "base_model_name_or_path": base}
