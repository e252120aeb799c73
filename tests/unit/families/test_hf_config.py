"""Tests of ``Architecture.from_hf``: parameters equal those of transformers; invalid configs raise."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.requirements import examples, few, needs, sample

from shardscope.catalog import get_config, models
from shardscope.core.architecture import MODEL_TYPES, Architecture
from shardscope.families.common import HfConfig
from shardscope.families.hf_config import FAMILIES
from shardscope.families.parameter_names import list_parameter_names

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}


def get_required_sizes(family: str) -> dict[str, Any]:
    """Return the sizes that a config of ``family`` must have."""
    if family == "gpt2":
        return GPT2
    sizes: dict[str, Any] = {**LLAMA, "model_type": family}
    if family == "falcon":
        del sizes["intermediate_size"]
    if family == "nemotron":
        sizes["num_key_value_heads"] = 4
    if family == "deepseek_v2":
        sizes["num_experts_per_tok"] = 2
    return sizes


def build_meta_model(config: dict[str, Any]) -> Any:
    torch = needs("torch")
    transformers = needs("transformers", minversion="5.0")
    transformers.logging.set_verbosity_error()
    keys = {key: value for key, value in config.items() if key != "model_type"}
    keys |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **keys)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(hf_config)


def assert_same_parameters(config: dict[str, Any]) -> None:
    arch = Architecture.from_hf(config)
    theirs = {name: tuple(parameter.shape) for name, parameter in build_meta_model(config).named_parameters()}
    prefix = list_parameter_names(arch).layers
    ours = {name: shape for _, name, shape in arch.outer_shapes}
    for index in range(arch.num_hidden_layers):
        ours |= {f"{prefix}.{index}.{name}": shape for _, name, shape in arch.layer_shapes(index)}
    assert ours == theirs
    assert arch.num_parameters == sum(math.prod(shape) for shape in theirs.values())
    assert sum(arch.parameter_groups.values()) == arch.num_parameters


@sample(5)
@pytest.mark.parametrize(
    "name", few(models, {arch.model_type: name for name, arch in models.items()}.values())
)
def test_catalog_models_have_the_parameters_of_transformers(name: str) -> None:
    assert_same_parameters(get_config(name))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-2-7b", 6_738_415_616),
        ("mixtral-8x7b", 46_702_792_704),
        ("gemma-2-2b", 2_614_341_888),
        ("deepseek-v3", 671_026_404_352),
        ("gpt2", 124_439_808),
        ("phi-3-mini", 3_821_079_552),
        ("llama-2-13b", 13_015_864_320),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-14b", 14_768_307_200),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("gemma-2b", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("gemma-3-1b", 999_885_952),
        ("phi-2", 2_779_683_840),
        ("phi-4", 14_659_507_200),
        ("phi-4-mini", 3_836_021_760),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v2-lite", 15_706_484_224),
        ("gpt2-large", 774_030_080),
        ("gpt-neox-20b", 20_554_567_680),
        ("pythia-70m", 70_426_624),
        ("pythia-12b", 11_846_072_320),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("olmo-2-7b", 7_298_617_344),
        ("olmo-3-7b", 7_298_011_136),
        ("olmo-3-32b", 32_233_522_176),
        ("smollm2-1.7b", 1_711_376_384),
        ("smollm3-3b", 3_075_098_624),
        ("falcon-7b", 6_921_720_704),
        ("falcon-40b", 41_303_293_952),
        ("falcon-180b", 179_522_565_120),
        ("starcoder2-3b", 3_030_371_328),
        ("starcoder2-15b", 15_957_889_024),
        ("glm-4-9b", 9_399_951_360),
        ("glm-4.5-air", 106_852_245_504),
        ("glm-4.7-flash", 29_943_390_976),
        ("ministral-3-3b", 3_429_006_336),
    ],
)
def test_parameter_counts_equal_the_published_ones(name: str, published: int) -> None:
    assert models[name].num_parameters == published


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
QWEN_MOE = ("qwen2_moe", "qwen3_moe")
WITH_SHARED = ("glm4_moe", *LATENT)
WITH_EXPERTS = ("mixtral", "gpt_oss", *QWEN_MOE, *WITH_SHARED)
BIASED = (
    *("gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "olmo2", "olmo3", "glm", "glm4", "glm4_moe"),
    *("qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe_lite"),
)
WITH_MLP_BIAS = ("llama", "granite", "nemotron", "deepseek_v2", "seed_oss", "smollm3")
WITHOUT_HEAD_DIM = (*LATENT, "gpt_neox", "falcon", "phi")
"""Families that derive the head dimension from hidden_size; phi only with qk_layernorm."""
FLAG, WIDTH, NUM_EXPERTS = st.booleans(), st.integers(1, 40), st.sampled_from([2, 4, 8])
KEYS: dict[str, tuple[st.SearchStrategy[Any], tuple[str, ...]]] = {
    "attention_bias": (FLAG, (*BIASED, *WITH_MLP_BIAS)),
    "mlp_bias": (FLAG, WITH_MLP_BIAS),
    "qkv_bias": (FLAG, ("qwen2_moe",)),
    "use_bias": (FLAG, ("starcoder2",)),
    "attention_out_bias": (FLAG, ("seed_oss",)),
    "bias": (FLAG, ("falcon",)),
    "alibi": (FLAG, ("falcon",)),
    "qk_layernorm": (FLAG, ("phi",)),
    "use_qk_norm": (FLAG, ("glm4_moe",)),
    "use_parallel_residual": (FLAG, ("gpt_neox",)),
    "use_sliding_window": (FLAG, ("qwen2", "qwen3", "smollm3", *QWEN_MOE)),
    "num_experts": (NUM_EXPERTS, QWEN_MOE),
    "num_local_experts": (NUM_EXPERTS, ("mixtral", "gpt_oss")),
    "n_routed_experts": (NUM_EXPERTS, WITH_SHARED),
    "num_experts_per_tok": (st.integers(1, 2), WITH_EXPERTS),
    "moe_intermediate_size": (WIDTH, (*QWEN_MOE, *WITH_SHARED)),
    "shared_expert_intermediate_size": (WIDTH, ("qwen2_moe",)),
    "n_shared_experts": (st.integers(1, 3), WITH_SHARED),
    "first_k_dense_replace": (st.integers(0, 5), WITH_SHARED),
    "mlp_layer_types": (
        st.none() | st.lists(st.sampled_from(["dense", "sparse"]), min_size=4, max_size=5),
        ("glm4_moe_lite",),
    ),
    "decoder_sparse_step": (st.integers(1, 3), QWEN_MOE),
    "mlp_only_layers": (st.lists(st.integers(0, 3), unique=True), QWEN_MOE),
    "n_group": (st.just(1), WITH_SHARED),
    "topk_group": (st.just(1), WITH_SHARED),
    "q_lora_rank": (st.none() | st.integers(1, 30), LATENT),
    "kv_lora_rank": (st.integers(1, 30), LATENT),
    "qk_nope_head_dim": (st.integers(1, 20), LATENT),
    "qk_rope_head_dim": (st.integers(1, 8).map(lambda half: 2 * half), LATENT),
    "v_head_dim": (st.integers(1, 20), LATENT),
}
"""Keys of config.json besides the sizes of every family: their values, and the families that have them."""
ALIASES = {
    "gpt2": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    },
    "mixtral": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"n_routed_experts": "num_experts"},
    "deepseek_v3": {"n_routed_experts": "num_local_experts"},
    "glm4_moe": {"n_routed_experts": "num_local_experts"},
    "glm4_moe_lite": {"n_routed_experts": "num_local_experts"},
    "falcon": {"hidden_size": "n_embed"},
}
"""Other names of keys, which transformers reads too."""
CHANGES_NO_SHAPE = {
    *("max_position_embeddings", "sliding_window", "layer_types", "max_window_layers"),
    *("sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval"),
    *("use_bidirectional_attention", "add_cross_attention", "rope_parameters", "rope_scaling"),
}
"""Keys that adapters read, and that no configuration here has: no shape depends on their values."""


@st.composite
def falcon_heads(draw: st.DrawFn, heads: int, kv_heads: int) -> dict[str, Any]:
    """Draw one of Falcon's three head layouts with the norms that it supports."""
    layout = draw(st.sampled_from(["new", "multi-query", "plain"]))
    if layout == "new":
        norms = draw(st.sampled_from([None, 1, 2]))
        return {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms}
    return {
        "multi_query": layout == "multi-query" or draw(st.sampled_from([False, None])),
        "parallel_attn": draw(st.sampled_from([True, False, None])),
        "ffn_hidden_size": draw(st.none() | st.integers(1, 99)),
    }


