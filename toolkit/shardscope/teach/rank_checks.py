"""Checks of code exercises on one rank: the learner's code, its collectives, and one process to compare with.

Every rank computes the reference alone, from the data of all ranks, so that the checks send nothing. Ranks
meet through files: a collective of theirs could pair with one that the learner's code left open.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardscope.records.json_files import write_json
from shardscope.teach.two_ranks import CALL_SECONDS, report_path

if TYPE_CHECKING:
    from shardscope.runs.launch.context import Context

TOLERANCE = 1e-4
"""Largest relative difference from one process: ranks add the same numbers in another order."""
EXIT_CODE = 7
"""Exit code of a rank whose code did not return."""
NOT_COLLECTIVE = ("barrier", "wait_tensor", "monitored_barrier", "work")


class ProblemError(Exception):
    """What is wrong with the answer, in words for the learner."""


class LearnerError(Exception):
    """An exception that the learner's code raised; its cause is that exception."""


class OtherRankError(Exception):
    """Another rank has reported a problem, and will not call anything any more."""


class Call(NamedTuple):
    """One collective call."""

    name: str
    """``allreduce``, ``allgather``, ``reduce_scatter``, ``broadcast``, ..."""
    num_bytes: int
    """Bytes of the whole vector: the larger of what goes in and what comes out."""


class CollectiveCounter(TorchDispatchMode):
    """List of the collectives of everything that runs inside it, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator, and note it if it is a collective."""
        space, _, name = function.name().partition("::")
        if "c10d" in space and not name.startswith(NOT_COLLECTIVE):
            sizes = [
                sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(one) if torch.is_tensor(leaf))
                for one in args
            ]
            self.calls.append(Call(_shorten_name(name), max(sizes, default=0)))
        return function(*args, **(kwargs or {}))


def _shorten_name(name: str) -> str:
    """Return one word for all operators of a collective: ``_allgather_base_`` is ``allgather``."""
    plain = name.partition(".")[0].replace("all_", "all")
    for kind in ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "reduce", "gather"):
        if kind in plain:
            return kind
    return plain.strip("_")


# ---- Calls of the learner's code, with a time limit


class Learner:
    """The learner's code on this rank: each call has a time limit, and ends on all ranks before the next."""

    def __init__(self, ctx: Context, file_name: str) -> None:
        self.rank, self.world_size = ctx.rank, ctx.world_size
        self._folder, self._file_name = ctx.folder, file_name
        self._main_thread = threading.get_ident()
        self._num_calls = 0
        self._started = 0.0
        """Monotonic time at which the current call began; 0 outside calls."""
        threading.Thread(target=self._watch, daemon=True).start()

    def call(self, function: Callable[[], object]) -> object:
        """Call ``function`` and wait for the other ranks to return from it too.

        Raises :class:`LearnerError` for its exceptions, :class:`OtherRankError` where another rank has ended.
        """
        self._num_calls += 1
        # The limit begins when all ranks are here: one may be seconds behind on a busy machine.
        self._meet("begins")
        self._started = time.monotonic()
        try:
            result = function()
        except Exception as error:
            raise LearnerError from error
        # The watching thread ends this wait, where another rank never returns.
        self._meet("returned")
        self._started = 0.0
        return result

    def _meet(self, place: str) -> None:
        """Wait until all ranks are there. Raises :class:`OtherRankError` where another rank has ended."""
        (self._folder / f"{place}_{self._num_calls}_{self.rank}").touch()
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while missing := [rank for rank in others if not self._has_come(place, rank)]:
            if any(map(self._has_reported, missing)):
                raise OtherRankError
            time.sleep(0.01)

    def report(self, **fields: object) -> None:
        """Write this rank's report, unless it has one."""
        if not self._has_reported(self.rank):
            write_json(report_path(self._folder, self.rank), {"time": time.time(), **fields})

    def report_exception(self, error: BaseException) -> None:
        """Report an exception of the learner's code, with the innermost line of the learner's cell."""
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self._file_name]
        self.report(problem="raised", error=text, file=self._file_name, line=lines[-1] if lines else None)

    def _has_come(self, place: str, rank: int) -> bool:
        return (self._folder / f"{place}_{self._num_calls}_{rank}").exists()

    def _has_reported(self, rank: int) -> bool:
        return report_path(self._folder, rank).exists()

    def _watch(self) -> None:
        """End this rank, with a report of its line, when a call does not return in time."""
        while not (started := self._started) or time.monotonic() - started < CALL_SECONDS:
            time.sleep(0.1)
        line = self._find_line(sys._current_frames().get(self._main_thread))
        self.report(problem="stuck", file=self._file_name, line=line)
        # The other rank's limit is over within moments: let it report where it is.
        time.sleep(1.5)
        os._exit(EXIT_CODE)

    def _find_line(self, frame: FrameType | None) -> int | None:
        """Return the innermost line of the learner's cell among ``frame`` and its callers."""
        while frame is not None:
            if frame.f_code.co_filename == self._file_name:
                return frame.f_lineno
            frame = frame.f_back
        return None


