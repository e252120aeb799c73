"""Tests of the catalogue: sources of all figures, valid names, and suggestions for misspelt names."""

from __future__ import annotations

import re
from datetime import date
from typing import Any

import pytest

from shardscope.catalog import gpus, links, load_model_names, load_table, models
from shardscope.core.architecture import MODEL_TYPES, Architecture
from shardscope.core.cluster import Cluster, Gpu, Link
from shardscope.core.errors import FieldError
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.machine.detection import GENERATIONS

RELEASED_GPUS = {
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "h100-sxm-80gb",
    "h200-sxm-141gb",
    "b200-sxm-180gb",
    "l4-24gb",
    "l40s-48gb",
    "rtx-4090-24gb",
    "rtx-pro-6000-blackwell-96gb",
    "v100-sxm-32gb",
    "mi300x-192gb",
    "t4-16gb",
    "a10-24gb",
    "a10g-24gb",
    "a30-24gb",
    "a40-48gb",
    "rtx-3090-24gb",
    "rtx-5090-32gb",
    "rtx-6000-ada-48gb",
    "h20-96gb",
    "h100-pcie-80gb",
    "h100-nvl-94gb",
    "gh200-96gb",
    "gb200-186gb",
    "b300-sxm-288gb",
    "mi250x-gcd-64gb",
    "mi325x-256gb",
    "mi355x-288gb",
}
"""Names that stored plans of users may have: none is ever removed or renamed."""
AMD_GENERATIONS = ("cdna2", "cdna3", "cdna4")
GPU_NAMES = sorted(set(load_table("gpus")) - {"cpu"})


@pytest.mark.parametrize("kind", ["models", "gpus", "links"])
def test_every_entry_has_a_source_and_a_valid_name(kind: str) -> None:
    for name, entry in load_table(kind).items():
        assert re.fullmatch(r"[a-z0-9]+(?:\.[a-z0-9]+)*(?:-[a-z0-9]+(?:\.[a-z0-9]+)*)*", name), name
        for key in (
            "source",
            *(["usable_source"] if kind == "gpus" else ["latency_source"] * (kind == "links")),
        ):
            assert len(entry[key]) > 10 or entry[key] == "the same", (name, key)
        if "host_memory_bytes" in entry:
            assert entry["host_source"], name


def test_catalog_has_all_gpus_and_at_least_60_models() -> None:
    assert set(gpus) >= {*RELEASED_GPUS, "cpu"}
    assert len(models) >= 60
    assert {arch.model_type for arch in models.values()} == set(MODEL_TYPES)
    assert {"llama-3.1-8b", "llama-3.1-405b", "deepseek-v3", "megatron-gpt-8.3b"} <= set(models)


def test_mappings_are_lazy_cached_ordered_and_read_only() -> None:
    assert models["llama-3.1-8b"] is models["llama-3.1-8b"]
    assert isinstance(models["gpt2"], Architecture)
    assert models["gpt2"].name == "gpt2"
    assert isinstance(gpus["h100-sxm-80gb"], Gpu)
    assert isinstance(links["nvlink-4"], Link)
    assert list(models) == list(load_table("models"))
    assert "llama-3.1-8b" in repr(models)
    assert models.get("nothing") is None
    with pytest.raises(TypeError):
        models["mine"] = models["gpt2"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("mapping", "bad", "near"),
    [
        (models, "llama3.1-8b", "llama-3.1-8b"),
        (gpus, "h100", "h100-sxm-80gb"),
        (links, "nvlink4", "nvlink-4"),
    ],
)
def test_misspelt_names_raise_with_the_nearest(mapping: Any, bad: str, near: str) -> None:
    with pytest.raises(KeyError, match=re.escape(repr(near)).replace("'", ".")) as caught:
        mapping[bad]
    known = caught.value.args[0].partition("known: ")[2].split(", ")
    assert known == sorted(mapping), "names are listed in alphabetical order"


