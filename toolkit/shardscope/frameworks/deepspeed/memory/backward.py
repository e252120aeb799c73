"""Backward, instant by instant: what stages reduce and gather beside what autograd still holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import ceil_div, is_array, largest, looked_up, where
from shardscope.core.number_format import gib
from shardscope.core.precision import FP32
from shardscope.families.parameter_names import mlp_inputs, names_of
from shardscope.frameworks.deepspeed.memory.buckets import Instant
from shardscope.frameworks.deepspeed.memory.tensors import cuts_tied_head
from shardscope.memory.activations.backward import FullestLayer, Peak, PeakTerms, layer_backward, places
from shardscope.memory.activations.forward import layer_activations, modules_of, unsaved_at_start
from shardscope.memory.activations.head import loss_in_force
from shardscope.memory.activations.modules.attention import scores_per_token
from shardscope.memory.report import Phase, Term, summed

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.frameworks.deepspeed.memory.counted import Counted, Layer
    from shardscope.memory.activations.backward import Backward
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.state.stages import Stage


class Sizes(NamedTuple):
    """Bytes on one rank that only some of backward's instants need."""

    logits: int
    """The logits' gradient in the type of products; 0 where logits are never whole."""
    leaving: int
    """In a layer's first norm, the last of it: its input, gradients and the stream's."""
    drops: tuple[int, ...]
    """What is gone of a dense layer, against where its product is taken apart, as each matrix of its
    feed-forward has its gradient."""
    product: int
    """A dense feed-forward's product."""
    down: int
    """Elements of the matrix behind that product, whose gradient is made while the product is still there."""
    adapts_down: bool
    """Whether an adapter of that matrix has the first gradient of all."""
    between: int
    """Of a dense layer, where its feed-forward's first matrices have such adapters instead: the stream's
    gradient, and what their adapters pass on, beside what the layer has saved."""
    unsaved: int
    """What the very first layer under adapters does not save when it is computed again."""
    num_layers: int
    """Of the stage."""
    in_scores: bool
    """Whether a layer is fullest in attention, whose scores are tensors, and not in its feed-forward."""
    has_scores: bool
    """Whether attention's scores are tensors at all."""
    away: bool
    """Whether activations come back one by one: of dense layers, all trained; of others all are counted."""
    attention: int
    """What one layer saves in front of its feed-forward."""
    interval: int
    """Of layers so many there is one that is recomputed or offloaded; 1: all or none."""


def sizes_of(plan: Plan, stage: Stage) -> Sizes:
    """Operator by operator, as transformers' modules run."""
    arch, modules = plan.architecture, modules_of(plan)
    tokens = plan.recipe.micro_batch_size * plan.recipe.seq_len
    cut = plan.degrees.tp if cuts_tied_head(arch) else 1
    vocab = ceil_div(arch.vocab_size, cut)
    whole = loss_in_force(plan) == "full"
    own = layer_backward(arch, False, modules)
    feed_forward, inner = own.inside - own.stream, arch.intermediate_size * modules.compute
    # Scores, where they are tensors, may outweigh the feed-forward.
    in_scores = scores_per_token(arch, modules) > 0 and feed_forward > (2 if arch.gated_mlp else 3) * inner
    if arch.gated_mlp:
        fused = names_of(arch).fused_gate_up is not None
        later = (2 * inner,) if fused else (inner, 3 * inner)
    else:
        later = (inner,)
    drops = tuple(ceil_div(tokens * (feed_forward + drop), plan.degrees.tp) for drop in (0, *later))
    stream = arch.hidden_size * modules.stream
    # Its input, and x^2's gradient in plain operations: of those four and what they start from.
    in_norm = 3 * stream
    if arch.norm == "rmsnorm" and modules.kernels == "transformers":
        in_norm = 6 * arch.hidden_size * FP32
    kept = stream if plan.recipe.recompute == "full" else 0
    recomputes = plan.recipe.recompute in ("full", "selective")
    return Sizes(
        logits=tokens * vocab * modules.compute * whole * stage.is_last,
        leaving=tokens * (stream + in_norm + kept),
        drops=drops,
        product=ceil_div(tokens * inner, plan.degrees.tp),
        down=ceil_div(arch.intermediate_size * arch.hidden_size, plan.degrees.tp),
        adapts_down=names_of(arch).down in (modules.targets or ()),
        between=tokens * (stream + 2 * arch.hidden_size * modules.compute) * _adapts_up_alone(arch, modules),
        num_layers=stage.num_layers,
        in_scores=in_scores,
        has_scores=scores_per_token(arch, modules) > 0,
        away=_comes_back(plan, modules),
        attention=tokens * looked_up(lambda tp: _in_attention(arch, modules, tp), plan.degrees.tp),
        interval=plan.recipe.recompute_interval if plan.recipe.recompute != "none" else 1,
        unsaved=recomputes
        * tokens
        * looked_up(lambda tp: unsaved_at_start(arch, modules, tp, 1), plan.degrees.tp),
    )