def check_on_rank(ctx: Context, check: str, answer: object, file_name: str) -> None:
    """Run one check on this rank and write its report; no problem of the answer is raised."""
    torch.set_num_threads(1)
    # The first operator in a dispatch mode imports 800 modules, for seconds: not in the learner's time.
    with CollectiveCounter():
        torch.zeros(1) + 1
    learner = Learner(ctx, file_name)
    try:
        summary = CHECKS[check](learner, answer)
    except LearnerError as error:
        learner.report_exception(error.__cause__ or error)
    except ProblemError as problem:
        learner.report(problem=str(problem))
    except OtherRankError:
        pass
    else:
        learner.report(problem="", summary=summary)


# ---- Comparisons


def is_near(value: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """Return whether two tensors differ by at most ``tolerance`` of the largest expected number."""
    if value.shape != expected.shape:
        return False
    # A comparison with NaN is False.
    limit = tolerance * float(expected.detach().abs().max()) + 1e-12
    return bool((value.detach() - expected.detach()).abs().max() <= limit)


def all_near(values: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], factor: float = 1.0) -> bool:
    """Return whether all tensors are ``factor`` times the expected ones."""
    return all(is_near(one, factor * other) for one, other in zip(values, expected, strict=True))


def list_names(names: Iterable[str]) -> str:
    """Return some names for a sentence: the first three, and how many more."""
    listed = list(names)
    more = len(listed) - 3
    return ", ".join(listed[:3]) + (f" and {more} more" if more > 0 else "")


def describe_calls(calls: Sequence[Call]) -> str:
    """Return the collectives with their numbers and bytes: "3 allreduce (25,344 bytes)"."""
    numbers = Counter(call.name for call in calls)
    parts = []
    for name, number in numbers.items():
        num_bytes = sum(call.num_bytes for call in calls if call.name == name)
        parts.append(f"{number} {name} ({num_bytes:,} bytes)")
    return ", ".join(parts) or "no collective"


def build_layers(seed: int) -> torch.nn.Sequential:
    """Return six layers of equal size, the same on every rank."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def make_batch(rank: int, step: int = 0, width: int | None = None) -> torch.Tensor:
    """Return the batch of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(BATCH, width or WIDTH, generator=generator)


def compute_gradients(model: torch.nn.Module, rank: int, step: int = 0) -> list[torch.Tensor]:
    """Return the gradients of the model on one rank's batch."""
    batch = make_batch(rank, step)
    loss = F.mse_loss(model(batch), batch.flip(1))
    return list(torch.autograd.grad(loss, list(model.parameters())))


