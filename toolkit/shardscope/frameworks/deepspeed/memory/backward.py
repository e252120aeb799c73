"""Peak candidates of ZeRO's backward: reductions and all-gathers on top of autograd's saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.number_format import gib
from shardscope.core.ops import ceil_div, is_array, map_distinct, maximum, where
from shardscope.core.precision import FP32
from shardscope.families.parameter_names import mlp_inputs, names_of
from shardscope.frameworks.deepspeed.memory.buckets import Instant
from shardscope.frameworks.deepspeed.memory.tensors import cuts_tied_head
from shardscope.memory.activations.backward import (
    LargestLayer,
    PeakCandidate,
    PeakTerms,
    compute_layer_backward,
    list_candidate_depths,
)
from shardscope.memory.activations.forward import (
    compute_layer_activations,
    compute_unsaved_at_start,
    find_modules,
)
from shardscope.memory.activations.head import resolve_loss
from shardscope.memory.activations.modules.attention import compute_saved_scores
from shardscope.memory.report import Phase, Term, sum_parts

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.frameworks.deepspeed.memory.counted import Counted, Layer
    from shardscope.memory.activations.backward import StageBackward
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.state.stages import Stage


class Sizes(NamedTuple):
    """Sizes on one rank that only some peak candidates of backward need, in bytes unless noted."""

    logits: int
    """Gradient of the logits in the compute type; 0 if the logits are never materialized whole."""
    leaving: int
    """Input and gradients in a layer's first norm, the last in backward, with the residual stream's."""
    drops: tuple[int, ...]
    """Bytes of a dense layer that are freed, compared to the backward of its activation product, when each
    matrix of its feed-forward gets its gradient."""
    product: int
    """Activation product of a dense feed-forward, the input of its down projection."""
    down: int
    """Elements of the down projection, whose gradient is computed while the product is still alive."""
    adapts_down: bool
    """Whether the down projection has an adapter, which then has the first gradient in backward."""
    between: int
    """Gradients of the stream and of the adapters' inputs in a dense layer, on top of its saved tensors; 0
    unless the feed-forward's first matrices have adapters and the down projection has none."""
    unsaved: int
    """Tensors that the first layer with adapters does not save when it is recomputed."""
    num_layers: int
    """Number of layers of the stage."""
    in_scores: bool
    """Whether a layer's maximum is in attention, with materialized scores, and not in its feed-forward."""
    has_scores: bool
    """Whether attention scores are materialized."""
    away: bool
    """Whether offloaded activations are fetched one by one: only dense, fully trained layers are modelled so;
    for others all are counted at once."""
    attention: int
    """Saved tensors of one layer before its feed-forward."""
    interval: int
    """One of this many layers is recomputed or offloaded; 1: all or none."""


def sizes_of(plan: Plan, stage: Stage) -> Sizes:
    """Return the sizes of ``stage``, operator by operator, as transformers' modules run."""
    arch, modules = plan.architecture, find_modules(plan)
    tokens = plan.recipe.micro_batch_size * plan.recipe.seq_len
    cut = plan.degrees.tp if cuts_tied_head(arch) else 1
    vocab = ceil_div(arch.vocab_size, cut)
    whole = resolve_loss(plan) == "full"
    own = compute_layer_backward(arch, False, modules)
    feed_forward, inner = own.inside - own.stream, arch.intermediate_size * modules.compute
    # Materialized scores may be larger than the feed-forward's activations.
    in_scores = (
        compute_saved_scores(arch, modules) > 0 and feed_forward > (2 if arch.gated_mlp else 3) * inner
    )
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
        has_scores=compute_saved_scores(arch, modules) > 0,
        away=_comes_back(plan, modules),
        attention=tokens * map_distinct(lambda tp: _in_attention(arch, modules, tp), plan.degrees.tp),
        interval=plan.recipe.recompute_interval if plan.recipe.recompute != "none" else 1,
        unsaved=recomputes
        * tokens
        * map_distinct(lambda tp: compute_unsaved_at_start(arch, modules, tp, 1), plan.degrees.tp),
    )


def _adapts_up_alone(arch: Architecture, modules: Modules) -> bool:
    targets = set(modules.targets or ())
    return bool(targets.intersection(mlp_inputs(arch))) and names_of(arch).down not in targets


def _comes_back(plan: Plan, modules: Modules) -> bool:
    """Return whether offloaded activations are modelled one by one: transformers' dense, trained layers."""
    plain = modules.kernels == "transformers" and modules.trained and not plan.architecture.num_moe_layers
    return plan.recipe.recompute == "offload" and plan.on_gpu and plain


