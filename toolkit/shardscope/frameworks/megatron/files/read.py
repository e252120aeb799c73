"""Import of a plan from Megatron-LM's command line: a file of arguments, or the arguments themselves."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse
from shardscope.core.recipe import Recipe
from shardscope.core.serialization import replace_fields
from shardscope.core.text_positions import KeyPath
from shardscope.frameworks.formats.documents import Document, read_text
from shardscope.frameworks.formats.sidecar_files import (
    PlanParts,
    apply_to_recipe,
    build_plan,
    load_plan_parts,
)
from shardscope.frameworks.formats.unsupported_fields import read_noted_fields
from shardscope.frameworks.megatron.files.arguments import BACKENDS, OPTIMIZERS, megatron_arguments
from shardscope.frameworks.megatron.files.read_architecture import (
    SHAPE,
    FlagValues,
    check_positions,
    read_architecture,
    read_sizes,
)
from shardscope.frameworks.megatron.layout import MegatronLayout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan

DEGREES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "vpp": "num-virtual-stages-per-pipeline-rank",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}
SWITCHES = {
    "sequence_parallel": "sequence-parallel",
    "distributed_optimizer": "use-distributed-optimizer",
    "use_precision_aware_optimizer": "use-precision-aware-optimizer",
    "overlap_grad_reduce": "overlap-grad-reduce",
    "overlap_param_gather": "overlap-param-gather",
    "tp_comm_overlap": "tp-comm-overlap",
}
TYPES = {
    "exp_avg_dtype": "exp-avg-dtype",
    "exp_avg_sq_dtype": "exp-avg-sq-dtype",
    "cross_entropy_fusion_impl": "cross-entropy-fusion-impl",
}
SIZES = {
    "seq_len": "seq-length",
    "micro_batch_size": "micro-batch-size",
    "global_batch_size": "global-batch-size",
}
REFUSED = {"optimizer-cpu-offload": "plans have no optimizer state on the host for Megatron"}
"""Flags whose effect on memory or time has no formula."""
CHUNK = "num-layers-per-virtual-pipeline-stage"
READ = (
    CHUNK, *REFUSED, *SHAPE, *DEGREES.values(), *SWITCHES.values(), *TYPES.values(), *SIZES.values(),
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "optimizer",
    "hidden-dropout", "attention-dropout", "fp16", "bf16", "fp8-format", "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32", "attention-backend", "cross-entropy-loss-fusion",
    "recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-activations",
    "moe-expert-capacity-factor", "use-flash-attn",
)  # fmt: skip
ALONE = frozenset({
    *SWITCHES.values(), "group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias",
    "qk-layernorm", "untie-embeddings-and-output-weights", "multi-latent-attention",
    "moe-router-pre-softmax", "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split", "fp16", "bf16", "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32", "cross-entropy-loss-fusion", "recompute-activations",
    "use-flash-attn", *REFUSED,
})  # fmt: skip
"""Flags without a value."""
MISSPELT = 0.9
"""Similarity (difflib) from which an unknown flag counts as a misspelled one of :data:`READ`."""


def read(
    arguments: str | Path | Sequence[str],
    architecture: Architecture | None = None,
    cluster: Cluster | None = None,
    recipe: Recipe | None = None,
) -> Plan:
    """Read a plan; see :meth:`shardscope.core.plan.Plan.from_megatron`."""
    document, file = _read_document(arguments)
    for flag, why in REFUSED.items():
        if document.get(flag):
            document.refuse((flag,), f"nothing: {why}", "leave it out")
    rest = load_plan_parts(file, architecture, cluster, recipe)
    recipe_noted, layout_noted = read_noted_fields(document, read_text(file) if file else "", MegatronLayout)
    if rest.is_recipe_open:
        rest = replace(rest, recipe=apply_to_recipe(rest.recipe, document, recipe_noted))
    before = rest.layout if isinstance(rest.layout, MegatronLayout) else None
    rest = replace(rest, recipe=_without_switches(document, rest))
    recipe_values = _read_recipe(document, rest)
    planned_recipe = apply_to_recipe(rest.recipe, document, recipe_values)
    if document.get("global-batch-size") is None and rest.layout is None:
        where = document.name
        allowed = "a number: Megatron-LM's default depends on the cluster"
        refuse(f"{where}, --global-batch-size", None, allowed, "--global-batch-size 64")
    layout_values = ({} if rest.layout else layout_noted) | _read_layout(document, planned_recipe, before)
    flag_values = recipe_values | layout_values | read_sizes(document, rest)
    check_positions(document, planned_recipe, flag_values)
    rest = replace(rest, architecture=read_architecture(document, rest, flag_values))
    if document.get(CHUNK) is not None:
        pp = layout_values["pp"][1]
        assert isinstance(pp, int)
        layout_values["vpp"] = (
            (CHUNK,),
            count_model_chunks(document, rest.require_architecture(document.name), pp),
        )
    values = {name: value for name, (_, value) in layout_values.items()}
    start = before or MegatronLayout()
    plan = build_plan(
        rest, document, planned_recipe, flag_values | layout_values, lambda: replace_fields(start, values)
    )
    _check_split(document, plan)
    return plan


# ------------------------------------------------------------------------------------------- the arguments


def _read_document(arguments: str | Path | Sequence[str]) -> tuple[Document, Path | None]:
    """Return flag -> value, with each flag's line number if they come from a file."""
    if isinstance(arguments, Path) or (
        isinstance(arguments, str) and not arguments.lstrip().startswith("--")
    ):
        file = Path(arguments).expanduser()
        text = read_text(arguments)
        words = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                words += [(number, word) for word in shlex.split(line.rstrip(" \\"), comments=True)]
            except ValueError as error:
                raise ValueError(f"{file.name}, line {number}: {error}.") from error
        return _parse_words(file.name, words), file
    if isinstance(arguments, str):
        arguments = shlex.split(arguments)
    if not isinstance(arguments, Sequence) or not all(isinstance(word, str) for word in arguments):
        refuse(
            "arguments", arguments, "a file of arguments, or a list of words", Value("megatron_arguments.txt")
        )
    return _parse_words("the arguments", [(0, word) for word in arguments]), None


