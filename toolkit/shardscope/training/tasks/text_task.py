"""Base class of the tasks that train the plan's model on text: common fields and the training itself.

Subclasses provide the initial weights and the tokenizer.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from shardscope.core.errors import (
    FieldError,
    Value,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    convert_numpy_number,
    refuse,
    warn_user,
)
from shardscope.core.number_format import format_count
from shardscope.frameworks.registry import check_trained
from shardscope.machine.user_folders import expand_home
from shardscope.records.folder import EXPORT
from shardscope.records.json_files import read_json
from shardscope.records.json_values import is_int
from shardscope.training.checkpoints.choice import (
    Choice,
    check_any_usable,
    choose_by_name,
    choose_for_rank,
    find_checkpoint,
)
from shardscope.training.checkpoints.folders import POSITION_FILE
from shardscope.training.data.plain_text import check_can_be_read, check_is_plain_text
from shardscope.training.data.tokenizer import SHIPPED_TEXT
from shardscope.training.data.windows import check_text_length
from shardscope.training.examples.source_record import describe_changed_data, describe_file, select_identity
from shardscope.training.optimizers.schedule import (
    DEFAULT_SCHEDULE,
    DEFAULT_WARMUP,
    SCHEDULER_TYPES,
    Schedule,
    SchedulerType,
    count_warmup_steps,
)
from shardscope.training.tasks.disk_space import check_disk_space
from shardscope.training.tasks.final_export import ENTRY, WORSE, export_when_possible
from shardscope.training.tasks.resumed_checkpoint import check_loads, find_resumable

if TYPE_CHECKING:
    import torch

    from shardscope.core.plan import Plan
    from shardscope.training.data.batches import Batches, Share
    from shardscope.training.data.tokenizer import TokenIds
    from shardscope.training.data.windows import Windows
    from shardscope.training.engine import Engine, TrainingContext
    from shardscope.training.samples import SampleGenerations
    from shardscope.training.validation import Validation

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Names that ``report_to`` takes, in the spelling of transformers' TrainingArguments."""
MAX_STEPS = 10**7


def name_field(task: object, name: str) -> str:
    """Return the name of a task's field in error messages, such as ``Pretrain.seed``."""
    return f"{type(task).__name__}.{name}"


def resolve_text(field: str, value: object) -> Path:
    """Return the absolute path of a plain text file. Raises ``ValueError`` naming ``field`` for others."""
    if not isinstance(value, str | Path):
        refuse(field, value, "a path or None", Value(None))
    # Make the path absolute: the kernel may change its working directory before the launch.
    path = expand_home(value).absolute()
    if not os.path.isfile(path):  # noqa: PTH113 - raises nothing for a long text
        refuse(field, str(value), "an existing text file, or None", Value(None))
    check_is_plain_text(field, path)
    return path


