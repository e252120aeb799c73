"""Sample generations while training: the same prompts answered before, during and after a run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.records.samples import append_samples
from shardscope.training.examples.conversation import Prompt, decode_answer
from shardscope.training.generation import generate_greedily

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardscope.training.engine import Context, Engine


@dataclass(frozen=True, kw_only=True)
class SampleGenerations:
    """Prompts of one run, and when they are answered."""

    prompts: tuple[Prompt, ...]
    every: int
    """Steps between generations."""
    max_new_tokens: int
    end_ids: frozenset[int]
    """Token ids that end an answer."""
    tokenizer: PreTrainedTokenizerBase

    def is_due(self, num_steps_done: int, num_steps: int) -> bool:
        """Return whether to generate after a step."""
        return num_steps_done % self.every == 0 or num_steps_done == num_steps

    def run(self, ctx: Context, engine: Engine) -> None:
        """Generate an answer to each prompt, on all ranks together; rank 0 writes them to the run folder."""
        ids = [prompt.ids for prompt in self.prompts]
        answers = generate_greedily(engine, ids, self.max_new_tokens, self.end_ids)
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
        print(f"generated {len(answers):,} samples after {engine.num_steps_done:,} steps", flush=True)