def _parse_words(name: str, words: list[tuple[int, str]]) -> Document:
    values: dict[str, object] = {}
    lines: dict[KeyPath, int] = {}
    unread: list[str] = []
    index = 0
    while index < len(words):
        line, word = words[index]
        at = f"{name}, line {line}" if line else name
        if not word.startswith("--"):
            raise ValueError(f"{at}, {word!r}: this is not a flag; allowed: --name value.")
        flag, has_value, value = word[2:].partition("=")
        index += 1
        flag_arguments = [value] if has_value else []
        while not has_value and index < len(words) and not words[index][1].startswith("--"):
            flag_arguments.append(words[index][1])
            index += 1
        if flag in values:
            raise ValueError(f"{at}, --{flag}: this flag is given twice; keep one.")
        if line:
            lines[(flag,)] = line
        values[flag] = _parse_value(at, flag, flag_arguments)
        if flag not in READ:
            near = difflib.get_close_matches(flag, READ, n=1, cutoff=MISSPELT)
            if near:
                refuse(f"{at}, --{flag}: this flag", flag, f"--{near[0]} and others", f"--{near[0]}")
            unread.append(f"--{flag}" + (f" (line {line})" if line else ""))
    return Document(name=name, values=values, lines=lines, _unread=unread)


def _parse_value(at: str, flag: str, flag_arguments: list[str]) -> object:
    if flag not in READ:
        return flag_arguments
    if len(flag_arguments) != (0 if flag in ALONE else 1):
        allowed = "no value" if flag in ALONE else "one value"
        refuse(
            f"{at}, --{flag}",
            " ".join(flag_arguments),
            allowed,
            f"--{flag}" + ("" if flag in ALONE else " VALUE"),
        )
    if flag in ALONE:
        return True
    for kind in (int, float):
        try:
            return kind(flag_arguments[0])
        except ValueError:
            continue
    return flag_arguments[0]


