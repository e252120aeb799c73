"""Model card of a run's model: the README.md of an exported or merged folder, in the Hub's format.

A run folder may come from anybody, so its texts are data: each stands in a code span that it cannot leave,
with secrets masked. Of paths only the last name is shown. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import refuse
from shardscope.core.number_format import format_count
from shardscope.core.recipe import Recipe
from shardscope.records.folder import EXPORT, MERGED, RunFolder
from shardscope.records.json_files import LineTail, finite_or_special, parse_lines, read_json
from shardscope.records.json_values import is_number
from shardscope.records.metrics_table import compute_curve, compute_perplexity
from shardscope.records.redaction import redact
from shardscope.records.regular_files import open_new, open_to_read
from shardscope.records.terminal_text import plain_text
from shardscope.runs.explain.measured import format_amount
from shardscope.runs.task_fields import find_builtin_task, read_description
from shardscope.runs.totals import compute_totals
from shardscope.training.weights.hub_folder import find_hub_name
from shardscope.training.weights.weights_folder import WeightsFolder

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.run import Run

README = "README.md"
MAX_TEXT = 200
"""Longest text of a run folder in a card, in characters."""
HEAD_BYTES = 2**20
"""Bytes of each rank's metrics in which the first loss is searched."""
MAX_HEADS = 8
"""Maximum number of ranks whose first loss is averaged."""
MAX_VALIDATION_BYTES = 2**30
"""Bytes of rank 0's metrics in which validation losses are searched, about a second's work."""
MAX_README_BYTES = 2**16
ALWAYS_SHOWN = ("method", "precision", "optimizer", "seq_len", "micro_batch_size", "global_batch_size")
"""Fields of the recipe that are shown even with their default value."""
IN_OTHER_SECTIONS = ("weights", "data", "text", "validation", "num_steps")
"""Fields of the task that are shown by their names and sizes."""
WITHOUT_EFFECT = (
    *("export", "keep_last", "log_every", "memory_snapshot", "profile", "report_to", "save_checkpoint"),
    "save_every",
)
"""Fields of the task that the weights do not depend on."""
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
_LICENCE = re.compile(r"^(license(?:_name|_link)?):[ \t]*[\"']?([\w.+:/-]{1,200})[\"']?[ \t]*$", re.MULTILINE)
"""Plain values of the front matter's licence keys. The file may be anybody's, so it is not parsed as YAML."""
_REPOSITORY = re.compile(r"(\w[\w.-]{0,94}/)?\w([\w.-]{0,94}\w)?", re.ASCII)
"""Names of repositories (huggingface_hub/utils/_validators.py)."""

Row = tuple[str, ...]


class ValidationLosses(NamedTuple):
    """First, lowest and last validation loss of a run."""

    first: float
    best: float
    """NaN if no loss was a number."""
    best_step: int
    """Number of steps after which the loss was lowest."""
    last: float


def build_model_card(run: Run, *, is_merged: bool = False) -> str:
    """Return the model card of ``run`` as Markdown; ``is_merged``: of its adapters merged into their base.

    Raises ``ValueError`` if the run did not train its plan's model, or if its plan cannot be read, and
    ``ImportError`` without huggingface_hub.
    """
    if not run.trains_the_plan:
        allowed = "a run of Pretrain or Finetune: what the user's own function trained is unknown"
        refuse("run.model_card run", run.name, allowed, "ss.Finetune(weights, data, export=True)")
    plan = run.plan
    base = find_base_name(run)
    has_adapters = plan.recipe.has_adapters and not is_merged
    parts = [
        _build_front_matter(run, base, has_adapters=has_adapters),
        f"# {format_code(run.name)}",
        _describe_model(run, plan, base, is_merged=is_merged),
        "## Data",
        _render_table(("", ""), _list_data(run)),
        "## Training",
        _render_table(("", ""), _list_training(run, plan)),
        "## Results",
        _render_table(("", "loss", "perplexity"), _list_results(run)),
        "## Predicted and measured",
        _render_table(("", "predicted", "measured", "error"), _list_measured(run)),
        "## Versions",
        _render_table(("", ""), _list_versions(run)),
    ]
    # Once more over the whole text: a secret may be part of a folder's name.
    return redact("\n\n".join(filter(None, parts))) + "\n"


