"""Explanations of FSDP2's peak candidates, one text for each component."""

from __future__ import annotations

from typing import NamedTuple

SOURCE = "torch.distributed.fsdp, fully_shard"


class Words(NamedTuple):
    """Texts for the components of a peak candidate, in the order of its bytes."""

    held: tuple[str, ...]
    gathered: tuple[str, ...]
    explains_layers: bool = True
    """Whether ``held`` includes the layers' saved tensors."""


_ROOT = ("root group (embedding, final norm, head)",)
_WAITING = ("whole gradients until the schedule ends", "received from other stages")
_LEFT_OVER = ("reduce-scatter input of the micro-batch before",)
_GATHERED = (*_ROOT, *_WAITING, "layers that stay gathered", *_LEFT_OVER)
_SENT = ("hidden states and their gradients, sent to other stages",)
_NEXT = ("the next all-gather's output",)
BEFORE_FORWARD = Words(
    ("saved by the layers before", *_SENT),
    (
        *_GATHERED,
        "a layer's parameters",
        "its all-gather's output",
        "the one before",
        "casts of one tensor after another",
    ),
)
IN_FORWARD = Words((*BEFORE_FORWARD.held, "saved, and in use inside one layer"), BEFORE_FORWARD.gathered[:-2])
FIRST = Words(
    ("what the embedding puts out",),
    (
        *_ROOT,
        "its all-gather's output",
        "received from other stages",
        *_LEFT_OVER,
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
AT_LOSS = Words(_SAVED, (*_GATHERED, "the last all-gather's output"))
IN_NORM = Words(
    (*_SAVED, "the final norm's gradients", "a tied head's gradient"),
    (*_GATHERED, "the head's gradient", *_NEXT),
)
_LEFT = ("saved by the layers before this one", "a tied head's gradient", *_SENT)
_KEPT = (
    *_ROOT,
    *_WAITING,
    "the head's gradient",
    "layers that stay gathered",
    "layers that have gone backward, but are not reduced yet",
)
_OWN = (*_KEPT, "this layer's parameters", "the reduce-scatter's input before")
BEFORE_LAYER = Words(
    (*_LEFT, "saved by this layer", "the gradient of its output"), (*_OWN, "all-gathers under way")
)
IN_LAYER = Words(
    (*_LEFT, "in this layer: gradients, and what is left of what it saved"),
    (*_OWN, *_NEXT, "first gradients of its weights"),
)
AFTER_LAYER = Words(
    (*_LEFT, "gradients of this layer's input and output"),
    (*_KEPT, *_NEXT, "this layer's reduce-scatter's input", "its output, or gradients not yet copied"),
)
IN_EMBEDDING = Words(
    (
        "the gradient of the embedding's output",
        "gradients of a tied weight",
        "the embedding's gradient, whole before tp cuts it",
        "held by micro-batches in flight",
    ),
    (
        *_ROOT,
        "the root's gradients",
        "the last layer's reduce-scatter's input",
        "what stays until the schedule ends",
    ),
    explains_layers=False,
)
IN_ROOT = Words(("activations: all are used up",), ("the root's gradients, and its reduce-scatter's input",))
AFTER_ROOT = Words(
    ("activations: all are used up",),
    ("the root's reduce-scatter's input, and its output", "the last gradient that went into it"),
)

IN_LAST_CONVERSION = Words(
    ("held by micro-batches in flight", *_SENT),
    (
        *_ROOT,
        "the root's gradients, and their casts to the reduction type",
        "what stays until the schedule ends",
    ),
    explains_layers=False,
)
REDUCING = Words(
    _SENT,
    (
        "layers that are gathered still",
        "whole gradients that are not reduced yet",
        "the reduce-scatter's input",
        "received from other stages",
    ),
    explains_layers=False,
)
