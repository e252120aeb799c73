"""Export of Megatron-LM's command line with a script that runs ``pretrain_gpt.py``, and of train.py."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING

from shardscope.families.registry import find_family
from shardscope.frameworks.accelerate.limits import why_not_started
from shardscope.frameworks.formats.accelerate_config import list_absent_files
from shardscope.frameworks.formats.commands import add_commands, render_commands, set_defaults
from shardscope.frameworks.formats.comment_fields import find_missing_fields, render_comment_fields
from shardscope.frameworks.formats.exported import Absent, Exported, render_header
from shardscope.frameworks.formats.train_file import PACKAGES, SCRIPT_FILE, render_train_files
from shardscope.frameworks.formats.training_arguments import ARGUMENTS_FILE
from shardscope.frameworks.megatron.engine.launching import ONE_CONNECTION, wants_one_connection
from shardscope.frameworks.megatron.files import TRAINED_VALUES
from shardscope.frameworks.megatron.files.arguments import LAYOUT, RECIPE, build_arguments
from shardscope.frameworks.megatron.limits import check_trainable

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

FLAGS_FILE = "megatron_arguments.txt"
MODEL_SCRIPT = "megatron_model.py"
"""Module that ``train.py`` imports."""
ACTIVATIONS = ("silu", "gelu_new")
"""Activations that Megatron-LM's flags can express: ``silu`` with --swiglu, else ``gelu_new``."""

READ_FLAGS = f"""set -f  # --moe-layer-freq has stars in it
mapfile -t lines < <(grep -v '^#' {FLAGS_FILE})
arguments=(${{lines[*]}})
"""
NEEDS = (
    "MEGATRON_LM is the folder of Megatron-LM. Data, tokenizer, steps and rates are added behind: to try it, "
    "--mock-data --tokenizer-type NullTokenizer --train-iters 20 --lr 1e-4"
)


def render_files(plan: Plan) -> list[Exported | Absent]:
    """Return the files that an export of a Megatron plan writes in addition to its JSON."""
    why = _explain_missing_support(plan)
    plain = _render_script(plan)
    none: list[Exported | Absent] = [
        *list_absent_files(
            why_not_started(plan)
            or "Megatron-LM has arguments of its own here; ss.Script starts a script through Accelerate, "
            "where Megatron-LM is installed."
        ),
        Absent(name=ARGUMENTS_FILE, why="transformers' Trainer does not run Megatron."),
    ]
    # A value that the user has set is kept, as in a run.
    variables = {ONE_CONNECTION: "1"} if wants_one_connection(plan) else {}
    script_files = add_commands(
        plan, *plain, packages=[*PACKAGES, "megatron-core>=0.16"], variables=variables
    )
    if why is not None:
        return [Absent(name=FLAGS_FILE, why=why), *script_files, *none]
    program = '"${MEGATRON_LM:?the folder of Megatron-LM}/pretrain_gpt.py" "${arguments[@]}"'
    flags = Exported(
        name=FLAGS_FILE,
        what="command-line arguments of Megatron-LM's pretrain_gpt.py",
        text=_render_arguments(plan),
    )
    return [
        flags,
        *render_commands(plan, program, needs=NEEDS, environment=set_defaults(variables) + READ_FLAGS),
        *_rename_commands(script_files),
        *none,
    ]


def _render_script(plan: Plan) -> list[Exported | Absent]:
    """Return ``train.py``, its model and its ``config.json``, or the reason that they are absent."""
    try:
        check_trainable(plan)
    except ValueError as refusal:
        return [Absent(name=SCRIPT_FILE, why=str(refusal))]
    if not plan.on_gpu:
        why = "Only Shardscope's engine trains this: Megatron-core calls CUDA, and the plan has CPU ranks."
        return [Absent(name=SCRIPT_FILE, why=why)]
    arch, tp = plan.architecture, plan.degrees.tp
    if arch.vocab_size % tp:
        # Megatron-LM pads the vocabulary, and the padding's logits must then be kept out of the loss.
        why = (
            f"Only Shardscope's engine trains this: {SCRIPT_FILE} does not pad a vocabulary, and "
            f"{arch.vocab_size:,} tokens are not divisible by tp={tp}."
        )
        return [Absent(name=SCRIPT_FILE, why=why)]
    script, *other_files = render_train_files(plan, TRAINED_VALUES)
    if isinstance(script, Absent):
        return [script]
    text = (resources.files(__package__) / MODEL_SCRIPT).read_text(encoding="utf-8")
    what = f"the model of {SCRIPT_FILE}: Megatron-core's modules with a transformers model's weights"
    return [script, Exported(name=MODEL_SCRIPT, what=what, text=text), *other_files]


