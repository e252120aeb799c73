"""Pipeline stages of a transformers model, for ``torch.distributed.pipelining``.

Each stage has some of the model's decoder layers, the first one the embedding, and the last one the final
norm and the head. What passes between stages are hidden states; the loss is the schedule's.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class StageModule(torch.nn.Module):  # type: ignore[misc]
    """One stage: token ids or hidden states in, hidden states or logits out.

    Under tensor parallelism (``tp_mesh``) the stream is cut along the sequence, and each rank passes on its
    own part: stages send plain tensors.
    """

    def __init__(
        self, part: torch.nn.Module, *, is_first: bool, is_last: bool, tp_mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        self.model = part
        self.is_first, self.is_last = is_first, is_last
        self._tp_mesh = tp_mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence), or (batch, sequence, hidden), to (batch, sequence, hidden or vocabulary)."""
        if self._tp_mesh is not None and not self.is_first:
            x = DTensor.from_local(x, self._tp_mesh, [Shard(1)], run_check=False)
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        # The last stage is the whole model's own forward, whatever that does to its logits.
        found = (self.model if self.is_last else self.model.model)(**given, use_cache=False)
        states: torch.Tensor = found.logits if self.is_last else found.last_hidden_state
        if isinstance(states, DTensor) and not self.is_last:
            return states.redistribute(placements=[Shard(1)]).to_local()
        return states