@dataclass(frozen=True, kw_only=True)
class TextTask(ABC):
    """Training task on text: ``shardscope.launch(plan, task)``.

    Each data-parallel rank reads its own windows of the text. Every step logs ``loss``, ``learning_rate``,
    ``grad_norm``, ``step_seconds``, ``tokens_per_second`` and memory per rank. Raises ``ValueError`` naming
    the field, its value, what is allowed and the nearest fix.
    """

    num_steps: int | None = 50
    """Total number of optimizer steps, including those before a ``resume``; 1 to 10,000,000."""
    learning_rate: float | None = None
    """Peak learning rate; None: the task's default for the plan's method."""
    schedule: SchedulerType = DEFAULT_SCHEDULE
    """Learning rate schedule, one of transformers' ``lr_scheduler_type``: "linear", "cosine",
    "cosine_with_min_lr" (a tenth of the peak), "constant" (without warm-up), "constant_with_warmup" or
    "inverse_sqrt"."""
    warmup: float = DEFAULT_WARMUP
    """Number of warm-up steps; below 1, their share of all steps. The first step has a rate above 0."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay, on matrices only; 0 to 1."""
    seed: int = 0
    """Seed of random weights and of the order of the text; 0 to 2^31 - 1."""
    profile: bool | Literal["nsys"] = False
    """Whether to record a few steady steps on every rank with torch.profiler (the last of a short run).
    "nsys": run all ranks under Nsight Systems (``nsys profile``), with NVTX ranges of phases and layers."""
    memory_snapshot: bool = False
    """Whether to record torch's GPU allocation history over the first steps, for torch's memory viewer."""
    log_every: int = 1
    """Steps between logged metrics; the last step is always logged."""
    save_checkpoint: bool = False
    """Whether to save a checkpoint after the last step. ``run.stop(checkpoint=True)`` saves one anyway."""
    save_every: int | None = None
    """Steps between checkpoints, saved asynchronously if the framework can; the last step has one too. None:
    only for ``save_checkpoint`` or on command."""
    keep_last: int | None = 2
    """With ``save_every``, the number of complete checkpoints that are kept, one more while the next is being
    written; None: all."""
    resume: bool | Path | None = None
    """Checkpoint to resume from. True: the newest complete one of this run or, if it has none, of the latest
    run launched with the same name; start from step 0 if there is none. Only checkpoints saved by this user's
    launches on this machine are used then. A path: that checkpoint, or the newest one of that run folder (a
    bare name may be a run in ``./runs``), whoever saved it; a :class:`Run` works too."""
    export: bool = False
    """Whether to write weights and tokenizer to ``export`` in the run folder after the last step, as a
    Hugging Face checkpoint; with adapters only these, in peft's format."""

    report_to: str | Sequence[str] = ("tensorboard",)
    """Where metrics go beside the run folder: "tensorboard" (files in the run folder), "trackio" and "wandb",
    one or several, or "none". A process of its own reports rank 0's to the last two, offline unless the
    environment says otherwise (WANDB_MODE, TRACKIO_SPACE_ID)."""

    preload: ClassVar[tuple[str, ...]] = (
        "transformers.models.llama.modeling_llama",
        "tokenizers",
        "shardscope.training.loop",
    )
    """Modules that the launcher imports once before it forks ranks; none of them initializes CUDA."""
    recorded_texts: ClassVar[frozenset[str]] = frozenset({"schedule", "report_to", "profile"})
    """Text fields that the run folder keeps, because they cannot contain secrets."""
    trains_the_plan: ClassVar[bool] = True
    """Whether the task trains the plan's model, so that the predicted memory holds for it."""

    def __post_init__(self) -> None:
        # The run folder's JSON has no numbers of numpy's.
        for field in fields(self):
            object.__setattr__(self, field.name, convert_numpy_number(getattr(self, field.name)))
        if self.num_steps is not None:
            self._check_integer("num_steps", 1, MAX_STEPS)
        if self.learning_rate is not None:
            self._check_learning_rate()
        self._check_schedule()
        self._check_number("weight_decay", 1.0)
        self._check_integer("seed", 0, 2**31 - 1)
        self._check_integer("log_every", 1, 10**7)
        for name in ("save_every", "keep_last"):
            if getattr(self, name) is not None:
                self._check_integer(name, 1, 10**7)
        if self.profile != "nsys" and not isinstance(self.profile, bool):
            refuse(self._field("profile"), self.profile, "True, False or 'nsys'", Value(True))
        for name in ("memory_snapshot", "save_checkpoint", "export"):
            check_flag(self._field(name), getattr(self, name))
        object.__setattr__(self, "report_to", self._list_trackers())
        if self.resume is False:
            object.__setattr__(self, "resume", None)
        if self.resume is not None and self.resume is not True:
            object.__setattr__(self, "resume", find_resumable(self._field("resume"), self.resume))

    def _check_integer(self, name: str, low: int, high: int) -> None:
        default = getattr(type(self), name)
        number = check_integer(self._field(name), getattr(self, name), low=low, high=high, default=default)
        object.__setattr__(self, name, number)

    def _check_number(self, name: str, high: float) -> None:
        default = getattr(type(self), name)
        number = check_number(self._field(name), getattr(self, name), low=0.0, high=high, default=default)
        object.__setattr__(self, name, number)

    def _check_learning_rate(self) -> None:
        try:
            self._check_number("learning_rate", 10.0)
        except FieldError as error:
            if error.fix_values != {"learning_rate": 0}:
                raise
            # The nearest number, 0, would learn nothing.
            default = type(self).learning_rate
            allowed = error.allowed if default is not None else f"{error.allowed}, or None for the usual one"
            refuse(error.field, self.learning_rate, allowed, Value(default))

    def _check_schedule(self) -> None:
        check_choice(self._field("schedule"), self.schedule, SCHEDULER_TYPES)
        field, warmup = self._field("warmup"), self.warmup
        if not (isinstance(warmup, float) and 0 <= warmup < 1):
            try:
                self._check_integer("warmup", 0, self.num_steps or MAX_STEPS)
            except FieldError as error:
                allowed = f"{error.allowed}, or a share of all steps, below 1"
                refuse(field, warmup, allowed, Value((error.fix_values or {"warmup": 0})["warmup"]))

    def _list_trackers(self) -> tuple[str, ...]:
        """Return ``report_to`` as a tuple without repetitions. Raises ``ValueError`` for unknown names."""
        names = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        field = self._field("report_to")
        if not isinstance(names, tuple | list):
            refuse(field, names, f"names among {', '.join(TRACKERS)}, or none", {"report_to": "none"})
        if tuple(names) == ("none",):
            return ()
        return tuple(dict.fromkeys(check_choice(field, name, TRACKERS) for name in names))

    def _check_trackers(self) -> None:
        """Raise ``ValueError`` if the package of a tracker is missing."""
        for name in self.report_to:
            # The supervisor's TensorBoard writer is a dependency of training itself.
            if name != "tensorboard" and importlib.util.find_spec(name) is None:
                refuse(self._field("report_to"), name, "a package that is installed", f"pip install {name}")

    def _field(self, name: str) -> str:
        return name_field(self, name)

    # ---- implemented by each task

    @abstractmethod
    def begin(self, engine: Engine, plan: Plan) -> Callable[[], torch.nn.Module]:
        """Set the source of the initial weights in ``engine``. Return the function that builds the model."""

    @abstractmethod
    def peak_rate(self, plan: Plan) -> float:
        """Return ``learning_rate``, or the task's default for it."""

    @property
    @abstractmethod
    def plain_text(self) -> Path | None:
        """The text file that token windows are cut from; None if the data are examples."""

    @abstractmethod
    def encode(self) -> Callable[[str], TokenIds] | None:
        """Return the function from text to int32 token ids; None: the shipped tokenizer."""

    @abstractmethod
    def complete_export(self, folder: Path, plan: Plan) -> None:
        """Add the tokenizer to a folder of exported weights."""

    @abstractmethod
    def frozen_base(self) -> dict[str, object]:
        """Identify the adapters' base: the ``seed`` of a random one, or ``weights`` and their ``sample``."""

    @abstractmethod
    def check_model(self, plan: Plan) -> None:
        """Raise ``ValueError`` if weights or tokenizer do not fit the architecture of ``plan``."""

    # ---- common to all tasks

    @property
    def loses_weights(self) -> bool:
        """Return whether a complete run has neither a checkpoint nor exported weights: its result is lost."""
        return not (self.export or self.save_checkpoint or self.save_every)

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint to which a ``resume`` path currently resolves; None if ``resume`` is no path."""
        return find_checkpoint(self.resume) if isinstance(self.resume, Path) else None

    def __call__(self, ctx: TrainingContext) -> None:
        """Train on this rank. Called by ``run_rank`` after the process group is initialized."""
        # The files may have changed since the launch checked them.
        self.check(ctx.plan)
        # The tokenizer's threads would compete with other ranks for cores, and it warns after a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch

        from shardscope.training.loop import train
        from shardscope.training.ranges import Ranges

        # Settings that engines read in setup().
        plan, engine = ctx.plan, ctx.engine
        engine.seed, engine.weight_decay = self.seed, self.weight_decay
        engine.learning_rate = self.peak_rate(plan)
        if plan.recipe.has_adapters:
            engine.frozen_base = self.frozen_base()
        engine.setup(self.begin(engine, plan))
        # Tensor-parallel ranks share their data and need the same dropout masks, so seed by data rank.
        # Before load(), which restores the states of a checkpoint.
        torch.manual_seed(self.seed + 1 + engine.data_rank)
        # This also sets the number of finished steps, from which train() continues.
        resumed = self._load_resumed(ctx)
        batches, num_steps, validation = self.prepare_data(ctx, resumed)
        schedule = self.build_schedule(plan, num_steps)
        # The notebook reads num_steps here if the launch could not know it; the model card reads all.
        ctx.record("training", schedule.describe())
        if ctx.rank == 0:
            self._record_data_source(ctx, resumed)
        if validation is not None:
            engine.validation_state = validation.describe_state()
        print(
            f"training {plan.architecture.name} ({plan.architecture.num_parameters:,} parameters) on "
            f"{self.data_name}: {batches.title}, {batches.rows} per step on this rank",
            flush=True,
        )
        print(
            f"learning rate: {schedule.peak:g}, {schedule.kind}, after "
            f"{format_count(schedule.warmup_steps, 'step')} of warm-up",
            flush=True,
        )
        if self.profile == "nsys":
            Ranges().begin(ctx.device, engine.list_layers())  # To the end of the process, as nsys records.
        is_complete = train(
            ctx,
            engine,
            batches,
            schedule,
            log_every=self.log_every,
            profile=self.profile is True,
            save_checkpoint=self.save_checkpoint,
            save_every=self.save_every,
            keep_last=self.keep_last if self.save_every else None,
            memory_snapshot=self.memory_snapshot,
            validation=validation,
            samples=self.prepare_samples(ctx, num_steps, validation),
            exports=self.export,
        )
        if is_complete and validation is not None and (worse := validation.describe_worse()):
            print(f"warning: {worse}", flush=True)
            ctx.record(WORSE, {"why": worse})
        # A stopped run is not exported: it is resumed from its checkpoint, and exported at its end.
        if self.export and is_complete:
            self._export_model(ctx, validation)

    def _record_data_source(self, ctx: TrainingContext, resumed: Path | None) -> None:
        """Record the data in the run folder, and note changes since the checkpoint ``resumed``."""
        data_source = self.describe_data(ctx.folder)
        if resumed is not None and (notice := describe_changed_data(resumed, data_source)):
            print(notice, flush=True)
        ctx.record("data_source", data_source)
        # With each checkpoint too: a run that is started again in this folder writes its record anew.
        ctx.engine.data_source = select_identity(data_source)

    def _export_model(self, ctx: TrainingContext, validation: Validation | None) -> None:
        """Export the best weights, or without validation the last ones. Called by all ranks."""
        engine = ctx.engine
        best = None if validation is None else validation.best_checkpoint
        done = engine.num_steps_done
        exported = None if validation is None else validation.find_export()
        if exported is not None:
            done = exported.num_steps_done
            print(f"exporting the weights after {format_count(done, 'step')}, the best", flush=True)
        elif validation is not None and best is not None and validation.has_best_checkpoint():
            if validation.is_last_better:
                print("the best weights were not saved: exporting the last ones, the best left", flush=True)
            else:
                engine.load(best)
                done = engine.num_steps_done
                print(f"exporting the weights after {format_count(done, 'step')}, the best", flush=True)
        elif best is not None:
            print(f"the best weights, {best}, are gone: exporting the last ones", flush=True)
        complete = partial(self.complete_export, plan=ctx.plan)
        if not export_when_possible(ctx, complete, has_best=exported is not None):
            return
        ctx.record(ENTRY, {"num_steps_done": done})
        print(f"exported {EXPORT}", flush=True)

    def build_schedule(self, plan: Plan, num_steps: int) -> Schedule:
        """Return the learning rate schedule of a run of ``num_steps`` steps."""
        num_warmup = count_warmup_steps(self.warmup, num_steps, self.schedule)
        return Schedule(
            peak=self.peak_rate(plan), num_steps=num_steps, warmup_steps=num_warmup, kind=self.schedule
        )

    @property
    def planned_steps(self) -> int | None:
        """Total number of steps, as far as it is known before the data are read."""
        return self.num_steps

    @property
    def data_name(self) -> str:
        """Short name of the data, for the log."""
        return self.plain_text.name if self.plain_text is not None else ""

    def describe_data(self, folder: Path) -> dict[str, object]:
        """Return name, SHA-256 and size of the data, for the model card; ``folder`` is the run's.

        Called on rank 0, after :meth:`prepare_data`.
        """
        assert self.plain_text is not None, "a subclass with other data overrides this"
        return describe_file(self.plain_text)

    def prepare_data(
        self, ctx: TrainingContext, resumed: Path | None
    ) -> tuple[Batches, int, Validation | None]:
        """Return this rank's batches, the total number of steps, and the validation, if any.

        Called by all ranks together; ``resumed`` is the checkpoint that they have loaded.
        """
        assert self.num_steps is not None, "a subclass with another length overrides this"
        return self.read_text(ctx), self.num_steps, None

    def prepare_samples(
        self, ctx: TrainingContext, num_steps: int, validation: Validation | None
    ) -> SampleGenerations | None:
        """Return the prompts to answer while training, if any. Called by all ranks together."""
        return None

    def read_text(self, ctx: TrainingContext) -> Windows:
        """Return the windows of the plain text."""
        from shardscope.training.data.windows import Windows, read_tokens

        plan, text = ctx.plan, self.plain_text
        assert text is not None
        # The shipped corpus with the shipped tokenizer is cached; read_tokens knows it by None.
        field = self._field(next(iter(self._list_texts()), "text"))
        tokens = read_tokens(None if text == SHIPPED_TEXT else text, self.encode(), field)
        return Windows(tokens=tokens, seq_len=plan.recipe.seq_len, **self.share_of_rank(ctx))

    def share_of_rank(self, ctx: TrainingContext) -> Share:
        """Return the fields of :class:`Batches` that say which samples this rank reads."""
        return {
            "rows": ctx.plan.num_micro_batches * ctx.plan.recipe.micro_batch_size,
            "rank": ctx.engine.data_rank,
            "num_ranks": ctx.engine.num_data_ranks,
            "seed": self.seed,
        }

    def _load_resumed(self, ctx: TrainingContext) -> Path | None:
        """Load the checkpoint to resume from, if any, the same one on every rank. Return its path."""
        if self.resume is None:
            return None
        import torch
        import torch.distributed as dist

        # Rank 0 chooses for all: another run may be writing or deleting checkpoints at the same time.
        broadcast: list[Choice | Path | None] = [None]
        if ctx.rank == 0:
            broadcast = [choose_for_rank(ctx.folder) if self.resume is True else self.resume_from]
        # On the CPU, because every run has gloo: with NCCL the default device would be the GPU.
        dist.broadcast_object_list(broadcast, src=0, device=torch.device("cpu"))
        checkpoint = broadcast[0]
        if isinstance(checkpoint, Choice):
            if checkpoint.notice:
                print(checkpoint.notice, flush=True)
            check_any_usable(checkpoint, self._field("resume"))
            checkpoint = checkpoint.checkpoint
        if checkpoint is None:
            print("no checkpoint to resume from: starting at step 0", flush=True)
            return None
        # The launch checked it too, but with resume=True another checkpoint may be the newest by now.
        notices = self._check_loads(checkpoint, ctx.plan)
        ctx.engine.load(checkpoint)
        print(
            f"resumed from {checkpoint}: {format_count(ctx.engine.num_steps_done, 'step')} done", flush=True
        )
        for notice in notices:
            print(notice, flush=True)
        return checkpoint

    def _check_loads(self, checkpoint: Path, plan: Plan) -> list[str]:
        base = self.frozen_base() if plan.recipe.has_adapters else None
        return check_loads(checkpoint, plan, self._field("resume"), seed=self.seed, frozen_base=base)

    def check(self, plan: Plan) -> None:
        """Raise ``ValueError`` if the task cannot train ``plan``. Cheap; called again on every rank."""
        check_trained(plan)
        if self.resume_from is not None:
            self._check_loads(self.resume_from, plan)
        self.check_model(plan)
        if plan.recipe.seq_len < 2:
            refuse("Recipe.seq_len", plan.recipe.seq_len, "at least 2: a token and the next", {"seq_len": 2})

    def _list_texts(self) -> dict[str, Path]:
        """Return the user's plain text files by field, that of the training data first."""
        text = self.plain_text
        return {} if text is None or text == SHIPPED_TEXT else {"text": text}

    def check_launch(self, plan: Plan, folder: Path, name: str | None) -> None:
        """Raise ``ValueError`` if a run could not begin, for reasons other than the plan.

        A text cannot be read or is shorter than a sequence, the checkpoint that ``resume=True`` would choose
        now for a run ``name`` in ``folder`` cannot be loaded, a tracker's package or nsys is missing, or the
        disk has no room for checkpoints and export. Warn of what a resumed run does otherwise than before.
        """
        for field, path in self._list_texts().items():
            check_can_be_read(self._field(field), path)
            self._check_text_length(field, path, plan)
        self._check_trackers()
        check_disk_space(self, plan, folder)
        if self.profile == "nsys" and shutil.which("nsys") is None:
            allowed = "True or False: there is no nsys on PATH (NVIDIA Nsight Systems)"
            refuse(self._field("profile"), self.profile, allowed, Value(True))
        checkpoint = self.resume_from
        if self.resume is True and name is not None:
            # The ranks choose again when they start; this warns in the notebook, before anything runs.
            choice = choose_by_name(folder, name)
            check_any_usable(choice, self._field("resume"))
            if choice.notice:
                warn_user(f"{self._field('resume')}: {choice.notice}")
            checkpoint = choice.checkpoint
        if checkpoint is not None:
            for notice in self._check_loads(checkpoint, plan):
                warn_user(f"{self._field('resume')}: {notice}")
            self._warn_of_no_steps(checkpoint)

    def _warn_of_no_steps(self, checkpoint: Path) -> None:
        """Warn if ``checkpoint`` has all of the run's steps. No error: such a run may export the weights."""
        done = (read_json(checkpoint / POSITION_FILE) or {}).get("num_steps_done")
        total = self.planned_steps
        if total is None or not is_int(done) or done < total:
            return
        warn_user(
            f"{self._field('num_steps')} is {total:,}, the total with the steps before; {checkpoint} has "
            f"{format_count(done, 'step')} already, so nothing will be trained"
            f"{', only exported' if self.export else ''}. Nearest fix: num_steps={done + total}, for "
            f"{total:,} more."
        )

    def _check_text_length(self, field: str, path: Path, plan: Plan) -> None:
        """Raise ``ValueError`` if the text in ``field`` has too few tokens for ``plan``."""
        check_text_length(path, self.encode(), self._field(field), plan.recipe.seq_len, None)