def _rename_commands(files: list[Exported | Absent]) -> list[Exported | Absent]:
    """Return the files of ``train.py``, renamed where Megatron-LM's commands have the same names."""
    new_names = {"torchrun.sh": "train.sh", "job.sbatch": "train.sbatch"}
    script = next(file for file in files if file.name == SCRIPT_FILE)
    if isinstance(script, Absent):
        # The commands are Megatron-LM's alone.
        why = f"{script.why} Megatron-LM's own pretrain_gpt.py trains it: torchrun.sh runs that."
        return [
            replace(script, why=why),
            *(file for file in files if isinstance(file, Absent) and file is not script),
        ]
    return [
        replace(file, name=new_names[file.name], what=f"{file.what}, for {SCRIPT_FILE}")
        if isinstance(file, Exported) and file.name in new_names
        else file
        for file in files
    ]


def _explain_missing_support(plan: Plan) -> str | None:
    """Return why Megatron-LM cannot build or run the plan, or None if it can."""
    arch = plan.architecture
    if arch.norms_per_layer != 2:
        return "megatron-core's TransformerLayer has no norms after attention and MLP."
    if not plan.on_gpu:
        return "Megatron-LM needs CUDA, and the plan has CPU ranks."
    if plan.recipe.seq_len > arch.max_position_embeddings:
        return (
            f"Megatron-LM asserts max-position-embeddings >= seq-length, and these are "
            f"{arch.max_position_embeddings:,} and {plan.recipe.seq_len:,}."
        )
    return None


def _render_arguments(plan: Plan) -> str:
    layout_fields = {*LAYOUT, *(["cross_entropy_fusion_impl"] if plan.recipe.loss == "fused" else [])}
    # Megatron does not distinguish bf16 and bf16-mixed: it always keeps fp32 main weights.
    expressed = [field for field in RECIPE if field != "precision" or plan.recipe.precision != "bf16"]
    missing = find_missing_fields(plan, {*expressed, "kernels"}, layout_fields)
    arguments = build_arguments(plan)
    notes = [
        "Options that a plan does not have keep Megatron-LM's defaults: --rotary-base, --norm-epsilon..."
    ]
    if plan.architecture.num_moe_layers:
        notes.append(
            "So have routers and experts: --moe-router-load-balancing-type and --moe-aux-loss-coeff, without "
            "which nothing evens the experts' load, and --moe-router-score-function."
        )
        if "moe-grouped-gemm" not in arguments:
            notes.append(
                "Megatron-LM takes --moe-grouped-gemm with bf16 alone. Without it a rank's experts run one "
                "after the other, and predictions are for all of them at once."
            )
    if find_family(plan.architecture).activation not in ACTIVATIONS:
        notes.append(
            f"The MLP's activation is {plan.architecture.model_type}'s own; --swiglu is SiLU behind a gate, "
            "and without it Megatron-LM has GELU."
        )
    if plan.architecture.sliding_window_layers:
        notes.append(
            f"{plan.architecture.sliding_window_layers} layers of this model attend to a window of "
            f"{plan.architecture.sliding_window} tokens; with these flags all attend to everything."
        )
    lines = [f"--{name}" if value is None else f"--{name} {value}" for name, value in arguments.items()]
    comment = render_header(plan, *notes) + render_comment_fields(missing, "the user")
    return comment + "\n".join(lines) + "\n"
