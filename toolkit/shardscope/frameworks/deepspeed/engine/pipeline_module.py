"""DeepSpeed's ``PipelineModule`` over a transformers model in parts: one of its layers is a whole stage.

Imported once ``deepspeed`` knows its accelerator, for it is the base of a class here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule

TIED = "embedding"
"""DeepSpeed's key of what the first stage and the last both have."""


class Stage(torch.nn.Module):  # type: ignore[misc]
    """Pipeline stage of a transformers model: token ids or hidden states in, hidden states or logits out."""

    def __init__(self, part: torch.nn.Module, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.part = part
        self.is_first, self.is_last = is_first, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stage: (batch, sequence[, hidden]) in, (batch, sequence, hidden or vocabulary) out."""
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        # The last stage runs the causal language model's own forward, which may scale its logits.
        found = (self.part if self.is_last else self.part.model)(**given, use_cache=False)
        states: torch.Tensor = found.logits if self.is_last else found.last_hidden_state
        return states


class StagedModule(PipelineModule):  # type: ignore[misc]
    """``part`` on its own stage of a pipeline of ``num_stages``; ``tied`` has the embedding's weight.

    DeepSpeed cuts a list of layers where weights are even; here it has one for each stage, so that the cut is
    the plan's, and layers of a stage share their rotary angles and mask as transformers' own forward does.
    """

    def __init__(
        self,
        part: torch.nn.Module,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        stage: int,
        num_stages: int,
        is_tied: bool,
        tied: torch.nn.Module | None,
    ) -> None:
        self._is_tied = is_tied
        # In a list, so that torch does not count it among this module's own.
        self._tied = [tied]
        spec = LayerSpec(Stage, part, is_first=stage == 0, is_last=stage == num_stages - 1)
        # It prints its layers and its seed.
        with redirect_stdout(StringIO()):
            # Each stage builds the one of its own number, whose parts are this rank's.
            super().__init__([spec] * num_stages, num_stages, loss_fn=loss_of, partition_method="uniform")

    def _index_tied_modules(self) -> dict[str, Any]:
        """The embedding on the first stage and the head on the last, which DeepSpeed keeps equal.

        Its own way is a layer of two places (``TiedLayerSpec``); a stage here is one layer.
        """
        grid, last, found = self._grid, self.num_stages - 1, {}
        if not self._is_tied:
            return {}
        for place in range(grid.data_parallel_size):
            ranks = [stage * grid.data_parallel_size + place for stage in (0, last)]
            group = dist.new_group(ranks)
            if grid.global_rank in ranks:
                (tied,) = self._tied
                assert tied is not None
                found[TIED] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": tied}
                # Of both, a norm counts the first stage's.
                tied.weight.ds_pipe_replicated = grid.global_rank != ranks[0]
        return found

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def get_tied_weights_and_groups(self) -> list[tuple[torch.nn.Parameter, Any]]:
        """What DeepSpeed sums gradients of, when the schedule has ended."""
        return [(comm["module"].weight, comm["group"]) for comm in self.tied_comms.values()]
