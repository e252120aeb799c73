"""Kinds of answers: numbers with units, choices, and plans; each judges one answer of a learner.

Whatever a learner passes is judged, never raised: a wrong type or unit is a judgement with a hint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shardscope.core.errors import add_article
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.serialization import replace_fields


class Judgement(NamedTuple):
    """Verdict on one answer, with the feedback for the learner."""

    correct: bool
    text: str
    """What is wrong with this answer, or what was compared; empty: only the exercise's hints say more."""
    valid: bool = True
    """Whether the answer has the right kind (a number, a known unit, ...); only such answers cost a hint."""


class Expected(Protocol):
    """Correct answer of an exercise: judges answers, and has an example of the right kind."""

    def judge(self, answer: object) -> Judgement:
        """Judge one answer; no answer raises."""


# ---- Numbers

BYTES = {"bit": 0.125, "bits": 0.125, "b": 1.0, "byte": 1.0, "bytes": 1.0}
DECIMAL_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
DECIMAL_BYTES |= {"kilobytes": 1e3, "megabytes": 1e6, "gigabytes": 1e9, "terabytes": 1e12}
BINARY_BYTES = {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
SECONDS = {"s": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": BYTES | DECIMAL_BYTES | BINARY_BYTES,
    "seconds": SECONDS,
    "a plain number": {
        "": 1.0,
        "x": 1.0,
        "×": 1.0,
        "times": 1.0,
        "times fewer": 1.0,
        "%": 0.01,
        "percent": 0.01,
        "k": 1e3,
        "m": 1e6,
        "million": 1e6,
        "b": 1e9,
        "billion": 1e9,
    },
    "tokens per second": {"tokens/s": 1.0, "tok/s": 1.0, "tokens per second": 1.0},
    "FLOPs per byte": {"flop/b": 1.0, "flops/b": 1.0, "flop/byte": 1.0, "flops/byte": 1.0},
}
"""Dimensions, their units in lower case, and the size of each unit."""
COUNTED = (
    "allgather",
    "bucket",
    "step",
    "rank",
    "gpu",
    "microbatch",
    "microbatche",
    "stage",
    "layer",
    "parameter",
    "replica",
    "sequence",
    "token",
)
"""Nouns that may follow a plain number, with or without a plural s, spaces and hyphens."""
NUMBER = re.compile(r"\s*([-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(.*?)\s*", re.IGNORECASE)
CALCULATION = re.compile(r"[\s(]*[\d.][\d\s.,_()e]*[-+*/x×^][-+\s\d.,_()e*/x×^]*\d[\s)]*", re.IGNORECASE)
"""Text like ``15/8`` or ``2 x (7 + 1)``: numbers with at least one operator between them."""
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)
"""A number whose commas separate groups of three digits."""
MISTAKE_TOLERANCE = 0.005
"""Smallest relative tolerance of a known mistake: its hint is right for a rounded number too."""


