"""Pinned plans: their names, and the button that pins the current plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from textwrap import shorten, wrap
from typing import NamedTuple

import shardscope as ss
from shardscope.planner.differences import Difference, find_differences
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import IgnoredError
from shardscope_widgets.kit.display_names import describe_devices, name_model

PIN = "Pin for comparison"
UNPIN = "Unpin"
SAME = "this plan"
IN_NAME = ("model", "GPUs", "framework")
"""Differences that the name of a whole plan includes."""
OFFLOADS = ("offload", "offload_optimizer", "offload_params")
"""Fields that say which training state is on the host."""
MAX_NAMED = 2
"""Differences that a pin's name may have."""
LABEL_CHARACTERS = 14
"""Characters per line of a chart row's label."""
SIGN_PLACE = "\N{NO-BREAK SPACE}" * 4
"""As wide as the sign of a line and a space."""
SHORT_FIELDS = {
    "micro_batch_size": "micro-batch",
    "global_batch_size": "batch",
    "seq_len": "sequence",
    "reshard_after_forward": "reshard",
    "cpu_offload": "offload",
}
"""Shorter field names, used where the full name would fill a column's heading."""


class PinName(NamedTuple):
    """The name of a pinned plan: how it differs from the current plan."""

    short: str
    """One or two differences, or else model and framework: ``recompute none``, ``Llama 3.1 8B, FSDP2``."""
    full: str
    """Model, GPUs and framework, then all other differences."""


def name_pins(pins: Sequence[ss.Plan], plan: ss.Plan) -> tuple[PinName, ...]:
    """Return a unique name for each of ``pins``, relative to the current ``plan``."""
    names: list[PinName] = []
    for pin in pins:
        name = _name_pin(find_differences(plan, pin), pin)
        names.append(_make_unique(name, pin, names, pins))
    return tuple(names)


def _make_unique(name: PinName, pin: ss.Plan, names: Sequence[PinName], pins: Sequence[ss.Plan]) -> PinName:
    """Return ``name``, whose short form begins with what tells ``pin`` from an earlier one of that name.

    Names are told apart by what a chart's labels show of them.
    """
    taken = {label for earlier in names for label in _list_labels(earlier.short)}
    # Two pins may differ from the current plan in the same first values.
    same = [
        other
        for other, earlier in zip(pins, names, strict=False)
        if not _list_labels(earlier.short).isdisjoint(_list_labels(name.short))
    ]
    if not same:
        return name
    changes = find_differences(same[0], pin)
    unique = []
    if any(change.field == "framework" for change in changes):
        unique.append(f"{pin.layout.description}, {name_model(pin.architecture)}")
    # A short name may have model and framework, but not the GPUs.
    others = [change for change in changes if change.field not in ("model", "framework")]
    for value in (_describe_value(change, pin) for change in others):
        unique.append(", ".join([value, *(part for part in name.short.split(", ") if part != value)]))
    unique += [f"({number}) {name.short}" for number in range(2, len(names) + 2)]
    return name._replace(short=next(one for one in unique if taken.isdisjoint(_list_labels(one))))


def _list_labels(short: str) -> set[str]:
    """Return the labels that charts show of a name: of a bar, and of a line, which has less room."""
    return {wrap_label(short), wrap_label(short, sign="-")}


def _name_pin(changes: Sequence[Difference], pin: ss.Plan) -> PinName:
    if not changes:
        return PinName(SAME, "same as the current plan")
    named = [(difference.field, _describe_value(difference, pin)) for difference in changes]
    values = list(
        dict.fromkeys(value for _, value in named)
    )  # Several fields are one list of what is offloaded.
    plan = f"{name_model(pin.architecture)} on {describe_devices(pin.cluster)} with {pin.layout.description}"
    fields = [difference.field for difference in changes]
    # The framework's description has what is offloaded.
    options = [value for field, value in named if field not in (*IN_NAME, *OFFLOADS)]
    full = f"{plan}: {', '.join(options)}" if options else plan
    # Many differences of one model under one framework: the first two, because those names would not differ.
    if len(values) <= MAX_NAMED or set(fields).isdisjoint(("model", "framework")):
        more = ", …" if len(values) > MAX_NAMED else ""
        return PinName(", ".join(values[:MAX_NAMED]) + more, full)
    return PinName(f"{name_model(pin.architecture)}, {pin.layout.description}", full)


