"""Suggested fixes of errors and findings: setting them in the Studio's pickers, and completing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope_widgets.pickers import (
    ArchitecturePicker,
    ClusterPicker,
    LayoutPicker,
    RecipePicker,
    RunOptions,
    TaskPicker,
)
from shardscope_widgets.pickers.base import Picker, format_fix_value

CLUSTER_UNITS = {"num_nodes": "nodes", "gpus_per_node": "GPUs per node"}
MAX_FIXES = 4
"""Maximum number of fixes applied in sequence."""


@dataclass(frozen=True, kw_only=True)
class PickerFixes:
    """The pickers whose inputs a fix changes. A fix maps fields, such as "Recipe.seq_len", to values."""

    architecture: ArchitecturePicker
    cluster: ClusterPicker
    recipe: RecipePicker
    layout: LayoutPicker
    task: TaskPicker
    options: RunOptions

    def set_inputs(self, changes: Mapping[str, object]) -> None:
        """Set each changed input in its picker."""
        for name, value in changes.items():
            owner, _, field = name.rpartition(".")
            if isinstance(value, ss.Layout):
                self.layout.set_value(value)
            else:
                self._find_picker(owner, field).set_fields({field: value})

    def complete(self, changes: Mapping[str, object]) -> dict[str, object]:
        """Extend a fix with the follow-up fixes that it needs, so that one click leads to a valid plan."""
        complete = dict(changes)
        for _ in range(MAX_FIXES):
            try:
                self._build_plan(complete).memory()
            except FieldError as error:
                # The same fix again would never end.
                if not error.changes or error.changes.items() <= complete.items():
                    break
                complete |= error.changes
            except ValueError:  # This error has no suggested fix.
                break
            else:
                return complete
        return dict(changes)

    def find_cluster_changes(self, error: FieldError) -> dict[str, object]:
        """Return the complete fix of a launch that a target refuses; empty if no input of the plan is it."""
        prefix = "plan.cluster."
        changes = {
            f"Cluster.{name.removeprefix(prefix)}": value
            for name, value in error.changes.items()
            if name.startswith(prefix)
        }
        return self.complete(changes) if changes else {}

    def find_owner(self, owner: str) -> Picker:
        """Return the picker of a part of the plan, such as "Recipe"; that of the layout for other names."""
        owners: dict[str, Picker] = {
            "Architecture": self.architecture,
            "Cluster": self.cluster,
            "Recipe": self.recipe,
        }
        return owners.get(owner, self.layout)

    def _build_plan(self, changes: Mapping[str, object]) -> ss.Plan:
        """Return the plan of the current inputs with a fix applied. Raises ``ValueError``."""
        fields: dict[str, dict[str, object]] = {"Recipe": {}, "Cluster": {}, "Layout": {}}
        for name, value in changes.items():
            owner, _, field = name.rpartition(".")
            fields.setdefault(owner, {})[field] = value
        model = changes.get("model")
        arch = ss.models[str(model)] if model else self.architecture.value
        nouns = (arch, self.cluster.build_value(fields["Cluster"]), self.recipe.build_value(fields["Recipe"]))
        layout = changes.get("Layout")
        if not isinstance(layout, ss.Layout):
            layout = self.layout.layout_for(*nouns)
        return ss.Plan(*nouns, replace(layout, **fields["Layout"]))

    def _find_picker(self, owner: str, field: str) -> Picker:
        for picker in (self.task, self.options):
            if field in picker.rows:
                return picker
        return self.find_owner(owner)


def label_cluster_fix(changes: Mapping[str, object]) -> str:
    """Return the label of a button: ``Use 2 nodes``, or ``Use 2 nodes, global batch size 8``."""
    parts = []
    for name, value in changes.items():
        field, shown = name.rpartition(".")[2], format_fix_value(value)
        unit = CLUSTER_UNITS.get(field)
        parts.append(f"{shown} {unit}" if unit else f"{field.replace('_', ' ')} {shown}")
    return f"Use {', '.join(parts)}"
