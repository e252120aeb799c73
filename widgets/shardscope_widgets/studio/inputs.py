"""The Studio's inputs: the pickers, the plan that they describe, and fixes that set several of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.errors import FieldError
from shardscope.core.recipe import Recipe
from shardscope_widgets.pickers import (
    ArchitecturePicker,
    ClusterPicker,
    LayoutPicker,
    RecipePicker,
    RunOptions,
    TaskPicker,
)
from shardscope_widgets.pickers.base import Picker

MAX_FIXES = 4
"""Maximum number of fixes applied in sequence."""


class StudioInputs:
    """All pickers of the Studio.

    A fix maps fields, such as "Recipe.seq_len", to values.
    """

    def __init__(self) -> None:
        self.architecture = ArchitecturePicker()
        self.cluster = ClusterPicker()
        self.recipe = RecipePicker()
        self.layout = LayoutPicker()
        self.options = RunOptions()
        self.task = TaskPicker(self.options)
        for picker in (self.task, *self.plan_pickers):
            picker.complete = self.complete

    @property
    def plan_pickers(self) -> tuple[Picker, ...]:
        """The pickers that define the plan."""
        return self.architecture, self.cluster, self.recipe, self.layout

    @property
    def all_pickers(self) -> tuple[Picker, ...]:
        """All pickers from top to bottom, one for each question."""
        return self.task, *self.plan_pickers, self.options

    @property
    def is_wrong(self) -> bool:
        """Return whether an input is invalid, in which case the plan does not match the inputs."""
        return any(picker.is_wrong for picker in self.plan_pickers)

    def clear_plan_errors(self) -> None:
        """Remove errors of the plan; those of single inputs stay."""
        for picker in self.plan_pickers:
            picker.clear_plan_errors()

    def build_plan(self) -> ss.Plan:
        """Return the plan of the inputs. Raises ``ValueError``, also if its memory cannot be predicted."""
        self.clear_plan_errors()
        # The layout depends on model, GPUs and recipe; the recipe's choices in turn on the layout.
        nouns = self._nouns
        self.layout.offer_choices(*nouns)
        self.recipe.offer_choices(self.layout.value)
        plan = ss.Plan(*nouns, self.layout.value)
        # A plan that can run may have no memory formulas: there is no prediction to show.
        plan.memory()
        return plan

    def set_plan(self, plan: ss.Plan, weights: Path | None) -> None:
        """Set all inputs to match ``plan``, whose model is in the folder ``weights`` if that is given."""
        if weights is not None:
            self.architecture.set_folder(weights)
        if plan.cluster != self.cluster.value or self.cluster.is_wrong:
            self.cluster.set_value(plan.cluster)
        if plan.architecture != self.architecture.value or self.architecture.is_wrong:
            self.architecture.set_value(plan.architecture)
        # Add the options of the new framework before choosing one that the previous framework lacks.
        self.recipe.offer_choices(plan.layout)
        self.recipe.set_value(plan.recipe)
        self.layout.set_value(plan.layout, self._nouns)

    def show_error(self, error: ValueError) -> None:
        """Show why there is no plan at the input that causes it."""
        # Errors other than FieldError also start with their field: "Architecture.model_type is ...".
        owner = getattr(error, "field", str(error)).partition(".")[0]
        self._find_owner(owner).show_plan_error(error)

    def set_fields(self, changes: Mapping[str, object]) -> None:
        """Set each changed field in its picker."""
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
                self._build_fixed_plan(complete).memory()
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

    def _build_fixed_plan(self, changes: Mapping[str, object]) -> ss.Plan:
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
        return self._find_owner(owner)

    def _find_owner(self, owner: str) -> Picker:
        """Return the picker of a part of the plan, such as "Recipe"; that of the layout for other names."""
        owners: dict[str, Picker] = {
            "Architecture": self.architecture,
            "Cluster": self.cluster,
            "Recipe": self.recipe,
        }
        return owners.get(owner, self.layout)

    @property
    def _nouns(self) -> tuple[Architecture, Cluster, Recipe]:
        return self.architecture.value, self.cluster.value, self.recipe.value
