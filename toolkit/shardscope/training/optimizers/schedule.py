"""Learning rate schedule: a linear warm-up, then a cosine decay to a tenth of the peak."""

from __future__ import annotations

import math
from dataclasses import dataclass

FINAL_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Cosine decay with warm-up, as GPT-3 (arXiv:2005.14165 appendix B) and Llama train."""

    peak: float
    """Learning rate after the warm-up."""
    num_steps: int
    """Total number of steps, warm-up included."""
    warmup_steps: int
    """Number of steps in which the rate rises linearly to ``peak``."""

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of ``step`` (from 0)."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + math.cos(math.pi * done)) / 2)
