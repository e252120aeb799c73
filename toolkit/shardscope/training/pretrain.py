"""``Pretrain``: a model of the plan's architecture, from fresh weights, on real text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shardscope.frameworks.registry import check_trained
from shardscope.training.tokenizer import SHIPPED_TEXT, VOCAB_SIZE
from shardscope.validation import flag, real_number, refuse, whole_number


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Train from scratch on text: ``shardscope.launch(plan, Pretrain())``.

    Each data-parallel rank reads its own windows of the text. Every step logs ``loss``, ``learning_rate``,
    ``grad_norm``, ``step_seconds``, ``tokens_per_second`` and memory per rank. Raises ``ValueError`` naming
    the field, its value, what is allowed and the nearest fix.
    """

    num_steps: int = 50
    """Optimizer steps in all, those before ``resume_from`` included; 1 to 10,000,000."""
    learning_rate: float = 1e-3
    """The peak rate; right for a few million parameters, too high for billions (there 3e-4)."""
    warmup_steps: int | None = None
    """Steps that rise to the peak; None is a tenth of ``num_steps``, 100 at most."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay, on matrices only; 0 to 1."""
    seed: int = 0
    """Of the initial weights and of the order of the text; 0 to 2^31 - 1."""
    text: Path | None = None
    """A UTF-8 text file; None is *Moby-Dick*, which ships with Shardscope."""
    profile: bool = False
    """Record a few steady steps on every rank with torch.profiler; of a short run, the last."""
    memory_snapshot: bool = False
    """Keep torch's history of GPU allocations over the first steps, in the run folder, for torch's viewer."""
    log_every: int = 1
    """Steps between lines of metrics; the last step is always logged."""
    save_checkpoint: bool = False
    """Save a checkpoint after the last step. A stopped run saves one anyway."""
    resume_from: Path | None = None
    """A checkpoint folder of an earlier run of the same plan."""

    preload: ClassVar[tuple[str, ...]] = (
        "transformers.models.llama.modeling_llama",
        "tokenizers",
        "shardscope.training.loop",
    )
    """Modules that a launcher imports once before it forks ranks; none of them initialises CUDA."""

    def __post_init__(self) -> None:
        whole_number("Pretrain.num_steps", self.num_steps, low=1, high=10**7)
        real_number("Pretrain.learning_rate", self.learning_rate, low=0.0, high=10.0)
        if self.warmup_steps is not None:
            whole_number("Pretrain.warmup_steps", self.warmup_steps, low=0, high=self.num_steps)
        real_number("Pretrain.weight_decay", self.weight_decay, low=0.0, high=1.0)
        whole_number("Pretrain.seed", self.seed, low=0, high=2**31 - 1)
        flag("Pretrain.profile", self.profile)
        flag("Pretrain.memory_snapshot", self.memory_snapshot)
        whole_number("Pretrain.log_every", self.log_every, low=1, high=10**7)
        flag("Pretrain.save_checkpoint", self.save_checkpoint)
        for field in ("text", "resume_from"):
            self._check_path(field)

    def __call__(self, ctx: Any) -> None:
        """Train on this rank; called by the launcher with the process group up."""
        self.check(ctx.plan)
        # The tokenizer's own threads would fight the other ranks for cores, and it warns after a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch

        from shardscope.training.data import Windows, read_tokens
        from shardscope.training.loop import train
        from shardscope.training.model import build_model
        from shardscope.training.schedule import Schedule

        plan, engine = ctx.plan, ctx.engine
        engine.seed, engine.fresh_weights = self.seed, True
        engine.learning_rate, engine.weight_decay = self.learning_rate, self.weight_decay
        engine.setup(lambda: build_model(plan.architecture, plan.recipe.dropout))
        if self.resume_from is not None:
            engine.load(self.resume_from)
        # Ranks of one tensor group drop out the same numbers: they have one share of the data.
        torch.manual_seed(self.seed + 1 + engine.data_rank)
        windows = Windows(
            tokens=read_tokens(self.text),
            seq_len=plan.recipe.seq_len,
            rows=plan.num_micro_batches * plan.recipe.micro_batch_size,
            rank=engine.data_rank,
            num_ranks=engine.num_data_ranks,
            seed=self.seed,
        )
        warmup = min(100, self.num_steps // 10) if self.warmup_steps is None else self.warmup_steps
        schedule = Schedule(peak=self.learning_rate, num_steps=self.num_steps, warmup_steps=warmup)
        print(
            f"training {plan.architecture.name} ({plan.architecture.num_parameters:,} parameters) on "
            f"{(self.text or SHIPPED_TEXT).name}: {windows.num_windows:,} windows of {windows.seq_len:,} "
            f"tokens, {windows.rows} a step on this rank",
            flush=True,
        )
        train(
            ctx,
            engine,
            windows,
            schedule,
            log_every=self.log_every,
            profile=self.profile,
            save_checkpoint=self.save_checkpoint,
            memory_snapshot=self.memory_snapshot,
        )

    def check(self, plan: Any) -> None:
        """Raise ``ValueError`` if ``plan`` cannot train on text; cheap, and called again on every rank."""
        check_trained(plan)
        vocab_size = plan.architecture.vocab_size
        if vocab_size < VOCAB_SIZE:
            refuse(
                "Architecture.vocab_size",
                vocab_size,
                f"at least {VOCAB_SIZE:,}, the tokens of the tokenizer that Pretrain reads text with",
                f"vocab_size={VOCAB_SIZE}",
            )
        if plan.recipe.seq_len < 2:
            refuse("Recipe.seq_len", plan.recipe.seq_len, "at least 2: a token and the next", "seq_len=2")

    def _check_path(self, field: str) -> None:
        value = getattr(self, field)
        if value is None:
            return
        if not isinstance(value, str | Path):
            refuse(f"Pretrain.{field}", value, "a path or None", "None")
        # Absolute from here on: the kernel may change folders before it launches, or launch from another.
        path = Path(value).expanduser().absolute()
        kind = "an existing text file" if field == "text" else "an existing checkpoint folder"
        if not (path.is_file() if field == "text" else path.is_dir()):
            refuse(f"Pretrain.{field}", str(value), f"{kind}, or None", "None")
        object.__setattr__(self, field, path)
