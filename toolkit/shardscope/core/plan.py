"""``Plan``: a validated combination of Architecture, Cluster, Recipe and Layout, the input of everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.errors import add_article, check_keys, refuse
from shardscope.core.fixes import suggest_complete_fixes
from shardscope.core.html_table import render_html_fields
from shardscope.core.layout import Degrees, Layout, find_largest_divisor
from shardscope.core.number_format import format_count
from shardscope.core.recipe import Recipe
from shardscope.core.serialization import Serializable, read_parts
from shardscope.prediction.support import check_sequence, check_supported, check_targets

if TYPE_CHECKING:
    from shardscope.core.finding import Finding
    from shardscope.memory.report import MemoryReport
    from shardscope.planner.repairs.make_it_fit import Fit
    from shardscope.planner.repairs.repairs import Repair
    from shardscope.rehearsal.process import Progress
    from shardscope.runs.run import Run
    from shardscope.timing.rates import Rates
    from shardscope.timing.report import StepReport


@suggest_complete_fixes
@dataclass(frozen=True)
class Plan(Serializable):
    """A training setup: the model, the GPUs, the recipe and the parallel layout.

    The constructor checks that it can run. Raises ``ValueError`` with the field, the value, what is allowed
    and the nearest fix.
    """

    architecture: Architecture
    """The model architecture."""
    cluster: Cluster
    """The GPU inventory."""
    recipe: Recipe
    """The training recipe."""
    layout: Layout
    """The parallel layout as given, with defaults for open options that the framework needs as numbers;
    :attr:`degrees` has the degrees derived from the cluster."""

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            check_type(f"Plan.{name}", getattr(self, name), kind)
        # Before the checks, which need values for all options.
        layout = self.layout.resolve_options(self.architecture, self.cluster, self.recipe)
        object.__setattr__(self, "layout", layout)
        check_supported(self)
        check_targets(self.architecture, self.recipe)
        self._check_batch()
        check_sequence(self.architecture, self.recipe)

    @cached_property
    def degrees(self) -> Degrees:
        """All parallel degrees; their product is :attr:`world_size`."""
        return self.layout.compute_degrees(self.architecture, self.cluster, self.recipe)

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of decoder layers on each pipeline stage, first to last."""
        return tuple(self.layout.stage_layers(self.architecture, self.degrees))

    @property
    def world_size(self) -> int:
        """Number of ranks, one for each GPU of the cluster."""
        return self.cluster.num_gpus

    @property
    def on_gpu(self) -> bool:
        """Return whether ranks run on GPUs. CPU ranks use host memory, other kernels and no CUDA context."""
        return self.cluster.gpu.vendor != "cpu"

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each data-parallel rank in one optimizer step."""
        return self.recipe.global_batch_size // (self.recipe.micro_batch_size * self.degrees.data_parallel)

    @property
    def kernels(self) -> str:
        """The kernels in force: ``Recipe.kernels``, or the framework's default."""
        return self.recipe.kernels or self.layout.default_kernels

    def memory(self) -> MemoryReport:
        """Predict the memory in bytes by component, on each pipeline stage, in each phase of a step.

        The report is cached on the plan.
        """
        return self._memory

    def step(self) -> StepReport:
        """Predict the seconds of one optimizer step by component, and tokens/s, MFU, days and cost.

        Raises ``ValueError`` with the unknown hardware figure: the GPU's peak FLOP/s in this precision, its
        memory bandwidth, its link, or the NVMe bandwidth. ``ss.calibrate()`` measures them. The report is
        cached on the plan, once per stored calibration.
        """
        from shardscope.prediction.step import predict_step
        from shardscope.timing.calibration.selection import select_rates

        # The rates are the cache's key, because ``ss.calibrate()`` may change them between two calls.
        rates = select_rates(self.cluster)
        report = self._steps.get(rates)
        if report is None:
            report = self._steps[rates] = predict_step(self, rates)
        return report

    def _repr_html_(self) -> str:
        """Return model, cluster, recipe and layout as an HTML table, without predictions."""
        return render_html_fields(self._describe_parts(), "Plan")

    def __str__(self) -> str:
        """Return model, cluster, recipe and layout as lines of text, without predictions."""
        return "\n".join(f"{name:9}  {text}" for name, text in self._describe_parts().items())

    # All fields of its parts would fill a screen, in each finding and each repair that has a plan;
    # ``to_dict`` has them.
    def __repr__(self) -> str:
        recipe = self.recipe
        return (
            f"<Plan: {self.architecture.name} on {self.cluster} with {self.layout.full_description}, "
            f"{recipe.method}, {recipe.precision}, "
            f"{format_count(recipe.global_batch_size, 'sequence')} of {recipe.seq_len:,} tokens>"
        )

    def _describe_parts(self) -> dict[str, str]:
        recipe, num_micro_batches = self.recipe, self.num_micro_batches
        degrees = {field.name: getattr(self.degrees, field.name) for field in fields(self.degrees)}
        split = (f"{name.replace('_', ' ')} {value}" for name, value in degrees.items() if value > 1)
        return {
            "model": f"{self.architecture.name}, {self.architecture.num_parameters:,} parameters",
            "cluster": str(self.cluster),
            "framework": self.layout.full_description,
            "degrees": ", ".join(split) or "one rank",
            "training": f"{recipe.method}, {recipe.precision}, {recipe.optimizer}",
            "batch": f"{format_count(recipe.global_batch_size, 'sequence')} of {recipe.seq_len:,} tokens "
            f"per step, {num_micro_batches:,} micro-batch{'es' * (num_micro_batches != 1)} of "
            f"{recipe.micro_batch_size:,} on each replica",
            "recompute": str(recipe.recompute),
        }

    def repairs(self) -> list[Repair]:
        """Return single changes that make the plan fit, cheapest in predicted step time first.

        Each is ``(change, plan, bytes_won, seconds_lost)``, is sufficient alone, and makes the step at most
        three times as long. The list is empty if the plan fits already, in host memory and NVMe too, or if no
        single change is enough; then :meth:`make_it_fit` combines several.
        """
        from shardscope.planner.repairs.repairs import find_repairs

        return find_repairs(self)

    def make_it_fit(self) -> Fit | None:
        """Return the cheapest combination of changes that makes the plan fit, in predicted step time.

        None if the plan fits, if nothing makes it fit, or if there are no formulas for it. Changes of the
        layout come first, then another framework, and only then what is trained and the GPUs
        (:func:`shardscope.planner.repairs.make_it_fit.make_it_fit`); the result's ``text`` names each.
        """
        from shardscope.planner.repairs.make_it_fit import make_it_fit

        return make_it_fit(self)

    def findings(self, task: object = None, runs: Iterable[Run] | None = ()) -> list[Finding]:
        """Return the preflight findings, worst first: what runs but wastes time or spoils the result.

        Each finding has the number behind it and a suggested fix: a changed plan or task, or text. If the
        search for a fix takes seconds, the finding's ``run_search()`` does it. ``question`` asks for facts
        that only the user knows.

        ``task`` is the task to launch (a ``Pretrain``, or a function ``f(ctx)``, whose source is parsed): its
        learning rate, data and checkpoint are checked too. ``runs`` are earlier runs
        (:func:`shardscope.runs`), which show whether this plan was ever profiled. A check is skipped if one
        of its figures is unknown. Raises ``ValueError`` for a ``task`` that cannot be launched as one, and if
        ``runs`` has anything but runs.
        """
        from shardscope.runs.checks.findings import collect_findings

        return collect_findings(self, task, runs)

    def rehearse(self, progress: Progress | None = None, timeout: float = 600.0) -> MemoryReport:
        """Measure the memory report by running the framework's own code on fake tensors, without a GPU.

        It runs in a separate process. ``progress(words, fraction)`` is called repeatedly; an exception in it
        ends the process. Raises ``TimeoutError`` after ``timeout`` seconds and ``ValueError`` for plans that
        cannot be rehearsed; see :func:`shardscope.rehearsal.process.rehearse`. Needs the ``train`` extra.
        """
        from shardscope.rehearsal.process import rehearse

        return rehearse(self, progress, timeout)

    def export(self, folder: str | Path) -> list[Path]:
        """Write the plan as configuration files of the tools that run it, and return their paths.

        Always written: ``plan.json`` and ``FILES.md``, which describes each file and why others are missing.
        Written if they apply to the framework: ``accelerate_config.yaml``, ``training_arguments.yaml``,
        ``ds_config.json``, ``fsdp2_arguments.json``, ``megatron_arguments.txt``, commands for torchrun,
        Accelerate and Slurm, and ``train.py``, which trains common plans without Shardscope, with its
        ``config.json`` and jobs for Kubeflow Trainer, SkyPilot and Ray. Each file lists the options that its
        format cannot express. An earlier export is replaced. ``config.json`` needs transformers (the
        ``train`` extra). Raises ``ValueError`` if files in ``folder`` were changed since an export or are
        not from one.
        """
        from shardscope.export.files import export

        return export(self, folder)

    @classmethod
    def from_accelerate(
        cls,
        file: str | Path,
        *,
        architecture: Architecture | None = None,
        cluster: Cluster | None = None,
        recipe: Recipe | None = None,
    ) -> Plan:
        """Read an ``accelerate config`` YAML or JSON: DDP, FSDP2, or the DeepSpeed JSON that it names.

        Values come from the file first, then from the arguments, then from a ``plan.json`` in the same folder
        (an export writes one), then from ``Recipe()``; without a recipe of either, a missing
        ``mixed_precision`` is Accelerate's default, "no". Warnings list keys that a plan cannot represent,
        and units other than layers. Raises ``ValueError`` with line and key for invalid values
        and unknown keys, and for a missing architecture or cluster.
        """
        from shardscope.export import reading

        return reading.from_accelerate(file, architecture, cluster, recipe)

    @classmethod
    def from_deepspeed(
        cls,
        file: str | Path,
        *,
        architecture: Architecture | None = None,
        cluster: Cluster | None = None,
        recipe: Recipe | None = None,
    ) -> Plan:
        """Read a DeepSpeed JSON. Missing values, warnings and errors: see :meth:`from_accelerate`.

        "auto" is resolved as in transformers' Trainer: three bucket sizes, and the recipe's batch sizes.
        """
        from shardscope.export import reading

        return reading.from_deepspeed(file, architecture, cluster, recipe)

    @classmethod
    def from_megatron(
        cls,
        arguments: str | Path | Sequence[str],
        *,
        architecture: Architecture | None = None,
        cluster: Cluster | None = None,
        recipe: Recipe | None = None,
    ) -> Plan:
        """Read Megatron-LM arguments: a file, also a shell script, a list, or a string that starts with "--".

        They define the architecture of a Llama; any other architecture is checked against them. Missing
        values, warnings and errors: see :meth:`from_accelerate`.
        """
        from shardscope.export import reading

        return reading.from_megatron(arguments, architecture, cluster, recipe)

    def to_dict(self) -> dict[str, object]:
        """Return all four parts in full, so that a stored plan does not depend on the catalogue."""
        return {name: getattr(self, name).to_dict() for name in _PARTS}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Create a plan from :meth:`to_dict`'s output. Raises ``ValueError`` for bad or missing keys."""
        check_keys("Plan", data, _PARTS)
        # Not left to the constructor, which would ask for an Architecture in place of its fields.
        for name, kind in _PARTS.items():
            value = data.get(name)
            if not isinstance(value, Mapping):
                fields = f"the fields of {add_article(kind.__name__)}"
                refuse(f"Plan.{name}", value, fields, _suggest_expression(kind, value))
        return super().from_dict(read_parts(data, _PARTS))

    def __reduce__(self) -> tuple[object, ...]:
        # Only the four parts: cached reports contain functions, which pickle rejects.
        return type(self), tuple(getattr(self, name) for name in _PARTS)

    @cached_property
    def _memory(self) -> MemoryReport:
        from shardscope.prediction.memory import predict_memory

        return predict_memory(self)

    @cached_property
    def _steps(self) -> dict[Rates, StepReport]:
        """Cached step reports by the calibrated rates that they were computed from."""
        return {}

    def _check_batch(self) -> None:
        per_step = self.recipe.micro_batch_size * self.degrees.data_parallel
        if self.recipe.global_batch_size % per_step:
            # With data parallelism only, "GPUs" is shorter and as exact.
            ranks = "data-parallel ranks"
            if self.degrees.data_parallel == self.world_size:
                ranks = "GPUs" if self.on_gpu else "CPU ranks"
            size = self.recipe.micro_batch_size
            micro_batches = f" in micro-batches of {size}" if size > 1 else ""
            refuse(
                "Recipe.global_batch_size",
                self.recipe.global_batch_size,
                f"a multiple of micro_batch_size x data-parallel ranks = "
                f"{self.recipe.micro_batch_size} x {self.degrees.data_parallel} = {per_step}",
                self._suggest_batch(per_step),
                problem=f"{self.recipe.global_batch_size:,} does not divide over "
                f"{self.degrees.data_parallel:,} {ranks}{micro_batches}",
            )

    def _suggest_batch(self, per_step: int) -> dict[str, int]:
        """Return the nearest batch sizes that divide over the data-parallel ranks."""
        ranks, batch = self.degrees.data_parallel, self.recipe.global_batch_size
        # A smaller micro-batch trains the same.
        if batch % ranks == 0:
            return {"micro_batch_size": find_largest_divisor(batch // ranks, self.recipe.micro_batch_size)}
        if batch > per_step:
            return {"global_batch_size": round(batch / per_step) * per_step}
        # The batch is less than one micro-batch on each rank: keep the batch rather than the micro-batch.
        per_rank = max(1, round(batch / ranks))
        smaller = {"micro_batch_size": per_rank} if per_rank < self.recipe.micro_batch_size else {}
        return {"global_batch_size": per_rank * ranks, **smaller}


_PARTS: Mapping[str, type[Serializable]] = {
    "architecture": Architecture,
    "cluster": Cluster,
    "recipe": Recipe,
    "layout": Layout,
}


def check_type(field: str, value: object, kind: type) -> None:
    """Raise ``ValueError``, with an example expression as the fix, if ``value`` is not a ``kind``."""
    if not isinstance(value, kind):
        refuse(field, value, add_article(kind.__name__), _suggest_expression(kind, value))


def _suggest_expression(kind: type, value: object) -> str:
    """Return an expression that creates a ``kind``; for a model name, the model of the nearest name."""
    if kind is Architecture and isinstance(value, str):
        from shardscope.catalog import load_model_names  # loaded only for this fix

        name = load_model_names().find(value) or load_model_names().find_similar(value)
        # A name outside of the catalogue may be a folder or a Hub repository.
        return f'ss.models["{name}"]' if name else f"ss.Architecture.from_hf({value!r})"
    return {
        Architecture: 'ss.models["llama-3.1-8b"]',
        Cluster: 'ss.Cluster.parse("8xh100-sxm-80gb")',
        Recipe: "ss.Recipe()",
        Layout: "ss.Layout.fsdp2()",
    }.get(kind, "ss.Plan(architecture, cluster, recipe, layout)")
