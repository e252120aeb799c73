"""One pipeline stage of a transformers model, for ``torch.distributed.pipelining``.

Each stage has some of the model's decoder layers, the first one the embedding, and the last one the final
norm and the head. What passes between stages are hidden states; the loss is the schedule's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardscope.training.recompute import decoder_layers
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.plan import Plan

FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "granite"),
    *("phi3", "olmo2", "deepseek_v3", "starcoder2"),
)
"""Families whose models are ``model.embed_tokens``, ``model.layers``, ``model.norm`` and ``lm_head``, and
take hidden states in the embedding's place."""


def check_pipeline(plan: Plan) -> None:
    """Raise ``ValueError`` for what is not cut into stages here, or not scheduled by torch."""
    degrees = plan.degrees
    if degrees.vpp > 1:
        refuse("Layout.vpp", degrees.vpp, "1 in a rehearsal: stages are played one at a time", "vpp=1")
    if degrees.tp > 1:
        refuse(
            "Layout.tp",
            degrees.tp,
            "1 with pp > 1 in a rehearsal: what passes between stages is whole",
            "tp=1",
        )
    if plan.architecture.model_type not in FAMILIES:
        refuse(
            "Architecture.model_type",
            plan.architecture.model_type,
            f"{', '.join(FAMILIES)} with pp > 1: others' models do not come apart in the same places",
            "pp=1",
        )
    if plan.recipe.method != "full":
        refuse("Recipe.method", plan.recipe.method, "'full' with pp > 1: peft wraps the whole model", "pp=1")


class StageModule(torch.nn.Module):  # type: ignore[misc]
    """One stage: token ids or hidden states in, hidden states or logits out."""

    def __init__(
        self, model: torch.nn.Module, first_layer: int, num_layers: int, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        body: Any = model.model
        layers = decoder_layers(model)[first_layer : first_layer + num_layers]
        body.layers = torch.nn.ModuleList(layers)
        kinds = getattr(model.config, "layer_types", None)
        if kinds is not None:
            model.config.layer_types = kinds[first_layer : first_layer + num_layers]
        if not is_first:
            body.embed_tokens = None
        if not is_last:
            body.norm = torch.nn.Identity()
            model.lm_head = None
        self.model = model
        self.is_first, self.is_last = is_first, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence), or (batch, sequence, hidden), to (batch, sequence, hidden or vocabulary)."""
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        # The last stage is the whole model's own forward, whatever that does to its logits.
        found = (self.model if self.is_last else self.model.model)(**given, use_cache=False)
        states: torch.Tensor = found.logits if self.is_last else found.last_hidden_state
        return states
