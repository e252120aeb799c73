"""DeepSpeed's ``PipelineModule`` with one layer per stage: this rank's stage of a transformers model.

Import it after :func:`import_deepspeed`: importing ``deepspeed`` chooses its accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule

TIED = "embedding"
"""DeepSpeed's key of the weight that the first and the last stage share."""


class Stage(torch.nn.Module):
    """Pipeline stage of a transformers model: token ids or hidden states in, hidden states or logits out."""

    def __init__(self, part: torch.nn.Module, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.part = part
        self.is_first, self.is_last = is_first, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stage: (batch, sequence[, hidden]) in, (batch, sequence, hidden or vocabulary) out."""
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        if self.is_last:
            # The causal language model's own forward, which may scale its logits.
            logits: torch.Tensor = self.part(**inputs, use_cache=False).logits
            return logits
        body = self.part.get_submodule("model")
        hidden_states: torch.Tensor = body(**inputs, use_cache=False).last_hidden_state
        return hidden_states


class StagedModule(PipelineModule):  # type: ignore[misc]
    """Pipeline of ``num_stages`` stages, of which this rank has ``part``; ``tied`` has the tied embedding.

    DeepSpeed splits a list of layers by their weights. Here the list has one layer per stage, so that the
    split is the plan's, and the decoder layers of a stage share rotary angles and mask, as in transformers'
    forward.
    """

    def __init__(
        self,
        part: torch.nn.Module,
        compute_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        stage: int,
        num_stages: int,
        is_tied: bool,
        tied: torch.nn.Module | None,
    ) -> None:
        self._is_tied = is_tied
        # In a list, so that torch does not register it as a submodule.
        self._tied = [tied]
        spec = LayerSpec(Stage, part, is_first=stage == 0, is_last=stage == num_stages - 1)
        # PipelineModule prints its layers and its seed.
        with redirect_stdout(StringIO()):
            # Each stage builds only the layer with its own index, so that all entries may be this rank's.
            super().__init__(
                [spec] * num_stages, num_stages, loss_fn=compute_loss, partition_method="uniform"
            )

    def _index_tied_modules(self) -> dict[str, dict[str, object]]:
        """Return the tied embedding's ranks, group and module, which DeepSpeed keeps equal on both stages.

        DeepSpeed's own declaration, ``TiedLayerSpec``, is a layer; here the tied module is inside one.
        """
        grid, last = self._grid, self.num_stages - 1
        comms: dict[str, dict[str, object]] = {}
        if not self._is_tied:
            return comms
        for data_rank in range(grid.data_parallel_size):
            ranks = [stage * grid.data_parallel_size + data_rank for stage in (0, last)]
            group = dist.new_group(ranks)
            if grid.global_rank in ranks:
                (tied,) = self._tied
                assert tied is not None
                comms[TIED] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": tied}
                # The gradient norm counts the weight once, on the first stage.
                vars(tied.weight)["ds_pipe_replicated"] = grid.global_rank != ranks[0]
        return comms

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def get_tied_weights_and_groups(self) -> list[tuple[torch.nn.Parameter, dist.ProcessGroup]]:
        """Return the weights whose gradients DeepSpeed sums over their group at the end of the schedule."""
        return [(comm["module"].weight, comm["group"]) for comm in self.tied_comms.values()]