@st.composite
def small_configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    config = draw(named_configs(family))
    for key, alias in ALIASES.get(family, {}).items():
        if draw(st.booleans()):
            config[alias] = config.pop(key)
    return config


@st.composite
def named_configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    tied = draw(st.booleans())
    if family == "gpt2":
        heads = draw(st.sampled_from([1, 2, 4]))
        config: dict[str, Any] = {"n_embd": heads * draw(st.integers(1, 24)), "n_head": heads}
        config |= {"n_layer": draw(st.integers(1, 3)), "n_positions": draw(st.integers(1, 64))}
        config |= {"n_inner": draw(st.none() | st.integers(1, 99))}
        return {
            "model_type": family,
            "vocab_size": draw(st.integers(1, 300)),
            "tie_word_embeddings": tied,
            **config,
        }
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    config = {
        "model_type": family,
        "hidden_size": heads * draw(st.integers(1, 16)) * 2,
        "intermediate_size": draw(st.integers(1, 99)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": draw(st.integers(1, 300)),
        "tie_word_embeddings": tied,
    }
    if family not in WITHOUT_HEAD_DIM and draw(st.booleans()):
        config["head_dim"] = draw(st.integers(1, 16)) * 2
    if family == "falcon":
        config |= draw(falcon_heads(heads, kv_heads))
    return config | {key: draw(values) for key, (values, families) in KEYS.items() if family in families}


class RecordedKeys(dict[str, object]):
    """A config.json that records which of its keys are read."""

    def __init__(self, data: dict[str, object]) -> None:
        super().__init__(data)
        self.keys_read: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> object:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_small_configs_have_every_key_that_the_adapter_reads(family: str) -> None:
    """Otherwise a wrong name or default of a key would pass the tests below."""
    keys_read, keys_drawn = set[str](), set[str]()

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(small_configs(family))
    def read(config: dict[str, object]) -> None:
        recorded = RecordedKeys(config)
        FAMILIES[family].read(HfConfig(recorded))
        keys_read.update(recorded.keys_read)
        keys_drawn.update(config)

    read()
    missing = keys_read - keys_drawn - CHANGES_NO_SHAPE
    missing -= {"head_dim"} if family in WITHOUT_HEAD_DIM else set()
    assert not missing, f"name {family} in KEYS for {sorted(missing)}, or in CHANGES_NO_SHAPE if it is so"


@sample(5)
@pytest.mark.parametrize("family", MODEL_TYPES)
@settings(
    max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.data())
def test_random_small_configs_have_the_parameters_of_transformers(family: str, data: st.DataObject) -> None:
    assert_same_parameters(data.draw(small_configs(family)))


def test_llama_with_every_bias_has_the_parameters_of_transformers() -> None:
    assert_same_parameters({**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})


@sample(5)
@pytest.mark.parametrize("family", MODEL_TYPES)
@settings(
    max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.data())
def test_models_built_from_an_architecture_have_its_parameters(family: str, data: st.DataObject) -> None:
    """The inverse conversion: ``training.model`` writes an architecture as the family's config."""
    needs("transformers", minversion="5.0")
    from shardscope.training.model.model import config_values

    arch = Architecture.from_hf(data.draw(small_configs(family)))
    built = build_meta_model({"model_type": family, **config_values(arch)})
    assert sum(p.numel() for p in built.parameters()) == arch.num_parameters
    kinds = getattr(built.config, "layer_types", None) or ()
    if arch.sliding_window_layers and kinds:
        assert list(kinds).count("sliding_attention") == arch.sliding_window_layers


@pytest.mark.parametrize(("num_experts", "num_groups"), [(8, 1), (12, 1), (16, 8)])
def test_deepseek_models_of_few_experts_have_no_groups_too_small_to_route(
    num_experts: int, num_groups: int
) -> None:
    """DeepseekV3MoE scores a group by its two best experts, so that groups of one fail in forward."""
    transformers = needs("transformers", minversion="5.0")
    torch = needs("torch")
    from shardscope.training.model.model import config_values

    sizes = {**get_required_sizes("deepseek_v3"), "first_k_dense_replace": 0, "moe_intermediate_size": 8}
    arch = Architecture.from_hf({**sizes, "n_routed_experts": num_experts})
    config = transformers.AutoConfig.for_model("deepseek_v3", **config_values(arch))
    assert config.n_group == num_groups
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 100)


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_fault_36_missing_keys_have_the_familys_defaults(family: str) -> None:
    wide = {} if family == "gpt2" else {"hidden_size": 128, "num_attention_heads": 32}
    assert_same_parameters({**get_required_sizes(family), **wide})


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_fault_36_each_missing_size_raises_with_its_key(family: str) -> None:
    sizes = get_required_sizes(family)
    # Published files of Gemma 3 4B have neither heads nor a vocabulary.
    optional = {"num_attention_heads", "vocab_size"} if family == "gemma3_text" else set()
    for key in sizes.keys() - {"model_type"} - optional:
        with pytest.raises(ValueError, match=rf"config\.json {key} is None"):
            Architecture.from_hf({k: v for k, v in sizes.items() if k != key})


