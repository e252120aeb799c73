"""Fit of measured curves to the rates of the step-time formulas.

Every fit is least squares of relative errors, so that small calls count as much as large ones, with the same
formulas that predictions use (``MatrixRate.seconds``, ``collectives.seconds``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import exp, log
from statistics import fmean, median
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from shardscope.timing.collectives import compute_transfer_seconds
from shardscope.timing.rates import AttentionRate, LinkRate, MatrixRate, MeasuredCalls, Rates, look_up_rates
from shardscope.timing.traffic import Transfer

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.timing.calibration.curves import (
        AttentionPass,
        Calibration,
        CollectiveCall,
        MatrixProduct,
        MemoryPass,
    )

MIN_FITTED_SECONDS = 50e-6
"""Minimum time of a fitted matmul: shorter ones are dominated by launch time."""


class Term(NamedTuple):
    """One measured time, modelled as ``first * x + second * y``."""

    x: float
    y: float
    seconds: float


def fit_rates(calibration: Calibration, cluster: Cluster) -> Rates:
    """Return the catalogue's rates of ``cluster``, with everything that was measured replaced."""
    known = look_up_rates(cluster)
    matrices = dict(known.matrices)
    precisions = {product.precision for product in calibration.matrix_products}
    # Each precision has kernels, and so a speed and a size effect, of its own.
    for precision in sorted(precisions):
        products = [one for one in calibration.matrix_products if one.precision == precision]
        peak = cluster.gpu.peak_flops.get(precision)
        matrices[precision] = fit_matrices(products, peak)
    memory = fit_memory_bandwidth(calibration.memory_passes)
    inside = known.inside
    # A single rank measures no collective, and keeps the catalogue's link.
    if calls := [call for call in calibration.collectives if call.collective in STATE]:
        inside = fit_link(known, calls, calibration.num_ranks)
    # SDPA was measured, which is FlashAttention's kernels where it does not take cuDNN's.
    attention = fit_attention(calibration.attention)
    flash = {
        precision: rate
        for precision, rate in attention.items()
        if known.sdpa.get(precision) == known.flash_attention.get(precision)
    }
    return replace(
        known,
        matrices=MappingProxyType(matrices),
        sdpa=MappingProxyType({**known.sdpa, **attention}),
        flash_attention=MappingProxyType({**known.flash_attention, **flash}),
        memory_bytes_per_second=memory,
        kernel_seconds=calibration.kernel_seconds,
        inside=inside,
        collectives=MappingProxyType(build_measured_calls(calibration.collectives, calibration.num_ranks)),
        host=_fit_host_link(calibration, known.host, memory),
        host_updates_per_second=calibration.host_updates_per_second,
        source=calibration.source,
    )


STATE = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives of the training state; a link's rate is fitted to these together."""


def fit_matrices(products: list[MatrixProduct], peak: float | None) -> MatrixRate:
    """Return the speed and the half size of matmuls in one precision."""
    worth = [one for one in products if one.seconds >= MIN_FITTED_SECONDS] or products
    terms = []
    for one in worth:
        # ``MatrixRate.seconds`` is 2 x (multiplied + half_size x moved) / speed: linear in these two.
        multiplied = float(one.rows) * one.inner * one.columns
        moved = one.rows * one.inner + one.inner * one.columns + one.rows * one.columns
        terms.append(Term(2 * multiplied, 2.0 * moved, one.seconds))
    per_flop, per_moved = fit_two_terms(terms)
    if not per_flop:
        # No measured matmul was large enough to be compute-bound.
        return MatrixRate(max(one.flops_per_second for one in worth), 0.0, peak)
    # Balance 0: the measured effect of size includes matmuls that are bound by memory.
    return MatrixRate(1 / per_flop, per_moved / per_flop, peak)


def fit_link(known: Rates, calls: list[CollectiveCall], ranks: int) -> LinkRate:
    """Return the bandwidth and latency for which the collectives' formula best fits ``calls`` on one node.

    The formula is evaluated, not inverted, so the fit includes all of its effects. Coordinate search: each
    figure is scaled by decreasing factors while that reduces the squared log errors.
    """
    largest = max(calls, key=lambda call: call.num_bytes)
    smallest = min(calls, key=lambda call: call.num_bytes)
    # Start from what the largest call says about bandwidth and the smallest about latency.
    # A ring's all-reduce has 2 x (ranks - 1) steps, each with the link's latency.
    link = LinkRate(known.inside.name, largest.num_bytes / largest.seconds, smallest.seconds / (2 * ranks))
    least, factor = _compute_error(known, link, calls, ranks), 4.0
    while factor > FINEST:
        moved = [
            link._replace(**{name: getattr(link, name) * by})
            for name in ("bytes_per_second", "latency_seconds")
            for by in (factor, 1 / factor)
        ]
        error, best = min((_compute_error(known, one, calls, ranks), one) for one in moved)
        if error < least:
            least, link = error, best
        else:
            # No direction is better at this distance: look closer.
            factor = factor**0.5
    return link