def write_model_card(run: Run, folder: Path, *, is_merged: bool = False) -> None:
    """Write the card to ``folder``. Raises ``OSError``, and as :func:`build_model_card`."""
    text = build_model_card(run, is_merged=is_merged)
    partial = folder / f".{README}.partial"
    with open_new(partial) as file:
        file.write(text.encode(errors="replace"))
    partial.replace(folder / README)


def find_base_name(run: Run) -> str | None:
    """Return the name of the model that the run started from, without its path; None for random weights."""
    path = (run.recorded_base or {}).get("weights")
    if not isinstance(path, str):
        return None
    folder = Path(path)
    # The folders of a run's model have the same name in each run.
    own_name = folder.parent.name if folder.name in (EXPORT, MERGED) else folder.name
    return find_hub_name(folder) or own_name


# ---- Front matter


def _build_front_matter(run: Run, base: str | None, *, has_adapters: bool) -> str:
    try:
        from huggingface_hub import ModelCardData
    except ImportError:
        message = 'A model card needs huggingface_hub: pip install "shardscope[train]".'
        raise ImportError(message) from None
    recipe, licence = run.plan.recipe, _read_licence(run)
    data = ModelCardData(
        library_name="peft" if has_adapters else "transformers",
        pipeline_tag="text-generation",
        tags=[
            "shardscope",
            *([recipe.method] if recipe.has_adapters else []),
            *(["dpo"] if _learns_preferences(run) else []),
        ],
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    )
    # The Hub refuses a card whose base_model cannot be a repository's name.
    base = redact(base or "")
    if _REPOSITORY.fullmatch(base) and "--" not in base and ".." not in base:
        data["base_model"] = base
        data["base_model_relation"] = "adapter" if has_adapters else "finetune"
    return f"---\n{data.to_yaml()}\n---"


def _read_licence(run: Run) -> dict[str, str]:
    """Return the licence keys of the base's own README.md; empty if it has none."""
    path = (run.recorded_base or {}).get("weights")
    if not isinstance(path, str):
        return {}
    try:
        with open_to_read(WeightsFolder(Path(path), "base").resolve_file(README)) as file:
            text = file.read(MAX_README_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return {}
    matter = _FRONT_MATTER.match(text.replace("\r\n", "\n"))
    return dict(_LICENCE.findall(matter[1])) if matter else {}


# ---- Sections


def _describe_model(run: Run, plan: Plan, base: str | None, *, is_merged: bool) -> str:
    recipe, trained = plan.recipe, "trained from random weights"
    if base is not None:
        part = "the language model of " if _is_multimodal(run) else ""
        trained = f"fine-tuned from {part}{format_code(base)}"
    kind = "Weights"
    if recipe.has_adapters:
        kind = "Adapters merged into their base," if is_merged else "LoRA adapters,"
    sentences = [f"{kind} {trained} by Shardscope on {format_code(str(plan.cluster))}."]
    if _learns_preferences(run):
        reference = "the base without adapters" if recipe.has_adapters else "the base"
        sentences.append(
            "They were trained by direct preference optimization (DPO, arXiv:2305.18290) on pairs of a "
            f"chosen and a rejected answer; the reference is {reference}."
        )
    if is_merged and recipe.base_quantization:
        sentences.append(
            f"They were trained over the base in {recipe.base_quantization}, and merged into the base as it "
            "is stored."
        )
    if recipe.has_adapters and not is_merged:
        # By the name of a multimodal base, transformers opens the whole of it.
        base = "a copy of that language model" if _is_multimodal(run) else "its base"
        sentences.append(f"peft opens this folder over {base}.")
    else:
        sentences.append("transformers opens this folder with `AutoModelForCausalLM.from_pretrained`.")
    return " ".join(sentences)


def _is_multimodal(run: Run) -> bool:
    """Return whether the run trained the language model alone of a multimodal base that is still there."""
    path = (run.recorded_base or {}).get("weights")
    try:
        return isinstance(path, str) and WeightsFolder(Path(path), "base").multimodal_type is not None
    except ValueError:
        return False


def _list_data(run: Run) -> Iterator[Row]:
    record = _read_record(run, "data_source")
    yield from _list_source("training", record)
    validation = record.get("validation")
    if isinstance(validation, dict):
        yield from _list_source("validation", validation)


def _list_source(use: str, record: Mapping[str, object]) -> Iterator[Row]:
    name, prefix = record.get("name"), "" if use == "training" else f"{use} "
    if not isinstance(name, str):
        return
    yield f"{use} data", format_code(_format_value(name))
    digest = record.get("sha256")
    if isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest):
        hashed = record.get("hashed")
        of = f" of its {hashed}" if hashed in ("tokens", "folder") else ""
        yield f"{prefix}SHA-256{of}", f"`{digest}`"
    for key, label in (
        ("num_rows", "rows"),
        ("num_examples", "examples"),
        ("num_tokens", "tokens"),
        ("num_loss_tokens", "tokens that bear loss"),
        ("num_truncated_tokens", "tokens cut off"),
        ("num_shared_examples", "examples that are trained on as well"),
    ):
        count = record.get(key)
        if is_number(count) and (count or key not in ("num_truncated_tokens", "num_shared_examples")):
            yield f"{prefix}{label}", f"{count:,.0f}"