def _in_attention(arch: Architecture, modules: Modules, tp: int) -> int:
    """Return the bytes per token saved by attention and by the norms before it, half of a layer's norms."""
    layer = compute_layer_activations(arch, arch.num_moe_layers > 0, modules, "none", tp, 1)
    return layer.attention + layer.norms // 2


class Kept(NamedTuple):
    """Buffers and gradients on one rank besides activations, in bytes."""

    bucket: int = 0
    """Bucket, allocated at the first gradient."""
    first_hook: bool = True
    """Whether the first gradient is the head's; else the bucket is allocated after the last layer's
    feed-forward, or, if all weights are trained, from the last layer on."""
    trains_all: bool = True
    forward: int = 0
    """All-gathered parameters and bucket at the end of forward; if not 0, the bucket is always allocated."""
    waiting: int = 0
    """Gradients of earlier micro-batches, in addition to those counted part by part."""
    before: int = 0
    """All gradients during the loss's backward."""
    gathers: bool = False
    """Whether parameters are all-gathered in forward too."""


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


def peaks(c: Counted, shape: StageBackward, half: int, sizes: Sizes, kept: Kept) -> list[PeakCandidate]:
    """Return the peak candidates; ``c`` has the parts of backward in elements of ``half`` bytes."""
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
    ) -> PeakCandidate:
        staging, gradients = allocated + half * instant.staging, waiting + half * instant.kept

        def terms() -> PeakTerms:
            gathered = (
                f"{instant.staging:,} elements × {half} bytes gathered, waiting to be reduced, or copied"
            )
            source = None if words in (_IN_EMBEDDING, _USED_UP) else shape.explain_layers
            return PeakTerms(
                sum_parts(*zip(held, words, strict=True), source=source),
                sum_parts((allocated, "bucket (reduce_bucket_size)"), (half * instant.staging, gathered)),
                sum_parts(
                    (waiting, "of micro-batches before"),
                    (half * instant.kept, f"{instant.kept:,} elements × {half} bytes reduced or kept so far"),
                ),
            )

        return PeakCandidate(at, sum(held), staging, gradients, terms, logits, phase)

    def at_end() -> PeakTerms:
        return PeakTerms(
            sum_parts(*zip(full, _SAVED, strict=True), source=shape.explain_layers),
            _counted(kept.forward, half, "gathered, or the bucket"),
            _counted(kept.before, half, "of micro-batches before"),
        )

    already = (kept.forward > 0) * kept.bucket
    at_first = where(kept.first_hook, kept.bucket, already)
    at_head = Term(sizes.logits, lambda: f"{gib(sizes.logits)} GiB, the gradient of the logits")
    found = [
        PeakCandidate(0.34, sum(full), kept.forward, kept.before, at_end, shape.logits),
        peak(0.345, full, _SAVED, c.head.peak, already, at_head),
        peak(0.347, full, _SAVED, c.head.peak, at_first),
        peak(0.35, (*full, shape.norm), _IN_NORM, c.head.base, kept.bucket if kept.trains_all else at_first),
    ]
    fullest = shape.find_fullest()
    has_experts = fullest.later != fullest.inside
    met = list(zip(list_candidate_depths(num_layers - 1), c.layers, strict=False))
    if is_array(c.fullest_at) or 1 < c.fullest_at < num_layers - 1:
        met.append((c.fullest_at, c.layers[-1]))
    if sizes.interval > 2:
        # The first recomputed layer in backward order may be neither of the first two.
        met.append(((num_layers - 1) % sizes.interval, c.layers[1]))
    for done, layer in met:
        fraction = 0.36 + 0.6 * done / num_layers
        one, saved = fullest, _left(shape.layers, fullest.saved, num_layers, done)
        if sizes.interval > 1:
            one, saved = _between(fullest, shape, num_layers - 1 - done, sizes.interval)
        is_last = done == num_layers - 1
        # The bucket is allocated at the first gradient; with adapters mostly after the last feed-forward.
        comes = kept.trains_all or sizes.adapts_down
        allocated = kept.bucket if comes else where((done > 0) | kept.first_hook, kept.bucket, already)
        left = maximum(0, saved - one.saved)
        if sizes.away:
            for before, held, instant in _coming_back(shape, layer, num_layers - 1 - done):
                found.append(peak(fraction, (before, held), _IN_LAYER, instant, allocated))
            found.append(peak(fraction + 0.01, (left, 2 * shape.stream), _AFTER_LAYER, layer.peak))
            continue
        inside = (saved, maximum(one.inside, one.earlier) - is_last * sizes.unsaved)
        base = layer.middle if sizes.in_scores else layer.base
        found.append(peak(fraction, inside, _IN_LAYER, base, allocated))
        if kept.trains_all:
            whole = one.inside - sizes.drops[0] + sizes.product
            made = (where(has_experts, 0, saved), where(has_experts, 0, whole))
            down = layer.base._replace(staging=layer.base.staging + sizes.down)
            found.append(peak(fraction + 0.002, made, _IN_LAYER, down, allocated))
        if sizes.between and not done:
            # The bucket is allocated by then, at the first gradient.
            inside = (saved, where(has_experts, 0, sizes.between))
            found.append(peak(fraction + 0.003, inside, _IN_LAYER, layer.base))
        drop, instant = _fullest(layer.inner, sizes.drops, half)
        dense = one.inside - drop
        experts = one.later if kept.trains_all else one.inside
        # A layer without experts, after layers with experts, cannot free more than is left.
        activations = (saved, maximum(where(has_experts, experts, dense), -saved))
        last = where(has_experts & kept.trains_all, layer.last, instant)
        found.append(peak(fraction + 0.004, activations, _IN_LAYER, last, allocated))
        if sizes.has_scores:
            found.append(peak(fraction + 0.006, (saved, maximum(one.core, -saved)), _IN_LAYER, layer.middle))
        found.append(peak(fraction + 0.01, (left, 2 * shape.stream), _AFTER_LAYER, layer.peak))
        if kept.trains_all:
            behind = (left, sizes.attention, 2 * shape.stream)
            found.append(peak(fraction + 0.008, behind, _BEHIND_ATTENTION, layer.behind))
        # With frozen embeddings no gradient reaches the first layer's first norm.
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