def average(gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the mean over ranks of each gradient: that of the whole batch, as all have equally many rows."""
    return [torch.stack(list(one)).mean(0) for one in zip(*gradients, strict=True)]


WIDTH, NUM_LAYERS, BATCH = 32, 6, 8
BUCKET_BYTES = 10_000
"""The 25,344 bytes of gradients are three buckets of at most so many bytes, the last one partly full."""


# ---- DDP's bucketed all-reduce


class AverageGradients(Protocol):
    """The learner's function."""

    def __call__(self, parameters: list[torch.nn.Parameter], bucket_bytes: int) -> object:
        """Average ``.grad`` of all parameters over the ranks."""


def check_bucketed_all_reduce(learner: Learner, answer: AverageGradients) -> str:
    """Compare gradients with those of one process on the whole batch, and count the all-reduces."""
    model = build_layers(seed=0)
    gradients = [compute_gradients(model, rank) for rank in range(learner.world_size)]
    expected, own = average(gradients), gradients[learner.rank]
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, own, strict=True):
        parameter.grad = gradient.clone()
    with CollectiveCounter() as counter:
        learner.call(lambda: answer(parameters, BUCKET_BYTES))
    got = [parameter.grad for parameter in parameters]
    found = [gradient for gradient in got if gradient is not None]
    if len(found) < len(got):
        missing = [name for name, gradient in zip(names, got, strict=True) if gradient is None]
        raise ProblemError(f"The .grad of {list_names(missing)} is None afterwards; averages belong there.")
    _compare_gradients(names, found, expected, own, learner.world_size)
    _check_buckets(counter.calls, sum(gradient.numel() * gradient.element_size() for gradient in expected))
    return (
        f"The gradients on both ranks equal those of one process with the whole batch; your code made "
        f"{describe_calls(counter.calls)}."
    )


def _compare_gradients(
    names: Sequence[str],
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    ranks: int,
) -> None:
    """Raise :class:`ProblemError` with the cause of a difference, if it is a known one."""
    if all_near(found, expected):
        return
    if all_near(found, expected, ranks):
        raise ProblemError(
            f"Every gradient is {ranks} times too large: an all-reduce sums and does not average."
        )
    if all_near(found, expected, 1 / ranks):
        raise ProblemError(f"Every gradient is {ranks} times too small: it is divided twice.")
    if all_near(found, own):
        raise ProblemError(
            "Every rank still has its own gradients. Does the average come back from the bucket into "
            ".grad, and does an asynchronous all-reduce end before it is read (work.wait())?"
        )
    if all_near(found, own, 1 / ranks):
        raise ProblemError("The gradients are divided by the number of ranks, but not summed over them.")
    local = [name for name, one, mine in zip(names, found, own, strict=True) if is_near(one, mine)]
    if local:
        raise ProblemError(
            f"{list_names(local)}: still this rank's own gradient. Is the last bucket, which is not full, "
            "sent too?"
        )
    wrong = [name for name, one, right in zip(names, found, expected, strict=True) if not is_near(one, right)]
    raise ProblemError(
        f"Other gradients than those of one process: {list_names(wrong)}. Is each slice of a bucket "
        "copied to the parameter that it came from?"
    )


