"""Findings about tasks: their learning rate, their text, their checkpoint, their profile."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.requirements import needs
from tests.unit.calibrations import FLOPS, make_calibration, make_matmul

import shardscope as ss
from shardscope.machine.host import multiplies_in_bf16
from shardscope.planner.checks import Finding
from shardscope.planner.checks.learning_rate import WARM_UP_STEPS
from shardscope.planner.checks.usual_rates import (
    REFERENCES,
    find_reference,
    find_small_reference,
    find_usual_rate,
    scale_rate,
)
from shardscope.runs.checks.text import SHIPPED_TOKENS
from shardscope.timing.calibration.store import store_calibration
from shardscope.training.tasks.choices import choose_precision
from shardscope.training.tasks.recommended_rate import ADAPTER_RATE, FULL_RATE


def make_plan(model: str = "llama-2-7b", layout: ss.Layout | None = None, **recipe: Any) -> ss.Plan:
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    return ss.Plan(ss.models[model], cluster, ss.Recipe(**recipe), layout or ss.Layout.fsdp2())


def make_tiny_plan(**recipe: Any) -> ss.Plan:
    return ss.Plan(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(**{"seq_len": 128, "global_batch_size": 8, **recipe}),
        ss.Layout.ddp(),
    )


def find_by_name(plan: ss.Plan, name: str, task: object = None, runs: Any = ()) -> Finding | None:
    findings = [finding for finding in plan.findings(task, runs) if finding.name == name]
    assert len(findings) <= 1, findings
    return findings[0] if findings else None


# ------------------------------------------------------------------------------------ learning rate


@given(
    st.floats(1e-6, 1e-1),
    st.floats(1e3, 1e8),
    st.floats(1e3, 1e8),
    st.floats(1e3, 1e8),
)
def test_scaling_rules_compose_over_batch_sizes(rate: float, one: float, two: float, three: float) -> None:
    """From one batch to a third is the same with or without the second, and back is where it began."""
    there = scale_rate(rate, one, three)
    by_way = scale_rate(scale_rate(rate, one, two).linear, two, three).linear
    assert there.linear == pytest.approx(by_way)
    assert scale_rate(there.square_root, three, one).square_root == pytest.approx(rate)
    assert min(there) <= rate <= max(there) or rate <= min(there) or rate >= max(there)
    assert there.square_root**2 == pytest.approx(rate * there.linear)


def test_a_rate_that_is_too_high_for_the_batch() -> None:
    plan = make_plan(global_batch_size=64, seq_len=4096)
    finding = find_by_name(plan, "learning-rate-against-batch", ss.Pretrain(learning_rate=1e-3, num_steps=1))
    assert finding is not None and finding.severity == "danger"
    # LLaMA 7B had 3e-4 at 4M tokens; this plan has 262,144.
    ratio = 64 * 4096 / 4e6
    assert finding.number == pytest.approx(1e-3 / (3e-4 * ratio**0.5))
    assert finding.number == pytest.approx(13.0, rel=0.01)
    assert "LLaMA 7B" in finding.why and "Touvron" in finding.why
    assert finding.change == "learning_rate=8e-05"


def test_a_rate_that_is_right_for_the_batch() -> None:
    name = "learning-rate-against-batch"
    plan = make_plan(global_batch_size=1024, seq_len=4096)
    assert find_by_name(plan, name, ss.Pretrain(learning_rate=3e-4)) is None
    assert find_by_name(plan, name) is None, "a plan alone has no learning rate"
    low = find_by_name(plan, name, ss.Pretrain(learning_rate=1e-6))
    assert low is not None and low.severity == "hint"
    sgd = make_plan(global_batch_size=64, optimizer="sgd")
    assert find_by_name(sgd, name, ss.Pretrain(learning_rate=1e-3)) is None


def test_no_finding_without_a_published_run_of_the_size() -> None:
    assert find_reference(2e6) is None and find_reference(3e12) is None
    assert find_small_reference(300.0) is None and find_small_reference(1e9) is None
    for optimizer in ("sgd", "adafactor"):
        plan = make_plan(global_batch_size=64, optimizer=optimizer, layout=ss.Layout.ddp())
        assert find_usual_rate(plan, begins_from_weights=False) is None
        assert find_usual_rate(plan, begins_from_weights=True) is None
    for run in REFERENCES:
        assert find_reference(run.num_parameters) == run


class Tuning:
    """The interface of a ``Finetune`` that the preflight uses."""

    weights, num_steps, warmup = "folder", 100, 3

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def __call__(self, ctx: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("recipe", "task", "source", "advised"),
    [
        ({}, Tuning(0.05), "Llama 2 Chat 7B", 2e-5),
        ({"method": "lora"}, Tuning(0.05), "Schulman", 2e-4),
        ({"method": "lora"}, ss.Pretrain(learning_rate=0.05), "Schulman", 2e-4),
        ({"optimizer": "lion"}, ss.Pretrain(learning_rate=0.05), "Chen et al. 2023", 1e-5),
        ({"optimizer": "muon"}, ss.Pretrain(learning_rate=0.05), "LLaMA 7B", 8e-5),
        ({"optimizer": "adamw_8bit"}, ss.Pretrain(learning_rate=0.05), "LLaMA 7B", 8e-5),
    ],
)
def test_a_rate_that_is_far_too_high_is_reported_with_the_rule(
    recipe: dict[str, Any], task: Any, source: str, advised: float
) -> None:
    plan = make_plan(global_batch_size=64, seq_len=4096, layout=ss.Layout.ddp(), **recipe)
    finding = find_by_name(plan, "learning-rate-against-batch", task)
    assert finding is not None and finding.severity == "danger" and source in finding.why
    assert finding.change == f"learning_rate={advised:g}"
    if isinstance(task, ss.Pretrain):
        assert isinstance(finding.task, ss.Pretrain) and finding.task.learning_rate == advised
        assert find_by_name(plan, "learning-rate-against-batch", finding.task) is None


@pytest.mark.parametrize("rate", [0.0, 8e-5, 0.05])
def test_only_a_finetune_recommends_a_rate_of_its_own(rate: float) -> None:
    """A method of that name with other arguments failed the whole preflight."""

    @dataclass(frozen=True)
    class OwnTask:
        learning_rate: float | None

        def peak_rate(self) -> float:
            raise NotImplementedError

        def __call__(self, ctx: object) -> None:
            raise NotImplementedError

    plan = make_plan(global_batch_size=64, seq_len=4096, layout=ss.Layout.ddp())
    finding = find_by_name(plan, "learning-rate-against-batch", OwnTask(rate))
    assert (finding is None) == (rate == 8e-5)


@pytest.mark.parametrize("task", [ss.Pretrain, 3, "pretrain"])
def test_what_cannot_be_launched_is_no_task(task: object) -> None:
    with pytest.raises(ValueError, match=r"findings\.task is .*a callable f\(ctx\)"):
        make_plan().findings(task)


def test_lions_rate_is_three_to_ten_times_smaller_than_adamws() -> None:
    of = {
        name: find_usual_rate(make_plan(optimizer=name), begins_from_weights=False)
        for name in ("adamw", "lion")
    }
    adamw, lion = of["adamw"], of["lion"]
    assert adamw is not None and lion is not None and lion.rules == adamw.rules
    assert lion.highest == pytest.approx(adamw.highest / 3) and lion.lowest == pytest.approx(
        adamw.lowest / 10
    )
    assert adamw.rate / 10 < lion.rate < adamw.rate / 3


def test_small_models_use_the_rule_of_kaplan_et_al() -> None:
    findings = find_by_name(make_tiny_plan(), "learning-rate-against-batch", ss.Pretrain(learning_rate=0.05))
    assert findings is not None and findings.severity == "danger" and "equation D.1" in findings.why
    # 0.003239 - 0.0001395 ln(1.46e6) = 0.00126
    assert findings.change == "learning_rate=0.001" and findings.number == pytest.approx(0.05 / 0.0013)


@pytest.mark.parametrize("size", ["2m", "30m", "125m", "350m", "1.3b", "7b", "13b", "70b", "175b", "405b"])
@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_the_defaults_of_finetune_have_no_finding(size: str, batch: int) -> None:
    for method, rate in (("full", FULL_RATE), ("lora", ADAPTER_RATE)):
        plan = ss.Plan(
            ss.Architecture.of_size(size),
            ss.Cluster.parse("1xh100-sxm-80gb"),
            ss.Recipe(seq_len=2048, global_batch_size=batch, method=method),
            ss.Layout.ddp(),
        )
        usual = find_usual_rate(plan, begins_from_weights=True)
        if usual is not None and usual.run.name == "InstructGPT 175B" and batch == 1:
            assert usual.highest < FULL_RATE, "its batch was small too, and its rate a quarter"
            return
        assert usual is None or usual.lowest <= rate <= usual.highest, (size, batch, method)


def test_a_short_warm_up() -> None:
    plan = make_plan()
    finding = find_by_name(plan, "short-warm-up", ss.Pretrain(num_steps=5000, warmup=0))
    assert finding is not None and finding.number == 0 and WARM_UP_STEPS == 40
    assert "40" in finding.change
    for warm_up in (0.03, 40, 500):
        task = ss.Pretrain(num_steps=5000, warmup=warm_up)
        assert find_by_name(plan, "short-warm-up", task) is None


def test_beta_2_is_that_of_pretrain() -> None:
    needs("torch")
    from shardscope.planner.checks.learning_rate import BETA_2
    from shardscope.training.optimizers.optimizers import ADAM_BETAS

    assert ADAM_BETAS[1] == BETA_2


# --------------------------------------------------------------------------------------------- data


def test_the_shipped_text_has_the_stated_number_of_tokens() -> None:
    needs("tokenizers")
    from shardscope.training.data.windows import read_tokens

    assert len(read_tokens(None)) == SHIPPED_TOKENS


def test_ranks_that_read_the_same_text() -> None:
    plan = make_plan(global_batch_size=512, seq_len=4096)
    finding = find_by_name(plan, "ranks-read-the-same-text", ss.Pretrain(num_steps=1))
    assert finding is not None and finding.severity == "warning", "it wastes work, and the run ends"
    windows = SHIPPED_TOKENS // 4096
    assert finding.number == 512 / windows
    assert finding.plan is not None and finding.plan.recipe.global_batch_size <= windows
    assert find_by_name(finding.plan, "ranks-read-the-same-text", ss.Pretrain(num_steps=1)) is None
    assert find_by_name(plan, "ranks-read-the-same-text") is None


def test_a_text_that_is_shorter_than_one_window(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a short text")
    task = ss.Pretrain(text=text, num_steps=1)
    finding = find_by_name(make_plan(seq_len=4096), "ranks-read-the-same-text", task)
    assert finding is not None and finding.severity == "danger" and "less than one window" in finding.why
    assert finding.change == "A longer text" and finding.plan is None, "it was seq_len=0"


def test_tokens_of_the_users_text_are_estimated_from_its_bytes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a" * 10_239)
    plan = make_tiny_plan(seq_len=1024, global_batch_size=20)
    finding = find_by_name(plan, "ranks-read-the-same-text", ss.Pretrain(text=text, num_steps=1))
    assert finding is not None and finding.number == 2.0
    text.write_text("a" * 30_000)
    assert find_by_name(plan, "ranks-read-the-same-text", ss.Pretrain(text=text, num_steps=1)) is None


def test_a_text_that_is_read_many_times() -> None:
    plan = make_tiny_plan(seq_len=128, global_batch_size=64)
    finding = find_by_name(plan, "text-read-many-times", ss.Pretrain(num_steps=500))
    assert finding is not None
    assert finding.number == 500 * 64 / (SHIPPED_TOKENS // 128)
    assert find_by_name(plan, "text-read-many-times", ss.Pretrain(num_steps=150)) is None


def make_fast_plan(seq_len: int) -> ss.Plan:
    """Make a plan of half a million tokens a step, over one node."""
    return ss.Plan(
        ss.models["gpt2"],
        ss.Cluster.parse("8xb200-sxm-180gb"),
        ss.Recipe(seq_len=seq_len, micro_batch_size=32768 // seq_len, global_batch_size=524_288 // seq_len),
        ss.Layout.ddp(),
    )


def own_loader(ctx: Any) -> None:
    ctx.log(loss=1.0)


def test_data_loading_that_is_faster_than_usual_storage() -> None:
    plan = make_fast_plan(256)
    finding = find_by_name(plan, "data-loading", own_loader)
    assert finding is not None and finding.severity == "warning"
    samples = plan.recipe.global_batch_size / plan.step().seconds
    assert finding.number == pytest.approx(samples) and samples > 3_000
    assert f"{samples:,.0f} sequences a second" in finding.why
    assert f"{samples * 256 * 4 / 1e6:,.1f} MB/s of tokens" in finding.why and "AWS gp3" in finding.why
    alone = find_by_name(plan, "data-loading")
    assert alone is not None and alone.severity == "hint"
    assert alone.task is None, "the shipped text has not so many windows"
    fewer = ss.Recipe(seq_len=256, micro_batch_size=64, global_batch_size=512)
    alone = find_by_name(replace(plan, recipe=fewer), "data-loading")
    assert alone is not None and isinstance(alone.task, ss.Pretrain)
    assert find_by_name(plan, "data-loading", alone.task) is None, "what it offers has its tokens in memory"
    assert "num_workers=4" in finding.change
    assert find_by_name(plan, "data-loading", ss.Pretrain(num_steps=1)) is None, "it has its tokens in memory"
    assert find_by_name(make_plan(), "data-loading", own_loader) is None


def test_a_batch_that_no_text_has_windows_for_gets_shorter_ones(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a" * 4095)
    plan = make_tiny_plan(seq_len=256, micro_batch_size=16, global_batch_size=64)
    task = ss.Pretrain(text=text, num_steps=1)
    finding = find_by_name(plan, "ranks-read-the-same-text", task)
    assert finding is not None and finding.plan is not None
    assert finding.plan.recipe.seq_len == 64 and "seq_len=64" in finding.change
    assert find_by_name(finding.plan, "ranks-read-the-same-text", task) is None


def test_a_batch_for_a_short_text_leaves_no_stage_without_micro_batches() -> None:
    """Otherwise each of two findings is fixed by what the other is about."""
    cluster, recipe = ss.Cluster.parse("2x8xh100-sxm-80gb"), ss.Recipe(seq_len=32768, recompute="full")
    plan = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, ss.Layout.megatron(pp=4))
    task = ss.Pretrain(num_steps=3)
    finding = find_by_name(plan, "ranks-read-the-same-text", task)
    assert finding is not None and finding.plan is not None
    assert finding.plan.recipe.global_batch_size == 64 and finding.plan.recipe.seq_len < 32768
    for name in ("ranks-read-the-same-text", "fewer-micro-batches-than-stages"):
        assert find_by_name(finding.plan, name, task) is None
    finding = find_by_name(
        make_tiny_plan(seq_len=2**20, global_batch_size=8), "ranks-read-the-same-text", task
    )
    assert finding is not None and f"seq_len={SHIPPED_TOKENS // 8}" in finding.change


def test_ranks_that_share_a_sequence_each_read_it() -> None:
    """Two nodes of data-parallel ranks need half as much each; two tensor-parallel ranks the same again."""
    tiny_step = ss.Recipe(seq_len=128, micro_batch_size=64, global_batch_size=1024)
    samples = []
    for cluster, layout in (
        ("8xb200-sxm-180gb", ss.Layout.megatron()),
        ("2x8xb200-sxm-180gb", ss.Layout.megatron()),
        ("2x8xb200-sxm-180gb", ss.Layout.megatron(tp=2)),
    ):
        plan = ss.Plan(ss.models["gpt2"], ss.Cluster.parse(cluster), tiny_step, layout)
        finding = find_by_name(plan, "data-loading", own_loader)
        assert finding is not None and finding.number is not None
        samples.append(finding.number * plan.step().seconds)
    assert samples == pytest.approx([1024, 512, 1024])


# --------------------------------------------------------------------------------------- checkpoint


def save_checkpoint(folder: Path, plan: ss.Plan, steps: int = 100) -> Path:
    """Write a checkpoint folder as a run of ``plan`` leaves it, as far as the preflight reads it."""
    checkpoint = folder / "checkpoints" / f"step-{steps:06d}"
    checkpoint.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"plan": json.loads(plan.to_json())}))
    (checkpoint / "position.json").write_text(json.dumps({"num_steps_done": steps}))
    return checkpoint


def list_findings(plan: ss.Plan, path: Path) -> set[str]:
    findings = plan.findings(ss.Pretrain(resume=path, num_steps=200))
    return {finding.name for finding in findings if finding.name.startswith("checkpoint-of")}


def test_a_checkpoint_of_the_same_plan_has_no_finding(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_plan())
    assert list_findings(make_plan(), path) == set()
    assert list_findings(make_plan(layout=ss.Layout.ddp()), path) == set(), "DDP and FSDP2 share a format"


def test_a_checkpoint_of_another_batch(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_plan(global_batch_size=64))
    task = ss.Pretrain(resume=path, num_steps=200)
    plan = make_plan(global_batch_size=128)
    finding = find_by_name(plan, "checkpoint-of-another-batch", task)
    assert finding is not None and finding.number == 100 * 64 and "never read" in finding.why
    assert finding.plan is not None and finding.plan.recipe.global_batch_size == 64
    smaller = find_by_name(make_plan(global_batch_size=32), "checkpoint-of-another-batch", task)
    assert smaller is not None and "read again" in smaller.why


def test_a_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_plan(optimizer="adamw"))
    task = ss.Pretrain(resume=path, num_steps=200)
    finding = find_by_name(make_plan(optimizer="lion"), "checkpoint-of-another-optimizer", task)
    assert finding is not None and finding.severity == "danger" and "optimizer='adamw'" in finding.why
    assert finding.plan is not None and finding.plan.recipe.optimizer == "adamw"
    assert list_findings(make_plan(optimizer="adamw_foreach"), path) == set(), (
        "it keeps the same of each weight"
    )


def test_a_checkpoint_of_a_model_without_formulas(tmp_path: Path) -> None:
    """It was no reason to refuse to resume: names and sizes of its parameters are those of transformers."""
    needs("torch")
    needs("transformers")

    def plan_of(width: int) -> ss.Plan:
        sizes = {"hidden_size": width, "intermediate_size": 64, "vocab_size": 256, "num_hidden_layers": 2}
        config = {"model_type": "stablelm", **sizes, "num_attention_heads": 4, "num_key_value_heads": 4}
        return replace(make_plan(), architecture=ss.Architecture.from_hf(config, rehearse_only=True))

    path = save_checkpoint(tmp_path, plan_of(64))
    assert list_findings(plan_of(64), path) == set()
    assert list_findings(plan_of(128), path) == {"checkpoint-of-another-model"}


def test_a_checkpoint_of_another_model_or_format(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_plan("llama-3.1-8b"))
    assert list_findings(make_plan(), path) == {"checkpoint-of-another-model"}
    assert list_findings(make_plan("llama-3.1-8b", ss.Layout.zero()), path) == {
        "checkpoint-of-another-format"
    }
    task = ss.Pretrain(resume=path, num_steps=200)
    for now in (make_plan(), make_plan("llama-3.1-8b", ss.Layout.zero())):
        (findings,) = [one for one in now.findings(task) if one.name.startswith("checkpoint-of-another")]
        assert findings.plan is not None and list_findings(findings.plan, path) == set()
    assert findings.change == "Go on with FSDP2"
    assert "resume it with FSDP2 and export=True, and start ss.Finetune(run.model)" in findings.why


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({}, "and this plan trains all weights."),
        ({"method": "lora"}, "over a base that is not quantized."),
        ({"method": "lora", "quantization": "nf4"}, "over a base in NF4."),
        ({"method": "qlora", "lora_rank": 8}, "trains adapters of rank 8 on k_proj, o_proj, q_proj, v_proj,"),
        ({"method": "qlora", "lora_targets": ("q_proj",)}, "trains adapters of rank 16 on q_proj,"),
    ],
)
def test_a_checkpoint_of_other_adapters_or_of_another_base(
    recipe: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path, make_plan(method="qlora"))
    plan = make_plan(**recipe)
    finding = find_by_name(plan, "checkpoint-of-other-weights", ss.Pretrain(resume=path, num_steps=200))
    assert finding is not None and finding.severity == "danger" and words in finding.why
    held = (
        "adapters of rank 16 on k_proj, o_proj, q_proj, v_proj, over a base in NF4 with double quantization"
    )
    assert f"holds {held}, " in finding.why
    assert finding.plan is not None and list_findings(finding.plan, path) == set()
    assert list_findings(make_plan(method="qlora", lora_rank=16), path) == set()


def test_a_checkpoint_of_other_ranks(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_plan(layout=ss.Layout.zero()))
    fewer = ss.Plan(
        ss.models["llama-2-7b"], ss.Cluster.parse("4xh100-sxm-80gb"), ss.Recipe(), ss.Layout.zero()
    )
    task = ss.Pretrain(resume=path, num_steps=200)
    finding = find_by_name(fewer, "checkpoint-of-other-ranks", task)
    assert finding is not None and finding.number == 8 and "ds_to_universal" in finding.change
    assert find_by_name(make_plan(layout=ss.Layout.zero()), "checkpoint-of-other-ranks", task) is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"plan": {"shardscope": "Plan"}}'])
def test_a_damaged_run_beside_a_checkpoint_is_not_judged(tmp_path: Path, content: str) -> None:
    path = save_checkpoint(tmp_path, make_plan("llama-3.1-8b"))
    (tmp_path / "run.json").write_text(content)
    assert list_findings(make_plan(), path) == set()


# ------------------------------------------------------------------------------------------ profile


class Earlier:
    """The interface of a run that the preflight uses."""

    def __init__(self, plan: ss.Plan, folder: Path, traces: int) -> None:
        self.plan, self.folder = plan, folder
        (folder / "traces").mkdir(parents=True)
        for rank in range(traces):
            (folder / "traces" / f"rank-{rank}.json.gz").touch()


def test_a_plan_that_was_never_profiled(tmp_path: Path) -> None:
    name, plan = "never-profiled", make_tiny_plan()
    finding = find_by_name(plan, name, ss.Pretrain())
    assert finding is not None and finding.number == 0
    assert find_by_name(plan, name, ss.Pretrain(profile=True)) is None
    assert find_by_name(plan, name) is None, "nothing is run"
    blind = [Earlier(plan, tmp_path / str(number), 0) for number in range(2)]
    findings = find_by_name(plan, name, ss.Pretrain(), blind)
    assert findings is not None and findings.number == 2
    seen = Earlier(plan, tmp_path / "seen", 2)
    assert find_by_name(plan, name, ss.Pretrain(), [*blind, seen]) is None
    other = Earlier(make_tiny_plan(seq_len=64), tmp_path / "other", 2)
    assert find_by_name(plan, name, ss.Pretrain(), [other]) is not None


def test_runs_of_a_wrong_type_are_refused() -> None:
    plan = make_tiny_plan()
    assert plan.findings(runs=None) == plan.findings()
    wrong: tuple[Any, ...] = ([1], 3, "runs", [None], [plan])
    for runs in wrong:
        with pytest.raises(ValueError, match=r"findings\.runs.*Nearest fix: ss\.runs\(\)"):
            plan.findings(ss.Pretrain(), runs)


def test_a_function_that_profiles_itself() -> None:
    def profile_itself(ctx: Any) -> None:
        with ctx.profile():
            pass

    def does_not(ctx: Any) -> None:
        ctx.log(loss=1.0)

    assert find_by_name(make_tiny_plan(), "never-profiled", profile_itself) is None
    assert find_by_name(make_tiny_plan(), "never-profiled", does_not) is not None


class TrainsWeights:
    """A task that begins from the weights of a folder."""

    weights, num_steps, warmup, learning_rate = "folder", 100, 3, None

    def __call__(self, ctx: object) -> None:
        raise NotImplementedError


def test_bf16_on_cpu_ranks_without_bf16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    name, task = "bf16-on-cpu-ranks", TrainsWeights()
    has_bf16 = "shardscope.planner.checks.precision.multiplies_in_bf16"
    monkeypatch.setattr(has_bf16, lambda: False)
    for precision in ("bf16", "bf16-mixed"):
        finding = find_by_name(make_tiny_plan(precision=precision), name, task)
        assert finding is not None and finding.plan is not None and finding.number == 3
        assert finding.plan.recipe.precision == "fp32" and find_by_name(finding.plan, name, task) is None
    assert (
        find_by_name(make_tiny_plan(), name) is None
        and find_by_name(make_tiny_plan(), name, ss.Pretrain()) is None
    )
    assert find_by_name(make_plan(), name, task) is None, "GPUs have it"
    for known in (True, None):
        monkeypatch.setattr(has_bf16, lambda known=known: known)
        assert find_by_name(make_tiny_plan(), name, task) is None


@pytest.mark.parametrize(("slowdown", "is_found"), [(0.5, False), (2.5, True)])
def test_a_calibration_decides_about_bf16_on_cpu_ranks(
    slowdown: float, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the CPU's instruction sets are."""
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path))
    plan = make_tiny_plan(precision="bf16-mixed")
    products = [make_matmul(256), make_matmul(256, "bf16", FLOPS / slowdown)]
    cluster = f"{plan.cluster.num_gpus}xcpu"
    store_calibration(make_calibration(cluster, matrix_products=products))
    for known in (True, False):
        monkeypatch.setattr(
            "shardscope.planner.checks.precision.multiplies_in_bf16", lambda known=known: known
        )
        finding = find_by_name(plan, "bf16-on-cpu-ranks", TrainsWeights())
        assert (finding is not None) is is_found
        assert finding is None or "2.5 times" in finding.why
    assert f"{slowdown:g} times as long" in choose_precision(plan).why


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f", False),
        ("flags\t\t: fpu avx512_bf16", True),
        ("flags\t\t: amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", None),
    ],
)
def test_bf16_instructions_are_read_from_cpuinfo(line: str, expected: bool | None, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert multiplies_in_bf16(tmp_path / "cpuinfo") is expected
    assert multiplies_in_bf16(tmp_path / "nowhere") is None
