"""Import of a plan from Megatron-LM's command line: a file of arguments, or the arguments themselves."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse, warn_user
from shardscope.core.recipe import Recipe
from shardscope.core.serialization import replace_fields
from shardscope.core.text_positions import KeyPath
from shardscope.frameworks.formats.comment_fields import read_comment_fields
from shardscope.frameworks.formats.documents import Document, read_text
from shardscope.frameworks.formats.sidecar_files import (
    FileFields,
    PlanParts,
    apply_to_recipe,
    build_plan,
    load_plan_parts,
)
from shardscope.frameworks.megatron.files.arguments import BACKENDS, OPTIMIZERS, build_arguments
from shardscope.frameworks.megatron.files.read_architecture import (
    ROTARY,
    SHAPE,
    check_grouped_experts,
    check_padding,
    check_positions,
    read_architecture,
    read_sizes,
)
from shardscope.frameworks.megatron.files.shell_script import SCRIPTS, UNSET, read_script_arguments
from shardscope.frameworks.megatron.layout import MegatronLayout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32
from shardscope.machine.user_folders import expand_home

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
    flag.replace("-", "_"): flag
    for flag in ("exp-avg-dtype", "exp-avg-sq-dtype", "cross-entropy-fusion-impl")
}
SIZES = {
    "seq_len": "seq-length",
    **{flag.replace("-", "_"): flag for flag in ("micro-batch-size", "global-batch-size")},
}
REFUSED = {
    "optimizer-cpu-offload": "plans have no optimizer state on the host for Megatron",
    "fp4-format": "plans have no training in 4 bits; --fp8-format hybrid trains in 8",
    **dict.fromkeys(
        ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2"),
        "plans shard Megatron's optimizer state only; Layout.fsdp2 shards parameters too",
    ),
    "pipeline-model-parallel-layout": "plans have the pipeline splits of the other flags",
    "cpu-offloading-num-layers": "plans have no activations on the host for Megatron",
}
"""Flags whose effect on memory or time has no formula."""
CHUNK = "num-layers-per-virtual-pipeline-stage"
COUNTED_ENDS = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
END_SIZES = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
"""Numbers of layers of the first and of the last pipeline stage."""
REPLACED = {
    "batch-size": "micro-batch-size",
    "model-parallel-size": "tensor-model-parallel-size",
    "checkpoint-activations": "recompute-granularity full --recompute-method uniform",
}
"""Flags of older versions, at which Megatron-LM stops (megatron/training/arguments.py, ``validate_args``)."""
READ = (
    CHUNK, *REFUSED, *SHAPE, *DEGREES.values(), *SWITCHES.values(), *TYPES.values(), *SIZES.values(),
    *COUNTED_ENDS, *END_SIZES, "optimizer",
    "hidden-dropout", "attention-dropout", "fp16", "bf16", "fp8-format", "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32", "attention-backend", "cross-entropy-loss-fusion",
    "recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-activations",
    "moe-expert-capacity-factor", "use-flash-attn", ROTARY,
)  # fmt: skip
COSTLY = frozenset({
    *("mtp-num-layers", "recompute-modules", "moe-layer-recompute", "fine-grained-activation-offloading"),
    *("distribute-saved-activations", "main-grads-dtype", "main-params-dtype", "transformer-impl"),
    *("num-distributed-optimizer-instances", "rampup-batch-size", "fp8-param-gather", "fp8-recipe"),
    *("no-gradient-accumulation-fusion", "attention-softmax-in-fp32", "no-rope-fusion", "squared-relu"),
    *("no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-masked-softmax-fusion", "cuda-graph-impl"),
    *("enable-cuda-graph", "step-batch-size-schedule"),
    *("external-cuda-graph", "delay-wgrad-compute", "defer-embedding-wgrad-compute", "hybrid-layer-pattern"),
    *("overlap-moe-expert-parallel-comm", "experimental-attention-variant", "moe-shared-expert-overlap"),
    *("moe-pad-expert-input-to-capacity", "cp-comm-type", "hierarchical-context-parallel-sizes"),
    *("use-legacy-models", "first-last-layers-bf16", "use-packed-sequence"),
})  # fmt: skip
"""Flags that are in no plan, but change memory or step time."""
UNREAD_DEFAULTS = {"transformer-impl": "transformer_engine", "recompute-modules": "core_attn"}
"""Unread flags -> Megatron-LM's default, with which a file loses nothing."""
ALONE = frozenset({
    *SWITCHES.values(), "group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias",
    "qk-layernorm", "untie-embeddings-and-output-weights", "multi-latent-attention",
    "moe-router-pre-softmax", "moe-grouped-gemm", *COUNTED_ENDS, "fp16", "bf16", "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32", "cross-entropy-loss-fusion", "recompute-activations",
    "use-flash-attn", "optimizer-cpu-offload", "use-megatron-fsdp", "use-custom-fsdp",
    "use-torch-fsdp2", ROTARY,
})  # fmt: skip
"""Flags without a value."""
MISSPELT = 0.9
"""Similarity (difflib) from which an unknown flag counts as a misspelled one of :data:`READ`."""
LONG = 6
"""Length from which the beginning of a flag counts as an abbreviation in the middle of a word, too."""


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

    # What flags cannot express comes from the caller, from plan.json, or else from the file's comments.
    parts = load_plan_parts(file, architecture, cluster, recipe)
    comment_recipe, comment_layout = read_comment_fields(
        document, read_text(file) if file else "", MegatronLayout
    )
    if parts.is_recipe_open:
        parts = replace(parts, recipe=apply_to_recipe(parts.recipe, document, comment_recipe))
    stored_layout = parts.layout if isinstance(parts.layout, MegatronLayout) else None
    parts = replace(parts, recipe=_reset_removed_options(document, parts))

    # The recipe comes first: the default dtype of gradients depends on it.
    recipe_values = _read_recipe(document, parts)
    planned_recipe = apply_to_recipe(parts.recipe, document, recipe_values)
    if document.get("global-batch-size") is None and parts.layout is None:
        allowed = "a number: Megatron-LM's default depends on the cluster"
        refuse(f"{document.name}, --global-batch-size", None, allowed, "--global-batch-size 64")
    layout_values = _read_layout(document, planned_recipe, stored_layout)
    if parts.layout is None:
        layout_values = comment_layout | layout_values

    # Then the architecture, which the older flag for model chunks needs.
    flag_values = recipe_values | layout_values | read_sizes(document, parts)
    check_positions(document, planned_recipe, flag_values)
    parts = replace(parts, architecture=read_architecture(document, parts, flag_values))
    if document.get(CHUNK) is not None:
        pp = layout_values["pp"][1]
        assert isinstance(pp, int)
        num_chunks = count_model_chunks(document, parts.require_architecture(document.name), pp)
        layout_values["vpp"] = ((CHUNK,), num_chunks)

    values = {name: value for name, (_, value) in layout_values.items()}
    start = stored_layout or MegatronLayout()
    plan = build_plan(
        parts, document, planned_recipe, flag_values | layout_values, lambda: replace_fields(start, values)
    )
    _check_split(document, plan)
    check_padding(document, plan)
    check_grouped_experts(document, plan)
    return plan


