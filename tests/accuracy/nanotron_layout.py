"""nanotron's partition of layers into pipeline stages: by cost, the head's included, not evenly."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardscope.core.architecture import Architecture
from shardscope.core.layout import Degrees, Layout
from shardscope.core.ops import ceil_div
from shardscope.frameworks.megatron.layout import MegatronLayout


@dataclass(frozen=True, kw_only=True)
class NanotronLayout(MegatronLayout):
    """Megatron's degrees with nanotron's stages (models/base.py, ``build_model``; models/llama.py,
    ``get_block_compute_costs``): a stage takes blocks until the cost of all so far reaches its share."""

    @classmethod
    def of(cls, layout: Layout) -> NanotronLayout:
        """The same degrees and options."""
        return cls(**{field.name: getattr(layout, field.name) for field in fields(layout)})

    def stage_layers(self, architecture: Architecture, degrees: Degrees) -> list[int]:
        """Layers on each stage, first to last; the last one may have the head alone."""
        layers = architecture.num_hidden_layers
        one = sum(architecture.layer_matrix_parameters(0).values())
        total = layers * one + architecture.vocab_size * architecture.hidden_size
        until = [min(layers, ceil_div(total * (stage + 1), degrees.pp * one)) for stage in range(degrees.pp)]
        return [end - start for start, end in zip([0, *until], until, strict=False)]
