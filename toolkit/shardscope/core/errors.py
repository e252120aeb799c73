"""How every noun refuses a bad value: field, value, what is allowed, and the nearest fix.

All refusals are ``ValueError``; the Studio prints the same text at the input.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

# "tp=4", "pp > 1", and both sides of "tp x pp".
_NAMED = re.compile(r"\b([a-z_]\w*)(?= ?[=<>]| x )|(?<= x )([a-z_]\w*)")


@dataclass(frozen=True)
class Value:
    """A fix: another value for the refused field itself."""

    value: object


Fix: TypeAlias = str | Value | Mapping[str, object]
"""The nearest fix of a refused value: another value for its field; changes of fields, ``{"tp": 2}``, where
``{"layout": "fsdp2"}`` means ``Layout.fsdp2()``; or words, where no change of a field fixes it."""


class FieldError(ValueError):
    """A refused value; ``field`` says whose, so that a picker can show the message at its input."""

    way: tuple[str, ...] = ()
    """The keys under which the refused noun stands in the data that it was read from."""

    def __init__(self, field: str, value: object, allowed: str, fix: Fix, problem: str = "") -> None:
        text = write_fix(fix)
        super().__init__(f"{field} is {_shown(value)}; allowed: {allowed}. Nearest fix: {text}.")
        self.field = field
        self.problem = problem
        """Why the value is refused, in the few words that fit beside an input; empty: see :attr:`allowed`."""
        self.allowed = allowed
        self.fix = text
        """The fix as the message has it."""
        self.refused = _fields_of(field)
        """The fields that it is about, without their noun: one in "Recipe.seq_len", two in "Layout tp x pp"
        (of a key that does not exist, the key)."""
        self.fix_values = _fix_values(fix, self.refused)
        """The fix as data: field -> value, and "layout" -> the name of one of ``Layout``'s constructors. None
        if the fix is words."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the constructor with the message alone.
        return _restored, (str(self), _state(self))

    @property
    def changes(self) -> dict[str, object]:
        """The fix as data: ``{"Recipe.global_batch_size": 66}``; empty if it cannot be said as values.

        Keys are the object and its field, as in :attr:`field`. Another framework is
        ``{"Layout": Layout.fsdp2()}``.
        """
        from shardscope.core.fixes import find_changes  # fixes.py imports this module.

        return find_changes(self)

    @property
    def summary(self) -> str:
        """The refusal in few words, for its input: ``64 does not divide over 6 GPUs. Use 66``."""
        changes = self.changes
        value = changes.get(self.field)
        use = f"{value}" if len(changes) == 1 and isinstance(value, int | float | str) else self.fix
        return f"{self.problem or f'Allowed: {self.allowed}'}. Use {use}"

    @property
    def named(self) -> list[str]:
        """Every field that the message sets a value or a bound for, in its order; other words among them."""
        return [before or behind for before, behind in _NAMED.findall(str(self))]

    def with_fix(self, fix: Fix) -> FieldError:
        """Return the same error, from the same place, with another fix."""
        text = write_fix(fix)
        changed = _restored(f"{str(self).removesuffix(f'{self.fix}.')}{text}.", _state(self))
        changed.fix, changed.fix_values = text, _fix_values(fix, self.refused)
        return changed.with_traceback(self.__traceback__)

    def behind(self, where: str) -> FieldError:
        """Return the same error, its message after ``where`` the value stands."""
        return _restored(f"{where}: {self}", _state(self)).with_traceback(self.__traceback__)


def write_fix(fix: Fix) -> str:
    """Return ``fix`` as a message has it: ``8``, ``tp=2, pp=1``, ``layout=Layout.fsdp2()``, or its words."""
    if isinstance(fix, str):
        return fix
    if isinstance(fix, Value):
        return _write_value(fix.value)
    return ", ".join(
        f"layout=Layout.{value}()" if name == "layout" else f"{name}={_write_value(value)}"
        for name, value in fix.items()
    )