def _list_training(run: Run, plan: Plan) -> Iterator[Row]:
    yield "task", format_code(find_builtin_task(read_description(run)) or "unknown")
    name = _format_value(plan.architecture.name)
    yield "model", f"{format_code(name)}, {plan.architecture.num_parameters:,} parameters"
    trained = _read_record(run, "engine").get("num_trained_parameters")
    if is_number(trained):
        yield "trained parameters", f"{trained:,.0f}"
    yield "hardware", f"{format_code(str(plan.cluster))}, {plan.world_size} rank{'s' * (plan.world_size > 1)}"
    yield "layout", format_code(plan.layout.full_description)
    for field in fields(Recipe):
        value = getattr(plan.recipe, field.name)
        if field.name in ALWAYS_SHOWN or value != field.default:
            yield field.name, format_code(_format_value(value))
    if plan.recipe.has_adapters and plan.recipe.lora_rank is None:
        yield "lora_rank", format_code(str(plan.recipe.adapter_rank))
    done = _read_record(run, "data").get("num_steps_done")
    if is_number(done):
        yield "steps", f"{done:,.0f}" + (f" of {run.num_steps:,}" if run.num_steps else "")
    exported = _read_record(run, "export").get("num_steps_done")
    if is_number(exported) and exported != done:
        yield (
            "exported weights",
            f"those after {format_count(round(exported), 'step')}, with the lowest validation loss",
        )
    # The task's own fields, with what it derived from them.
    training = _read_record(run, "training")
    shown = {
        **(run.task_fields or {}),
        **{name: value for name, value in training.items() if is_number(value)},
    }
    for name, value in sorted(shown.items()):
        if value is None or value is False or name in (*IN_OTHER_SECTIONS, *WITHOUT_EFFECT):
            continue
        if name == "dpo_beta" and not _learns_preferences(run):
            continue
        yield format_code(name), format_code(_format_value(value))


def _list_results(run: Run) -> Iterator[Row]:
    curve = _read_first_losses(run)
    if curve:
        first = min(curve)
        yield f"training, step {first + 1:,}", f"{curve[first]:.4g}", ""
    last = compute_totals(run).loss
    if last is not None:
        yield "training, last step", f"{last:.4g}", ""
    losses = read_validation_losses(run)
    if losses is not None:
        best = f"validation, best: after {format_count(losses.best_step, 'step')}"
        rows = {"validation, first": losses.first, best: losses.best, "validation, last": losses.last}
        if math.isnan(losses.best):
            del rows[best]
        for label, loss in rows.items():
            # DPO's loss is that of a pair, not of a token.
            yield label, f"{loss:.4g}", "" if _learns_preferences(run) else f"{compute_perplexity(loss):.4g}"


