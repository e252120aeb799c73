"""Step-time report of one tier: seconds of one optimizer step by part, and derived figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from shardscope.core.errors import check_choice, check_number
from shardscope.core.number_format import Scale, format_gib, format_rate, format_share

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.timing.calibration.finished_runs import Residual

Part = Literal[
    "matrices",
    "attention",
    "elementwise",
    "loss",
    "recomputation",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_transfers",
    "gathers",
    "gradients",
    "bubble",
    "optimizer",
    "offload",
]
PARTS: tuple[Part, ...] = get_args(Part)
_PART_LABELS = {"matrices": "matmuls", "gathers": "all-gathers", "gradients": "gradient reduction"}
"""Parts whose name in ``StepReport.parts`` says less than the operation's usual name."""
DAY_SECONDS = 86_400
HOUR_SECONDS = 3_600


class Communication(NamedTuple):
    """All calls of one collective over one group in one step, on one rank of the slowest stage."""

    part: Part
    """The part of :data:`PARTS` that includes its exposed seconds."""
    collective: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``send``."""
    link: str
    """Name of the link that bounds it."""
    ranks: int
    """Number of ranks in the group."""
    num_bytes: float
    """Bytes of the full vectors over all calls: each rank's output of an all-gather, or its input to a
    reduction."""
    seconds: float
    """Seconds without overlap."""
    hidden_seconds: float
    """Seconds overlapped with arithmetic."""

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the step waits for it."""
        return self.seconds - self.hidden_seconds

    def describe(self, scale: Scale) -> str:
        """Return a one-line description, with times in the unit of ``scale``.

        For example ``all-gather of 12.3 GiB among 8 ranks over nvlink-4: 45.6 ms, 40.1 ms of it overlapped``.
        """
        hidden = (
            f", {scale.format_with_unit(self.hidden_seconds)} of it overlapped" if self.hidden_seconds else ""
        )
        called, moved = self.collective.replace("_", "-"), f"{format_gib(self.num_bytes)} GiB"
        took = f"{scale.format_with_unit(self.seconds)}{hidden}"
        return f"{called} of {moved} among {self.ranks:,} ranks over {self.link}: {took}"

    def add(self, other: Communication) -> Communication:
        """Return the sum of both, e.g. of forward's and backward's all-gathers."""
        return self._replace(
            num_bytes=self.num_bytes + other.num_bytes,
            seconds=self.seconds + other.seconds,
            hidden_seconds=self.hidden_seconds + other.hidden_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Seconds of one optimizer step on the slowest pipeline stage, and derived figures.

    TFLOP/s and MFU count model FLOPs with causal attention, recomputation excluded.
    """

    parts: Mapping[Part, float]
    """Exposed seconds by part, every name of :data:`PARTS`; they sum to :attr:`seconds`."""
    hidden: Mapping[Part, float]
    """Seconds overlapped with arithmetic, by part."""
    find_communication: Callable[[], tuple[Communication, ...]]
    """Computes :attr:`communication`; lazy, because suggested fixes and pickers read seconds only."""
    num_gpus: int
    """Number of GPUs."""
    num_tokens: int
    """Tokens of one step over all ranks."""
    model_flops: float
    """Model FLOPs of one step over all ranks: causal attention, no recomputation."""
    model_flops_full_attention: float
    """The same with attention to every key, as in Megatron's and PaLM's papers."""
    hardware_flops: float
    """FLOPs executed by all GPUs in one step, recomputation included."""
    peak_flops: float | None
    """Datasheet peak of one GPU, the denominator of MFU; None: unknown."""
    watts: float | None = None
    """Power limit of one GPU; None: unknown."""
    price_per_hour_usd: float | None = None
    """US dollars per hour of all GPUs; None: unknown."""
    calibration: str = ""
    """Source of the constants."""
    words: Callable[[Part], str] | None = field(default=None, repr=False, compare=False)
    """Returns the text of :meth:`explain` for a part; lazy."""
    find_residual: Callable[[], Residual | None] | None = field(default=None, repr=False, compare=False)
    """Computes :attr:`residual`; lazy."""
    tier: Literal["predicted", "measured"] = "predicted"
    on_gpu: bool = True
    """Whether the ranks run on GPUs; rates of CPU ranks are shown per rank."""

    @cached_property
    def communication(self) -> tuple[Communication, ...]:
        """Every kind of collective of the step."""
        return self.find_communication()

    @cached_property
    def sent(self) -> tuple[Communication, ...]:
        """:attr:`communication`, with forward's and backward's calls of the same kind merged."""
        kinds: dict[tuple[str, str, int, str], Communication] = {}
        for call in self.communication:
            kind = (call.part, call.collective, call.ranks, call.link)
            kinds[kind] = kinds[kind].add(call) if kind in kinds else call
        return tuple(kinds.values())

    @cached_property
    def staged(self) -> dict[Part, float]:
        """Seconds of local memory copies: of parts with communication, of added gradients, of cast weights.

        A part's exposed seconds are the sum of these and of its exposed communication.
        """
        # Without any communication, one rank adds up gradients of micro-batches, and autocast casts weights.
        copying: tuple[Part, ...] = ("gradients", "gathers")
        exposed: dict[Part, float] = dict.fromkeys((*(call.part for call in self.sent), *copying), 0.0)
        for call in self.sent:
            exposed[call.part] += call.exposed_seconds
        left = {part: self.parts[part] - seconds for part, seconds in exposed.items()}
        # Ignore rounding errors of float sums.
        return {part: seconds for part, seconds in left.items() if seconds > 1e-9 * self.parts[part]}

    @property
    def residual(self) -> Residual | None:
        """Measured over predicted step time of finished runs of this architecture, framework and machine.

        Reported next to the seconds, which it does not correct. None if no such run has finished. Not cached:
        another run may have finished since.
        """
        return None if self.find_residual is None else self.find_residual()

    @cached_property
    def seconds(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, all GPUs together."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second per GPU."""
        return self.tokens_per_second / self.num_gpus

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s per GPU: causal attention, no recomputation."""
        return self._tflops(self.model_flops)

    @property
    def tflops_per_gpu_full_attention(self) -> float:
        """Model TFLOP/s per GPU with attention to every key (Narayanan et al. 2021, eq. 3)."""
        return self._tflops(self.model_flops_full_attention)

    @property
    def hardware_tflops_per_gpu(self) -> float:
        """Executed TFLOP/s per GPU, recomputation included."""
        return self._tflops(self.hardware_flops)

    @property
    def mfu(self) -> float | None:
        """:attr:`tflops_per_gpu` as a share of the datasheet's peak (Chowdhery et al. 2022, appendix B).

        None if the peak is unknown.
        """
        return None if self.peak_flops is None else self.tflops_per_gpu * 1e12 / self.peak_flops

    @property
    def cost_per_token(self) -> float | None:
        """US dollars per token; None if the price is unknown."""
        if self.price_per_hour_usd is None:
            return None
        return self.price_per_hour_usd / HOUR_SECONDS / self.tokens_per_second

    @property
    def joules_per_token(self) -> float | None:
        """Energy of the GPUs per token at their power limit, in joules; None if that is unknown."""
        if self.watts is None:
            return None
        return self.watts * self.num_gpus / self.tokens_per_second

    def days(self, num_tokens: float) -> float:
        """Return the days for ``num_tokens`` tokens if nothing fails.

        Raises ``ValueError`` if ``num_tokens`` is not a valid number.
        """
        return self._check_num_tokens(num_tokens) / self.tokens_per_second / DAY_SECONDS

    def cost(self, num_tokens: float) -> float | None:
        """Return US dollars for ``num_tokens`` tokens; None if the price is unknown."""
        token_usd = self.cost_per_token
        return None if token_usd is None else self._check_num_tokens(num_tokens) * token_usd

    @property
    def scale(self) -> Scale:
        """The unit in which this report shows all of its times."""
        return Scale.for_seconds(self.seconds)

    def explain(self, name: str, scale: Scale | None = None) -> str:
        """Return the formula of a part, with its numbers and its source.

        Times are in the unit of ``scale``, by default :attr:`scale`.
        Raises ``ValueError`` for a name that is not in ``PARTS``.
        """
        part: Part = check_choice("part", name, PARTS)
        exposed, hidden = self.parts[part], self.hidden[part]
        show = (scale or self.scale).format_with_unit
        overlapped = f", {show(hidden)} more overlapped with arithmetic" if hidden else ""
        formula = f" = {self.words(part)}" if self.words else ""
        calls = "".join(f"; {one.describe(scale or self.scale)}" for one in self.sent if one.part == part)
        copies = self.staged.get(part)
        staged = f"; staged in its own memory: {show(copies)}" if copies else ""
        return f"{format_part(name)}, {show(exposed)}{overlapped}{formula}{calls}{staged}"

    def to_frame(self) -> pd.DataFrame:
        """Return one row per part: exposed and hidden seconds, and the share of the step."""
        import pandas as pd

        rows = [
            {
                "part": name,
                "seconds": self.parts[name],
                "hidden_seconds": self.hidden[name],
                "share": self.parts[name] / self.seconds,
            }
            for name in PARTS
        ]
        return pd.DataFrame(rows).set_index("part")

    def to_html(self) -> str:
        """Return the parts as a plain HTML table, without scripts."""
        scale = self.scale
        rows = "".join(
            f"<tr><th scope='row' style='text-align:left'>{format_part(name)}</th>"
            f"<td style='text-align:right'>{scale.format(self.parts[name])}</td>"
            f"<td style='text-align:right'>{scale.format(self.hidden[name])}</td>"
            f"<td style='text-align:right'>{100 * self.parts[name] / self.seconds:.0f} %</td></tr>"
            for name in PARTS
        )
        left, right = (f"<th style='text-align:{side}'>" for side in ("left", "right"))
        return (
            f"<table><caption style='text-align:left;white-space:nowrap'>{self._summary()}</caption><thead>"
            f"<tr>{left}part</th>{right}exposed, {scale.unit}</th>{right}overlapped, {scale.unit}</th>"
            f"{right}share</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>{self._render_source()}"
        )

    def _render_source(self) -> str:
        """Return the source of the constants and the residual of finished runs, as HTML paragraphs."""
        sentences = (
            self.calibration and f"From {self.calibration}.",
            self.residual and f"{self.residual.words.capitalize()}.",
        )
        return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        return f"<StepReport {self._summary()}>"

    def _summary(self) -> str:
        mfu = "" if self.mfu is None else f", MFU {format_share(self.mfu)}"
        device = "GPU" if self.on_gpu else "rank"
        # CPU ranks and small models have less than one.
        tokens, tflops = format_rate(self.tokens_per_second_per_gpu), format_rate(self.tflops_per_gpu)
        return (
            f"{self.tier} step: {format_seconds(self.seconds)}, {tokens} tokens/s per {device}, "
            f"{tflops} TFLOP/s{mfu}"
        )

    def _tflops(self, flops: float) -> float:
        return flops / self.seconds / self.num_gpus / 1e12

    def _check_num_tokens(self, num_tokens: float) -> float:
        return check_number("num_tokens", num_tokens, low=1, high=1e18)


def format_part(name: str) -> str:
    """Return the display name of a part of a step: ``matmuls`` for ``matrices``."""
    return _PART_LABELS.get(name, name.replace("_", " "))


def format_seconds(seconds: float) -> str:
    """Format seconds with three significant digits: ``12.3 s``, ``45.6 ms``, ``7.9 µs``."""
    if not seconds:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 0.9995 or unit == "µs":
            # The limits are where rounding adds a digit: 9.996 is shown as 10.0, not as 10.00.
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:,.{digits}f} {unit}"
    raise AssertionError("unreachable")