@dataclass(frozen=True)
class Mistake:
    """A known wrong number, and the hint that its error deserves."""

    value: Callable[[], float]
    hint: str


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number in ``unit``, within a relative tolerance. Text may have another unit: ``"119.7 GiB"``."""

    value: Callable[[], float]
    """Computes it, in :attr:`unit`."""
    unit: str
    """Unit of a bare number, such as ``GB``; ``""``: a plain number."""
    tolerance: float = 0.02
    mistakes: tuple[Mistake, ...] = ()

    def judge(self, answer: object) -> Judgement:
        """Judge a number, or text with a number and a unit."""
        dimension, scale = _find_unit(self.unit) or ("a plain number", 1.0)
        example = f"{self.unit and 'a number of '}{self.unit or 'a plain number'}"
        value, unit = _read_number(answer)
        if value is None and isinstance(answer, str) and _has_decimal_comma(answer):
            return Judgement(False, f"Write {answer!r} with a decimal point; expected: {example}.", False)
        found = None if unit is None else _find_unit(unit, dimension)
        is_unread = value is None or (unit is not None and found is None)
        if is_unread and isinstance(answer, str) and CALCULATION.fullmatch(answer):
            return Judgement(False, f"Write the calculation without quotes; expected: {example}.", False)
        if value is None:
            return Judgement(False, f"{_describe(answer)}; expected: {example}, such as 12.5.", False)
        if unit is not None:
            if found is None:
                return Judgement(False, f"{unit!r} is no unit that I know; expected: {example}.", False)
            if found[0] != dimension:
                return Judgement(False, f"{unit!r} measures {found[0]}; expected: {example}.", False)
        written, expected = value, self.value()
        if found is not None:
            value *= found[1] / scale
        if _is_near(value, expected, self.tolerance):
            return Judgement(True, "")
        for mistake in self.mistakes:
            if _is_near(value, mistake.value(), max(self.tolerance, MISTAKE_TOLERANCE)):
                return Judgement(False, mistake.hint)
        if _is_near(written, expected, self.tolerance):
            # "28 GiB" for 28 GB
            text = f"The digits are right, the unit is not: expected is {example}."
            return Judgement(False, text)
        return Judgement(False, _find_unit_mistake(value, expected, dimension, self.unit, self.tolerance))


def _is_near(value: float, expected: float, tolerance: float) -> bool:
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=1e-12)


def _find_unit(unit: str, dimension: str = "") -> tuple[str, float] | None:
    """Return the dimension and size of a unit, of ``dimension`` if two have that name (``"6.8 b"``)."""
    name = unit.lower().strip()
    # "bytes per parameter", "8 micro-batches per replica": what it is counted for is the question's.
    name, _, counted_for = (part.strip() for part in re.sub(r"\s*\bper\b\s*|/", "/", name).partition("/"))
    if counted_for and not _is_counted(counted_for):
        name = unit.lower().strip()
    for known, units in sorted(UNITS.items(), key=lambda item: item[0] != dimension):
        if name in units:
            return known, units[name]
    if _is_counted(name):
        return "a plain number", 1.0
    # "6.8 million parameters"
    size, _, noun = name.partition(" ")
    if size in UNITS["a plain number"] and _is_counted(noun):
        return "a plain number", UNITS["a plain number"][size]
    return None


def _is_counted(noun: str) -> bool:
    return re.sub(r"[\s-]", "", noun).removesuffix("s") in COUNTED


def _read_number(answer: object) -> tuple[float | None, str | None]:
    """Return the finite number in ``answer`` and its unit; None for what has none."""
    unit = None
    if isinstance(answer, str):
        match = NUMBER.fullmatch(answer)
        if match is None or _has_decimal_comma(answer):
            return None, None
        answer, unit = match[1].replace(",", "").replace("_", ""), match[2] or None
    elif isinstance(answer, bool) or not hasattr(answer, "__float__"):
        return None, None
    try:
        # numpy's and torch's scalars have __float__ too; arrays raise TypeError or ValueError.
        value = float(answer)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None, None
    return (value, unit) if math.isfinite(value) else (None, None)


def _has_decimal_comma(text: str) -> bool:
    """Return whether ``text`` begins with a number like ``16,6``: much of the world writes 16.6 so."""
    match = NUMBER.fullmatch(text)
    return match is not None and "," in match[1] and THOUSANDS.fullmatch(match[1]) is None


def _find_unit_mistake(value: float, expected: float, dimension: str, unit: str, tolerance: float) -> str:
    """Return the hint for an answer that is right in another unit; empty if there is none."""
    if value == 0 or expected == 0 or math.copysign(1, value) != math.copysign(1, expected):
        return "The sign is wrong." if value and value * expected < 0 else ""
    ratio = value / expected
    if dimension == "bytes":
        for power, name in ((1, "K"), (2, "M"), (3, "G")):
            binary = (1000 / 1024) ** power
            if unit.lower() in ("kb", "mb", "gb")[power - 1 : power] and math.isclose(
                ratio, binary, rel_tol=tolerance / 4
            ):
                return (
                    f'The number is right in {name}iB. Write it as text, "{value:g} {name}iB", or '
                    f"convert it to {unit}."
                )
        if math.isclose(ratio, 8, rel_tol=tolerance):
            return "That is the number of bits: a byte has 8."
    for power in (-12, -9, -6, -3, 3, 6, 9, 12):
        if dimension != "a plain number" and math.isclose(ratio, 10.0**power, rel_tol=0.08):
            return f"The digits are right, the unit is not: expected is a number of {unit}."
    if unit == "%" and math.isclose(ratio, 0.01, rel_tol=tolerance):
        return "The fraction is right. Expected are percent: multiply by 100."
    return "It is too large." if ratio > 1 else "It is too small."


# ---- Choices

FILLERS = frozenset(("a", "an", "the", "it", "is", "it's", "one", "ones", "bucket", "layer", "plain"))
"""Words around the name of a choice that do not change it."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several words, or a set of them; case, hyphens and underscores do not matter."""

    right: frozenset[str]
    """The right word, or all of the right words."""
    wrong: Mapping[str, str]
    """The other words, each with the hint for whoever chooses it."""

    def judge(self, answer: object) -> Judgement:
        """Judge a word, or a list, tuple or set of words."""
        several = len(self.right) > 1
        words = [answer] if isinstance(answer, str) else answer
        if several and isinstance(answer, str):
            words = [word for word in re.split(r"[,;+&/\n]|\band\b", answer) if word.strip()]
        names = {_normalize(name): name for name in (*sorted(self.right), *self.wrong)}
        options = ", ".join(f'"{name}"' for name in sorted(names.values()))
        if not isinstance(words, list | tuple | set | frozenset) or not all(
            isinstance(word, str) for word in words
        ):
            kind = "a list of words" if several else "a word"
            return Judgement(False, f"{_describe(answer)}; expected: {kind} out of {options}.", False)
        given = {_find_name(_normalize(word), names) for word in words if isinstance(word, str)}
        unknown = given - set(names)
        if unknown or not given:
            words_given = ", ".join(f'"{word[:40]}"' for word in sorted(unknown)[:3])
            which = f"There is no {words_given} here. " if unknown else ""
            return Judgement(False, f"{which}Choose out of {options}.", False)
        chosen = {names[word] for word in given}
        if chosen == self.right:
            return Judgement(True, "")
        hints = [self.wrong[name] for name in sorted(chosen) if name in self.wrong]
        # Only right words, and too few of them.
        missing = len(self.right - chosen)
        return Judgement(False, hints[0] if hints else f"That is right, but not all: {missing} missing.")