def _adapts_up_alone(arch: Architecture, modules: Modules) -> bool:
    targets = set(modules.targets or ())
    return bool(targets.intersection(mlp_inputs(arch))) and names_of(arch).down not in targets


def _comes_back(plan: Plan, modules: Modules) -> bool:
    """Whether offloaded activations are told one by one: of transformers' own dense layers, all trained."""
    plain = modules.kernels == "transformers" and modules.trained and not plan.architecture.num_moe_layers
    return plan.recipe.recompute == "offload" and plan.on_gpu and plain


def _in_attention(arch: Architecture, modules: Modules, tp: int) -> int:
    """Bytes a token: what attention saves, and the norms before it, which are half of them."""
    layer = layer_activations(arch, arch.num_moe_layers > 0, modules, "none", tp, 1)
    return layer.attention + layer.norms // 2


class Kept(NamedTuple):
    """Bytes on one rank that stay beside activations."""

    bucket: int = 0
    """There from the first gradient on."""
    first_hook: bool = True
    """Whether that is the head's; else it comes after the last layer's feed-forward, or, where all weights
    are trained, from the last layer on."""
    trains_all: bool = True
    forward: int = 0
    """Gathered when forward ends; where there is any, the bucket is there all along."""
    waiting: int = 0
    """Gradients of micro-batches before, beside those that are counted part by part."""
    before: int = 0
    """All gradients while the loss is differentiated."""
    gathers: bool = False
    """Whether parameters are gathered in forward too."""


_SAVED = ("saved by the layers", "saved by the final norm and for the head", "autocast's copies of weights")
_IN_NORM = (*_SAVED, "the final norm's gradients")
_IN_LAYER = ("saved by the layers that are left", "beside that inside one of them, gradients first")
_AFTER_LAYER = ("saved by the layers that are left", "gradients of one layer's input and output")
_BEHIND_ATTENTION = (
    "saved by the layers that are left",
    "saved by one layer's attention",
    "gradients of that attention's output and of the stream",
)
_IN_FIRST_NORM = ("saved by the layers that are left", "gradients inside one layer's first norm")
_IN_EMBEDDING = ("the gradient of the embedding's output",)
_USED_UP = ("activations: all are used up",)
_IN_FORWARD = ("saved by the layers before",)
_INSIDE_FORWARD = ("saved by the layers before", "saved, and in use inside one layer")


