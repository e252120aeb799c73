"""Ten layout puzzles in three levels: a model, a cluster and targets; the answer is a layout or a plan.

A layout is checked on three tiers: the prediction at once, and on request the rehearsal (the framework's
own code on fake tensors) and a run of a tiny model with the same kind of layout on four CPU ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Literal, get_args

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.errors import find_similar
from shardscope.core.html_table import render_html_table
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.core.serialization import replace_fields
from shardscope.planner.cpu_trial import build_cpu_trial
from shardscope.planner.memory_needs import fits
from shardscope.runs.launch.launch import launch
from shardscope.teach.answers import Condition, Judgement, PlanGoal
from shardscope.teach.attempts import Attempt, list_wrong_answers, read_attempts, store_attempt
from shardscope.teach.checking import describe_answer, is_unanswered
from shardscope.teach.feedback import Feedback
from shardscope.training.tasks.pretrain import Pretrain

Tier = Literal["prediction", "rehearsal", "run"]
GB = 1e9
RUN_RANKS = 4
MAX_DEGREE = 2
"""Largest degree of the run on CPU ranks, whatever the layout's degrees are."""
RUN_SECONDS = 300.0
REHEARSAL_SECONDS = 600.0
MAY_CHANGE = ("layout", "recipe.recompute", "recipe.micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """One layout puzzle: change the start plan's layout so that it meets the targets."""

    name: str
    level: int
    """1 to 3, easy to hard."""
    title: str
    """The puzzle in words, targets excluded."""
    start: Callable[[], Plan]
    """Creates the plan to change; it misses a target."""
    max_gb: float
    """Largest peak of one GPU, in GB of 1e9 bytes."""
    min_tokens: float
    """Fewest predicted tokens/s per GPU."""
    hints: tuple[str, ...]
    may_change: tuple[str, ...] = MAY_CHANGE

    @property
    def plan(self) -> Plan:
        """The plan to start from."""
        return self.start()

    def __repr__(self) -> str:
        return (
            f"Puzzle {self.name} (level {self.level}): {self.title}: under {self.max_gb:g} GB and at least "
            f"{self.min_tokens:,.0f} tokens/s per GPU. You may change {', '.join(self.may_change)}."
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>"

    def check(self, answer: object, tier: Tier = "prediction") -> Feedback:
        """Check a plan or layout, store the attempt, and return the feedback to display; no answer raises.

        ``tier="rehearsal"`` also rehearses the plan, which takes a minute; ``tier="run"`` also trains a tiny
        model with the same framework on four CPU ranks, tensor and pipeline parallelism included. Both
        follow a right prediction only.
        """
        name = f"puzzle-{self.name}"
        if tier not in get_args(Tier):
            allowed = ", ".join(f'"{one}"' for one in get_args(Tier))
            return Feedback(exercise=name, correct=None, text=f"tier is {tier!r}; choose out of {allowed}.")
        if is_unanswered(answer):
            return Feedback(exercise=name, correct=None, text=f"Write your layout in this cell. {self!r}")
        judgement, text, speed = Judgement(False, "", False), type(answer).__name__, 0.0
        # What a learner passes may raise anything, in any method.
        try:
            judgement = self._goal.judge(answer)
            plan = answer if isinstance(answer, Plan) else replace_fields(self.plan, {"layout": answer})
            if judgement.correct and tier != "prediction":
                checked = self._rehearse(plan) if tier == "rehearsal" else self._run(plan)
                judgement = Judgement(checked.correct, f"{judgement.text}\n{checked.text}", checked.valid)
            text = describe_answer(plan)
            speed = plan.step().tokens_per_second_per_gpu
        except Exception as error:
            if judgement.correct or not judgement.text:
                judgement = Judgement(False, f"The answer cannot be read: {_shorten(error)}", False)
        wrong = list_wrong_answers(read_attempts(), name)
        note = store_attempt(
            Attempt(
                exercise=name,
                answer=text,
                correct=judgement.correct,
                valid=judgement.valid,
                tier=tier,
                tokens_per_second_per_gpu=speed if judgement.correct else 0.0,
            )
        )
        lines = [f"{'Right' if judgement.correct else 'Not yet'}. {judgement.text}"]
        if judgement.valid and not judgement.correct:
            number = wrong.index(text) if text in wrong else len(wrong)
            lines.append(f"Hint: {self.hints[min(number, len(self.hints) - 1)]}")
        return Feedback(
            exercise=name, correct=judgement.correct, text="\n".join(filter(None, [*lines, note]))
        )

    @property
    def _goal(self) -> PlanGoal:
        return PlanGoal(
            start=self.start,
            may_change=self.may_change,
            conditions=(
                Condition(f"the peak is under {self.max_gb:g} GB on each GPU", self._find_memory_problem),
                Condition(f"at least {self.min_tokens:,.0f} tokens/s per GPU", self._find_speed_problem),
            ),
        )

    def _find_memory_problem(self, plan: Plan) -> str | None:
        report = plan.memory()
        if report.peak_bytes >= self.max_gb * GB:
            return f"it is {report.peak_bytes / GB:.1f} GB"
        return None if fits(plan, report) else "host memory is too small for what is offloaded"

    def _find_speed_problem(self, plan: Plan) -> str | None:
        speed = plan.step().tokens_per_second_per_gpu
        return None if speed >= self.min_tokens else f"it has {speed:,.0f}"

    def _rehearse(self, plan: Plan) -> Judgement:
        try:
            peak = plan.rehearse(timeout=REHEARSAL_SECONDS).peak_bytes / GB
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            return Judgement(False, f"The rehearsal did not run: {_shorten(error)}", False)
        predicted = plan.memory().peak_bytes / GB
        text = f"Rehearsed with the framework's own code: {peak:.1f} GB, predicted {predicted:.1f} GB."
        return Judgement(peak < self.max_gb, text)

    def _run(self, plan: Plan) -> Judgement:
        try:
            trial = build_cpu_trial(plan, RUN_RANKS, max_degree=MAX_DEGREE)
            run = launch(trial.plan, Pretrain(num_steps=2))
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            return Judgement(False, f"The run did not start: {_shorten(error)}", False)
        status = run.wait(timeout=RUN_SECONDS)
        # wait() returns the status of a run that is not over yet.
        if status not in ("finished", "stopped", "failed", "lost"):
            run.stop()
            return Judgement(False, f"The run took more than {RUN_SECONDS:.0f} s and was stopped.")
        changes = "; ".join(trial.differences)
        text = f"Run on {RUN_RANKS} CPU ranks, every degree at most {MAX_DEGREE} ({changes}): {status}"
        return Judgement(
            status == "finished", f"{text}. {run.reason if status != 'finished' else ''}".strip()
        )


def _shorten(error: Exception) -> str:
    """Return the first line of an error: a rehearsal's has the traceback of its process."""
    return str(error).partition("\n")[0]


def _start(model: str, cluster: str, layout: Layout | None = None, **recipe: object) -> Callable[[], Plan]:
    """Return a function that creates the plan: puzzles cost nothing until one is used."""

    def build() -> Plan:
        return Plan(
            models[model],
            Cluster.parse(cluster),
            replace_fields(Recipe(), recipe),
            layout or Layout.fsdp2(),
        )

    return build


_PUZZLES = (
    Puzzle(
        name="8b-on-one-node",
        level=1,
        title="Llama 3.1 8B on 8 x H100, 4,096 tokens",
        start=_start(
            "llama-3.1-8b", "8xh100-sxm-80gb", seq_len=4096, micro_batch_size=2, global_batch_size=64
        ),
        max_gb=75,
        min_tokens=8000,
        hints=(
            "Recomputation costs speed. What else halves the activations?",
            "With one sequence in a micro-batch nothing has to be recomputed.",
        ),
    ),
    Puzzle(
        name="8b-on-gaming-gpus",
        level=1,
        title="Llama 3.1 8B on 8 x RTX 4090 without NVLink, 2,048 tokens",
        start=_start("llama-3.1-8b", "8xrtx-4090-24gb", seq_len=2048, global_batch_size=64),
        max_gb=25,
        min_tokens=900,
        hints=(
            "Sharding gathers every layer in each micro-batch, over PCIe. Which parallelism sends less?",
            "A pipeline sends activations at the borders of its stages only: Megatron with tp and pp.",
        ),
    ),
    Puzzle(
        name="7b-on-half-a-gpu",
        level=1,
        title="LoRA of Qwen2.5 7B on one RTX 4090 that others use too",
        start=_start("qwen2.5-7b", "1xrtx-4090-24gb", seq_len=2048, global_batch_size=8, method="lora"),
        max_gb=12,
        min_tokens=1500,
        may_change=(*MAY_CHANGE, "recipe.method"),
        hints=(
            "The frozen weights are most of it. How few bits can they have?",
            'Recipe(method="qlora") has the frozen weights in 4 bits; activations are the rest.',
        ),
    ),
    Puzzle(
        name="70b-on-two-nodes",
        level=2,
        title="Llama 3.1 70B on 2 x 8 H100, 4,096 tokens",
        start=_start(
            "llama-3.1-70b", "2x8xh100-sxm-80gb", seq_len=4096, global_batch_size=64, recompute="full"
        ),
        max_gb=75,
        min_tokens=400,
        hints=(
            "16 bytes x 70.6 billion / 16 GPUs are 70.6 GB: what may leave the GPU?",
            'The optimizer\'s state can be in host memory: offload="cpu". Gradients are then added up there, '
            "and backward waits: take larger micro-batches.",
        ),
    ),
    Puzzle(
        name="70b-without-nvlink",
        level=2,
        title="Llama 3.1 70B on 2 x 8 H100 PCIe, which have no NVLink, 4,096 tokens",
        start=_start(
            "llama-3.1-70b", "2x8xh100-pcie-80gb", seq_len=4096, global_batch_size=64, recompute="full"
        ),
        max_gb=75,
        min_tokens=400,
        hints=(
            "All-gathers come once for each micro-batch, whatever its size.",
            "Fewer and larger micro-batches gather less often; offloading makes room for them.",
        ),
    ),
    Puzzle(
        name="long-context",
        level=2,
        title="Llama 3.1 8B on 8 x H100 with 131,072 tokens a sequence",
        start=_start(
            "llama-3.1-8b", "8xh100-sxm-80gb", seq_len=131072, global_batch_size=8, recompute="full"
        ),
        max_gb=83,
        min_tokens=2000,
        hints=(
            "One sequence is too long for one GPU, whatever is sharded of the weights.",
            "Context parallelism (cp) cuts the sequence itself, in FSDP2 and in Megatron-core.",
        ),
    ),
    Puzzle(
        name="mixture-of-experts",
        level=2,
        title="Mixtral 8x7B on 2 x 8 H100, 4,096 tokens",
        start=_start("mixtral-8x7b", "2x8xh100-sxm-80gb", seq_len=4096, global_batch_size=128),
        max_gb=80,
        min_tokens=5500,
        hints=(
            "Each token uses two of eight experts: which degree leaves experts where they are?",
            "ep=8 and a pipeline of two stages. Activations are what is too large then: cp=2 halves them.",
        ),
    ),
    Puzzle(
        name="405b-on-512",
        level=3,
        title="Llama 3.1 405B on 512 H100, 8,192 tokens",
        start=_start(
            "llama-3.1-405b", "64x8xh100-sxm-80gb", seq_len=8192, global_batch_size=512, recompute="full"
        ),
        max_gb=80,
        min_tokens=180,
        hints=(
            "Full recomputation costs a quarter of the speed. Which degrees make it unnecessary?",
            "Long pipelines (pp 16 or 32) hold few layers a GPU; interleave them, and use tp and cp.",
        ),
    ),
    Puzzle(
        name="405b-long-context",
        level=3,
        title="Llama 3.1 405B on 1,024 H100 with 131,072 tokens a sequence",
        start=_start(
            "llama-3.1-405b",
            "128x8xh100-sxm-80gb",
            Layout.fsdp2(cp=8),
            seq_len=131072,
            global_batch_size=128,
            recompute="full",
        ),
        max_gb=80,
        min_tokens=85,
        hints=(
            "Meta used cp 16 for this length (Grattafiori et al. 2024, table 4).",
            "tp 4, cp 16 and a long interleaved pipeline, with full recomputation.",
        ),
    ),
    Puzzle(
        name="70b-book-length",
        level=3,
        title="Llama 3.1 70B on 64 H100 with 65,536 tokens a sequence",
        start=_start(
            "llama-3.1-70b", "8x8xh100-sxm-80gb", seq_len=65536, global_batch_size=64, recompute="full"
        ),
        max_gb=80,
        # Above the 509 of FSDP2 with cp=8 alone, which is the answer to "long-context" already.
        min_tokens=520,
        hints=(
            "cp shortens each GPU's part of a sequence; tp and pp shard the layers.",
            "cp 4, tp 2 and eight interleaved stages. vpp must divide the layers of a stage.",
        ),
    ),
)


class Puzzles(dict[str, Puzzle]):
    """Puzzles by name, displayed as a table at the end of a notebook cell."""

    __slots__ = ()

    def __missing__(self, name: object) -> Puzzle:
        similar = find_similar(name, self)
        nearest = f"; nearest: {similar!r}" if similar else ""
        raise KeyError(f"there is no puzzle {name!r}{nearest}; known: {', '.join(self)}")

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.values()))

    def _repr_html_(self) -> str:
        head = ("puzzle", "level", "task", "under, GB", "at least, tokens/s per GPU", "you may change")
        rows = [
            (one.name, one.level, one.title, one.max_gb, one.min_tokens, ", ".join(one.may_change))
            for one in self.values()
        ]
        return render_html_table(head, rows, "Layout puzzles")


puzzles = Puzzles({puzzle.name: puzzle for puzzle in _PUZZLES})
"""The puzzles by name, in the order of their levels."""