# ---- Arguments


def _read_document(arguments: str | Path | Sequence[str]) -> tuple[Document, Path | None]:
    """Return flag -> value, with each flag's line number if they come from a file."""
    # A string with a flag is a command line, any other one a path.
    is_path = isinstance(arguments, Path) or (
        isinstance(arguments, str) and not re.search(r"(^|\s)--\w", arguments)
    )
    if is_path:
        file = expand_home(str(arguments))
        text = read_text(str(arguments))
        if not _is_script(file, text):
            return _parse_arguments(file.name, _split_lines(file.name, text)), file
        words, conditional_flags = read_script_arguments(file.name, text, ALONE)
        known = conditional_flags & {*READ, *REFUSED, *COSTLY}
        conditional = [f"--{flag}" for flag in sorted(known)]
        if conditional:
            warn_user(
                f"{file.name} sets {', '.join(conditional)} in a condition, a loop or a function, which only "
                "a shell can follow.",
                UserWarning,
            )
        return _parse_arguments(file.name, [(0, word) for word in words]), file
    if isinstance(arguments, str):
        arguments = arguments.replace("\r\n", "\n")
        try:
            # A backslash and the line break after it are one space to a shell.
            arguments = shlex.split(arguments.replace("\\\n", " "))
        except ValueError as error:
            raise ValueError(f"the arguments: {error}.") from error
    if not isinstance(arguments, Sequence) or not all(isinstance(item, str) for item in arguments):
        refuse(
            "arguments",
            arguments,
            "a file of arguments, or a list of strings",
            Value("megatron_arguments.txt"),
        )
    # A whole command begins with its launcher, whose flags end at the script: torchrun ... pretrain_gpt.py.
    if arguments and not arguments[0].startswith("--"):
        script = next((index for index, item in enumerate(arguments) if item.endswith(".py")), -1)
        arguments = arguments[script + 1 :]
    return _parse_arguments("the arguments", [(0, item) for item in arguments]), None


