"""The layout picker: a framework and its degrees, limited to what can run on the model and the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.core.layout import OptionValue
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import frameworks
from shardscope.planner.repairs.first_layout import choose_first_layout
from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import NOTHING, Picker, Row

LABELS = {
    "stage": "ZeRO stage",
    "replicate": "Replicate",
    "tp": "Tensor",
    "pp": "Pipeline",
    "vpp": "Interleave",
    "pipeline_schedule": "Schedule",
    "cp": "Context",
    "ep": "Experts",
    "etp": "Expert tensor",
    "reshard_after_forward": "Reshard after",
    "offload": "Offload",
    "offload_optimizer": "Offload optimizer",
    "offload_params": "Offload parameters",
    "sequence_parallel": "Sequence parallel",
    "distributed_optimizer": "Distributed optimizer",
}
MAX_LABEL_CHARACTERS = 12
"""Longer labels take two lines, which the stylesheet sets in a smaller font."""
TOOLTIPS = {
    "stage": "ZeRO stage: 1 shards the optimizer state, 2 gradients too, 3 parameters too",
    "replicate": "Replicas of the sharded model (HSDP)",
    "tp": "Tensor-parallel degree",
    "pp": "Pipeline-parallel degree: number of stages",
    "vpp": "Virtual pipeline stages per rank (interleaved schedule)",
    "pipeline_schedule": "Pipeline schedule",
    "cp": "Context-parallel degree",
    "ep": "Expert-parallel degree",
    "etp": "Tensor-parallel degree of the experts",
}
VALUE_LABELS: dict[str, dict[OptionValue, str]] = {
    "reshard_after_forward": {True: "forward", False: "backward"},
    "etp": {None: "as tensor parallel"},
    "offload": {None: "none", "cpu": "CPU"},
    "offload_optimizer": {None: "none", "cpu": "CPU", "nvme": "NVMe"},
    "offload_params": {None: "none", "cpu": "CPU", "nvme": "NVMe"},
    "sequence_parallel": {True: "on", False: "off"},
    "distributed_optimizer": {True: "on", False: "off"},
}


class LayoutPicker(Picker):
    """A framework and its degrees. ``below`` is shown after the hint."""

    def __init__(self, layout: ss.Layout | None = None, below: widgets.Widget | None = None) -> None:
        self._layouts = {name: framework.layout_class() for name, framework in frameworks.items()}
        layout = layout or ss.Layout.fsdp2()
        self._layouts[layout.framework] = layout
        self.framework = controls.create_dropdown(
            options=[(framework.title, name) for name, framework in frameworks.items()],
            value=layout.framework,
            tooltip="Framework",
        )
        self._framework_row = Row("Framework", self.framework)
        self._controls: dict[str, dict[str, widgets.Dropdown | widgets.ToggleButtons]] = {
            name: {} for name in frameworks
        }
        self._rows: dict[str, dict[str, Row]] = {name: {} for name in frameworks}
        self._situation: tuple[ss.Architecture, ss.Cluster, ss.Recipe] | None = None
        self._offering = False
        self._new_layout: ss.Layout | None = None
        self._first: dict[str, tuple[ss.Architecture, ss.Cluster]] = {}
        """Framework -> the model and cluster for which its degrees were chosen, by default or by the user."""
        self._auto: dict[str, ss.Layout] = {}
        """Framework -> its default layout, until the user changes it."""
        self.hint = controls.create_html("", "ss-hint")
        self._below = [self.hint] if below is None else [self.hint, below]
        super().__init__({"framework": self._framework_row}, self.hint)
        self.framework.observe(self._choose_framework, "value")
        self.read()

    def close(self) -> None:
        """Close the rows of the other frameworks as well: their inputs would keep the whole view alive."""
        for row in [row for rows in self._rows.values() for row in rows.values()]:
            for part in (*row.children, row):
                part.close()
        super().close()

    @property
    def boxes(self) -> dict[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return {"framework": self.framework, **self._controls[self.framework.value]}

    def set_fields(self, values: Mapping[str, object]) -> None:
        """Set degrees and options of the chosen framework, as one change."""
        known = {field.name for field in fields(self._layouts[self.framework.value])}
        wanted = {name: value for name, value in values.items() if name in known}
        if wanted:
            self.set_value(replace_fields(self._layouts[self.framework.value], wanted))

    def offer_choices(self, architecture: ss.Architecture, cluster: ss.Cluster, recipe: ss.Recipe) -> None:
        """Restrict choices to what can run; a choice that no longer can is replaced by the nearest."""
        self._situation = (architecture, cluster, recipe)
        name = self.framework.value
        # Default degrees follow the model and the cluster for which they were chosen.
        is_ours = name in self._auto and self._auto[name] == self._layouts[name]
        if is_ours and self._first.get(name) != self._situation[:2]:
            self._set_first_layout(name)
            return
        self.read()

    def layout_for(self, architecture: ss.Architecture, cluster: ss.Cluster, recipe: ss.Recipe) -> ss.Layout:
        """Return the layout that :meth:`offer_choices` would choose, without changing anything."""
        # build_value reads the situation from the picker, which must not change here.
        name, before = self.framework.value, self._situation
        # Degrees that the user has changed stay, whatever the model.
        is_ours = name in self._auto and self._auto[name] == self._layouts[name]
        if is_ours and self._first.get(name) != (architecture, cluster):
            return choose_first_layout(name, architecture, cluster, recipe)
        self._situation = (architecture, cluster, recipe)
        try:
            return self.build_value()
        finally:
            self._situation = before

    def set_value(
        self,
        layout: ss.Layout,
        situation: tuple[ss.Architecture, ss.Cluster, ss.Recipe] | None = None,
    ) -> None:
        """Set the inputs to ``layout``. Fields without an input are stored with them."""
        name = layout.framework
        self._situation = situation or self._situation
        self._offering = True
        try:
            self._make_rows(name)
            self.framework.value = name
            self._set_controls(layout)
        finally:
            self._offering = False
        # From here on the degrees count as chosen for this model and cluster.
        self._layouts[name] = layout
        if self._situation is not None:
            self._first[name] = self._situation[:2]
        self._new_layout = layout
        try:
            self.read()
        finally:
            self._new_layout = None

    def _set_controls(self, layout: ss.Layout) -> None:
        """Set the inputs of the layout's framework; ``_offering`` is set meanwhile."""
        for field, control in self._controls[layout.framework].items():
            current = getattr(layout, field)
            value = NOTHING if current is None else current
            if value not in [offered for _, offered in control.options]:
                # Which choices can run depends on the previous fields: with those of this layout it can.
                control.options = [*control.options, *_list_options(field, [current])]
            control.value = value

    def remember_framework(self, framework: str) -> Callable[[], None]:
        """Return a function that restores the present degrees and options of ``framework``.

        It does nothing while that framework is chosen.
        """
        layout = self._layouts[framework]
        first, auto = self._first.get(framework), self._auto.get(framework)

        def restore() -> None:
            if framework == self.framework.value:
                return
            self._layouts[framework] = layout
            self._first.pop(framework, None)
            self._auto.pop(framework, None)
            if first is not None:
                self._first[framework] = first
            if auto is not None:
                self._auto[framework] = auto
            self._offering = True
            try:
                self._set_controls(layout)
            finally:
                self._offering = False

        return restore

    def _choose_framework(self, change: Mapping[str, str]) -> None:
        """Set degrees that suit the model and the cluster, once for each pair of these; the user's stay."""
        name, situation, left = self.framework.value, self._situation, change["old"]
        if not self._offering and situation is not None:
            # Coming back restores the degrees that are left now, also if the GPUs have changed since they
            # were set.
            if self._auto.get(left) != self._layouts[left]:
                self._first[left] = situation[:2]
            if self._first.get(name) != situation[:2] and not self._is_set_by_user(name):
                self._set_first_layout(name)
                return
        self.read()

    def _is_set_by_user(self, name: str) -> bool:
        """Return whether a framework has neither its default degrees and options nor those chosen for it."""
        return self._layouts[name] not in (self._auto.get(name), frameworks[name].layout_class())

    def _set_first_layout(self, name: str) -> None:
        """Set the degrees to those that suit the model and the cluster."""
        assert self._situation is not None
        self.set_value(choose_first_layout(name, *self._situation))
        self._auto[name] = self._layouts[name]
        try:
            ss.Plan(*self._situation, self._layouts[name])
        except ValueError:
            # Such as adapters with Megatron-core: degrees are chosen once the recipe can run.
            self._first.pop(name)

    def build_value(self) -> ss.Layout:
        """Return the layout given by the inputs, adjusted to what can run."""
        name = self.framework.value
        if self._situation is None:
            return self._layouts[name]
        situation = self._situation
        if self._new_layout is not None and _change_layout(self._new_layout, {}, situation) is not None:
            return self._new_layout
        inputs = self._controls[name]
        shown = {field: None if c.value is NOTHING else c.value for field, c in inputs.items()}
        # A single choice was not made by the user: the field keeps its default, if that can run.
        chosen = {field: value for field, value in shown.items() if len(inputs[field].options) > 1}
        last = self._layouts[name]
        unshown = {field: getattr(last, field) for field in _list_hidden_fields(last)}
        # First the inputs with more than one choice, then all of them, then the nearest layout that can run.
        for values in (chosen, shown):
            wanted = _change_layout(type(last)(), {**unshown, **values}, situation)
            if wanted is not None:
                return wanted
        fitted = last.find_nearest_valid(chosen, *situation)
        return _change_layout(fitted, unshown, situation) or fitted

    def read(self, change: object = None) -> None:
        """Read the inputs and update the choices."""
        if self._offering:
            return
        name = self.framework.value
        if change is not None and self._situation is not None:
            self._first[name] = self._situation[:2]  # The user has set the degrees: keep them.
        self._make_rows(name)
        self.rows = {"framework": self._framework_row, **self._rows[name]}
        rows = [self._framework_row, *self._rows[name].values(), *self._below]
        if list(self.children) != rows:
            self.children = rows
        if self._situation is None:
            self.value = self._layouts[name]
            return
        super().read(change)
        layout = self.value
        if layout is not None and layout.framework == name:
            self._layouts[name] = layout
            self._update_choices(layout)

    def _update_choices(self, layout: ss.Layout) -> None:
        if self._situation is None:
            return
        self._offering = True
        try:
            # In the layout's order: the valid values of a field depend on those of the fields before it.
            for field, values in layout.list_valid_values(*self._situation).items():
                control = self._controls[layout.framework][field]
                current = getattr(layout, field)
                # None means "on with tensor parallelism": show which of the two that is.
                if current is None and field == "sequence_parallel":
                    current = layout.splits_sequence
                if current is not None and current not in values:
                    # Valid, but not in the list: chunks of a stage need not divide the GPUs, and some degrees
                    # need a field that comes after them.
                    values = [*values, current]
                    numbers = [value for value in values if isinstance(value, int)]
                    if len(numbers) == len(values):
                        values = [*sorted(numbers)]
                options = _list_options(field, values)
                if list(control.options) != options:
                    control.options = options
                if current in values:
                    control.value = NOTHING if current is None else current
                # A field with one value leaves nothing to choose.
                self._rows[layout.framework][field].show(len(values) > 1)
            self.hint.value = _describe_ranks(layout, *self._situation)
            self.answer = _summarize_layout(layout, *self._situation)
        finally:
            self._offering = False

    def _make_rows(self, name: str) -> None:
        """Create a framework's rows when it is first chosen, because most users need only one framework."""
        if not self._rows[name]:
            for field, values in frameworks[name].layout_class.choices.items():
                self._add_row(name, field, values)

    def _add_row(self, name: str, field: str, values: Sequence[OptionValue] | None) -> None:
        label = LABELS.get(field, field.replace("_", " ").capitalize())
        options = _list_options(field, values or (1,))
        control = (
            # Degrees, whose values depend on the GPUs, may be too many for a row of buttons.
            controls.create_dropdown(options=options, tooltip=TOOLTIPS.get(field, label))
            if values is None
            else controls.create_segments(options, label)
        )
        default = getattr(self._layouts[name], field)
        offered = [value for _, value in options]
        control.value = default if default in offered else offered[0]
        # Observed last: the default set above is not a choice of the user.
        control.observe(self.read, "value")
        self._controls[name][field] = control
        row = Row(label, control)
        if len(label) > MAX_LABEL_CHARACTERS:
            row.add_class("ss-two-lines")
        self._rows[name][field] = row


