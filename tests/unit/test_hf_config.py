"""Counts, names and shapes equal those of transformers' own classes; bad configs are refused in words."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardscope.architecture import MODEL_TYPES, Architecture
from shardscope.catalog import NOT_FIELDS, entries, models
from shardscope.hf_config import FAMILIES

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}


def meta_model(config: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed: counts cannot be compared")
    transformers = pytest.importorskip(
        "transformers", minversion="5.0", reason="names are those of transformers 5"
    )
    transformers.logging.set_verbosity_error()
    keys = {key: value for key, value in config.items() if key != "model_type"}
    keys |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    made = transformers.AutoConfig.for_model(config["model_type"], **keys)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made)


def assert_same(config: dict[str, Any]) -> None:
    arch = Architecture.from_hf(config)
    theirs = {name: tuple(parameter.shape) for name, parameter in meta_model(config).named_parameters()}
    prefix = "transformer.h" if arch.model_type == "gpt2" else "model.layers"
    ours = {name: shape for _, name, shape in arch.outer_shapes}
    for index in range(arch.num_hidden_layers):
        ours |= {f"{prefix}.{index}.{name}": shape for _, name, shape in arch.layer_shapes(index)}
    assert ours == theirs
    assert arch.num_parameters == sum(math.prod(shape) for shape in theirs.values())
    assert sum(arch.parameter_groups.values()) == arch.num_parameters


@pytest.mark.parametrize("name", list(models))
def test_every_catalogue_model_has_transformers_own_parameters(name: str) -> None:
    assert_same({key: value for key, value in entries("models")[name].items() if key not in NOT_FIELDS})


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
    ],
)
def test_published_counts(name: str, published: int) -> None:
    assert models[name].num_parameters == published


@st.composite
def small_configs(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from(MODEL_TYPES))
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
    if family != "deepseek_v3" and draw(st.booleans()):
        config["head_dim"] = draw(st.integers(1, 16)) * 2
    if family in ("llama", "qwen3", "qwen3_moe", "gemma2", "deepseek_v3"):
        config["attention_bias"] = draw(st.booleans())
    if family == "llama":
        config["mlp_bias"] = draw(st.booleans())
    if family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        key = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}
        config |= {
            key[family]: draw(st.sampled_from([2, 4, 8])),
            "num_experts_per_tok": draw(st.integers(1, 2)),
        }
    if family in ("qwen3_moe", "deepseek_v3"):
        config["moe_intermediate_size"] = draw(st.integers(1, 40))
    if family == "qwen3_moe":
        config["decoder_sparse_step"] = draw(st.integers(1, 3))
        config["mlp_only_layers"] = draw(st.lists(st.integers(0, 3), unique=True))
    if family == "deepseek_v3":
        config |= {
            "first_k_dense_replace": draw(st.integers(0, 5)),
            "n_shared_experts": draw(st.integers(1, 3)),
        }
        config |= {
            "q_lora_rank": draw(st.none() | st.integers(1, 30)),
            "kv_lora_rank": draw(st.integers(1, 30)),
        }
        config |= {"qk_nope_head_dim": draw(st.integers(1, 20)), "v_head_dim": draw(st.integers(1, 20))}
        config |= {"qk_rope_head_dim": 2 * draw(st.integers(1, 8)), "n_group": 1, "topk_group": 1}
    return config


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(small_configs())
@example({**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
def test_any_small_config_has_transformers_own_parameters(config: dict[str, Any]) -> None:
    assert_same(config)


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_missing_keys_take_the_familys_own_defaults(family: str) -> None:
    sizes = GPT2 if family == "gpt2" else {**LLAMA, "hidden_size": 128, "num_attention_heads": 32}
    assert_same({**sizes, "model_type": family})


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_each_missing_size_is_refused_by_name(family: str) -> None:
    sizes = {**(GPT2 if family == "gpt2" else LLAMA), "model_type": family}
    for key in sizes.keys() - {"model_type"}:
        with pytest.raises(ValueError, match=rf"config\.json {key} is None"):
            Architecture.from_hf({k: v for k, v in sizes.items() if k != key})


@pytest.mark.parametrize("family", MODEL_TYPES)
@pytest.mark.parametrize("bad", [0, -1, 1e30, 10**30, float("nan"), float("inf"), True, "64", [64], 64.5])
def test_each_absurd_size_is_refused_by_name(family: str, bad: object) -> None:
    sizes = {**(GPT2 if family == "gpt2" else LLAMA), "model_type": family}
    for key in sizes.keys() - {"model_type"}:
        with pytest.raises(ValueError, match=rf"config\.json {key} is .*allowed: .*Nearest fix: "):
            Architecture.from_hf({**sizes, key: bad})


@pytest.mark.parametrize("bad", ["bert", "Llama", "", None, 7, ["llama"], "llama4_text"])
def test_an_unknown_model_type_lists_the_known_ones(bad: object) -> None:
    with pytest.raises(ValueError, match=r"known architectures: llama, mistral.*Nearest fix"):
        Architecture.from_hf({**LLAMA, "model_type": bad})


def test_a_multimodal_wrapper_is_refused_with_the_part_to_take() -> None:
    with pytest.raises(ValueError, match=r"wrapper.*from_hf\(config\['text_config'\]\)"):
        Architecture.from_hf({"model_type": "llava", "text_config": LLAMA})


def test_a_head_count_that_does_not_divide_is_refused_as_transformers_does() -> None:
    with pytest.raises(ValueError, match="a multiple of num_attention_heads=4"):
        Architecture.from_hf({**LLAMA, "hidden_size": 66})
    with pytest.raises(ValueError, match="a multiple of num_attention_heads=4"):
        Architecture.from_hf({**GPT2, "n_embd": 66})


def test_sliding_windows_by_family() -> None:
    def windows(**keys: object) -> tuple[int | None, int]:
        arch = Architecture.from_hf({**LLAMA, "num_key_value_heads": 4, **keys})
        return arch.sliding_window, arch.sliding_window_layers

    assert windows(model_type="llama", sliding_window=8) == (None, 0)
    assert windows(model_type="mistral") == (4096, 2)
    assert windows(model_type="mistral", sliding_window=None) == (None, 0)
    assert windows(model_type="gemma2", num_hidden_layers=3) == (4096, 2)
    assert windows(model_type="qwen2", sliding_window=8) == (None, 0)
    assert windows(model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1) == (
        8,
        1,
    )
    assert windows(model_type="phi3", sliding_window=2047) == (2047, 2)
    layer_types = ["full_attention", "sliding_attention"]
    assert windows(model_type="gemma2", layer_types=layer_types) == (4096, 1)


# -------------------------------------------------------------------------------------------- files


def test_a_file_its_folder_and_a_dict_are_the_same(tmp_path: Path) -> None:
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
            "line 3.*'hidden_size' stands twice",
        ),
        ('{"model_type": "llama",\n', "line 2"),
        ("", "line 1"),
        ("[1]", "one JSON object"),
        ("[" * 100_000, "nested too deeply|line"),
        (" " * 1_000_001, "1,000,000 bytes"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf(file)


def test_a_config_in_the_hubs_cache_is_named_by_its_hub_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--my-llama" / "snapshots" / "0e9e39f249a16976918f6564b8830bc894c89659"
    snapshot.mkdir(parents=True)
    (tmp_path / "blob").write_text(json.dumps(LLAMA))
    (snapshot / "config.json").symlink_to(tmp_path / "blob")
    assert Architecture.from_hf(snapshot).name == "org/my-llama"


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        Architecture.from_hf(tmp_path)


def test_a_fifo_a_device_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    for bad in (fifo, Path("/dev/zero")):
        with pytest.raises(ValueError, match="a regular file"):
            Architecture.from_hf(bad)
    with pytest.raises(ValueError, match=r"a folder that holds a config\.json"):
        Architecture.from_hf(tmp_path)


@pytest.mark.parametrize("bad", [None, 7, "", "  ", "no-such-file.json", "a/b/c", "x\0y", b"config.json"])
def test_what_is_no_config_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"config is .*allowed"):
        Architecture.from_hf(bad)


def test_a_hub_id_without_huggingface_hub_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r'pip install "shardscope\[train\]"'):
        Architecture.from_hf("org/name")


def test_a_hub_id_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert Architecture.from_hf("org/name").name == "org/name"


def test_a_hub_failure_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

    def fail(*_: object) -> None:
        raise OSError("offline\nmore")

    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"'org/name' could not be had from the hub: offline"):
        Architecture.from_hf("org/name")


def test_every_model_type_has_an_adapter() -> None:
    assert tuple(FAMILIES) == MODEL_TYPES