def _is_script(file: Path, text: str) -> bool:
    return file.suffix.lower() in SCRIPTS and not text.lstrip().startswith("--")


def _split_lines(name: str, text: str) -> list[tuple[int, str]]:
    """Return the file's arguments with their line numbers; lines may end in a shell's backslash."""
    arguments = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            arguments += [(number, item) for item in shlex.split(line.rstrip(" \\"), comments=True)]
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}.") from error
    return arguments


def _parse_arguments(name: str, arguments: list[tuple[int, str]]) -> Document:
    """Group (line, argument) pairs by flag. Line 0: the arguments come from no file."""
    values: dict[str, object] = {}
    lines: dict[KeyPath, int] = {}
    unread: list[tuple[str, str]] = []
    index = 0
    while index < len(arguments):
        line, argument = arguments[index]
        where = f"{name}, line {line}" if line else name
        if not argument.startswith("--"):
            raise ValueError(
                f"{where}, {argument!r}: this is not a flag; allowed: --name value. Nearest fix: the "
                "arguments alone, those of a shell script with its variables replaced."
            )
        # The flag's values: after "=", or all arguments up to the next flag.
        flag, has_value, value = argument[2:].partition("=")
        index += 1
        flag_arguments = [value] if has_value else []
        while not has_value and index < len(arguments) and not arguments[index][1].startswith("--"):
            flag_arguments.append(arguments[index][1])
            index += 1
        parsed = _parse_value(where, flag, flag_arguments)
        if flag in values and parsed == values[flag]:
            continue
        # argparse takes the last of two; of a flag that the plan needs, the author may have meant the other.
        if flag in values and flag in READ:
            allowed = f"given once: it has been {values[flag]!r} before"
            refuse(f"{where}, --{flag}", parsed, allowed, f"one of the two --{flag}")
        if line:
            lines[(flag,)] = line
        values[flag] = parsed
        # Megatron-LM has hundreds of flags; an unknown one is an error only if it looks misspelled.
        if flag in REPLACED:
            allowed = f"--{REPLACED[flag]}, which has replaced it"
            refuse(f"{where}, --{flag}: this flag", flag, allowed, f"--{REPLACED[flag]}")
        if flag not in READ:
            near = difflib.get_close_matches(flag, READ, n=1, cutoff=MISSPELT)
            # Megatron-LM takes no abbreviations (allow_abbrev=False), under which a degree would be 1.
            near = near or [name for name in READ if _is_abbreviation(flag, name)]
            if near:
                refuse(f"{where}, --{flag}: this flag", flag, f"--{near[0]} and others", f"--{near[0]}")
            unread = [entry for entry in unread if entry[0] != flag]
            if " ".join(flag_arguments) != UNREAD_DEFAULTS.get(flag):
                unread.append((flag, f"--{flag}" + (f" (line {line})" if line else "")))
    return Document(name=name, values=values, lines=lines, costly_keys=COSTLY, _unread=unread)


