"""Explanations of FSDP2's peak candidates, one text for each component."""

from __future__ import annotations

from typing import NamedTuple

SOURCE = "torch.distributed.fsdp, fully_shard"


class Explanations(NamedTuple):
    """Texts for the components of a peak candidate, in the order of its bytes."""

    activations: tuple[str, ...]
    gathered: tuple[str, ...]
    explains_layers: bool = True
    """Whether ``activations`` include the layers' saved tensors."""


_ROOT = ("root group (embedding, final norm, head)",)
_PIPELINE = ("unsharded gradients until the schedule ends", "receive buffers of the pipeline")
_PREVIOUS = ("the previous micro-batch's last reduce-scatter input",)
_GATHERED = (*_ROOT, *_PIPELINE, "layers that stay all-gathered", *_PREVIOUS)
_SENT = ("hidden states and their gradients, sent to other stages",)
_NEXT = ("the next all-gather's output",)
BEFORE_FORWARD = Explanations(
    ("saved by the layers before", *_SENT),
    (
        *_GATHERED,
        "a layer's parameters",
        "its all-gather's output",
        "the previous all-gather's output",
        "casts of one tensor after another",
    ),
)
IN_FORWARD = Explanations(
    (*BEFORE_FORWARD.activations, "saved, and in use inside one layer"), BEFORE_FORWARD.gathered[:-2]
)
FIRST_ALL_GATHER = Explanations(
    ("the embedding's output",),
    (
        *_ROOT,
        "its all-gather's output",
        "receive buffers of the pipeline",
        *_PREVIOUS,
        "the first layer's parameters",
        "their all-gather's output",
    ),
    explains_layers=False,
)
_SAVED = (
    "saved by the layers",
    "saved by the final norm and for the head",
    "autocast's copies of weights",
    *_SENT,
)
AT_LOSS = Explanations(_SAVED, (*_GATHERED, "the last all-gather's output"))
IN_NORM = Explanations(
    (*_SAVED, "the final norm's gradients", "a tied head's gradient"),
    (*_GATHERED, "the head's gradient", *_NEXT),
)
_SAVED_BEFORE = ("saved by the layers before this one", "a tied head's gradient", *_SENT)
_AROUND_LAYER = (
    *_ROOT,
    *_PIPELINE,
    "the head's gradient",
    "layers that stay all-gathered",
    "layers after their backward, not reduced yet",
)
_WITH_LAYER = (*_AROUND_LAYER, "this layer's parameters", "the previous reduce-scatter's input")
BEFORE_LAYER = Explanations(
    (*_SAVED_BEFORE, "saved by this layer", "the gradient of its output"),
    (*_WITH_LAYER, "pending all-gathers"),
)
IN_LAYER = Explanations(
    (*_SAVED_BEFORE, "in this layer: gradients, and saved tensors not freed yet"),
    (*_WITH_LAYER, *_NEXT, "new gradients of its weights"),
)
AFTER_LAYER = Explanations(
    (*_SAVED_BEFORE, "gradients of this layer's input and output"),
    (
        *_AROUND_LAYER,
        *_NEXT,
        "this layer's reduce-scatter's input",
        "its output, or gradients not yet copied",
    ),
)
IN_EMBEDDING = Explanations(
    (
        "the gradient of the embedding's output",
        "gradients of a tied weight",
        "the embedding's gradient, before tp shards it",
        "saved by micro-batches in flight",
    ),
    (
        *_ROOT,
        "the root's gradients",
        "the last layer's reduce-scatter's input",
        "parameters, gradients and receive buffers until the schedule ends",
    ),
    explains_layers=False,
)
IN_ROOT = Explanations(
    ("activations: all are freed",), ("the root's gradients, and its reduce-scatter's input",)
)
AFTER_ROOT = Explanations(
    ("activations: all are freed",),
    ("the root's reduce-scatter's input, and its output", "the last gradient that was copied into it"),
)
IN_LAST_CAST = Explanations(
    ("saved by micro-batches in flight", *_SENT),
    (
        *_ROOT,
        "the root's gradients, and their casts to the reduction type",
        "parameters, gradients and receive buffers until the schedule ends",
    ),
    explains_layers=False,
)
REDUCING = Explanations(
    _SENT,
    (
        "layers still all-gathered",
        "unsharded gradients that are not reduced yet",
        "the reduce-scatter's input",
        "receive buffers of the pipeline",
    ),
    explains_layers=False,
)