def build_measured_calls(calls: Iterable[CollectiveCall], ranks: int) -> dict[str, MeasuredCalls]:
    """Return the measured curve by collective; smaller calls never take longer than larger ones."""
    by_name: dict[str, list[CollectiveCall]] = {}
    for call in calls:
        by_name.setdefault(call.collective, []).append(call)
    curves = {}
    for name, measured in by_name.items():
        measured.sort(key=lambda call: call.num_bytes)
        # A larger call bounds a smaller one: outliers above it are noise.
        at_most = [min(later.seconds for later in measured[i:]) for i in range(len(measured))]
        sizes = tuple(log(call.num_bytes) for call in measured)
        curves[name] = MeasuredCalls(ranks, sizes, tuple(map(log, at_most)))
    return curves


FINEST = 1.001
"""Last factor of the link search: finer than the precision of any figure."""


def _compute_error(known: Rates, link: LinkRate, calls: list[CollectiveCall], ranks: int) -> float:
    # The catalogue's rates have no measured curves, which would replace the formula that is fitted
    # (``collectives.compute_call_seconds``).
    rates = replace(known, inside=link)
    total = 0.0
    for call in calls:
        transfer = Transfer("gathers", call.collective, call.num_bytes, ranks, 1, 1)
        total += log(compute_transfer_seconds(transfer, ranks, rates) / call.seconds) ** 2
    return total


def fit_two_terms(terms: Iterable[Term]) -> tuple[float, float]:
    """Return the non-negative ``first`` and ``second`` that minimize the squared relative errors."""
    # Dividing by the time makes errors relative; then solve the 2 x 2 normal equations.
    scaled = [(x / t, y / t) for x, y, t in terms]
    xx = sum(x * x for x, _ in scaled)
    yy = sum(y * y for _, y in scaled)
    xy = sum(x * y for x, y in scaled)
    x1, y1 = sum(x for x, _ in scaled), sum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    # Terms in nearly the same proportion have no unique solution: then only one of them is used.
    if determinant > 1e-12 * xx * yy:
        first, second = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if first >= 0 and second >= 0:
            return first, second
    # On the boundary one of them is 0: take the better of the two.
    edges = [(x1 / xx, 0.0)] if xx else []
    edges += [(0.0, y1 / yy)] if yy else []
    return min(edges, key=lambda edge: sum((edge[0] * x + edge[1] * y - 1) ** 2 for x, y in scaled))


def fit_memory_bandwidth(passes: Iterable[MemoryPass]) -> float:
    """Return the bandwidth of passes larger than caches, or of the largest pass if none is."""
    measured = sorted(passes, key=lambda one: one.num_bytes)
    large = [one for one in measured if one.num_bytes >= PAST_CACHES] or measured[-1:]
    return median(one.num_bytes / one.seconds for one in large)


PAST_CACHES = 128 * 2**20
"""More than a GPU's cache, and than a CPU rank's share of its host's."""


def fit_attention(passes: Iterable[AttentionPass]) -> dict[str, AttentionRate]:
    """Return the forward and backward speeds and the half-speed sequence length, by precision.

    Sequence lengths are tried one by one; the best speeds for each are geometric means.
    """
    by_precision: dict[str, list[AttentionPass]] = {}
    for one in passes:
        by_precision.setdefault(one.precision, []).append(one)
    return {
        precision: min(_fit_attention_with(measured, half_keys) for half_keys in HALF_KEYS)[1]
        for precision, measured in by_precision.items()
    }


HALF_KEYS = (0.0, *(2.0 ** (power / 2) for power in range(29)))
"""Candidate sequence lengths in tokens, up to 16,384."""


def _fit_attention_with(passes: list[AttentionPass], half_keys: float) -> tuple[float, AttentionRate]:
    """Return the squared log errors, and the rates."""
    forward, backward = [], []
    for one in passes:
        # The same slowdown as in ``LayerWork._compute_attention``.
        slower = 1 + half_keys / one.seq_len
        forward.append(log(one.flops_forward * slower / one.forward_seconds))
        backward.append(log(one.flops_backward * slower / one.backward_seconds))
    spread = sum((rate - fmean(rates)) ** 2 for rates in (forward, backward) for rate in rates)
    return spread, AttentionRate(exp(fmean(forward)), exp(fmean(backward)), half_keys)


def _fit_host_link(calibration: Calibration, known: LinkRate, memory: float) -> LinkRate:
    """Return the slower direction of host copies; for CPU ranks, a copy in memory."""
    # A copy inside host memory reads and writes each byte, hence half of the bandwidth.
    if calibration.gpu == "cpu":
        return LinkRate(known.name, memory / 2, calibration.kernel_seconds)
    # ``timing/offload.py`` has one rate for both directions: the slower one bounds a step that uses both.
    slowest = known
    for direction in ("to_gpu", "to_host"):
        copies = [one for one in calibration.host_copies if one.direction == direction]
        if not copies:
            continue
        per_byte, latency = fit_two_terms(Term(one.num_bytes, 1.0, one.seconds) for one in copies)
        if per_byte and (slowest is known or 1 / per_byte < slowest.bytes_per_second):
            slowest = LinkRate(known.name, 1 / per_byte, latency)
    return slowest