def test_models_are_found_by_hub_repository_in_any_case() -> None:
    """Repositories are unique in any case, and none is a name of the catalogue."""
    names = load_model_names()
    read = [name for name, entry in load_table("models").items() if "huggingface.co" in entry["source"]]
    assert sorted(names.repositories.values()) == sorted(read) and len(read) > 80
    assert len({repository.lower() for repository in names.repositories}) == len(read)
    assert names.repositories["meta-llama/Llama-3.1-8B"] == "llama-3.1-8b"
    for repository, name in names.repositories.items():
        for text in (repository, repository.lower(), repository.upper(), name.upper()):
            assert names.find(text) == name
    assert models["openai-community/gpt2"] is models["gpt2"] and "Qwen/Qwen2.5-7B" in models
    assert "Qwen/Qwen2.5-7B" not in list(models) and "openai-community" not in models


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("somebody/llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "qwen2.5-7b"),
        ("mistralai/mixtral8x7b-v0.1", "mixtral-8x7b"),
    ],
)
def test_unknown_repositories_raise_with_the_nearest_model(text: str, near: str) -> None:
    assert text not in models
    with pytest.raises(KeyError, match=rf"model '{text}' is not.*nearest: '{re.escape(near)}'"):
        models[text]
    with pytest.raises(ValueError, match=rf'Nearest fix: ss\.models\["{re.escape(near)}"\]'):
        Plan(text, None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mapping", "bad"), [(models, "bert-large-uncased"), (gpus, "tpu-v5p"), (links, "carrier-pigeon")]
)
def test_names_unlike_any_entry_raise_without_a_suggestion(mapping: Any, bad: str) -> None:
    with pytest.raises(KeyError, match="is not in the catalogue; known:") as caught:
        mapping[bad]
    assert "nearest" not in caught.value.args[0]


def test_plan_cluster_and_recipe_errors_suggest_no_unrelated_name() -> None:
    with pytest.raises(ValueError, match="from_hf") as caught:
        Plan("bert-large-uncased", None, None, None)  # type: ignore[arg-type]
    assert "ss.models" not in str(caught.value)
    with pytest.raises(FieldError) as field_error:
        Cluster.parse("8xtpu-v5p")
    assert field_error.value.problem == "tpu-v5p is not in the catalogue"
    assert field_error.value.changes == {}
    assert field_error.value.fix.startswith("Cluster.of(Gpu(...), gpus_per_node)")
    assert f"({Gpu.__module__}.{Gpu.__name__})" in field_error.value.fix
    with pytest.raises(FieldError) as field_error:
        Recipe(colour="red")  # type: ignore[call-arg]
    assert "colour" in field_error.value.fix, "the fix is to leave it out, not another key"


@pytest.mark.parametrize("bad", [None, 7, [], ("a",)])
def test_keys_that_are_not_names_raise(bad: Any) -> None:
    with pytest.raises((KeyError, TypeError)):
        models[bad]


REQUIRED_KEYS = {
    *("vendor", "architecture", "memory_bytes", "usable_gib", "memory_bandwidth_bytes_per_second"),
    *("tdp_watts", "link", "host_link", "inter_node_link", "driver_names", "peak_flops"),
    *("source", "usable_source"),
}
PRICE_KEYS = {"price_per_hour_usd", "price_date", "price_source"}
OPTIONAL_KEYS = {"host_memory_bytes", "host_source", "host_gpus", *PRICE_KEYS}


@pytest.mark.parametrize("name", GPU_NAMES)
def test_gpu_entry_has_the_keys_that_the_head_of_the_file_explains(name: str) -> None:
    """A misspelt generation would silently take the figures of none, and a missing driver name a KeyError."""
    entry = load_table("gpus")[name]
    assert REQUIRED_KEYS <= set(entry) <= REQUIRED_KEYS | OPTIONAL_KEYS
    assert set(entry) >= PRICE_KEYS or not PRICE_KEYS & set(entry), "a price has a day and a source"
    known = GENERATIONS.values() if entry["vendor"] == "nvidia" else AMD_GENERATIONS
    assert entry["architecture"] in known, "a new generation goes into GENERATIONS of machine/detection.py"