def _list_measured(run: Run) -> Iterator[Row]:
    totals = compute_totals(run)
    measured, predicted = totals.tensor_bytes, totals.predicted_tensor_bytes
    memory = run.memory()
    if measured and predicted:
        # The prediction is that of a step with the optimizer's state.
        is_first = memory.lacks_optimizer
        yield (
            f"tensors at the peak, fullest rank{', first step without optimizer state' if is_first else ''}",
            format_amount(predicted),
            format_amount(measured),
            "" if is_first else _format_error(predicted, measured),
        )
    expected, peaks = run.predicted_metrics(), [rank["peak_memory_bytes"] for rank in memory.ranks]
    if expected is not None and expected.peak_memory_bytes is not None and peaks:
        low, high = format_amount(min(peaks)), format_amount(max(peaks))
        yield (
            f"each rank: {expected.memory_content}",
            format_amount(expected.peak_memory_bytes),
            low if low == high else f"{low} to {high}",
            _format_error(expected.peak_memory_bytes, max(peaks)) if max(peaks) else "",
        )
    seconds, step = totals.step_seconds, run.predicted_step_seconds
    if seconds:
        shown, error = (f"{step:.3g} s", _format_error(step, seconds)) if step else ("not predicted", "")
        yield "step (median)", shown, f"{seconds:.3g} s", error


def _list_versions(run: Run) -> Iterator[Row]:
    versions = read_description(run).get("versions")
    if isinstance(versions, dict):
        for name, version in sorted(versions.items()):
            yield format_code(str(name)), format_code(str(version))


# ---- What the run recorded


def _read_record(run: Run, name: str) -> Mapping[str, object]:
    """Return what rank 0 recorded under ``name``; empty if nothing."""
    record = (read_json(RunFolder(run.folder).engine_report(0)) or {}).get(name)
    return record if isinstance(record, dict) else {}


def _learns_preferences(run: Run) -> bool:
    """Return whether the run was trained on preference pairs."""
    return (run.task_fields or {}).get("objective") == "dpo"


def _read_first_losses(run: Run) -> dict[int, float]:
    folder = RunFolder(run.folder)
    records = []
    for rank in range(min(MAX_HEADS, run.world_size)):
        records += LineTail(folder.events(rank)).read(HEAD_BYTES)
    return compute_curve(records, "loss")


def read_validation_losses(run: Run) -> ValidationLosses | None:
    """Return the validation losses that rank 0 logged; None if there is none."""
    first: float | None = None
    best, best_step, last = math.nan, 0, math.nan
    began = run.task_fields is not None and not run.task_fields.get("resume")
    for step, loss in _iterate_validations(RunFolder(run.folder)):
        # The first validation of a run that begins at step 0 is that of the initial weights.
        is_initial = first is None and began and step == 0
        first = loss if first is None else first
        last = loss
        if loss < best or math.isnan(best):
            best, best_step = loss, 0 if is_initial else step + 1
    return None if first is None else ValidationLosses(first, best, best_step, last)


def _iterate_validations(folder: RunFolder) -> Iterator[tuple[int, float]]:
    for piece in LineTail(folder.events(0)).read_pieces(MAX_VALIDATION_BYTES):
        # Only these lines are parsed: a long run has millions of others.
        lines = [line for line in piece.splitlines() if b'"validation_loss"' in line]
        for record in parse_lines(b"\n".join(lines)).records:
            step, loss = record.get("step"), finite_or_special(record.get("validation_loss"))
            if isinstance(step, int) and isinstance(loss, int | float) and not isinstance(loss, bool):
                yield step, float(loss)


# ---- Markdown


def format_code(text: str) -> str:
    """Return ``text`` as a code span, in which neither Markdown nor HTML has a meaning.

    It stays one line without backticks, so that it cannot end the span, and bars are escaped for tables.
    """
    line = " ".join(plain_text(text).replace("`", "'").split())
    line = line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]} …"
    return f"`{line}`".replace("|", "\\|") if line else "(empty)"


def _render_table(heads: Row, rows: Iterable[Row]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return "Not recorded."
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {entry}" for key, entry in value.items())
    # The last name only, should a text be a path of this machine.
    text = str(value)
    return Path(text).name if Path(text).is_absolute() else text


def _format_error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %".replace("-", "−")