def peaks(c: Counted, shape: Backward, half: int, sizes: Sizes, kept: Kept) -> list[Peak]:
    """The instants that can be fullest; parts of backward are counted in elements of ``half`` bytes."""
    num_layers = sizes.num_layers
    full = (shape.layers, shape.edges, shape.cast)
    waiting = kept.waiting

    def peak(
        at: Any,
        held: tuple[Any, ...],
        words: tuple[str, ...],
        instant: Instant,
        allocated: Any = kept.bucket,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> Peak:
        staging, gradients = allocated + half * instant.staging, waiting + half * instant.kept

        def terms() -> PeakTerms:
            gathered = (
                f"{instant.staging:,} elements × {half} bytes gathered, waiting to be reduced, or copied"
            )
            source = None if words in (_IN_EMBEDDING, _USED_UP) else shape.explain_layers
            return PeakTerms(
                summed(*zip(held, words, strict=True), source=source),
                summed((allocated, "bucket (reduce_bucket_size)"), (half * instant.staging, gathered)),
                summed(
                    (waiting, "of micro-batches before"),
                    (half * instant.kept, f"{instant.kept:,} elements × {half} bytes reduced or kept so far"),
                ),
            )

        return Peak(at, sum(held), staging, gradients, terms, logits, phase)

    def at_end() -> PeakTerms:
        return PeakTerms(
            summed(*zip(full, _SAVED, strict=True), source=shape.explain_layers),
            _counted(kept.forward, half, "gathered, or the bucket"),
            _counted(kept.before, half, "of micro-batches before"),
        )

    already = (kept.forward > 0) * kept.bucket
    at_first = where(kept.first_hook, kept.bucket, already)
    at_head = Term(sizes.logits, lambda: f"{gib(sizes.logits)} GiB, the gradient of the logits")
    found = [
        Peak(0.34, sum(full), kept.forward, kept.before, at_end, shape.logits),
        peak(0.345, full, _SAVED, c.head.peak, already, at_head),
        peak(0.347, full, _SAVED, c.head.peak, at_first),
        peak(0.35, (*full, shape.norm), _IN_NORM, c.head.base, kept.bucket if kept.trains_all else at_first),
    ]
    fullest = shape.find_fullest()
    has_experts = fullest.later != fullest.inside
    met = list(zip(places(num_layers - 1), c.layers, strict=False))
    if is_array(c.fullest_at) or 1 < c.fullest_at < num_layers - 1:
        met.append((c.fullest_at, c.layers[-1]))
    if sizes.interval > 2:
        # The first that is recomputed may be neither of the first two.
        met.append(((num_layers - 1) % sizes.interval, c.layers[1]))
    for done, layer in met:
        fraction = 0.36 + 0.6 * done / num_layers
        one, saved = fullest, _left(shape.layers, fullest.saved, num_layers, done)
        if sizes.interval > 1:
            one, saved = _between(fullest, shape, num_layers - 1 - done, sizes.interval)
        is_last = done == num_layers - 1
        # The bucket comes with the first gradient, mostly of adapters after the last layer's feed-forward.
        comes = kept.trains_all or sizes.adapts_down
        allocated = kept.bucket if comes else where((done > 0) | kept.first_hook, kept.bucket, already)
        left = largest(0, saved - one.saved)
        if sizes.away:
            for before, held, instant in _coming_back(shape, layer, num_layers - 1 - done):
                found.append(peak(fraction, (before, held), _IN_LAYER, instant, allocated))
            found.append(peak(fraction + 0.01, (left, 2 * shape.stream), _AFTER_LAYER, layer.peak))
            continue
        inside = (saved, largest(one.inside, one.earlier) - is_last * sizes.unsaved)
        base = layer.middle if sizes.in_scores else layer.base
        found.append(peak(fraction, inside, _IN_LAYER, base, allocated))
        if kept.trains_all:
            whole = one.inside - sizes.drops[0] + sizes.product
            made = (where(has_experts, 0, saved), where(has_experts, 0, whole))
            down = layer.base._replace(staging=layer.base.staging + sizes.down)
            found.append(peak(fraction + 0.002, made, _IN_LAYER, down, allocated))
        if sizes.between and not done:
            # By then the bucket has come, with the first gradient.
            inside = (saved, where(has_experts, 0, sizes.between))
            found.append(peak(fraction + 0.003, inside, _IN_LAYER, layer.base))
        drop, instant = _fullest(layer.inner, sizes.drops, half)
        dense = one.inside - drop
        experts = one.later if kept.trains_all else one.inside
        # One without experts, after layers that have them, cannot let go of more than is left.
        activations = (saved, largest(where(has_experts, experts, dense), -saved))
        last = where(has_experts & kept.trains_all, layer.last, instant)
        found.append(peak(fraction + 0.004, activations, _IN_LAYER, last, allocated))
        if sizes.has_scores:
            found.append(peak(fraction + 0.006, (saved, largest(one.core, -saved)), _IN_LAYER, layer.middle))
        found.append(peak(fraction + 0.01, (left, 2 * shape.stream), _AFTER_LAYER, layer.peak))
        if kept.trains_all:
            behind = (left, sizes.attention, 2 * shape.stream)
            found.append(peak(fraction + 0.008, behind, _BEHIND_ATTENTION, layer.behind))
        # No gradient comes into the first layer's first norm from frozen embeddings.
        gets_there = kept.trains_all | (done + 1 < num_layers)
        leaving = (gets_there * left, gets_there * sizes.leaving)
        found.append(peak(fraction + 0.012, leaving, _IN_FIRST_NORM, layer.following))
    found.append(peak(0.97, (shape.stream,), _IN_EMBEDDING, c.embedding))
    found += [peak(0.975, (0,), _USED_UP, instant) for instant in c.end]
    if sizes.has_scores:
        found += _in_scores(c, shape, kept, num_layers, peak)
    if kept.gathers:
        found.append(_gathering(c, shape, half, num_layers, peak))
    return found


def _coming_back(shape: Backward, layer: Layer, index: Any) -> list[tuple[Any, Any, Instant]]:
    """A dense layer whose activations come back one by one: (bytes before it, in it, elements beside).

    Instants as in ``memory/activations/modules/instants.py``: the MLP's four, the norm behind attention,
    its output's matrix, its core, its inputs' matrix, and its first norm.
    """
    order = shape.find_order()
    others = shape.layers - order.sum_before(order.num_layers, "saved")
    before = largest(0, others + order.sum_before(index, "saved"))
    first, second = layer.inner[0], layer.inner[min(1, len(layer.inner) - 1)]
    behind, middle, peak = layer.behind, layer.middle, layer.peak
    beside = (layer.base, first, first, second, behind, behind, middle, peak, layer.following)
    away, here = order.kinds[0], order.kinds[-1]
    chosen = index % order.interval == 0
    # An instant that has let go of more than is left holds nothing: short sequences, cut over many ranks.
    return [
        (before, largest(where(chosen, one.held, other.held), -before), instant)
        for one, other, instant in zip(away.backward, here.backward, beside, strict=True)
    ]


def _between(fullest: FullestLayer, shape: Backward, index: Any, interval: int) -> tuple[FullestLayer, Any]:
    """The layer at ``index`` where some are recomputed and others not, and what it and those before saved."""
    order = shape.find_order()
    before, with_it = (order.sum_before(at, "saved") for at in (index, index + 1))
    others = shape.layers - order.sum_before(order.num_layers, "saved")
    change = (index % interval == 0) * fullest.again - fullest.recomputed
    one = fullest._replace(
        saved=with_it - before,
        inside=fullest.inside + change,
        later=fullest.later + change,
        core=fullest.core + (fullest.core != 0) * change,
        earlier=fullest.earlier + change,
    )
    return one, others + with_it


def _counted(num_bytes: int, half: int, what: str) -> Term:
    return Term(
        num_bytes, lambda: f"{num_bytes // half:,} × {half} bytes {what}" if num_bytes else "none yet"
    )


def _fullest(inner: Sequence[Instant], drops: Sequence[Any], half: int) -> tuple[Any, Instant]:
    """Of the feed-forward's matrices the one at whose gradient most is held, and what is gone by then."""
    drop, instant = drops[0], inner[0]
    for other, one in zip(drops[1:], inner[1:], strict=False):
        more = half * one.total - other > half * instant.total - drop
        drop, instant = where(more, other, drop), where(more, one, instant)
    return drop, instant


def _in_scores(
    c: Counted, shape: Backward, kept: Kept, num_layers: Any, peak: Callable[..., Peak]
) -> list[Peak]:
    """In attention's scores of the last layer of each kind, where forward holds most of all."""
    elements: Any = 0
    for passed, gathered in c.in_forward:
        elements = where(passed >= num_layers - 1, gathered, elements)
    allocated = (kept.forward > 0) * kept.bucket
    return [
        peak(
            0.02 + 0.3 * (place.index + 1) / num_layers,
            (place.before, place.kind.forward),
            _INSIDE_FORWARD,
            Instant(elements, 0),
            allocated,
            phase="forward",
        )
        for place in shape.find_order().last_places(shape.layers)
    ]


def _gathering(c: Counted, shape: Backward, half: int, num_layers: Any, peak: Callable[..., Peak]) -> Peak:
    """Where gathers, and what layers before have saved, are most in forward."""
    done, elements = c.in_forward[0]
    for other, more in c.in_forward[1:]:
        fuller = (
            half * more + shape.layers * other // num_layers
            > half * elements + shape.layers * done // num_layers
        )
        done, elements = where(fuller, other, done), where(fuller, more, elements)
    saved = shape.layers * done // num_layers
    fraction = 0.02 + 0.3 * done / num_layers
    return peak(fraction, (saved,), _IN_FORWARD, Instant(elements, 0), phase="forward")


def _left(layers: Any, saved: Any, num_layers: Any, done: Any) -> Any:
    """What ``layers`` still hold when backward has passed ``done`` of them, the fullest kind first."""
    left = layers - done * saved
    # Of two kinds of layers the fuller one is counted off for both; the mean is for what that overdraws.
    return where(left > 0, left, layers // num_layers * (num_layers - done))