def _write_value(value: object) -> str:
    """Return a value as a user types it; 0.5 and 1e-05, but 8 rather than 8.0."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return repr(value)


def _fix_values(fix: Fix, refused: list[str]) -> dict[str, Any] | None:
    if isinstance(fix, str):
        return None
    return {refused[0]: fix.value} if isinstance(fix, Value) else dict(fix)


def _state(error: FieldError) -> dict[str, Any]:
    """Return the attributes that a copy of ``error`` takes over."""
    names = ("field", "allowed", "fix", "fix_values", "refused", "problem")
    return {name: getattr(error, name) for name in names}


def _restored(message: str, state: dict[str, Any]) -> FieldError:
    """Return an error with these attributes; its constructor would write another message."""
    error = FieldError.__new__(FieldError)
    ValueError.__init__(error, message)
    vars(error).update(state)
    return error


def _fields_of(field: str) -> list[str]:
    names = field.removeprefix("Layout ").split(" x ")
    return [re.match(r"\w*", name.rpartition(".")[2])[0] for name in names]  # type: ignore[index]


def refuse(field: str, value: object, allowed: str, fix: Fix, problem: str = "") -> NoReturn:
    """Raise :class:`FieldError` with ``field`` ("Recipe.seq_len"), ``value``, what is allowed and the fix.

    ``problem`` says in a few words what is wrong ("64 does not divide over 6 GPUs").
    """
    raise FieldError(field, value, allowed, fix, problem)


def whole_number(field: str, value: object, *, low: int, high: int) -> int:
    """``value`` as an int in ``low..high``; bools, text, NaN, infinities and fractions are refused."""
    allowed = f"a whole number from {low:,} to {high:,}"
    if isinstance(value, bool | str | bytes) or value is None:
        refuse(field, value, allowed, _nearest_number(value, low, high))
    try:
        number = value.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        refuse(field, value, allowed, _nearest_number(value, low, high))
    if not low <= number <= high:
        refuse(field, number, allowed, Value(min(max(number, low), high)))
    return int(number)


def real_number(field: str, value: object, *, low: float, high: float) -> float:
    """``value`` as a finite float in ``low..high``; bools, text, NaN and infinities are refused."""
    allowed = f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, value, allowed, Value(low))
    number = float(value) if abs(value) <= high else math.inf
    if not low <= number <= high:
        refuse(field, value, allowed, Value(high if number > high else low))
    return number


def flag(field: str, value: object) -> bool:
    """``value`` if it is True or False; 0, 1 and text are refused."""
    if not isinstance(value, bool):
        refuse(field, value, "True or False", Value(bool(value)))
    return value


def one_of(field: str, value: object, choices: Iterable[Any]) -> Any:
    """``value`` if it is among ``choices``, else a refusal that lists them and the nearest."""
    options = list(choices)
    for option in options:
        if value is option or (type(value) is type(option) and value == option):
            return option
    refuse(field, value, ", ".join(repr(option) for option in options), Value(nearest(value, options)))


def known_keys(owner: str, data: Mapping[str, object], allowed: Iterable[str]) -> None:
    """Refuse keys of ``data`` that are not in ``allowed``, naming the nearest one if it is near."""
    names = list(allowed)
    for key in data:
        if key not in names:
            meant = near(key, names)
            fix = repr(meant) if meant else f"leave {key} out"
            refusal = FieldError(f"{owner} key", key, ", ".join(names) or "none", fix)
            refusal.refused = [key]
            raise refusal


def with_article(name: str) -> str:
    """``an Architecture``, ``a Plan``."""
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


NEAR = 0.6
"""How alike two spellings are, by ``difflib``'s ratio, for one to be offered for the other: "rtx4090" and
"rtx-4090-24gb" have 0.70, "sequence_length" and "seq_len" 0.64."""


def near(value: object, options: Iterable[str]) -> str | None:
    """Return the option that begins as ``value`` does, or is spelled much like it; None if none is near."""
    return _spelled_like(value, list(options), NEAR)


def nearest(value: object, options: list[Any]) -> Any:
    """Return the option that begins as ``value`` does, or is spelled most like it; else the first one."""
    texts = [str(option) for option in options]
    close = _spelled_like(value, texts, 0.3)
    return options[0] if close is None else options[texts.index(close)]


def _spelled_like(value: object, texts: list[str], cutoff: float) -> str | None:
    wanted = str(value).lower()
    # "h200" means h200-sxm-141gb, though h20-96gb is nearer by letters.
    begins = [text for text in texts if wanted and text.startswith(f"{wanted}-")]
    return next(iter(begins or difflib.get_close_matches(wanted, texts, n=1, cutoff=cutoff)), None)


def _nearest_number(value: object, low: int, high: int) -> Value:
    """The closest allowed whole number to something that is not one ("8.0", "8", nan, None)."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return Value(low)
    if math.isnan(number):
        return Value(low)
    return Value(int(min(max(round(number) if math.isfinite(number) else number, low), high)))


def _shown(value: object) -> str:
    """``repr`` of what was given, short enough to read and safe if ``__repr__`` itself fails."""
    try:
        text = repr(value)
    except Exception:
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
