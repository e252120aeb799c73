"""Architecture x Cluster x Recipe x Layout, validated: the one noun that everything takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.errors import known_keys, refuse, with_article
from shardscope.core.fixes import checked
from shardscope.core.html_table import html_fields
from shardscope.core.layout import Degrees, Layout
from shardscope.core.recipe import Recipe
from shardscope.core.serialization import JsonNoun, part
from shardscope.prediction.support import check_sequence, check_supported, check_targets

if TYPE_CHECKING:
    from shardscope.core.finding import Finding
    from shardscope.memory.report import MemoryReport
    from shardscope.planner.repairs.repairs import Repair
    from shardscope.rehearsal.process import Progress
    from shardscope.runs.run import Run
    from shardscope.timing.rates import Rates
    from shardscope.timing.report import StepReport


@checked
@dataclass(frozen=True)
class Plan(JsonNoun):
    """What will be trained, on what, how, and spread in which way.

    Making one checks that it can run at all; ``ValueError`` names the field, the value, what is allowed
    and the nearest fix.
    """

    architecture: Architecture
    """The model's shape."""
    cluster: Cluster
    """The GPU inventory."""
    recipe: Recipe
    """What to train."""
    layout: Layout
    """How to spread it, as it was asked, but for options that a framework cannot do without a number for;
    :attr:`degrees` has what follows from the cluster."""

    def __post_init__(self) -> None:
        for field, noun in (
            ("architecture", Architecture),
            ("cluster", Cluster),
            ("recipe", Recipe),
            ("layout", Layout),
        ):
            check_noun(f"Plan.{field}", getattr(self, field), noun)
        settled = self.layout.settled(self.architecture, self.cluster, self.recipe)
        object.__setattr__(self, "layout", settled)
        check_supported(self)
        check_targets(self.architecture, self.recipe)
        self._check_batch()
        check_sequence(self.architecture, self.recipe)

    @cached_property
    def degrees(self) -> Degrees:
        """Every parallel degree; their product is :attr:`world_size`."""
        return self.layout.degrees(self.architecture, self.cluster, self.recipe)

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Decoder layers on each pipeline stage, first to last."""
        return tuple(self.layout.stage_layers(self.architecture, self.degrees))

    @property
    def world_size(self) -> int:
        """Ranks: one for each GPU of the cluster."""
        return self.cluster.num_gpus

    @property
    def on_gpu(self) -> bool:
        """Whether ranks have a GPU; CPU ranks have the host's memory, no CUDA context and other kernels."""
        return self.cluster.gpu.vendor != "cpu"

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that each data-parallel rank takes through one optimizer step."""
        return self.recipe.global_batch_size // (self.recipe.micro_batch_size * self.degrees.data_parallel)

    @property
    def kernels(self) -> str:
        """Whose modules run: the recipe's choice, or the framework's own."""
        return self.recipe.kernels or self.layout.default_kernels

    def memory(self) -> MemoryReport:
        """Predicted bytes by component, on every pipeline stage, in every phase of a step.

        Computed once: who asks this plan again gets the same report.
        """
        return self._memory

    def step(self) -> StepReport:
        """Predicted seconds of one optimizer step, by what they go to, and tokens/s, MFU, days and cost.

        Raises ``ValueError`` naming the figure that is not known: the GPU's peak in this precision, the
        bandwidth of its memory, its link, the speed of an NVMe. ``ss.calibrate()`` measures them. Computed
        once for each calibration: who asks again gets the same report, until another one is stored.
        """
        from shardscope.prediction.step import step
        from shardscope.timing.calibration.curves import rates_for

        rates = rates_for(self.cluster)
        found = self._steps.get(rates)
        if found is None:
            found = self._steps[rates] = step(self, rates)
        return found

    def _repr_html_(self) -> str:
        """Model, cluster, recipe and layout as a table; the prediction is :meth:`memory`'s."""
        recipe = self.recipe
        degrees = {field.name: getattr(self.degrees, field.name) for field in fields(self.degrees)}
        return html_fields(
            {
                "model": f"{self.architecture.name}, {self.architecture.num_parameters:,} parameters",
                "cluster": str(self.cluster),
                "framework": self.layout.description,
                "degrees": ", ".join(f"{name} {value}" for name, value in degrees.items() if value > 1),
                "training": f"{recipe.method}, {recipe.precision}, {recipe.optimizer}",
                "batch": f"{recipe.global_batch_size:,} sequences of {recipe.seq_len:,} tokens a step, "
                f"{self.num_micro_batches:,} micro-batches of {recipe.micro_batch_size:,} on each replica",
                "recompute": recipe.recompute,
            },
            "Plan",
        )

    def repairs(self) -> list[Repair]:
        """Return single changes that make the plan fit, cheapest in predicted time first: ``(change, plan,
        bytes_won, seconds_lost)`` each; empty if it fits already, in its nodes' host memory and NVMe too.

        Every one of them is enough, and its step takes at most three times as long. Where no single change
        is, the list is empty, and ``planner/repairs/make_it_fit.py`` combines several.
        """
        from shardscope.planner.repairs.repairs import repairs

        return repairs(self)

    def findings(self, task: object = None, runs: Iterable[Run] | None = ()) -> list[Finding]:
        """What runs, but badly, the worst first: each with the number behind it and the change that mends it.

        The suggested fix is a changed plan or task, or words; where finding it takes seconds, ``look()`` of
        the finding does, and ``question`` asks for what only the user knows.

        ``task`` is what will be run of the plan (a ``Pretrain``, a function ``f(ctx)``, whose source is
        read): its learning rate, its data and its checkpoint are looked at, too. ``runs`` are earlier runs
        (:func:`shardscope.runs`), which tell whether anybody ever profiled this plan. A check of which a
        figure is not known finds nothing. Raises ``ValueError`` for ``runs`` that are none.
        """
        from shardscope.runs.checks.findings import findings

        return findings(self, task, runs)

    def rehearse(self, progress: Progress | None = None, timeout: float = 600.0) -> MemoryReport:
        """The same bytes from the framework's own code, on fake tensors in a process of its own; no GPU.

        ``progress(words, fraction)`` is called as it goes on; an exception in it ends the process. Raises
        ``TimeoutError`` after ``timeout`` seconds and ``ValueError`` for what cannot be rehearsed; see
        :func:`shardscope.rehearsal.process.rehearse`. Needs the ``train`` extra.
        """
        from shardscope.rehearsal.process import rehearse

        return rehearse(self, progress, timeout)

    def export(self, folder: str | Path) -> list[Path]:
        """Write the plan as the files of the tools that run it; returns their paths.

        Its JSON and ``FILES.md``, which says what each is and what there is none of, and why; then what makes
        sense for its framework: ``accelerate_config.yaml``, ``training_arguments.yaml``, ``ds_config.json``,
        ``fsdp2_arguments.json``, ``megatron_arguments.txt``, commands for torchrun, Accelerate and Slurm, and
        ``train.py``, which trains common plans without Shardscope, with the ``config.json`` that it reads.
        What a format has no words for is named in the file. An earlier export is replaced. ``config.json``
        wants transformers (the ``train`` extra), which is imported for it. Raises ``ValueError`` where files
        in ``folder`` are not as an export left them.
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
        """The plan of an ``accelerate config`` YAML or JSON: DDP, FSDP2, or the DeepSpeed JSON it names.

        What the file does not hold is what is given here, or else what ``plan.json`` beside the file has (an
        export leaves one), or else ``Recipe()``'s; where the file says it, the file holds. Keys of the format
        that a plan has no place for are listed in a warning. Raises ``ValueError`` naming line and key for
        what cannot be, keys unknown to the format among them, and for a missing architecture or cluster.
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
        """The plan of a DeepSpeed JSON; the rest, warnings and errors as in :meth:`from_accelerate`.

        "auto" is what transformers' Trainer makes of it: its three bucket sizes, and the recipe's batches.
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
        """The plan of Megatron-LM's arguments: a file of them, a list of words, or a text that begins "--".

        They hold the architecture if it is a Llama's; any other is checked against them. The rest, warnings
        and errors as in :meth:`from_accelerate`.
        """
        from shardscope.export import reading

        return reading.from_megatron(arguments, architecture, cluster, recipe)

    def to_dict(self) -> dict[str, Any]:
        """The four nouns in full, so that a stored plan does not depend on the catalogue."""
        return {noun: getattr(self, noun).to_dict() for noun in _nouns}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The plan that :meth:`to_dict` described."""
        known_keys("Plan", data, _nouns)
        made = {}
        for name, noun in _nouns.items():
            if not isinstance(data.get(name), Mapping):
                value = data.get(name)
                refuse(f"Plan.{name}", value, f"the fields of a {noun.__name__}", _how_to_make(noun, value))
            made[name] = part(noun, data, name)
        return cls(**made)

    def __reduce__(self) -> tuple[Any, ...]:
        # By its nouns alone: what is cached holds functions, which pickle refuses.
        return type(self), tuple(getattr(self, noun) for noun in _nouns)

    @cached_property
    def _memory(self) -> MemoryReport:
        from shardscope.prediction.memory import predict

        return predict(self)

    @cached_property
    def _steps(self) -> dict[Rates, StepReport]:
        """What was predicted so far, by the speeds that it was predicted from."""
        return {}

    def _check_batch(self) -> None:
        per_step = self.recipe.micro_batch_size * self.degrees.data_parallel
        if self.recipe.global_batch_size % per_step:
            ranks = "data-parallel ranks"
            if self.degrees.data_parallel == self.world_size:
                ranks = "GPUs" if self.on_gpu else "CPU ranks"
            size = self.recipe.micro_batch_size
            in_parts = f" in micro-batches of {size}" if size > 1 else ""
            refuse(
                "Recipe.global_batch_size",
                self.recipe.global_batch_size,
                f"a multiple of micro_batch_size x data-parallel ranks = "
                f"{self.recipe.micro_batch_size} x {self.degrees.data_parallel} = {per_step}",
                {"global_batch_size": max(1, round(self.recipe.global_batch_size / per_step)) * per_step},
                problem=f"{self.recipe.global_batch_size:,} does not divide over "
                f"{self.degrees.data_parallel:,} {ranks}{in_parts}",
            )


_nouns: dict[str, type[Any]] = {
    "architecture": Architecture,
    "cluster": Cluster,
    "recipe": Recipe,
    "layout": Layout,
}


def check_noun(field: str, value: object, noun: type) -> None:
    """Raise ``ValueError`` with a line that makes one, if ``value`` is no ``noun``."""
    if not isinstance(value, noun):
        refuse(field, value, with_article(noun.__name__), _how_to_make(noun, value))


def _how_to_make(noun: type, value: object) -> str:
    """Return a line that makes one; of a model's name, the model that is called so or nearly so."""
    if noun is Architecture and isinstance(value, str):
        from shardscope.catalog import model_names  # Only where it is asked for.

        name = model_names().find(value) or model_names().near(value)
        # One that is not in the catalogue may be a folder, or a repository of the Hub.
        return f'ss.models["{name}"]' if name else f"ss.Architecture.from_hf({value!r})"
    return {
        Architecture: 'ss.models["llama-3.1-8b"]',
        Cluster: 'ss.Cluster.parse("8xh100-sxm-80gb")',
        Recipe: "ss.Recipe()",
        Layout: "ss.Layout.fsdp2()",
    }.get(noun, "ss.Plan(architecture, cluster, recipe, layout)")