@pytest.mark.parametrize("family", MODEL_TYPES)
@pytest.mark.parametrize("bad", [0, -1, 1e30, 10**30, float("nan"), float("inf"), True, "64", [64], 64.5])
def test_fault_36_each_absurd_size_raises_with_its_key(family: str, bad: object) -> None:
    sizes = get_required_sizes(family)
    for key in sizes.keys() - {"model_type"}:
        with pytest.raises(ValueError, match=rf"config\.json {key} is .*allowed: .*Nearest fix: "):
            Architecture.from_hf({**sizes, key: bad})


@pytest.mark.parametrize("bad", ["bert", "Llama", "", None, 7, ["llama"], "llama4_text"])
def test_fault_36_unknown_model_type_raises_with_the_known_ones(bad: object) -> None:
    with pytest.raises(
        ValueError, match=r"known architectures: llama, mistral.*Nearest fix.*plan\.rehearse\(\)"
    ):
        Architecture.from_hf({**LLAMA, "model_type": bad})


def test_a_family_of_another_name_is_found_by_its_class() -> None:
    """Kimi K2: transformers does not know kimi_k2, so it cannot be rehearsed by that name either."""
    config = {**LLAMA, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    with pytest.raises(
        ValueError, match=r"Nearest fix: from_hf\(\{\*\*config, 'model_type': 'deepseek_v3'\}"
    ):
        Architecture.from_hf(config)


def test_multimodal_config_that_transformers_reads_whole_needs_no_part_of_it() -> None:
    needs("transformers")
    config = {"model_type": "qwen3_5", "text_config": {**LLAMA, "model_type": "qwen3_5_text"}}
    with pytest.raises(ValueError, match=r"Nearest fix: its language model alone.*from_hf\(config, rehearse"):
        Architecture.from_hf(config)
    assert Architecture.from_hf(config, rehearse_only=True).hidden_size == LLAMA["hidden_size"]


def test_multimodal_config_raises_with_text_config_as_fix() -> None:
    with pytest.raises(ValueError, match=r"wrapper.*from_hf\(config\['text_config'\]\)"):
        Architecture.from_hf({"model_type": "llava", "text_config": LLAMA})
    with pytest.raises(ValueError, match=r"from_hf\(config\['text_config'\], rehearse_only=True\)"):
        Architecture.from_hf({"model_type": "llava", "text_config": {**LLAMA, "model_type": "stablelm"}})


def test_the_file_of_a_multimodal_checkpoint_is_its_language_model(tmp_path: Path) -> None:
    """Gemma 3 4B as it is on the Hub: most of its sizes are the family's defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    folder = tmp_path / "gemma-3-4b-it"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    arch = Architecture.from_hf(folder)
    assert arch == Architecture.from_hf({**text, "_name_or_path": "gemma-3-4b-it"})
    assert arch == Architecture.from_hf(folder / "config.json", rehearse_only=True)
    assert {**asdict(arch), "name": ""} == {**asdict(models["gemma-3-4b"]), "name": ""}


@pytest.mark.parametrize(
    ("whole", "text", "tied"),
    [
        ({}, {}, False),
        ({"tie_word_embeddings": True}, {}, True),
        # transformers writes Mistral3Config's default also over a language model with a head of its own.
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, False),
        ({}, {"tie_word_embeddings": True}, True),
    ],
)
def test_the_language_model_itself_says_whether_its_head_is_tied(
    whole: dict[str, Any], text: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    language_model = {**LLAMA, "num_key_value_heads": 4, **text, "model_type": "ministral3"}
    config = {"model_type": "mistral3", **whole, "text_config": language_model}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Architecture.from_hf(tmp_path).tie_word_embeddings is tied


def test_a_multimodal_file_without_a_known_language_model_raises(tmp_path: Path) -> None:
    for model_type in ("stablelm", None, ["llama"], {}):
        config = {"model_type": "llava", "text_config": {**LLAMA, "model_type": model_type}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="model_type is 'llava'"):
            Architecture.from_hf(tmp_path)
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": LLAMA}))
    with pytest.raises(ValueError, match="other heads"):
        Architecture.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("bad", "similar"),
    [
        ("llama9", "llama"),
        ("Llama", "llama"),
        ("mamba", None),
        ("pixtral", None),
        # transformers has classes of their own for these: their layers are not the same.
        ("llama4_text", None),
        ("qwen3_5_text", None),
    ],
)
def test_only_related_families_are_suggested(bad: str, similar: str | None) -> None:
    needs("transformers")
    with pytest.raises(ValueError, match=r"known architectures") as error:
        Architecture.from_hf({**LLAMA, "model_type": bad})
    assert ("if its layers are the same" in str(error.value)) == (similar is not None)
    assert similar is None or f"'{similar}' if its layers" in str(error.value)


@pytest.mark.parametrize(
    "name", ["LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaForQuestionAnswering"]
)
def test_configs_of_other_heads_raise(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"config\.json architectures is .*{name}.*ForCausalLM.*remove the key"
    ):
        Architecture.from_hf({**LLAMA, "architectures": [name]})
    for allowed in (["LlamaForCausalLM"], ["LlamaModel"], None):
        assert Architecture.from_hf({**LLAMA, "architectures": allowed}).hidden_size == 64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "hidden_act": "silu"}, None),
        ({**LLAMA, "hidden_act": "gelu"}, None),
        ({**GPT2, "activation_function": "gelu_new"}, None),
        (
            {**LLAMA, "model_type": "gpt_neox", "hidden_act": "gelu_fast"},
            r"hidden_act is 'gelu_fast', .* too low\. Nearest fix: 'gelu_pytorch_tanh'",
        ),
        ({**LLAMA, "hidden_act": "quick_gelu"}, r"too low\. Nearest fix: Recipe\.recompute='full'"),
        ({**GPT2, "activation_function": "gelu"}, r"activation_function is 'gelu', .* too high\.$"),
    ],
)
def test_activations_that_save_other_tensors_than_the_familys_warn(
    config: dict[str, Any], message: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Architecture.from_hf(config)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (message is not None)
    assert message is None or re.search(message, texts[0])


@pytest.mark.parametrize("rehearse_only", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {**GPT2, "add_cross_attention": True},
        {**LLAMA, "model_type": "gemma", "use_bidirectional_attention": True},
    ],
)
def test_models_that_are_no_causal_decoders_raise_without_promise_of_a_rehearsal(
    config: dict[str, Any], rehearse_only: bool
) -> None:
    with pytest.raises(ValueError, match=r"is True; allowed: False, because a causal decoder") as error:
        Architecture.from_hf(config, rehearse_only=rehearse_only)
    assert "rehearse" not in str(error.value)


def test_keys_that_contradict_their_other_name_raise() -> None:
    with pytest.raises(ValueError, match=r"hidden_size is 32; allowed: the same as n_embd=64.*remove one of"):
        Architecture.from_hf({**GPT2, "hidden_size": 32})
    assert Architecture.from_hf({**GPT2, "hidden_size": 64}).hidden_size == 64


def test_hidden_size_must_be_divisible_by_attention_heads() -> None:
    with pytest.raises(ValueError, match="a multiple of num_attention_heads=4"):
        Architecture.from_hf({**LLAMA, "hidden_size": 66})
    with pytest.raises(ValueError, match="a multiple of num_attention_heads=4"):
        Architecture.from_hf({**GPT2, "n_embd": 66})


def test_sliding_windows_by_family() -> None:
    def read_windows(**keys: object) -> tuple[int | None, int]:
        arch = Architecture.from_hf({**LLAMA, "num_key_value_heads": 4, **keys})
        return arch.sliding_window, arch.sliding_window_layers

    assert read_windows(model_type="llama", sliding_window=8) == (None, 0)
    assert read_windows(model_type="mistral") == (4096, 2)
    assert read_windows(model_type="mistral", sliding_window=None) == (None, 0)
    assert read_windows(model_type="gemma2", num_hidden_layers=3) == (4096, 2)
    assert read_windows(model_type="qwen2", sliding_window=8) == (None, 0)
    assert read_windows(
        model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1
    ) == (
        8,
        1,
    )
    assert read_windows(model_type="phi3", sliding_window=2047) == (2047, 2)
    # gemma3_text stores _sliding_window_pattern and does not read it again.
    assert read_windows(model_type="gemma3_text", _sliding_window_pattern=1) == (4096, 2)
    assert read_windows(model_type="gemma3_text", sliding_window_pattern=1) == (None, 0)
    layer_types = ["full_attention", "sliding_attention"]
    assert read_windows(model_type="gemma2", layer_types=layer_types) == (4096, 1)
    assert read_windows(model_type="olmo3", num_hidden_layers=9) == (4096, 7)
    assert read_windows(model_type="olmo3", sliding_window=8, layer_types=layer_types) == (8, 1)


def test_windows_of_smollm3_are_in_the_layers_without_rotary_embedding() -> None:
    needs("transformers", minversion="5.0")
    from transformers import SmolLM3Config

    window = {"sliding_window": 8, "use_sliding_window": True}
    for keys in (
        {},
        {"sliding_window": 8},
        {"use_sliding_window": True},
        window,
        {**window, "no_rope_layer_interval": 3},
        {**window, "no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 1, 0]},
        {**window, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 6},
    ):
        sizes = {**LLAMA, "num_hidden_layers": 9, "model_type": "smollm3", **keys}
        kinds = SmolLM3Config(**sizes).layer_types
        assert Architecture.from_hf(sizes).sliding_window_layers == kinds.count("sliding_attention"), keys
    with pytest.raises(ValueError, match="no_rope_layer_interval is 0"):
        Architecture.from_hf({**sizes, **window, "layer_types": None, "no_rope_layer_interval": 0})


def test_ministral3_without_its_scale_of_queries_raises_with_the_missing_key() -> None:
    """Its attention multiplies by both numbers, and has defaults only without any rotary settings."""
    sizes = {**LLAMA, "model_type": "ministral3", "num_key_value_heads": 4}
    rotary = {"rope_type": "default", "rope_theta": 1e4}
    for settings_, missing in (
        (rotary, "llama_4_scaling_beta"),
        ({**rotary, "llama_4_scaling_beta": 0.1}, "original_max_position_embeddings"),
    ):
        with pytest.raises(ValueError, match=rf"rope_parameters\.{missing} is None.*add '{missing}'"):
            Architecture.from_hf({**sizes, "rope_parameters": settings_})
    full = {**rotary, "llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 262_144}
    complete = {**sizes, "rope_parameters": full}
    assert Architecture.from_hf(complete) == Architecture.from_hf(sizes)
    torch, transformers = needs("torch"), needs("transformers", minversion="5.0")
    config = transformers.AutoConfig.for_model(**complete, head_dim=16, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 100)


def test_windows_of_ministral3_are_in_all_layers() -> None:
    """Ministral3Model has one mask for all layers, whatever ``layer_types`` the file has."""
    types = ["full_attention", "sliding_attention"]
    sizes = {**LLAMA, "model_type": "ministral3", "num_key_value_heads": 4, "layer_types": types}
    assert Architecture.from_hf(sizes).sliding_window_layers == 0
    assert Architecture.from_hf({**sizes, "sliding_window": 8}).sliding_window_layers == 2


def test_layers_with_experts_of_glm4_moe_lite_are_those_of_its_list() -> None:
    def find_moe_layers(**keys: object) -> list[bool]:
        sizes = {**LLAMA, "model_type": "glm4_moe_lite", "num_hidden_layers": 3, **keys}
        return [Architecture.from_hf(sizes).is_moe_layer(index) for index in range(3)]

    assert find_moe_layers() == find_moe_layers(first_k_dense_replace=2) == [False, True, True]
    kinds = ["sparse", "dense", "sparse"]
    assert find_moe_layers(mlp_layer_types=kinds) == [True, False, True]
    for bad in (kinds[:2], ["sparse", "moe", "sparse"], "sparse"):
        with pytest.raises(ValueError, match=r"mlp_layer_types is .*each of num_hidden_layers=3"):
            find_moe_layers(mlp_layer_types=bad)


# -------------------------------------------------------------------------------------------- files


def test_from_hf_reads_a_file_a_folder_and_a_dict(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text("\ufeff" + json.dumps(LLAMA), encoding="utf-8")
    by_folder = Architecture.from_hf(folder)
    assert by_folder == Architecture.from_hf(str(file)) == Architecture.from_hf(file)
    assert by_folder.name == "my-llama"
    assert Architecture.from_hf(LLAMA).num_parameters == by_folder.num_parameters


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"model_type": "llama",\n "hidden_size": 64,\n "hidden_size": 65}',
            "line 3.*duplicate key 'hidden_size'",
        ),
        ('{"model_type": "llama",\n', "line 2"),
        ("", "line 1"),
        ("[1]", "one JSON object"),
        ("[" * 100_000, "nested too deeply|line"),
        (" " * 1_000_001, "1,000,000 bytes"),
    ],
)
def test_invalid_config_files_raise_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf(file)


def test_config_in_the_hub_cache_is_named_by_its_hub_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--my-llama" / "snapshots" / "0e9e39f249a16976918f6564b8830bc894c89659"
    snapshot.mkdir(parents=True)
    (tmp_path / "blob").write_text(json.dumps(LLAMA))
    (snapshot / "config.json").symlink_to(tmp_path / "blob")
    assert Architecture.from_hf(snapshot).name == "org/my-llama"


def test_the_model_of_a_run_has_the_name_of_the_run(tmp_path: Path) -> None:
    """All of them were named "export", in comparisons and in the log of a further fine-tune."""
    for name in ("export", "merged"):
        folder = tmp_path / "whales" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        assert Architecture.from_hf(folder).name == name
    (tmp_path / "whales" / "run.json").write_text("{}")
    assert Architecture.from_hf(tmp_path / "whales" / "export").name == "whales"
    assert Architecture.from_hf(tmp_path / "whales" / "merged" / "config.json").name == "whales"


def test_config_files_that_are_not_utf8_raise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        Architecture.from_hf(tmp_path)


def test_fault_41_a_fifo_a_device_and_an_empty_folder_raise(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    for bad in (fifo, Path("/dev/zero")):
        with pytest.raises(ValueError, match="a regular file"):
            Architecture.from_hf(bad)
    with pytest.raises(ValueError, match=r"a folder that contains a config\.json"):
        Architecture.from_hf(tmp_path)


@pytest.mark.parametrize("bad", [None, 7, "", "  ", "no-such-file.json", "a/b/c", "x\0y", b"config.json"])
def test_rejects_invalid_config_arguments(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"config is .*allowed"):
        Architecture.from_hf(bad)


def test_hub_id_without_huggingface_hub_raises_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r'pip install "shardscope\[train\]"'):
        Architecture.from_hf("org/name")


def test_hub_id_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = needs("huggingface_hub")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert Architecture.from_hf("org/name").name == "org/name"


def test_hub_download_failure_raises_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = needs("huggingface_hub")

    def fail(*_: object) -> None:
        raise OSError("offline\nmore")

    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"'org/name' could not be downloaded from the Hub: offline"):
        Architecture.from_hf("org/name")


def test_every_model_type_has_an_adapter() -> None:
    assert tuple(FAMILIES) == MODEL_TYPES


@pytest.mark.parametrize("method", ["gptq", "fp8", "bitsandbytes"])
def test_a_quantized_checkpoint_is_reported(method: str) -> None:
    """Its plans count the weights unpacked, which nothing said."""
    with pytest.warns(RuntimeWarning, match=rf"quant_method '{method}', but plans count all") as caught:
        packed = Architecture.from_hf({**LLAMA, "quantization_config": {"quant_method": method, "bits": 4}})
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Architecture.from_hf({**LLAMA, "quantization_config": None}) == packed
