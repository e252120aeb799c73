"""Validation while training: the loss on other samples every few steps, and early stopping by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shardscope.core.number_format import format_count
from shardscope.records.json_files import read_json
from shardscope.records.metrics_table import compute_perplexity
from shardscope.training.checkpoints.folders import BEST, CHECKPOINTS, POSITION_FILE, is_complete
from shardscope.training.data.batches import Batches
from shardscope.training.micro_batches import count_labels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardscope.training.engine import Context, Engine


class BestExport(NamedTuple):
    """Weights that were exported while training."""

    loss: float
    num_steps_done: int


@dataclass
class Validation:
    """Validation of one run, and the state of its early stopping."""

    batches: Batches
    """Samples in order (``Batches.in_order``)."""
    every: int
    """Steps between validations."""
    patience: int | None = None
    """Validations without a lower loss after which the run stops; None: no early stopping."""
    best_loss: float = math.inf
    saved_loss: float = math.inf
    """Loss of the best checkpoint: higher than ``best_loss`` if the disk did not take that one."""
    num_without_improvement: int = 0
    best_checkpoint: Path | None = None
    first_loss: float | None = None
    """Loss of the initial weights; None in a resumed run."""
    last_loss: float | None = None
    best_export: BestExport | None = None
    """The best weights where nodes share no folder; None before the first, and on a shared one."""
    _saved_before: tuple[float, Path | None] = (math.inf, None)
    """Loss and path of the best checkpoint before the last one."""

    @classmethod
    def resume(
        cls,
        batches: Batches,
        every: int,
        patience: int | None,
        state: Mapping[str, object],
        resumed: Path | None = None,
    ) -> Validation:
        """Return a validation that continues ``state``, which :meth:`describe_state` returned.

        ``resumed`` is the checkpoint that has it. Without the best checkpoint, the count begins again. Called
        by all ranks together.
        """
        validation = cls(batches, every, patience)
        if patience is None:  # The last weights are exported, not the best ones of the run before.
            return validation
        best, number = state.get("best_loss"), state.get("num_without_improvement")
        path = state.get("best_checkpoint")
        if isinstance(best, float) and isinstance(number, int) and isinstance(path, str):
            # A run folder that was moved or copied has it beside the other checkpoints.
            candidates = [Path(path), *([] if resumed is None else [resumed.parent / BEST])]
            found = _find_best(candidates, best)
            if found is None:
                print(f"the best weights so far, {path}, are gone: the best of this run are kept", flush=True)
                return validation
            validation.best_loss, validation.num_without_improvement = best, number
            validation.saved_loss = best
            validation.best_checkpoint = found
        return validation

    def describe_state(self) -> dict[str, object] | None:
        """Return the state for a checkpoint; None if there is none."""
        if self.best_checkpoint is None:
            return None
        return {
            "best_loss": self.saved_loss,
            "num_without_improvement": self.num_without_improvement,
            "best_checkpoint": str(self.best_checkpoint),
        }

    def is_due(self, num_steps_done: int, num_steps: int) -> bool:
        """Return whether to validate after a step."""
        return num_steps_done % self.every == 0 or num_steps_done == num_steps

    @property
    def is_exhausted(self) -> bool:
        """Return whether early stopping ends the run."""
        return self.patience is not None and self.num_without_improvement >= self.patience

    def has_best_checkpoint(self) -> bool:
        """Return whether every rank finds the best checkpoint, so that all of them can load it together."""
        is_there = self.best_checkpoint is not None and is_complete(self.best_checkpoint)
        answers = [False] * dist.get_world_size()
        dist.all_gather_object(answers, is_there)
        return all(answers)

    def describe_worse(self) -> str:
        """Return that the weights that are kept have a higher loss than the initial ones; else empty."""
        kept = self.last_loss if self.patience is None or self.is_last_better else self.saved_loss
        if self.first_loss is None or kept is None or kept <= self.first_loss:
            return ""
        return (
            f"the model became worse: its validation loss was {self.first_loss:.4g} before the first step, "
            f"and is {kept:.4g}. A lower learning_rate usually helps"
        )

    def run(self, ctx: Context, engine: Engine) -> bool:
        """Evaluate and log the loss. Return whether the weights are the best so far and should be saved.

        The initial weights are never the best: an optimizer has no state to save before its first step.
        """
        if engine.objective is not None:
            metrics = engine.objective.validate(engine, self.batches)
            loss, others = metrics.loss, metrics.rewards
        else:
            loss = compute_mean_loss(engine, self.batches)
            others = {"perplexity": compute_perplexity(loss)}
        self.last_loss = loss
        if engine.num_steps_done == 0:
            self.first_loss = loss
        step = max(0, engine.num_steps_done - 1)
        if ctx.rank == 0:
            named = {f"validation_{name}": value for name, value in others.items()}
            ctx.log(step=step, validation_loss=loss, **named)
        print(f"validation after {format_count(engine.num_steps_done, 'step')}: loss {loss:.4g}", flush=True)
        if self.patience is None or engine.num_steps_done == 0:
            return False
        self.num_without_improvement = 0 if loss < self.best_loss else self.num_without_improvement + 1
        self.best_loss = min(loss, self.best_loss)
        is_better = loss < self.saved_loss
        if is_better:
            self._saved_before = self.saved_loss, self.best_checkpoint
            self.saved_loss, self.best_checkpoint = loss, ctx.folder / CHECKPOINTS / BEST
        engine.validation_state = self.describe_state()
        return is_better

    def forget_best(self) -> None:
        """Go back to the best checkpoint that is on disk, if any: the last one was not saved."""
        self.saved_loss, self.best_checkpoint = self._saved_before

    def find_export(self) -> BestExport | None:
        """Return the exported best weights, unless the last ones are better: the disk did not take those."""
        exported, last = self.best_export, self.last_loss
        return None if exported is None or (last is not None and last < exported.loss) else exported

    @property
    def is_last_better(self) -> bool:
        """Return whether the last weights are better than the best ones on disk."""
        return self.last_loss is not None and self.last_loss < self.saved_loss


def _find_best(candidates: Sequence[Path], loss: float) -> Path | None:
    """Return the checkpoint with that best loss, the same on all ranks; None if there is none.

    At the path of a run folder that was moved there may be another run by now.
    """
    best: list[Path | None] = [None]
    for path in reversed(candidates):
        state = (read_json(path / POSITION_FILE) or {}).get("validation")
        if isinstance(state, dict) and state.get("best_loss") == loss:
            best = [path]
    if dist.is_initialized():  # Rank 0 looks for all: ranks that disagree would hang in the next save.
        dist.broadcast_object_list(best, src=0, device=torch.device("cpu"))
    return best[0]


def compute_mean_loss(engine: Engine, batches: Batches) -> float:
    """Return the mean loss over all labels of ``batches``, the same on all ranks."""
    # Each batch's mean counts by its number of labels. In host memory, for which every run has gloo.
    totals = torch.zeros(2, dtype=torch.float64)
    for step in range(math.ceil(batches.steps_per_epoch)):
        batch = batches.build_batch(step)
        num_labels = count_labels(batch)
        totals += torch.tensor([engine.evaluate(batch) * num_labels, num_labels], dtype=torch.float64)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])
