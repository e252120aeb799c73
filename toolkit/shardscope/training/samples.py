"""Sample generations while training: the same prompts answered before, during and after a run."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardscope.core.number_format import format_count
from shardscope.records.samples import append_samples
from shardscope.training.examples.conversation import Prompt, decode_answer
from shardscope.training.generation import generate_greedily

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardscope.training.engine import Context, Engine


MAX_SHARE = 0.25
"""Maximum share of the training time for generations whose steps the user has not chosen."""


@dataclass(kw_only=True)
class SampleGenerations:
    """Prompts of one run, and when they are answered."""

    prompts: tuple[Prompt, ...]
    every: int
    """Steps between generations."""
    max_new_tokens: int
    end_ids: frozenset[int]
    """Token ids that end an answer."""
    tokenizer: PreTrainedTokenizerBase
    is_limited: bool = False
    """Whether generations are left out that would take over :data:`MAX_SHARE` of the time, except after half
    of the steps and after the last."""
    _trained_since: float | None = None
    """Time of the first generation's end."""
    _seconds: float = 0.0
    """Time of all generations after the first."""
    _last_seconds: float = 0.0

    def is_due(self, num_steps_done: int, num_steps: int) -> bool:
        """Return whether to generate after a step, the same on all ranks."""
        if num_steps_done == num_steps:
            return True
        if num_steps_done % self.every:
            return False
        is_middle = num_steps_done == num_steps // self.every // 2 * self.every
        return is_middle or not self.is_limited or self._has_time()

    def _has_time(self) -> bool:
        began = time.monotonic() if self._trained_since is None else self._trained_since
        training = time.monotonic() - began - self._seconds
        has_time = torch.tensor(self._seconds + self._last_seconds <= MAX_SHARE * training)
        # In host memory, for which every run has gloo: clocks differ, so that rank 0 decides.
        dist.broadcast(has_time, src=0)
        return bool(has_time)

    def run(self, ctx: Context, engine: Engine) -> None:
        """Generate an answer to each prompt, on all ranks together; rank 0 writes them to the run folder."""
        began = time.monotonic()
        ids = [prompt.ids for prompt in self.prompts]
        answers = generate_greedily(engine, ids, self.max_new_tokens, self.end_ids)
        ended = time.monotonic()
        self._last_seconds = ended - began
        if self._trained_since is None:
            self._trained_since = ended
        else:
            self._seconds += self._last_seconds
        if ctx.rank == 0:
            texts = [decode_answer(self.tokenizer, answer) for answer in answers]
            # A full disk costs a sample, not the training run.
            with contextlib.suppress(OSError):
                append_samples(
                    ctx.folder,
                    [
                        {
                            "step": engine.num_steps_done,
                            "prompt": prompt.text,
                            "text": text,
                            "is_complete": bool(answer) and answer[-1] in self.end_ids,
                        }
                        for prompt, text, answer in zip(self.prompts, texts, answers, strict=True)
                    ],
                )
        print(
            f"generated {format_count(len(answers), 'sample')} after "
            f"{format_count(engine.num_steps_done, 'step')}, in {self._last_seconds:.1f} s",
            flush=True,
        )