# ------------------------------------------------------------------------------------------------ the nouns


def _without_switches(document: Document, rest: PlanParts) -> Recipe:
    """Return the recipe, with options reset whose flag was removed from the file of an exported plan."""
    recipe = rest.recipe
    if rest.layout is None:
        return recipe
    is_unfused = recipe.loss == "fused" and not document.get("cross-entropy-loss-fusion")
    loss = None if is_unfused else recipe.loss
    return replace(recipe, attention=None, expert_capacity_factor=None, loss=loss)


def _read_recipe(document: Document, rest: PlanParts) -> FlagValues:
    recipe = rest.recipe
    flag_values: FlagValues = {
        field: ((flag,), document.read_number(flag, low=1, high=2**24)) for field, flag in SIZES.items()
    }
    if flag_values["micro_batch_size"][1] is None and rest.layout is None:
        refuse(f"{document.name}, --micro-batch-size", None, "a number", "--micro-batch-size 1")
    names = {value: key for key, value in OPTIMIZERS.items()}
    optimizer = document.read_choice("optimizer", among=names) or "adam"
    flag_values["optimizer"] = (("optimizer",), names[optimizer])
    flag_values["precision"] = _read_precision(document, recipe)
    dropouts = [document.get(flag) for flag in ("hidden-dropout", "attention-dropout")]
    default = 0.1  # Megatron-LM's own
    hidden, attention = (default if value is None else value for value in dropouts)
    if hidden != attention:
        document.refuse(
            ("attention-dropout",), f"{hidden}, as --hidden-dropout: a recipe has one", str(hidden)
        )
    flag_values["dropout"] = (
        ("hidden-dropout",),
        float(hidden) if isinstance(hidden, int | float) else hidden,
    )
    backends = {value: key for key, value in BACKENDS.items()}
    backend = document.read_choice("attention-backend", among=("auto", "fused", *backends))
    if backend == "fused":
        backend = "flash"  # cuDNN's own, of the same memory
    if backend in backends or document.get("use-flash-attn"):
        flag_values["attention"] = (("attention-backend",), backends.get(backend or "", "flash"))
    if document.get("cross-entropy-loss-fusion"):
        flag_values["loss"] = (("cross-entropy-loss-fusion",), "fused")
    flag_values["recompute"] = _read_recompute(document)
    factor = document.get("moe-expert-capacity-factor")
    if factor is not None:
        flag_values["expert_capacity_factor"] = (
            ("moe-expert-capacity-factor",),
            float(factor) if isinstance(factor, int) else factor,
        )
    return flag_values


def _read_precision(document: Document, recipe: Recipe) -> tuple[KeyPath, str | None]:
    if document.get("fp16"):
        if document.get("bf16"):
            document.refuse(("bf16",), "not set with --fp16", "leave it out")
        return ("fp16",), "fp16-mixed"
    if document.read_choice("fp8-format", among=("hybrid", "e4m3")):
        return ("fp8-format",), "fp8-mixed"
    if document.get("bf16"):
        return ("bf16",), recipe.precision if recipe.precision in ("bf16", "bf16-mixed") else "bf16-mixed"
    return ("bf16",), "fp32"


def _read_recompute(document: Document) -> tuple[KeyPath, str]:
    keys = ("recompute-granularity",)
    kind = document.read_choice(*keys, among=("full", "selective"))
    if document.get("recompute-activations"):
        kind = "selective"
    if kind == "full":
        document.read_choice("recompute-method", among=("uniform",))
        layers = document.read_number("recompute-num-layers", low=1)
        if layers not in (None, 1):
            document.refuse(("recompute-num-layers",), "1: each layer by itself", "1")
    return keys, kind or "none"


