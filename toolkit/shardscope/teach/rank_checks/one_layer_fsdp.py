"""The exercise on FSDP: one linear layer whose weight is sharded over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from shardscope.teach.rank_checks.collectives import Call, CollectiveCounter, describe_calls
from shardscope.teach.rank_checks.comparison import find_tensors, is_near, make_batch
from shardscope.teach.rank_checks.learner import Learner, ProblemError

IN_FEATURES, OUT_FEATURES = 48, 32
FSDP_RATE = 0.5


class ShardedLayer(Protocol):
    """An instance of the learner's class: a module with a shard of the weights."""

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return the parameters."""

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Return what the whole layer would return."""


class MakeShardedLayer(Protocol):
    """The learner's class."""

    def __call__(self, linear: torch.nn.Linear) -> ShardedLayer:
        """Create the module with this rank's shard of the layer."""


def check_one_layer_fsdp(learner: Learner, answer: MakeShardedLayer) -> str:
    """Compare outputs, input gradients and trained weights with the whole layer in one process."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False)
    weight = linear.weight.detach().clone()
    given = copy.deepcopy(linear)
    layers: list[ShardedLayer] = []
    learner.call(lambda: layers.append(answer(given)))
    layer = layers[0]
    if not isinstance(layer, torch.nn.Module):
        raise ProblemError(f"The class makes a {type(layer).__name__}; it should be a torch.nn.Module.")
    shards = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    _check_shard(learner, layer, shards, weight.numel())
    optimizer = torch.optim.SGD(shards, lr=FSDP_RATE)
    identity = torch.eye(IN_FEATURES)
    calls: tuple[list[Call], list[Call]] = ([], [])
    for step in range(2):
        calls = _run_pass(learner, layer, weight, step)
        optimizer.step()
        optimizer.zero_grad()
        gradients = [_compute_weight_gradient(weight, rank, step) for rank in range(learner.world_size)]
        changed = weight - FSDP_RATE * torch.stack(gradients).mean(0)
        with torch.no_grad():
            got = _call_layer(learner, layer, identity)
        _compare_weights(got.t(), weight, changed, gradients, learner.rank)
        weight = changed
    _check_calls(*calls)
    return (
        f"Outputs, gradients and trained weights equal those of the whole layer. Forward made "
        f"{describe_calls(calls[0])}, backward {describe_calls(calls[1])}."
    )


def _check_shard(
    learner: Learner, layer: torch.nn.Module, shards: Sequence[torch.nn.Parameter], whole: int
) -> None:
    """Raise :class:`ProblemError` unless this rank holds its share of the weights and no more."""
    held = sum(parameter.numel() for parameter in layer.parameters())
    part = whole // learner.world_size
    if sum(shard.numel() for shard in shards) == 0:
        raise ProblemError(
            "The module has no parameter that trains: put this rank's slice into a torch.nn.Parameter."
        )
    if held != part:
        raise ProblemError(
            f"The parameters of the module on rank {learner.rank} have {held:,} weights; a shard of "
            f"{whole:,} over {learner.world_size} ranks has {part:,}."
        )
    # A slice is a view of the whole weight: as long as it lives, so does all of it.
    stored = {shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes() for shard in shards}
    others = find_tensors(layer, shards)
    others_bytes = sum(one.untyped_storage().nbytes() for one in others)
    size = shards[0].element_size()
    if sum(stored.values()) > part * size or others_bytes >= whole * size:
        raise ProblemError(
            "The module still keeps the whole weight alive, by an attribute or because the shard is a "
            "view of it: copy this rank's slice with .clone()."
        )


def _call_layer(learner: Learner, layer: ShardedLayer, batch: torch.Tensor) -> torch.Tensor:
    output = learner.call(lambda: layer(batch))
    if not isinstance(output, torch.Tensor):
        raise ProblemError(
            f"forward returns {type(output).__name__}; expected: a tensor, the layer's output."
        )
    return output


def _run_pass(
    learner: Learner, layer: ShardedLayer, weight: torch.Tensor, step: int
) -> tuple[list[Call], list[Call]]:
    """Run forward and backward, compare output and input gradient, and return the collectives of both."""
    batch = make_batch(learner.rank, step, IN_FEATURES).requires_grad_()
    twin = batch.detach().clone().requires_grad_()
    with CollectiveCounter() as forward:
        output = _call_layer(learner, layer, batch)
    expected = F.linear(twin, weight)
    if output.shape != expected.shape:
        raise ProblemError(
            f"The output has the shape {tuple(output.shape)}; the whole layer's has {tuple(expected.shape)}."
        )
    if not is_near(output, expected):
        raise ProblemError(
            "The output differs from the whole layer's. Are the shards put together in the order of the "
            "ranks?"
        )
    if not output.requires_grad:
        raise ProblemError("No gradient flows through the output: forward has to go through autograd.")
    with CollectiveCounter() as backward:
        learner.call(lambda: _compute_loss(output, step).backward())
    _compute_loss(expected, step).backward()
    if batch.grad is None or twin.grad is None or not is_near(batch.grad, twin.grad):
        raise ProblemError("The gradient of the input differs from that of the whole layer.")
    return forward.calls, backward.calls


def _compute_loss(output: torch.Tensor, step: int) -> torch.Tensor:
    """Return a loss whose gradient differs between steps."""
    target = torch.linspace(-1.0, 1.0 + step, output.numel()).reshape(output.shape)
    return F.mse_loss(output, target)


def _compute_weight_gradient(weight: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Return the gradient of the whole weight on one rank's batch."""
    leaf = weight.clone().requires_grad_()
    loss = _compute_loss(F.linear(make_batch(rank, step, IN_FEATURES), leaf), step)
    return torch.autograd.grad(loss, leaf)[0]