def _normalize(word: str) -> str:
    return re.sub(r"[\s_-]+", " ", word).strip(" .!'\"").lower()


def _find_name(text: str, names: Mapping[str, str]) -> str:
    """Return the name in a learner's words if the others are fillers, as in "the last bucket"; else ``text``.

    Any other word may deny the name, or make another one of it: "neither", "all but the last".
    """
    words = " ".join(word for word in text.split() if word not in FILLERS)
    found = [name for name in names if name.removesuffix("s") == words.removesuffix("s")]
    return found[0] if len(found) == 1 else text


# ---- Plans


class Condition(NamedTuple):
    """One condition on a plan: its words, and what is wrong if it is not met (None: it is met)."""

    words: str
    find_problem: Callable[[Plan], str | None]


@dataclass(frozen=True, kw_only=True)
class PlanGoal:
    """A plan that meets all conditions: a change of ``start`` in the fields of ``may_change``."""

    start: Callable[[], Plan]
    may_change: tuple[str, ...]
    """Parts (``layout``) or fields (``recipe.recompute``) that may differ from the start."""
    conditions: tuple[Condition, ...]

    def judge(self, answer: object) -> Judgement:
        """Judge a plan, or a layout for the start plan."""
        start = self.start()
        takes_layout = any(name.partition(".")[0] == "layout" for name in self.may_change)
        if isinstance(answer, Layout) and takes_layout:
            try:
                answer = replace_fields(start, {"layout": answer})
            except ValueError as error:
                return Judgement(False, f"This layout is not valid here: {error}", False)
        if not isinstance(answer, Plan):
            kinds = "a Plan or a Layout" if takes_layout else "a Plan"
            is_layout = "layout" in self.may_change
            example = "ss.Layout.fsdp2()" if is_layout else "ss.Plan(architecture, cluster, recipe, layout)"
            return Judgement(False, f"{_describe(answer)}; expected: {kinds}, such as {example}.", False)
        changed = _find_other_changes(start, answer, self.may_change)
        if changed:
            allowed = ", ".join(self.may_change)
            return Judgement(False, f"{changed} must stay as it is here; you may change: {allowed}.", False)
        lines, met = [], True
        for condition in self.conditions:
            try:
                problem = condition.find_problem(answer)
            except ValueError as error:
                problem = str(error)
            if problem is None:
                lines.append(f"met: {condition.words}")
            else:
                lines.append(f"not met: {condition.words} ({problem})")
            met = met and problem is None
        # It comes after "Right." or "Not yet.".
        text = "; ".join(lines) + "."
        return Judgement(met, text[0].upper() + text[1:])


def _find_other_changes(start: Plan, plan: Plan, may_change: Sequence[str]) -> str | None:
    """Return the first part or field that differs from ``start`` without leave."""
    for part in ("architecture", "cluster", "recipe", "layout"):
        before, after = getattr(start, part), getattr(plan, part)
        if part in may_change or before == after:
            continue
        leave = [name.partition(".")[2] for name in may_change if name.startswith(f"{part}.")]
        if type(before) is not type(after) or not leave:
            return part
        old, new = before.to_dict(), after.to_dict()
        for name in {**old, **new}:
            if name not in leave and old.get(name) != new.get(name):
                return f"{part}.{name}"
    return None


def _describe(answer: object) -> str:
    """Return what the learner passed, shortened, with its type."""
    if answer is None:
        return "The answer is None"
    try:
        text = repr(answer)
    except Exception:
        text = ""
    kind = add_article(type(answer).__name__)
    return f"The answer is {kind}" + (f", {text}" if 0 < len(text) <= 60 else "")