def _coming_back(shape: StageBackward, layer: Layer, index: Any) -> list[tuple[Any, Any, Instant]]:
    """Return the phases of a dense layer whose offloaded activations are fetched one by one.

    Each is (bytes of the layers before, bytes in the layer, ZeRO's elements). The phases are those of
    ``memory/activations/modules/instants.py``: the MLP's four, the norm after attention, attention's output
    projection, its core, its input projections, and the first norm.
    """
    order = shape.find_order()
    others = shape.layers - order.sum_before(order.num_layers, "saved")
    before = maximum(0, others + order.sum_before(index, "saved"))
    first, second = layer.inner[0], layer.inner[min(1, len(layer.inner) - 1)]
    behind, middle, peak = layer.behind, layer.middle, layer.peak
    beside = (layer.base, first, first, second, behind, behind, middle, peak, layer.following)
    away, here = order.kinds[0], order.kinds[-1]
    chosen = index % order.interval == 0
    # A phase cannot free more than is left: with short sequences over many ranks its bytes are 0.
    return [
        (before, maximum(where(chosen, one.held, other.held), -before), instant)
        for one, other, instant in zip(away.backward, here.backward, beside, strict=True)
    ]


def _between(
    fullest: LargestLayer, shape: StageBackward, index: Any, interval: int
) -> tuple[LargestLayer, Any]:
    """Return the layer at ``index`` if only some are recomputed, and the bytes saved up to and by it."""
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
    """Return the bytes freed and ZeRO's phase at the feed-forward matrix with the largest total."""
    drop, instant = drops[0], inner[0]
    for other, one in zip(drops[1:], inner[1:], strict=False):
        more = half * one.total - other > half * instant.total - drop
        drop, instant = where(more, other, drop), where(more, one, instant)
    return drop, instant


def _in_scores(
    c: Counted, shape: StageBackward, kept: Kept, num_layers: Any, peak: Callable[..., PeakCandidate]
) -> list[PeakCandidate]:
    """Return the candidates at attention's scores in forward, in the last layer of each kind."""
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


def _gathering(
    c: Counted, shape: StageBackward, half: int, num_layers: Any, peak: Callable[..., PeakCandidate]
) -> PeakCandidate:
    """Return the candidate in forward with the most all-gathered parameters and saved tensors together."""
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
    """Return the saved bytes left of ``layers`` after the backward of ``done``, the largest kind first."""
    left = layers - done * saved
    # With two kinds of layers the larger one is subtracted for both; use the mean where that is too much.
    return where(left > 0, left, layers // num_layers * (num_layers - done))