def _read_layout(document: Document, recipe: Recipe, before: MegatronLayout | None) -> FlagValues:
    flag_values: FlagValues = {}
    for field, flag in DEGREES.items():
        size = document.read_number(flag, low=1, high=2**20)
        flag_values[field] = ((flag,), size if field == "etp" else size or 1)
    for field, flag in SWITCHES.items():
        flag_values[field] = ((flag,), bool(document.get(flag)))
    for field, flag in TYPES.items():
        flag_values[field] = ((flag,), document.get(flag) or getattr(MegatronLayout, field))
    values = {name: value for name, (_, value) in flag_values.items()}
    if before is not None and not document.get("cross-entropy-loss-fusion"):
        flag_values["cross_entropy_fusion_impl"] = (
            ("cross-entropy-fusion-impl",),
            before.cross_entropy_fusion_impl,
        )
    # A layout field that was None stays None if its default has the same effect.
    if values["sequence_parallel"] == (values["tp"] > 1):
        previous = before.sequence_parallel if before is not None else None
        if previous is None or previous == values["sequence_parallel"]:
            flag_values["sequence_parallel"] = (("sequence-parallel",), previous)
    if values["etp"] in (None, values["tp"]):
        previous_etp = before.etp if before is not None else None
        flag_values["etp"] = (
            ("expert-tensor-parallel-size",),
            previous_etp if previous_etp in (None, values["tp"]) else None,
        )
        if before is not None and values["etp"] is None:
            flag_values["etp"] = (("expert-tensor-parallel-size",), before.etp)
    flag_values["grad_reduce_in_fp32"] = _read_gradient_dtype(document, recipe, before)
    return flag_values


def _read_gradient_dtype(
    document: Document, recipe: Recipe, before: MegatronLayout | None
) -> tuple[KeyPath, bool | None]:
    keys = ("grad-reduce-in-bf16",)
    if recipe.precision == "fp16-mixed":
        in_fp32 = bool(document.get("accumulate-allreduce-grads-in-fp32"))
    elif recipe.precision == "fp32":
        return keys, before.grad_reduce_in_fp32 if before is not None else None
    else:
        in_fp32 = not document.get(*keys)
    for start in (before, MegatronLayout()):
        if start is not None and reduces_in_fp32(start, recipe) == in_fp32:
            return keys, start.grad_reduce_in_fp32
    return keys, in_fp32


def _check_split(document: Document, plan: Plan) -> None:
    """Raise ``ValueError`` for a file whose pipeline split differs from the plan's."""
    wanted = megatron_arguments(plan)
    for flag in ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"):
        if bool(document.get(flag)) != (flag in wanted) and plan.degrees.pp > 1:
            presence = "set" if flag in wanted else "left out"
            allowed = (
                f"{presence}, as {plan.architecture.num_hidden_layers} layers over the stages are split here"
            )
            refuse(document.locate(flag), bool(document.get(flag)), allowed, "the split that the plan makes")


# ---- Megatron-LM's older flag for the model chunks of a pipeline stage: layers per chunk


SAME = "num-virtual-stages-per-pipeline-rank"
"""The newer flag, in chunks; Megatron-LM accepts only one of the two (megatron/training/arguments.py)."""


def count_model_chunks(document: Document, architecture: Architecture, pp: int) -> int:
    """Return the model chunks of a stage by Megatron-LM's rule (validate_args): both divisions are exact.

    Embedding and loss are included in the sum if they count as layers.
    """
    if document.get(SAME) is not None:
        document.refuse((CHUNK,), f"not set with --{SAME}", "leave it out")
    size = document.read_number(CHUNK, low=1, high=2**20) or 1
    ends = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    layers = architecture.num_hidden_layers + sum(bool(document.get(flag)) for flag in ends)
    per_stage = layers // pp
    if layers % pp or per_stage % size:
        allowed = f"a divisor of the {layers / pp:g} layers of a stage ({layers} over {pp})"
        document.refuse(
            (CHUNK,), allowed, "1" if layers % pp == 0 else "another pipeline-model-parallel-size"
        )
    return per_stage // size
