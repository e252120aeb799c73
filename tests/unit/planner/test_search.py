"""Tests of searches: the grid has all valid plans, with the numbers of each single plan."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from tests.requirements import few, sample, thorough
from tests.unit.random_plans import LATENT, LLAMA, MOE

import shardscope as ss
from shardscope.catalog import links
from shardscope.core.fixes import without_fix_search
from shardscope.core.layout import Layout, list_divisors
from shardscope.core.plan import Plan
from shardscope.frameworks.search_grid import list_micro_batch_sizes
from shardscope.planner.memory_needs import fits, list_memory_needs
from shardscope.planner.search.candidates import list_candidates
from shardscope.planner.search.nearest_misses import explain_no_plan
from shardscope.planner.search.ranking import AS_FAST, Ranking
from shardscope.prediction.batch import table

NODE = ss.Cluster.parse("8xh100-sxm-80gb")
SIX = ss.Cluster.parse("2x3xa100-sxm-80gb")
SAMPLE = 12


def list_varied_fields(plan: Plan) -> tuple[Any, ...]:
    """Return the fields in which plans of one search differ."""
    layout: Any = plan.layout
    names = (
        *("tp", "pp", "vpp", "cp", "ep", "etp", "replicate", "reshard_after_forward", "offload", "stage"),
        *("offload_optimizer", "offload_params", "distributed_optimizer", "splits_sequence"),
    )
    options = [getattr(layout, name, None) for name in names]
    return (plan.recipe.micro_batch_size, plan.recipe.recompute, *options)


def list_grid(framework: str, arch: Any, cluster: Any, recipe: Any) -> list[tuple[Any, ...]]:
    """Every plan of the grid, made: none is refused."""
    return [
        list_varied_fields(found.build_plan(cluster, row))
        for found in list_candidates(framework, arch, cluster, recipe)
        for row in range(found.num_plans)
    ]


def every_layout(framework: str, arch: Any, cluster: Any, recipe: Any) -> list[Layout]:
    """All that a person could try, but for what has no degrees there."""
    ranks, layers = list_divisors(cluster.num_gpus), arch.num_hidden_layers
    tried: list[dict[str, Any]] = []
    if framework == "fsdp2":
        chunks = [1 << power for power in range(layers.bit_length())]
        for tp, pp, vpp, cp, copies, reshard, place in product(
            ranks, ranks, chunks, ranks, ranks, (True, False), (None, "cpu")
        ):
            tried.append(
                {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "replicate": copies, "offload": place}
                | {"reshard_after_forward": reshard}
            )
        make: Any = Layout.fsdp2
    elif framework == "deepspeed":
        for stage, tp, pp, ep, optimizer, params in product(
            range(4), ranks, ranks, ranks, (None, "cpu"), (None, "cpu")
        ):
            tried.append(
                {"stage": stage, "tp": tp, "pp": pp, "ep": ep}
                | {"offload_optimizer": optimizer, "offload_params": params}
            )
        make = Layout.zero
    elif framework == "megatron":
        for tp, pp, vpp, cp, ep, etp, sequence, distributed in product(
            ranks, ranks, range(1, layers + 3), ranks, ranks, (None, 1), (None, False), (True, False)
        ):
            if tp == 1 and (etp is not None or sequence is not None):
                continue  # the same layout by other words
            shares = cluster.num_gpus > tp * pp or (ep > 1 and tp > ep * (etp or tp))
            if not distributed and recipe.optimizer == "adamw" and not shares:
                continue  # a rank without replicas has nothing to shard
            tried.append(
                {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp}
                | {"sequence_parallel": sequence, "distributed_optimizer": distributed}
            )
        make = Layout.megatron
    else:
        return [Layout.ddp()]
    results = []
    for fields in tried:
        try:
            layout = make(**fields)
            layout.compute_degrees(arch, cluster, recipe)
        except ValueError:
            continue
        results.append(layout)
    return results


@sample(2)
@pytest.mark.parametrize("framework", ["ddp", "fsdp2", "deepspeed", "megatron"])
@pytest.mark.parametrize("arch", few([LLAMA, MOE, LATENT], [MOE]), ids=lambda arch: arch.name)
def test_the_grid_has_all_valid_plans(framework: str, arch: Any) -> None:
    arch = replace(arch, num_hidden_layers=6)
    cluster, recipe = SIX, ss.Recipe(seq_len=1024, global_batch_size=24)
    found = list_grid(framework, arch, cluster, recipe)
    taken = set()
    recipes = [
        replace(recipe, micro_batch_size=size, recompute=recompute)
        for size, recompute in product(
            list_micro_batch_sizes(recipe), ("none", "selective", "full", "offload")
        )
    ]
    with without_fix_search():  # nobody reads the fixes
        for layout, one in product(every_layout(framework, arch, cluster, recipe), recipes):
            try:
                taken.add(list_varied_fields(Plan(arch, cluster, one, layout)))
            except ValueError:
                continue
    assert len(found) == len(set(found))
    assert set(found) == taken


@pytest.mark.parametrize("arch", [LLAMA, MOE], ids=lambda arch: arch.name)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_plan_of_ranks_without_replicas_is_listed_once(arch: Any, optimizer: str) -> None:
    """The distributed optimizer has nothing to shard there: with it and without it is one plan."""
    cluster, recipe = ss.Cluster.parse("4xh100-sxm-80gb"), ss.Recipe(seq_len=1024, global_batch_size=8)
    ranking = ss.search(arch, cluster, replace(recipe, optimizer=optimizer), frameworks=["megatron"])
    frame = ranking.to_frame()
    alone = frame[(frame["data_parallel"] == 1) & (frame["cp"] == 1) & (frame["ep"] == 1)]
    assert len(alone)
    split = ~alone["layout"].str.contains("distributed_optimizer=False")
    assert split.all() if optimizer == "adamw" else not split.any()
    for row in alone.index[:3]:
        plan = ranking.plan(row)
        if optimizer == "adamw":
            layout: Any = replace(plan.layout, distributed_optimizer=False)  # type: ignore[call-arg]
            other = replace(plan, layout=layout)
            assert other.memory().peak_bytes == plan.memory().peak_bytes
            assert other.step().seconds == plan.step().seconds


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dense": (LLAMA, NODE, {"global_batch_size": 64}),
    "experts": (MOE, NODE, {"global_batch_size": 16}),
    "latent attention": (LATENT, ss.Cluster.parse("4x4xa100-sxm-80gb"), {"global_batch_size": 32}),
    "six GPUs": (replace(LLAMA, num_hidden_layers=6), SIX, {"global_batch_size": 24}),
    "adapters": (LLAMA, NODE, {"global_batch_size": 16, "method": "lora"}),
    "adapters of the MLP's inputs": (
        LLAMA,
        NODE,
        {"global_batch_size": 16, "method": "lora", "lora_targets": ("gate_proj", "up_proj")},
    ),
    "adapters of the MLP's inputs, every third layer recomputed": (
        LLAMA,
        NODE,
        {
            "global_batch_size": 16,
            "method": "lora",
            "lora_targets": ("up_proj",),
            "recompute": "full",
            "recompute_interval": 3,
        },
    ),
    "packed documents": (LLAMA, NODE, {"global_batch_size": 64, "packing": True}),
    "quantised": (LLAMA, NODE, {"global_batch_size": 16, "method": "qlora"}),
    "eight bits": (LLAMA, NODE, {"global_batch_size": 16, "precision": "fp8-mixed"}),
    "sgd in fp32": (LLAMA, NODE, {"global_batch_size": 16, "precision": "fp32", "optimizer": "sgd"}),
    "paged": (LLAMA, NODE, {"global_batch_size": 16, "optimizer": "paged_adamw"}),
    "every other layer": (
        LLAMA,
        NODE,
        {"global_batch_size": 16, "recompute": "full", "recompute_interval": 2},
    ),
    "quantised, in stages": (
        ss.models["pythia-6.9b"],
        ss.Cluster.parse("4x8xh100-sxm-80gb"),
        {"global_batch_size": 48, "method": "qlora"},
    ),
    "adapters of experts, in stages": (
        ss.models["qwen3-30b-a3b"],
        ss.Cluster.parse("4x8xh100-sxm-80gb"),
        {"global_batch_size": 48, "method": "lora"},
    ),
    "405B": (
        ss.models["llama-3.1-405b"],
        ss.Cluster.parse("2048x8xh100-sxm-80gb"),
        {"global_batch_size": 2048, "seq_len": 8192},
    ),
    "experts of 671B": (
        ss.models["deepseek-v3"],
        ss.Cluster.parse("32x8xh100-sxm-80gb"),
        {"global_batch_size": 256},
    ),
}


@sample(1)
@pytest.mark.parametrize("case", few(CASES, ["dense", "packed documents"]))
def test_the_search_has_the_numbers_of_each_single_plan(case: str) -> None:
    arch, cluster, fields = CASES[case]
    found = ss.search(arch, cluster, ss.Recipe(**fields))
    draw = random.Random(case)
    starts = np.cumsum([0, *(one.num_plans for one in found.candidates)])
    rows = [draw.randrange(low, high) for low, high in pairwise(starts)]
    rows = draw.sample(rows, min(len(rows), 2 * SAMPLE)) + draw.choices(range(found.num_evaluated), k=SAMPLE)
    for row in rows:
        plan = found.plan(row)
        report = plan.memory()
        assert report.peak_bytes == found.peak_bytes[row], plan
        assert plan.step().seconds == pytest.approx(found.step_seconds[row], rel=1e-9), plan
        needed = {place.name: place.needed_bytes for place in list_memory_needs(plan, report)}
        assert needed.get("host memory", 0) == found.host_bytes[row], plan
        assert needed.get("NVMe", 0) == found.nvme_bytes[row], plan
        assert needed.get("host memory while the model is built", 0) == found.building_bytes[row], plan
        assert fits(plan, report) == found.is_feasible[row], plan
        assert plan.layout.framework == found.framework[row]
        assert plan.recipe.recompute == found.recompute[row]
        assert plan.degrees.data_parallel == found.column("data_parallel")[row]


def test_nvme_offload_is_searched_if_its_speed_is_known() -> None:
    cluster = replace(NODE, nvme_bytes=2**42, nvme_bandwidth_bytes_per_second=6e9)
    found = ss.search(LLAMA, cluster, ss.Recipe(global_batch_size=8), ["deepspeed"])
    rows = np.flatnonzero(found.nvme_bytes > 0)
    assert len(rows)
    for row in rows[:: max(1, len(rows) // SAMPLE)]:
        plan = found.plan(int(row))
        assert plan.memory().peak_bytes == found.peak_bytes[row]
        assert plan.step().seconds == pytest.approx(found.step_seconds[row], rel=1e-9)
    assert not ss.search(LLAMA, NODE, ss.Recipe(global_batch_size=8), ["deepspeed"]).nvme_bytes.any()


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return ss.search(ss.models["llama-3.1-8b"], NODE, ss.Recipe(global_batch_size=32))


def test_the_best_is_as_fast_as_any_that_fits(ranking: Ranking) -> None:
    assert 0 < ranking.num_feasible < ranking.num_evaluated
    best = ranking.best
    assert best.memory().fits
    assert best.step().seconds <= AS_FAST * ranking.step_seconds[ranking.is_feasible].min() * (1 + 1e-9)
    assert ranking.tokens_per_second_per_gpu[ranking.order[0]] == pytest.approx(
        best.step().tokens_per_second_per_gpu, rel=1e-9
    )
    cost = ranking.cost_per_token
    assert cost is not None
    assert cost[ranking.order[0]] == pytest.approx(best.step().cost_per_token, rel=1e-9)


def test_the_pareto_front_has_all_plans_that_none_dominates(ranking: Ranking) -> None:
    front = ranking.pareto()
    seconds, peaks = ranking.step_seconds, ranking.peak_bytes
    assert (np.diff(peaks[front]) < 0).all()
    for row in ranking.order[:: max(1, len(ranking.order) // 200)]:
        assert ((seconds[front] <= seconds[row] * (1 + 1e-8)) & (peaks[front] <= peaks[row])).any()


def test_steps_of_plans_that_do_not_fit_are_computed_when_they_are_read() -> None:
    """A search computes the steps of the plans that fit: whether all or few do, reading gives the same."""
    arch, recipe = ss.models["llama-3.1-8b"], ss.Recipe(global_batch_size=32)
    all_fit = ss.search(arch, replace(NODE, host_memory_bytes=2**50), recipe, headroom_bytes=0)
    few_fit = ss.search(arch, replace(NODE, host_memory_bytes=2**50), recipe, headroom_bytes=60 * 2**30)
    assert 0 < few_fit.num_feasible < all_fit.num_feasible
    misses = np.flatnonzero(~few_fit.is_feasible)
    some = misses[:: len(misses) // SAMPLE]
    seconds = [few_fit.plan(int(row)).step().seconds for row in some]
    np.testing.assert_allclose(few_fit.get_step_seconds(some), seconds, rtol=1e-9)
    # The rest is completed, and what was read before stays.
    np.testing.assert_allclose(few_fit.step_seconds, all_fit.step_seconds, rtol=1e-12)
    np.testing.assert_allclose(few_fit.step_seconds[some], seconds, rtol=1e-9)
    np.testing.assert_allclose(
        few_fit.get_tokens_per_second_per_gpu(some), few_fit.tokens_per_second_per_gpu[some], rtol=0
    )


def test_headroom_is_kept_free() -> None:
    arch, recipe = ss.models["llama-3.1-8b"], ss.Recipe(global_batch_size=32)
    found = ss.search(arch, NODE, recipe, ["fsdp2"], headroom_bytes=20 * 2**30)
    assert found.headroom_bytes[found.order].min() >= 20 * 2**30
    with pytest.raises(ValueError, match="headroom_bytes"):
        ss.search(arch, NODE, recipe, headroom_bytes=-1)


def test_the_table_has_feasible_plans_first(ranking: Ranking) -> None:
    table = ranking.to_frame()
    assert len(table) == ranking.num_evaluated
    assert table["feasible"].to_numpy()[: ranking.num_feasible].all()
    assert not table["feasible"].to_numpy()[ranking.num_feasible :].any()
    assert table.index[0] == ranking.order[0]
    few = ranking.to_frame(limit=7)
    assert len(few) == 7
    row = few.iloc[0]
    best = ranking.best
    assert (row["tp"], row["micro_batch_size"]) == (best.degrees.tp, best.recipe.micro_batch_size)


def test_nearest_misses_are_reported_if_nothing_fits() -> None:
    found = ss.search(ss.models["llama-3.1-405b"], NODE, ss.Recipe(global_batch_size=8))
    assert found.num_feasible == 0
    assert found.num_evaluated > 100
    with pytest.raises(
        ValueError, match=r"(?s)No plan of .* fits 8xh100-sxm-80gb.*lacks .* GiB of GPU memory"
    ):
        _ = found.best
    nearest = found.misses[0]
    plan = found.plan(nearest.index)
    over = plan.memory().peak_bytes - NODE.usable_bytes_per_gpu
    assert nearest.lacks.get("GPU memory", 0) == max(0, over)
    # Of plans that lack as much host memory, the one whose GPUs suffice is nearer.
    assert list(nearest.lacks) == ["host memory"]
    assert {miss.framework for miss in found.misses} == {"ddp", "fsdp2", "deepspeed", "megatron"}
    assert len(found.pareto()) == 0
    table = found.to_frame()
    assert len(table) == found.num_evaluated
    # The table comes in the order of what is missing, wherever that is, and says where.
    share = table["missing_share"].to_numpy()
    assert (share > 0).all() and (share[1:] >= share[:-1]).all()
    needed = table.loc[nearest.index, ["peak_bytes", "host_bytes", "nvme_bytes", "building_bytes"]]
    assert needed["peak_bytes"] == plan.memory().peak_bytes and (needed > 0).sum() >= 1


def test_a_plan_that_lacks_host_memory_is_not_the_nearest_miss() -> None:
    found = ss.search(ss.models["llama-3.1-405b"], NODE, ss.Recipe(global_batch_size=8), ("deepspeed",))
    table = found.to_frame(3)
    assert next(iter(table.index)) == found.misses[0].index
    row = table.iloc[0]
    host = max(row["host_bytes"], row["building_bytes"]) / NODE.host_memory_bytes
    card = row["peak_bytes"] / NODE.usable_bytes_per_gpu
    assert row["missing_share"] == pytest.approx(max(host, card) - 1)
    assert host > card, "what is nearest lacks host memory, whatever its card has to spare"


def test_an_unnamed_link_is_refused() -> None:
    gpu = replace(NODE.gpu, name="mine", link=None)
    with pytest.raises(ValueError, match=r"Gpu\.link is None.*Nearest fix: link='pcie-4-x16'"):
        ss.search(LLAMA, ss.Cluster.of(gpu, 8), ss.Recipe())


def test_an_unnamed_network_is_refused() -> None:
    cluster = ss.Cluster.of(replace(NODE.gpu, name="mine"), 8, 4)
    assert ss.Plan(LLAMA, cluster, ss.Recipe(), ss.Layout.fsdp2()).memory().peak_bytes > 0
    for ask in (
        lambda: ss.search(LLAMA, cluster, ss.Recipe()),
        lambda: ss.Plan(LLAMA, cluster, ss.Recipe(), ss.Layout.fsdp2()).step(),
    ):
        with pytest.raises(
            ValueError, match=r"Cluster\.inter_node_link is .*assumed.*roce-400g.*Nearest fix"
        ):
            ask()
    named = replace(cluster, inter_node_link=links["ethernet-25g"])
    assert ss.Plan(LLAMA, named, ss.Recipe(), ss.Layout.fsdp2()).step().seconds > 0


@thorough()
def test_the_chunked_loss_is_reported_if_only_it_fits() -> None:
    model = ss.models["llama-3.1-8b"]
    small = replace(ss.Cluster.parse("1xrtx-3090-24gb"), host_memory_bytes=512 * 2**30)
    asked = ss.Recipe(seq_len=16384, global_batch_size=8)
    found = ss.search(model, small, asked)
    assert not found.num_feasible and found.alternative is not None
    other = found.alternative.best
    assert other.memory().fits and other.recipe == replace(
        asked,
        loss="chunked",
        recompute=other.recipe.recompute,
        micro_batch_size=other.recipe.micro_batch_size,
    )
    with pytest.raises(ValueError, match=r"With the loss in chunks \(Recipe\.loss='chunked'\).*tokens/s"):
        _ = found.best
    advised = ss.recommend(model, small, asked)
    assert advised.plan is not None and advised.plan.recipe.loss == "chunked"
    assert all(plan.memory().fits for plan, _ in advised.alternatives)


def test_a_batch_that_no_layout_divides_gets_the_nearest_one() -> None:
    found = ss.search(LLAMA, ss.Cluster.parse("7xh100-sxm-80gb"), ss.Recipe(global_batch_size=8), ["ddp"])
    assert found.num_evaluated == 0
    assert "Recipe.global_batch_size" in found.refused["ddp"]
    assert found.misses == ()
    assert len(found.to_frame()) == 0
    assert found.alternative is not None and found.alternative.best.recipe.global_batch_size == 7
    with pytest.raises(ValueError, match=r"With a global batch of 7, .*: DDP.* tokens/s per GPU"):
        _ = found.best
    # The grid has smaller micro-batches than the recipe's.
    micro = ss.Recipe(global_batch_size=20, micro_batch_size=4)
    other = ss.search(LLAMA, found.cluster, micro, ["ddp"]).alternative
    assert other is not None and other.best.recipe.global_batch_size == 21
    chunked = ss.Recipe(global_batch_size=8, loss="chunked")
    with pytest.raises(ValueError, match=r"With a global batch of 7, "):
        _ = ss.search(LLAMA, found.cluster, chunked, ["ddp"]).best
    larger = ss.search(
        ss.models["llama-3.1-405b"], found.cluster, ss.Recipe(global_batch_size=8), frameworks=["ddp"]
    )
    with pytest.raises(ValueError, match=r"With a global batch of 7, .*DDP.*lacks .* GiB of GPU memory"):
        _ = larger.best


def test_a_framework_that_lacks_the_layers_is_reported() -> None:
    arch = next(arch for arch in ss.models.values() if arch.model_type == "olmo2")
    found = ss.search(arch, NODE, ss.Recipe(global_batch_size=8))
    assert "olmo2" in found.refused["megatron"]
    assert "megatron" not in set(found.framework)
    assert found.num_evaluated


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"peak_flops": {}}, r"Gpu\.peak_flops"),
        ({"memory_bandwidth_bytes_per_second": None}, r"Gpu\.memory_b"),
    ],
)
def test_a_gpu_with_missing_figures_is_refused(change: dict[str, Any], named: str) -> None:
    cluster = replace(NODE, gpu=replace(NODE.gpu, name="half-filled", **change))
    with pytest.raises(ValueError, match=named):
        ss.search(LLAMA, cluster, ss.Recipe(global_batch_size=8))


def test_a_link_without_bandwidth_is_refused() -> None:
    bad: Any = None
    with pytest.raises(ValueError, match=r"Link\.bandwidth_bytes_per_second"):
        replace(NODE, intra_node_link=replace(NODE.intra_node_link, bandwidth_bytes_per_second=bad))


@pytest.mark.parametrize("bad", [[], "fsdp2", ["fdsp2"], ["fsdp2", None]])
def test_frameworks_are_checked(bad: Any) -> None:
    with pytest.raises(ValueError, match="frameworks is"):
        ss.search(LLAMA, NODE, ss.Recipe(global_batch_size=8), bad)


@pytest.mark.parametrize(
    ("field", "given", "fix"),
    [
        ("arch", "llama-3.1-8b", 'ss.models["llama-3.1-8b"]'),
        ("cluster", "8xh100-sxm-80gb", 'ss.Cluster.parse("8xh100-sxm-80gb")'),
        ("recipe", None, "ss.Recipe()"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(field: str, given: Any, fix: str) -> None:
    nouns = {"arch": LLAMA, "cluster": NODE, "recipe": ss.Recipe(), field: given}
    with pytest.raises(ValueError, match=f"^{field} is ") as refusal:
        ss.search(**nouns)
    assert str(refusal.value).endswith(f"Nearest fix: {fix}.")


def test_the_name_of_a_layout_leads_to_its_framework() -> None:
    with pytest.raises(ValueError, match="Nearest fix: 'deepspeed'"):
        ss.search(LLAMA, NODE, ss.Recipe(), ["zero"])


def test_a_single_framework_name_must_be_in_a_tuple() -> None:
    with pytest.raises(ValueError, match=r"Nearest fix: \('fsdp2',\)"):
        ss.search(LLAMA, NODE, ss.Recipe(), "fsdp2")  # type: ignore[arg-type]


def test_a_recipe_without_valid_plans_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Recipe\.seq_len"):
        ss.search(ss.models["gpt2-xl"], NODE, ss.Recipe(seq_len=4096, global_batch_size=8))
    with pytest.raises(ValueError, match=r"Recipe\.lora_targets"):
        ss.search(LLAMA, NODE, ss.Recipe(global_batch_size=8, method="lora", lora_targets=("no_proj",)))


def test_progress_rises_and_can_end_it() -> None:
    results: list[tuple[str, float]] = []
    ss.search(
        LLAMA,
        NODE,
        ss.Recipe(global_batch_size=8),
        progress=lambda words, done: results.append((words, done)),
    )
    fractions = [done for _, done in results]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0

    class EnoughError(Exception):
        pass

    def stop(words: str, done: float) -> None:
        if done > 0.2:
            raise EnoughError

    with pytest.raises(EnoughError):
        ss.search(LLAMA, NODE, ss.Recipe(global_batch_size=8), progress=stop)


def test_rows_beyond_the_plans_are_refused(ranking: Ranking) -> None:
    for row in (-1, ranking.num_evaluated):
        with pytest.raises(IndexError, match=r"of .* plans"):
            ranking.plan(row)


@pytest.mark.parametrize("arch", [LLAMA, MOE], ids=lambda arch: arch.name)
def test_few_plans_row_by_row_and_many_deduplicated_give_the_same_numbers(
    arch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for most in (0, 10**9):
        monkeypatch.setattr(table, "FEW_ROWS", most)
        results.append(ss.search(arch, NODE, ss.Recipe(seq_len=1024, global_batch_size=64)))
    by_keys, by_rows = results
    for field in ("peak_bytes", "host_bytes", "nvme_bytes", "building_bytes"):
        assert np.array_equal(getattr(by_keys, field), getattr(by_rows, field)), field
    # Sums begin with what fewest keys decide.
    np.testing.assert_allclose(by_keys.step_seconds, by_rows.step_seconds, rtol=1e-12)
    assert len(by_keys.peak_bytes) > 1000


@pytest.mark.parametrize(
    ("cluster", "precision", "fix"),
    [
        ("8xv100-sxm-32gb", "bf16-mixed", "Recipe(precision='fp16-mixed')"),
        ("8xa100-sxm-80gb", "fp8-mixed", "Recipe(precision='bf16-mixed')"),
    ],
)
def test_an_unsupported_precision_names_a_supported_one(cluster: str, precision: Any, fix: str) -> None:
    recipe = ss.Recipe(seq_len=1024, global_batch_size=8, precision=precision)
    with pytest.raises(ValueError, match=r"Gpu\.peak_flops") as refusal:
        ss.search(ss.models["qwen3-0.6b"], ss.Cluster.parse(cluster), recipe)
    assert str(refusal.value).endswith(f"Nearest fix: {fix}.")


def test_a_search_without_any_layout_counts_no_plans() -> None:
    """It had the headline "0 of 0 plans fit" over an empty table, and its error "No plan of 0"."""
    cluster, recipe = ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(seq_len=512, global_batch_size=7)
    ranking = ss.search(ss.models["llama-3.1-8b"], cluster, recipe, frameworks=["ddp"])
    for shown in (repr(ranking), ranking._repr_html_(), explain_no_plan(ranking)):
        assert "global_batch_size=8" in shown
        assert " 0 " not in shown
    assert "<table" not in ranking._repr_html_()