def _is_abbreviation(flag: str, name: str) -> bool:
    """Return whether ``flag`` is ``name`` with underscores, or the beginning of it, as in ``--seq-len``."""
    dashed = flag.replace("_", "-")
    return dashed == name or name.startswith(f"{dashed}-" if len(dashed) < LONG else dashed)


def _parse_value(where: str, flag: str, flag_arguments: list[str]) -> object:
    """Return True for a flag without a value, else a number or a string; of an unread flag its arguments."""
    if flag not in READ:
        return flag_arguments
    if len(flag_arguments) != (0 if flag in ALONE else 1):
        allowed = "no value" if flag in ALONE else "one value"
        refuse(
            f"{where}, --{flag}",
            " ".join(flag_arguments),
            allowed,
            f"--{flag}" + ("" if flag in ALONE else " VALUE"),
        )
    if flag in ALONE:
        return True
    value = flag_arguments[0]
    if UNSET.fullmatch(value):
        refuse(f"{where}, --{flag}", value, "a value, which the script does not set", f"--{flag} VALUE")
    for number_type in (int, float):
        try:
            return number_type(value)
        except ValueError:
            continue
    return value


# ---- Recipe and layout


def _reset_removed_options(document: Document, parts: PlanParts) -> Recipe:
    """Return the recipe, with options reset whose flag was removed from the file of an exported plan."""
    recipe = parts.recipe
    if parts.layout is None:
        return recipe
    is_unfused = recipe.loss == "fused" and not document.get("cross-entropy-loss-fusion")
    loss = None if is_unfused else recipe.loss
    return replace(recipe, attention=None, expert_capacity_factor=None, loss=loss)


def _read_recipe(document: Document, parts: PlanParts) -> FileFields:
    recipe = parts.recipe
    flag_values: FileFields = {
        field: ((flag,), document.read_number(flag, low=1, high=2**24)) for field, flag in SIZES.items()
    }
    if flag_values["micro_batch_size"][1] is None and parts.layout is None:
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


def _read_layout(document: Document, recipe: Recipe, stored: MegatronLayout | None) -> FileFields:
    """Return layout field -> (flag, value); ``stored`` is the layout of plan.json, if there is one."""
    degrees = {field: document.read_number(flag, low=1, high=2**20) for field, flag in DEGREES.items()}
    tp = degrees["tp"] or 1
    layout_values: FileFields = {field: ((DEGREES[field],), size or 1) for field, size in degrees.items()}
    layout_values["etp"] = ((DEGREES["etp"],), _read_expert_tp(degrees["etp"], tp, stored))
    for field, flag in SWITCHES.items():
        layout_values[field] = ((flag,), bool(document.get(flag)))
    layout_values["sequence_parallel"] = (
        (SWITCHES["sequence_parallel"],),
        _read_sequence_parallel(document, tp, stored),
    )
    for field, flag in TYPES.items():
        layout_values[field] = ((flag,), document.get(flag) or getattr(MegatronLayout, field))
    # An export writes this flag with a fused loss only.
    if stored is not None and not document.get("cross-entropy-loss-fusion"):
        flag = TYPES["cross_entropy_fusion_impl"]
        layout_values["cross_entropy_fusion_impl"] = ((flag,), stored.cross_entropy_fusion_impl)
    layout_values["grad_reduce_in_fp32"] = _read_gradient_dtype(document, recipe, stored)
    return layout_values


# A layout field that was None stays None if the flags say the same as its default: an exported plan that is
# read again is equal.


def _read_expert_tp(etp: int | None, tp: int, stored: MegatronLayout | None) -> int | None:
    previous = stored.etp if stored is not None else None
    if etp is None:
        return previous
    if etp == tp:
        return previous if previous == tp else None
    return etp


def _read_sequence_parallel(document: Document, tp: int, stored: MegatronLayout | None) -> bool | None:
    # Megatron-LM turns it off without tensor parallelism (validate_args), as in its example of Llama 3 8B.
    shards = tp > 1 and bool(document.get(SWITCHES["sequence_parallel"]))
    previous = stored.sequence_parallel if stored is not None else None
    if shards == (tp > 1) and previous in (None, shards):
        return previous
    return shards