def _change_layout(
    layout: ss.Layout, values: Mapping[str, object], situation: tuple[ss.Architecture, ss.Cluster, ss.Recipe]
) -> ss.Layout | None:
    """Return the layout with these values, or None if it cannot run."""
    try:
        changed = replace_fields(layout, values)
        changed.compute_degrees(*situation)
    except ValueError:
        return None
    return changed


def _list_options(field: str, values: Sequence[OptionValue]) -> list[tuple[str, object]]:
    labels = VALUE_LABELS.get(field, {})
    return [(labels.get(value, str(value)), NOTHING if value is None else value) for value in values]


def _list_hidden_fields(layout: ss.Layout) -> list[str]:
    """Return the fields without an input that differ from their defaults."""
    plain = type(layout)()
    return [
        field.name
        for field in fields(layout)
        if field.name not in layout.choices and getattr(layout, field.name) != getattr(plain, field.name)
    ]


def _describe_ranks(
    layout: ss.Layout, architecture: ss.Architecture, cluster: ss.Cluster, recipe: ss.Recipe
) -> str:
    degrees = layout.compute_degrees(architecture, cluster, recipe)
    parts = [
        f"{words} {value:,}"
        for words, value in (
            ("shard", degrees.shard),
            ("replicate", degrees.replicate),
            ("tensor", degrees.tp),
            ("pipeline", degrees.pp),
            ("context", degrees.cp),
        )
        if value > 1
    ]
    words = " × ".join(parts) + f" = {cluster.num_gpus:,} ranks" if parts else "one rank"
    also = [f"{name.replace('_', ' ')} {getattr(layout, name)}" for name in _list_hidden_fields(layout)]
    return f"{words}<br>Also set: {escape(', '.join(also))}" if also else words


def _summarize_layout(
    layout: ss.Layout, architecture: ss.Architecture, cluster: ss.Cluster, recipe: ss.Recipe
) -> str:
    """Return ``FSDP2, shard 8, training state on CPU`` or ``Megatron-core, tp 8, pp 4``."""
    degrees = layout.compute_degrees(architecture, cluster, recipe)
    is_split = max(degrees.tp, degrees.pp, degrees.cp) > 1
    names = ("tp", "pp", "cp", "ep") if is_split else ("shard", "replicate")
    parts = [f"{name} {getattr(degrees, name)}" for name in names if getattr(degrees, name, 1) > 1]
    return ", ".join([layout.title, *parts, *layout.offloaded])
