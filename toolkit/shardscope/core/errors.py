"""Validation errors: the field, its value, what is allowed, and the nearest fix. And warnings.

All errors are ``ValueError``; the Studio shows the same text at the input.
"""

from __future__ import annotations

import difflib
import linecache
import math
import numbers
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import NoReturn, TypeAlias, TypeVar

from shardscope.core.other_names import find_by_other_name

Option = TypeVar("Option")

# Matches the field in "tp=4" and "pp > 1", and both fields of "tp x pp".
_FIELD_IN_TEXT = re.compile(r"\b([a-z_]\w*)(?= ?[=<>]| x )|(?<= x )([a-z_]\w*)")


@dataclass(frozen=True)
class Value:
    """A fix: another value for the invalid field itself."""

    value: object


Fix: TypeAlias = str | Value | Mapping[str, object]
"""The nearest fix of an invalid value: another value for its field; a mapping of field changes, ``{"tp":
2}``, where ``{"layout": "fsdp2"}`` means ``Layout.fsdp2()``; or text, if no change of fields fixes it."""


class FieldError(ValueError):
    """An invalid value of ``field``, by which a widget finds the input to show the message at."""

    key_path: tuple[str, ...] = ()
    """Keys that lead to the invalid object in the data that it was read from, outermost first."""

    def __init__(self, field: str, value: object, allowed: str, fix: Fix, problem: str = "") -> None:
        text = write_fix(fix)
        super().__init__(f"{field} is {_format_value(value)}; allowed: {allowed}. Nearest fix: {text}.")
        self.field = field
        self.problem = problem
        """Short reason, to show next to an input; empty: use :attr:`allowed`."""
        self.allowed = allowed
        self.fix = text
        """The fix as text, as in the message."""
        self.field_names = _split_fields(field)
        """The invalid fields without their class: one in "Recipe.seq_len", two in "Layout tp x pp"; for an
        unknown key, the key."""
        self.fix_values = _get_fix_values(fix, self.field_names)
        """The fix as data: field -> value, and "layout" -> the name of one of ``Layout``'s constructors; None
        if the fix is text."""

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException's default calls the constructor with the message alone.
        return _restore, (str(self), _copy_state(self))

    def _render_traceback_(self) -> list[str]:
        """Return IPython's traceback with the user's own code alone, for the default mode of ``%xmode``.

        ``%debug`` and ``__traceback__`` still have all frames.
        """
        # IPython calls this method; the toolkit itself never imports it.
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is None:
            return traceback.format_exception(self)
        # Ten frames of this package and of ``dataclasses.replace`` would stand between the user's lines and
        # the message.
        own = _keep_own_frames(self.__traceback__)
        if own is None or shell.InteractiveTB.mode != "Context" or _has_own_context(self):
            return list(shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__))
        # The context, if any, is an error that this package handled.
        suppresses_context = self.__suppress_context__
        self.__suppress_context__ = True
        try:
            return list(shell.InteractiveTB.structured_traceback(type(self), self, own, tb_offset=0))
        finally:
            self.__suppress_context__ = suppresses_context

    @property
    def changes(self) -> dict[str, object]:
        """The fix as data: ``{"Recipe.global_batch_size": 66}``; empty if the fix is text.

        Keys are the class and its field, as in :attr:`field`. Another framework is
        ``{"Layout": Layout.fsdp2()}``.
        """
        from shardscope.core.fixes import find_changes  # fixes.py imports this module.

        return find_changes(self)

    @property
    def summary(self) -> str:
        """Short message to show at the input: ``64 does not divide over 6 GPUs. Use 66``."""
        changes = self.changes
        value = changes.get(self.field)
        use = f"{value}" if len(changes) == 1 and isinstance(value, int | float | str) else self.fix
        return f"{self.problem or f'Allowed: {self.allowed}'}. Use {use}"

    @property
    def without_fix(self) -> str:
        """The message without its nearest fix."""
        return str(self).removesuffix(f" Nearest fix: {self.fix}.")

    @property
    def mentioned_names(self) -> list[str]:
        """Fields that the message has a value or bound for, in its order; may contain other words too."""
        return [before or after for before, after in _FIELD_IN_TEXT.findall(str(self))]

    def with_fix(self, fix: Fix, more: str = "") -> FieldError:
        """Return the same error with another fix and the same traceback.

        ``more`` is text that follows the fix and is no part of its data.
        """
        text = write_fix(fix) + more
        # The message ends with the fix and a full stop (see ``__init__``).
        changed = _restore(f"{str(self).removesuffix(f'{self.fix}.')}{text}.", _copy_state(self))
        changed.fix, changed.fix_values = text, _get_fix_values(fix, self.field_names)
        return changed.with_traceback(self.__traceback__)

    def with_location(self, location: str) -> FieldError:
        """Return the same error with ``location`` (file, line, key) in front of its message."""
        return _restore(f"{location}: {self}", _copy_state(self)).with_traceback(self.__traceback__)