def _read_gradient_dtype(
    document: Document, recipe: Recipe, stored: MegatronLayout | None
) -> tuple[KeyPath, bool | None]:
    keys = ("grad-reduce-in-bf16",)
    if recipe.precision == "fp16-mixed":
        in_fp32 = bool(document.get("accumulate-allreduce-grads-in-fp32"))
    elif recipe.precision == "fp32":
        return keys, stored.grad_reduce_in_fp32 if stored is not None else None
    else:
        in_fp32 = not document.get(*keys)
    for start in (stored, MegatronLayout()):
        if start is not None and reduces_in_fp32(start, recipe) == in_fp32:
            return keys, start.grad_reduce_in_fp32
    return keys, in_fp32


def _check_split(document: Document, plan: Plan) -> None:
    """Raise ``ValueError`` for a file whose pipeline split differs from the plan's."""
    wanted, stages = build_arguments(plan), list(plan.stage_layers)
    counted = [flag for flag in COUNTED_ENDS if document.get(flag)]
    sizes = {flag: document.read_number(flag, low=1, high=2**20) for flag in END_SIZES}
    given = [flag for flag, size in sizes.items() if size is not None]
    split = f"the split of {plan.architecture.num_hidden_layers} layers over {plan.degrees.pp} stages here"
    if given:
        if counted:
            refuse(document.locate(counted[0]), True, f"left out with --{given[0]}", "leave it out")
        if _list_stages(plan, *sizes.values()) != stages:
            flags = " ".join(f"--{flag} {wanted[flag]}" for flag in END_SIZES if flag in wanted)
            allowed = f"{split}, {', '.join(map(str, stages))}"
            refuse(document.locate(given[0]), sizes[given[0]], allowed, flags or "leave it out")
        return
    if plan.degrees.pp == 1:
        return
    for flag in COUNTED_ENDS:
        if (flag in counted) != (flag in wanted):
            allowed = f"{'set' if flag in wanted else 'left out'}, as in {split}"
            refuse(document.locate(flag), flag in counted, allowed, "the split that the plan makes")
    if missing := [f"--{flag} {wanted[flag]}" for flag in END_SIZES if flag in wanted]:
        refuse(document.locate(END_SIZES[0]), None, f"set, as in {split}", " ".join(missing))


def _list_stages(plan: Plan, first: int | None, last: int | None) -> list[int] | None:
    """Return the layers of each stage if the first and the last have these numbers; None: no such split.

    The stages without a number have equal shares of what is left (megatron-core, transformer_block.py,
    ``get_num_layers_to_build``).
    """
    num_equal = plan.degrees.pp - (first is not None) - (last is not None)
    left = plan.architecture.num_hidden_layers - (first or 0) - (last or 0)
    if num_equal < 0 or left < num_equal or (left % num_equal if num_equal else left):
        return None
    equal = [left // num_equal] * num_equal if num_equal else []
    return [*([first] if first else []), *equal, *([last] if last else [])]


def count_model_chunks(document: Document, architecture: Architecture, pp: int) -> int:
    """Return the model chunks of a stage by Megatron-LM's rule (validate_args): both divisions are exact.

    Embedding and loss are included in the sum if they count as layers. The newer flag is in chunks, and
    Megatron-LM accepts only one of the two (megatron/training/arguments.py).
    """
    if document.get(DEGREES["vpp"]) is not None:
        document.refuse((CHUNK,), f"not set with --{DEGREES['vpp']}", "leave it out")
    size = document.read_number(CHUNK, low=1, high=2**20) or 1
    layers = architecture.num_hidden_layers + sum(bool(document.get(flag)) for flag in COUNTED_ENDS)
    per_stage = layers // pp
    if layers % pp or per_stage % size:
        allowed = f"a divisor of the {layers / pp:g} layers of a stage ({layers} over {pp})"
        document.refuse(
            (CHUNK,), allowed, "1" if layers % pp == 0 else "another pipeline-model-parallel-size"
        )
    return per_stage // size