def _describe_value(difference: Difference, pin: ss.Plan) -> str:
    """Return the value of the pinned plan: ``recompute none``, ``FSDP2``, ``Llama 3.1 8B``."""
    value = difference.after
    if difference.field in OFFLOADS:
        return ", ".join(pin.layout.offloaded) or "nothing on CPU"
    if difference.field == "framework":
        return str(value)
    if difference.field == "model":
        return name_model(pin.architecture)
    if difference.field == "GPUs":
        return describe_devices(pin.cluster)
    field = SHORT_FIELDS.get(difference.field, difference.field.replace("_", " "))
    if isinstance(value, bool):
        return field if value else f"no {field}"
    if value is None:
        return f"{field} unset"
    return f"{field} {value:,}" if isinstance(value, int) else f"{field} {value}"


def wrap_label(label: str, sign: str = "") -> str:
    """Return a chart row's label as HTML, on at most two lines, shortened with an ellipsis.

    ``sign`` comes first, such as the dashes of a line.
    """
    # In the place of the sign while the text is wrapped.
    room = SIGN_PLACE if sign else ""
    lines = wrap(label, LABEL_CHARACTERS, initial_indent=room)
    if len(lines) > 2:
        lines = [lines[0], shorten(" ".join(lines[1:]), LABEL_CHARACTERS, placeholder="…")]
    cut = [line if len(line) <= LABEL_CHARACTERS else line[: LABEL_CHARACTERS - 1] + "…" for line in lines]
    if sign and cut:
        cut[0] = f"{sign} {cut[0].removeprefix(room)}"
    return "<br>".join(escape(line) for line in cut)


class Pins:
    """The pinned plans of one view, with the button that pins or unpins the current plan.

    ``on_pin`` receives the plan to pin or unpin and must set :attr:`plans`; if None, this object updates its
    plans itself. ``on_change`` redraws the view.
    """

    def __init__(self, on_change: Callable[[], None], on_pin: Callable[[ss.Plan], None] | None) -> None:
        self._on_change = on_change
        self._on_pin = on_pin or self.toggle
        self._plans: tuple[ss.Plan, ...] = ()
        self._plan: ss.Plan | None = None
        self.button = controls.create_button(PIN, "ss-ghost", "ss-small", layout=controls.share_layout())
        self.button.on_click(lambda _: None if self._plan is None else self._on_pin(self._plan))

    @property
    def plans(self) -> tuple[ss.Plan, ...]:
        """The pinned plans in the order of pinning."""
        return self._plans

    @plans.setter
    def plans(self, plans: Sequence[ss.Plan]) -> None:
        distinct: list[ss.Plan] = []
        for plan in plans:
            if plan not in distinct:
                distinct.append(plan)
        if tuple(distinct) != self._plans:
            self._plans = tuple(distinct)
            self._label_button()
            self._on_change()

    def toggle(self, plan: ss.Plan) -> None:
        """Pin ``plan``, or unpin it if it is already pinned."""
        remaining = tuple(pin for pin in self._plans if pin != plan)
        self.plans = remaining if plan in self._plans else (*remaining, plan)

    def set_plan(self, plan: ss.Plan) -> None:
        """Set the plan that the button pins or unpins."""
        self._plan = plan
        self._label_button()

    def press_button(self, act: str) -> None:
        """Unpin the plan given by a table's ``unpin <index>`` button. Raises ``IgnoredError``."""
        word, _, index = act.partition(" ")
        if word != "unpin" or not index.isdecimal() or int(index) >= len(self._plans):
            raise IgnoredError(act)
        self._on_pin(self._plans[int(index)])

    def _label_button(self) -> None:
        is_pinned = self._plan in self._plans
        self.button.description = UNPIN if is_pinned else PIN
        self.button.tooltip = (
            "Remove this plan from the comparison"
            if is_pinned
            else "Keep this plan as a row and a column, to compare other plans with it"
        )