def _check_buckets(calls: Sequence[Call], num_bytes: int) -> None:
    """Raise :class:`ProblemError` unless the gradients were sent once, in a few buckets."""
    fewest = -(-num_bytes // BUCKET_BYTES)
    largest = max((call.num_bytes for call in calls), default=0)
    made = f"Right gradients, by {describe_calls(calls)}"
    if largest > BUCKET_BYTES:
        raise ProblemError(f"{made}. One of {largest:,} bytes is larger than a bucket of {BUCKET_BYTES:,}.")
    if len(calls) > fewest + 1:
        raise ProblemError(
            f"{made}. {num_bytes:,} bytes need {fewest} buckets of {BUCKET_BYTES:,}, not so many."
        )


# ---- ZeRO-1: a sharded optimizer


class Optimizer(Protocol):
    """An instance of the learner's class."""

    def step(self) -> object:
        """Update all parameters on this rank."""


class MakeOptimizer(Protocol):
    """The learner's class."""

    def __call__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> Optimizer:
        """Create the optimizer of this rank's share."""


LEARNING_RATE = 1e-2
NUM_STEPS = 3
MAX_STATE_SHARE = 0.8
"""A rank's state over the whole one: half, and the rest for shares that do not divide evenly."""
MAX_TRAFFIC = 1.5
"""Bytes that step() sends over those of the parameters."""


def check_sharded_optimizer(learner: Learner, answer: MakeOptimizer) -> str:
    """Compare parameters with AdamW of one process, and this rank's state with the whole one."""
    model, alone = build_layers(seed=0), build_layers(seed=0)
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    reference = torch.optim.AdamW(alone.parameters(), lr=LEARNING_RATE)
    optimizer: list[Optimizer] = []
    learner.call(lambda: optimizer.append(answer(parameters, LEARNING_RATE)))
    calls: list[Call] = []
    for step in range(NUM_STEPS):
        ranks = range(learner.world_size)
        gradients = average([compute_gradients(alone, rank, step) for rank in ranks])
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter, other, gradient in zip(parameters, alone.parameters(), gradients, strict=True):
            parameter.grad, other.grad = gradient.clone(), gradient
        with CollectiveCounter() as counter:
            learner.call(optimizer[0].step)
        reference.step()
        calls = counter.calls
        _compare_parameters(names, parameters, list(alone.parameters()), before)
    whole = sum(2 * parameter.numel() * parameter.element_size() for parameter in parameters)
    state = sum(tensor.numel() * tensor.element_size() for tensor in find_tensors(optimizer[0], parameters))
    share = f"The parameters are right, but rank {learner.rank} holds {state:,} of {whole:,} bytes of state"
    if state >= whole:
        raise ProblemError(f"{share}. ZeRO-1 keeps a part on each rank.")
    if state > MAX_STATE_SHARE * whole:
        raise ProblemError(f"{share}. Give the ranks equally many numbers, not equally many tensors.")
    traffic, size = sum(call.num_bytes for call in calls), whole // 2
    if traffic > MAX_TRAFFIC * size:
        raise ProblemError(
            f"The parameters are right, but a step sends {traffic:,} bytes: {describe_calls(calls)}. The "
            f"updated parameters have {size:,}; gradients are averaged already, and state stays where it is."
        )
    return (
        f"After {NUM_STEPS} steps both ranks have the parameters of one process; rank {learner.rank} holds "
        f"{100 * state / whole:.0f} % of the state, and a step made {describe_calls(calls)}."
    )


def _compare_parameters(
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
) -> None:
    """Raise :class:`ProblemError` with the cause of a difference, if it is a known one."""
    if all_near(parameters, expected):
        return
    if all_near(parameters, before):
        raise ProblemError("step() changes no parameter on this rank.")
    old = [name for name, one, was in zip(names, parameters, before, strict=True) if is_near(one, was, 1e-9)]
    if old:
        raise ProblemError(
            f"This rank still has the old values of {list_names(old)}: the rank that updates them has to "
            "send them."
        )
    wrong = [
        name for name, one, right in zip(names, parameters, expected, strict=True) if not is_near(one, right)
    ]
    raise ProblemError(
        f"Other parameters than those of torch.optim.AdamW in one process: {list_names(wrong)}. Does every "
        "parameter have exactly one owner, the same on all ranks, and does it get lr=learning_rate?"
    )


def find_tensors(root: object, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that ``root`` holds, in attributes and containers, without parameters and gradients.

    Step counts and other single numbers are left out.
    """
    known = {one.untyped_storage().data_ptr() for one in parameters}
    known |= {one.grad.untyped_storage().data_ptr() for one in parameters if one.grad is not None}
    tensors: list[torch.Tensor] = []
    queue, seen = [root], set[int]()
    while queue:
        one = queue.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            pointer = one.untyped_storage().data_ptr()
            if one.numel() > 1 and pointer not in known:
                known.add(pointer)
                tensors.append(one)
        elif isinstance(one, Mapping):
            queue.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            queue.extend(one)
        elif hasattr(one, "__dict__") and not isinstance(one, type | ModuleType | FunctionType):
            queue.extend(vars(one).values())
    return tensors


# ---- FSDP with one layer


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


IN_FEATURES, OUT_FEATURES = 48, 32
FSDP_RATE = 0.5


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


class Check(Protocol):
    """One check: it returns a sentence about a right answer, and raises :class:`ProblemError`."""

    def __call__(self, learner: Learner, answer: object) -> str:
        """Check the answer on this rank."""


CHECKS: dict[str, Check] = {
    "bucketed_all_reduce": check_bucketed_all_reduce,  # type: ignore[dict-item]
    "sharded_optimizer": check_sharded_optimizer,  # type: ignore[dict-item]
    "one_layer_fsdp": check_one_layer_fsdp,  # type: ignore[dict-item]
}
"""Checks by name; ``two_ranks.py`` has made sure that the answer is of the kind that each one calls."""