def test_no_two_gpus_of_one_size_share_a_driver_name() -> None:
    """The driver's name and the memory decide which entry a machine's GPU is."""
    entries = load_table("gpus")
    pairs = [(each, gpus[name].memory_bytes) for name in GPU_NAMES for each in entries[name]["driver_names"]]
    assert [pair for pair in pairs if pairs.count(pair) > 1] == []


@pytest.mark.parametrize("name", GPU_NAMES)
def test_gpu_figures_are_consistent(name: str) -> None:
    gpu = gpus[name]
    gigabytes = int(re.search(r"(\d+)gb$", name)[1])  # type: ignore[index]
    assert gpu.memory_bytes == gigabytes * 2**30
    assert 0.9 < gpu.usable_bytes / gpu.memory_bytes < 1
    peaks = gpu.peak_flops
    assert peaks["fp16"] >= peaks["fp32"]
    if "bf16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
    if "tf32" in peaks:  # AMD's CDNA 2 and 4 have no tf32
        assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.015)
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.015)
    assert gpu.link in links
    entry = load_table("gpus")[name]
    assert entry["host_link"] in links and entry["inter_node_link"] in links


def test_h100_usable_memory_equals_its_drivers() -> None:
    assert round(gpus["h100-sxm-80gb"].usable_bytes / 2**30, 2) == 79.10


def test_cpu_entry_has_the_memory_of_this_host() -> None:
    cpu = gpus["cpu"]
    assert cpu.memory_is_shared
    assert cpu.memory_bytes > 2**28
    assert cpu.peak_flops == {}


ADDRESS = re.compile(r"https://[^\s\"']+\.[^\s\"']+")
UNPRICED = {"a30-24gb", "h20-96gb", "mi250x-gcd-64gb"}


@pytest.mark.parametrize("name", sorted(set(GPU_NAMES) - UNPRICED))
def test_every_price_has_a_date_and_a_source_url(name: str) -> None:
    gpu, entry = gpus[name], load_table("gpus")[name]
    assert gpu.price_per_hour_usd and gpu.price_date
    assert 0.1 < gpu.price_per_hour_usd < 20  # a dollar amount for one GPU, not for a node or in cents
    assert date.fromisoformat(gpu.price_date) > date(
        2017, 1, 1
    )  # not compared with today: a machine's clock may be wrong
    assert ADDRESS.search(entry["price_source"])


def test_only_listed_gpus_have_no_price() -> None:
    """No dated price list in dollars has these; a price needs a date and a source."""
    unpriced = {name for name, gpu in gpus.items() if gpu.price_per_hour_usd is None}
    assert unpriced == UNPRICED | {"cpu"}, "UNPRICED names the GPUs that have no price, and no other"
    for name in unpriced:
        assert gpus[name].price_date is None and "price_source" not in load_table("gpus")[name]


@pytest.mark.parametrize("name", GPU_NAMES)
def test_gpu_sources_have_a_url_and_contain_the_figures(name: str) -> None:
    """The source has the peak (or twice the peak, with sparsity), the bandwidth and the power."""
    gpu, source = gpus[name], load_table("gpus")[name]["source"]
    assert ADDRESS.search(source)
    numbers = [float(number.replace(",", "")) for number in re.findall(r"(?<!\w)\d[\d,]*(?:\.\d+)?", source)]
    peak = gpu.peak_flops["fp16"] / 1e12 * (2 if "halved" in source else 1)
    assert any(value == pytest.approx(peak / unit, rel=2e-3) for value in numbers for unit in (1, 1000))
    whole = 2 if name == "mi250x-gcd-64gb" else 1  # its page has the figures of both dies
    speeds = re.findall(r"([\d,.]+) ([GT])B/s", source)
    bandwidths = [float(value.replace(",", "")) * {"G": 1e9, "T": 1e12}[unit] for value, unit in speeds]
    assert gpu.memory_bandwidth_bytes_per_second is not None
    assert any(
        value == pytest.approx(gpu.memory_bandwidth_bytes_per_second * whole, rel=2e-3)
        for value in bandwidths
    )
    assert gpu.tdp_watts is not None
    assert gpu.tdp_watts * whole in [
        float(value.replace(",", "")) for value in re.findall(r"([\d,]+) W\b", source)
    ]