def write_fix(fix: Fix) -> str:
    """Return ``fix`` as message text: ``8``, ``tp=2, pp=1``, ``layout=Layout.fsdp2(cp=2)``, or itself if
    text."""
    if isinstance(fix, str):
        return fix
    if isinstance(fix, Value):
        return _write_value(fix.value)
    if "layout" not in fix:
        return _write_arguments(fix)
    from shardscope.core.fixes import find_owner  # fixes.py imports this module.

    # The other layout's fields are arguments of its constructor; the rest is the recipe's.
    options = {name: value for name, value in fix.items() if find_owner(name) == "Layout"}
    layout = f"layout=Layout.{fix['layout']}({_write_arguments(options)})"
    others = {name: value for name, value in fix.items() if name != "layout" and name not in options}
    return ", ".join([layout, _write_arguments(others)] if others else [layout])


def _write_arguments(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_write_value(value)}" for name, value in values.items())


def _write_value(value: object) -> str:
    """Return a value as the user would type it: 0.5 and 1e-05, but 8 instead of 8.0."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return repr(value)


def _get_fix_values(fix: Fix, field_names: list[str]) -> dict[str, object] | None:
    if isinstance(fix, str):
        return None
    return {field_names[0]: fix.value} if isinstance(fix, Value) else dict(fix)


def _copy_state(error: FieldError) -> dict[str, object]:
    """Return the attributes to copy from ``error``."""
    names = ("field", "allowed", "fix", "fix_values", "field_names", "problem")
    return {name: getattr(error, name) for name in names}


def _restore(message: str, state: dict[str, object]) -> FieldError:
    """Create an error with these attributes, without the constructor, which composes its own message."""
    error = FieldError.__new__(FieldError)
    ValueError.__init__(error, message)
    vars(error).update(state)
    return error


def _split_fields(field: str) -> list[str]:
    names = field.removeprefix("Layout ").split(" x ")
    return [re.match(r"\w*", name.rpartition(".")[2])[0] for name in names]  # type: ignore[index]


_HIDDEN_MODULES = ("shardscope", "shardscope_widgets", "dataclasses", "IPython")
"""Packages whose frames are not shown to a user who passed an invalid value."""


def _keep_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package, IPython and code without a source."""
    frames = []
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        # ``%%time`` compiles the lines of its cell without their text; the cell's own frame shows them.
        has_source = linecache.getline(
            trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals
        )
        if name.partition(".")[0] not in _HIDDEN_MODULES and has_source:
            frames.append(trace)
        trace = trace.tb_next
    own = None
    for frame in reversed(frames):
        own = TracebackType(own, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return own


def _has_own_context(error: BaseException) -> bool:
    """Return whether an error has a cause, or was raised while an error of the user's code was handled."""
    while error.__cause__ is None and not error.__suppress_context__ and error.__context__ is not None:
        error = error.__context__
        if _keep_own_frames(error.__traceback__) is not None:
            return True
    return error.__cause__ is not None


class OverridableError(FieldError):
    """Error of a check that ``ss.launch(..., force=True)`` skips: what it found may be no obstacle."""


def refuse(field: str, value: object, allowed: str, fix: Fix, problem: str = "") -> NoReturn:
    """Raise :class:`FieldError` with ``field`` ("Recipe.seq_len"), ``value``, what is allowed and the fix.

    ``problem`` is a short reason ("64 does not divide over 6 GPUs").
    """
    raise FieldError(field, value, allowed, fix, problem)


def check_integer(field: str, value: object, *, low: int, high: int, default: object = None) -> int:
    """Return ``value`` as an int. Raises ``ValueError`` unless it is an integer in ``low..high``, no bool.

    ``default`` is the fix for what has no number ("ten"); None: ``low``.
    """
    # Most values are valid: what an error says is built for others only.
    if type(value) is int and low <= value <= high:
        return value
    allowed = f"a whole number from {low:,} to {high:,}"
    # bool is a subclass of int. ``__index__`` accepts numpy's integers and rejects every float.
    if isinstance(value, bool | str | bytes) or value is None:
        refuse(field, value, allowed, _find_nearest_number(value, low, high, default))
    try:
        number = value.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        refuse(field, value, allowed, _find_nearest_number(value, low, high, default))
    if not low <= number <= high:
        refuse(field, number, allowed, Value(min(max(number, low), high)))
    return int(number)


def check_number(field: str, value: object, *, low: float, high: float, default: object = None) -> float:
    """Return ``value`` as a float. Raises ``ValueError`` unless it is a number in ``low..high``, no bool.

    ``default`` is the fix for what has no number ("fast"); None: ``low``.
    """
    # A NaN is not in the range.
    if type(value) is float and low <= value <= high:
        return value
    allowed = f"a number from {low:g} to {high:g}"
    # bool is a subclass of int: True would count as 1.0.
    if isinstance(value, bool) or not isinstance(value, int | float):
        number = _read_number(value)
        fallback = low if default is None else default
        refuse(field, value, allowed, Value(fallback if math.isnan(number) else min(max(number, low), high)))
    if isinstance(value, float) and math.isnan(value):
        refuse(field, value, allowed, Value(low if default is None else default))
    # float() of an int beyond 1e308 raises OverflowError, so compare first.
    number = float(value) if abs(value) <= high else math.inf if value > 0 else -math.inf
    if not low <= number <= high:
        refuse(field, value, allowed, Value(high if number > high else low))
    return number


def convert_numpy_number(value: object) -> object:
    """Return a number of numpy's as Python's, which JSON can encode; others unchanged."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def check_flag(field: str, value: object) -> bool:
    """Return ``value``. Raises ``ValueError`` unless it is True or False (not 0 or 1)."""
    if not isinstance(value, bool):
        refuse(field, value, "True or False", Value(bool(value)))
    return value


def check_printable(field: str, value: object, fix: Fix) -> None:
    """Raise ``ValueError`` unless ``value`` is a text of 1 to 200 printable characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= 200 or not value.isprintable():
        refuse(field, value, "1 to 200 printable characters", fix)


def check_choice(field: str, value: object, choices: Iterable[Option]) -> Option:
    """Return ``value``. Raises ``ValueError``, with the nearest choice, unless it is in ``choices``."""
    options = list(choices)
    # Compare types too: otherwise True and 1.0 would pass as the choice 1.
    for option in options:
        if value is option or (type(value) is type(option) and value == option):
            return option
    refuse(field, value, ", ".join(repr(option) for option in options), Value(find_nearest(value, options)))


def check_mapping(owner: str, data: object) -> None:
    """Raise ``ValueError`` unless ``data``, of which an ``owner`` shall be created, has fields by name."""
    if not isinstance(data, Mapping):
        read = "from_json(...)" if isinstance(data, str | bytes) else "from_dict(stored.to_dict())"
        refuse(owner, data, "a mapping of field names to values", f"{owner}.{read}")


def check_keys(owner: str, data: Mapping[str, object], allowed: Iterable[str]) -> None:
    """Raise ``ValueError`` for keys of ``data`` outside of ``allowed``, with a similar key if any."""
    check_mapping(owner, data)
    names = list(allowed)
    for key in data:
        if key not in names:
            similar = find_by_other_name(key, names) or find_similar(key, names)
            fix = repr(similar) if similar else f"leave {key} out"
            error = FieldError(f"{owner} key", key, ", ".join(names) or "none", fix)
            # The key itself, so that its line in the file is found (``text_positions.py``).
            error.field_names = [key]
            raise error


def add_article(name: str) -> str:
    """Return ``name`` with its article: ``an Architecture``, ``a Plan``."""
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


MIN_SIMILARITY = 0.6
"""Lowest similarity (``difflib``'s ratio) at which a name is suggested for another: "rtx4090" and
"rtx-4090-24gb" have 0.70, "sequence_length" and "seq_len" 0.64."""


def get_first_line(error: BaseException) -> str:
    """Return the first line of the message of a library's error; without a message, the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def find_similar(value: object, options: Iterable[str]) -> str | None:
    """Return the option that starts with ``value`` or is spelled similarly; None if there is none."""
    return _find_by_spelling(value, list(options), MIN_SIMILARITY)


_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def find_nearest(value: object, options: list[Option]) -> Option:
    """Return the option that another tool calls ``value``, that starts with it or is spelled most similarly;
    else the first one.

    A switch means the option that turns it on or off: ``recompute=True`` is "full", and "off" is "none".
    """
    # As text, numpy's True and those of YAML and of command lines are switches, too.
    switch = _SWITCHES.get(str(value).lower())
    if value is None or switch is not None:
        is_off = [option in (None, False, "none") for option in options]
        wanted = [option for option, off in zip(options, is_off, strict=True) if off != (switch is True)]
        return next((option for option in wanted if option == "full"), (wanted or options)[0])
    texts = [str(option) for option in options]
    match = find_by_other_name(value, texts) or _find_by_spelling(value, texts, 0.3)
    return options[0] if match is None else options[texts.index(match)]


def _find_by_spelling(value: object, texts: list[str], cutoff: float) -> str | None:
    text = str(value).lower()
    # "h200" should match h200-sxm-141gb, although h20-96gb has a higher difflib ratio.
    longer = [option for option in texts if text and option.startswith(f"{text}-")]
    return next(iter(longer or difflib.get_close_matches(text, texts, n=1, cutoff=cutoff)), None)


def _find_nearest_number(value: object, low: int, high: int, default: object) -> Value:
    """Return the nearest allowed integer for a value that is not an integer ("8.0", "8k", nan, None)."""
    number = _read_number(value)
    if math.isnan(number):
        return Value(low if default is None else default)
    # round() raises OverflowError for infinities, which the bounds replace.
    return Value(int(min(max(round(number) if math.isfinite(number) else number, low), high)))


_SUFFIXES = {"k": 2**10, "m": 2**20, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
"""Letters after a number, as in "8k" tokens, and units of memory, of which vendors mean powers of two."""
_WITH_SUFFIX = re.compile(r"(.*\d)\s*(?:([kmgt])i?(b)|([km]))")


def _read_number(value: object) -> float:
    """Return the number that a value of another type stands for ("1e-3", "8k"); nan if none."""
    text = value.strip().lower() if isinstance(value, str) else value
    factor = 1
    if isinstance(text, str) and (match := _WITH_SUFFIX.fullmatch(text)):
        text, *letters = match.groups(default="")
        factor = _SUFFIXES["".join(letters)]
    try:
        return factor * float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _format_value(value: object) -> str:
    """Return ``repr(value)``, shortened to 80 characters; safe if ``__repr__`` raises.

    A path keeps its end, which has the file's name.
    """
    # The value may be anything, also an object of the user's class whose __repr__ raises.
    try:
        text = repr(value)
    except Exception:
        text = f"an unprintable {type(value).__name__}"
    if len(text) <= 80:
        return text
    if isinstance(value, PurePath) or (isinstance(value, str) and "/" in value and "\n" not in value):
        return f"{text[:25]}...{text[-52:]}"
    return text[:77] + "..."


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning at the line outside of this project from which it was called.

    For warnings that several public functions reach by different numbers of calls.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _get_package(frame) in ("shardscope", "shardscope_widgets"):
        level, frame = level + 1, frame.f_back
    # In a thread of this project the next frame is the standard library's.
    if _get_package(frame) in sys.stdlib_module_names:
        level -= 1
    warnings.warn(message, category, stacklevel=level)


def _get_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