def _compare_weights(
    got: torch.Tensor,
    before: torch.Tensor,
    expected: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    rank: int,
) -> None:
    """Raise :class:`ProblemError` with the cause of a difference, by the step that SGD made."""
    made, right = got - before, expected - before
    if is_near(made, right, 1e-3):
        return
    ranks = len(gradients)
    if is_near(made, torch.zeros_like(made), 1e-9) or float(made.detach().abs().max()) < 1e-6:
        raise ProblemError("The optimizer changed nothing: backward has to give the shard its gradient.")
    if is_near(made, ranks * right, 1e-3):
        raise ProblemError(
            f"The step is {ranks} times too large: a reduce-scatter sums, the gradient of a mean is the "
            "average."
        )
    if is_near(made, right / ranks, 1e-3):
        raise ProblemError(f"The step is {ranks} times too small: the gradient is divided twice.")
    pieces = [-FSDP_RATE * gradient for gradient in gradients]
    own = torch.cat([piece.flatten().chunk(ranks)[index] for index, piece in enumerate(pieces)])
    if is_near(made.flatten(), own, 1e-3) or is_near(made.flatten(), own / ranks, 1e-3):
        raise ProblemError(
            "Each shard learns from its own rank's batch alone: its gradient has to be reduced over the "
            "ranks."
        )
    raise ProblemError(
        f"The weights after a step differ from those of one process (on rank {rank}). Does each rank get "
        "the slice of the gradient that belongs to its shard?"
    )


def _check_calls(forward: Sequence[Call], backward: Sequence[Call]) -> None:
    """Raise :class:`ProblemError` unless weights are gathered twice and gradients scattered once."""
    made = (
        f"The weights are right; forward made {describe_calls(forward)}, backward {describe_calls(backward)}"
    )
    if any(call.name == "allreduce" for call in backward):
        raise ProblemError(
            f"{made}. An all-reduce brings the whole gradient to each rank, which needs a slice: "
            "reduce-scatter."
        )
    gathers = sum(call.name == "allgather" for call in backward)
    if not gathers:
        raise ProblemError(
            f"{made}. The whole weight is kept from forward to backward, in all layers at once: free it, and "
            "gather again in backward."
        )
    if len(forward) > 1 or len(backward) > 2:
        raise ProblemError(f"{made}. One all-gather is enough in each, and one reduce-scatter in backward.")
