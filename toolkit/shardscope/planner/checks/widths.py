"""Checks of widths that are not aligned for matrix units, and of vocabularies with much padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardscope.core.finding import Finding
from shardscope.core.layout import list_divisors
from shardscope.core.precision import FP32, HALF
from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks.case import Case, evaluate_variants, find_fastest, replace_plan_fields
from shardscope.planner.checks.nearby_widths import align_width, widen_model
from shardscope.planner.checks.number_format import format_percent
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.layers import PEAKS
from shardscope.timing.matmul import ALIGNED

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

ALIGNED_BYTES = 16
"""Row alignment of matrix units in bytes: "most efficient with multiples of 8" in half precision, of 4 in
TF32, of 16 in 8 bits (NVIDIA, Matrix Multiplication Background User's Guide, table 1)."""
PADDED_MUCH = 0.05
"""Share of padding rows in the vocabulary from which it is reported; less is within the noise of a step's
time."""
WORTH_A_WORD = 0.005
"""Share of the step from which a slowdown is mentioned."""
BYTES = {"fp32": FP32, "fp8-mixed": 1}
"""Bytes of a matmul operand; half precision for precisions that are not listed."""


def check_matrix_unit_alignment(case: Case) -> Iterator[Finding]:
    """Report the first width on one rank that is not a multiple of 16 bytes: its fix determines the others
    too."""
    plan = case.plan
    if not plan.on_gpu:
        return
    # The alignment is in bytes: 16 are 8 numbers in half precision, 4 in fp32 and 16 in fp8.
    multiple = ALIGNED_BYTES // BYTES.get(plan.recipe.precision, HALF)
    # Report only the first of the widths: a fix of the hidden size or of tp often aligns the others as well.
    missed = [name for name, width in list_widths_on_rank(plan).items() if width % multiple]
    if not missed:
        return
    name = missed[0]
    width = list_widths_on_rank(plan)[name]
    also = f" ({', '.join(missed[1:])} too)" if len(missed) > 1 else ""
    suggestion, fixed = _align_matmul_width(plan, name, multiple)
    if name not in (TOKENS, "vocabulary") and _has_given_model(case, fixed):
        return
    yield Finding(
        name="width-misses-matrix-units",
        severity="hint" if name == TOKENS else "warning",
        why=f"The {name} on one rank is {width:,}{also}: no multiple of the {multiple} numbers that matrix "
        f"units take at once in {plan.recipe.precision}, so that its products run slower.",
        number=float(width),
        change=suggestion,
        plan=fixed,
    )


def check_cache_line_alignment(case: Case) -> Iterator[Finding]:
    """Report aligned widths that are slower on this GPU because they are not multiples of 128 bytes."""
    plan = case.plan
    # Published runs show this slowdown on some GPU generations only (MatrixRate.unaligned_slowdown).
    slower = _slower_unaligned(case)
    missed = [name for name in _weight_widths(plan) if _weight_widths(plan)[name] % ALIGNED]
    # They ran in half precision: in fp32 64 numbers are 256 bytes.
    if not slower or not missed or plan.recipe.precision == "fp32":
        return
    name = missed[0]
    also = f" ({', '.join(missed[1:])} too)" if len(missed) > 1 else ""
    smaller = evaluate_variants(plan, [({}, {"tp": tp}) for tp in list_divisors(plan.degrees.tp)[:-1]])
    even = (variant for variant in smaller if not _weight_widths(variant.plan)[name] % ALIGNED)
    fixed = case.find_best(variant for variant in even if case.compute_gain(variant) > 0)
    suggestion, other_model = align_width(plan, name, ALIGNED)
    if _has_given_model(case, fixed.plan if fixed else other_model):
        return
    yield Finding(
        name="width-off-128-bytes",
        severity="hint",
        why=f"The {name} on one rank is {_weight_widths(plan)[name]:,}{also}: no multiple of {ALIGNED} "
        f"numbers, which are 128 bytes. Products with it took {format_percent(slower)} longer in published "
        "runs on this generation, and so they do in this prediction.",
        number=100 * slower,
        change=f"tp={fixed.plan.degrees.tp} instead of {plan.degrees.tp}" if fixed else suggestion,
        plan=fixed.plan if fixed else other_model,
    )


def _has_given_model(case: Case, fixed: Plan | None) -> bool:
    """Return whether the fix is another model, although the plan fine-tunes given weights."""
    is_finetune = case.plan.recipe.has_adapters or getattr(case.task, "weights", None) is not None
    return is_finetune and (fixed is None or fixed.architecture != case.plan.architecture)


def _slower_unaligned(case: Case) -> float:
    if case.step is None or not case.plan.on_gpu:
        return 0.0
    rates = select_rates(case.plan.cluster)
    return rates.get_matmul_rate(PEAKS[case.plan.recipe.precision]).unaligned_slowdown


def _weight_widths(plan: Plan) -> dict[str, int]:
    """Return the weight dimensions that are aligned for matrix units, except the vocabulary: it is one matmul
    of many."""
    widths = list_widths_on_rank(plan)
    multiple = ALIGNED_BYTES // BYTES.get(plan.recipe.precision, HALF)
    return {
        name: width
        for name, width in widths.items()
        if name not in (TOKENS, "vocabulary") and not width % multiple
    }


TOKENS = "number of tokens in a micro-batch"


def list_widths_on_rank(plan: Plan) -> dict[str, int]:
    """Return the matrix dimensions of one rank's matmuls."""
    arch, degrees, recipe = plan.architecture, plan.degrees, plan.recipe
    tp, moe = degrees.tp, arch.mixture_of_experts
    widths = {"hidden size": arch.hidden_size}
    if moe is None:
        widths["width of the MLP"] = _divide_up(arch.intermediate_size, tp)
    else:
        widths["width of an expert"] = _divide_up(moe.moe_intermediate_size, plan.layout.expert_tp)
    # Latent attention has other projections, whose widths have no single name.
    if arch.latent_attention is None:
        widths["width of the queries"] = _divide_up(arch.num_attention_heads, tp) * arch.head_dim
        widths["width of the keys"] = _divide_up(arch.num_key_value_heads, tp) * arch.head_dim
    widths["vocabulary"] = _divide_up(_pad_vocabulary(plan), tp)
    widths[TOKENS] = recipe.micro_batch_size * recipe.seq_len // degrees.cp
    return widths


def check_vocabulary_padding(case: Case) -> Iterator[Finding]:
    """Report rows of embedding and head that are padding, because tp must divide the vocabulary evenly."""
    plan = case.plan
    # Frameworks pad to a multiple of tp so that every rank has an equal part of the embedding and the head.
    rows, real = _pad_vocabulary(plan), plan.architecture.vocab_size
    share = 1 - real / rows
    if share < PADDED_MUCH:
        return
    smaller = evaluate_variants(plan, [({}, {"tp": tp}) for tp in list_divisors(plan.degrees.tp)[:-1]])
    better = (variant for variant in smaller if 1 - real / _pad_vocabulary(variant.plan) < PADDED_MUCH)
    fixed = find_fastest(better)
    lost = -case.compute_gain(fixed) if fixed else 0.0
    slower = f", {format_percent(lost)} slower" if lost >= WORTH_A_WORD else ""
    yield Finding(
        name="vocabulary-padded-much",
        severity="hint",
        why=f"tp={plan.degrees.tp} pads the vocabulary of {real:,} to {rows:,} rows: {format_percent(share)} "
        "of the embedding, the head and the logits stand for no token.",
        number=100 * share,
        change=f"tp={fixed.plan.degrees.tp}{slower}" if fixed else f"A vocabulary of {rows:,} tokens",
        plan=fixed.plan if fixed else widen_model(plan, vocab_size=rows),
    )


def _pad_vocabulary(plan: Plan) -> int:
    return frameworks[plan.layout.framework].defaults().pad_vocab_size(plan)


def _divide_up(width: int, ranks: int) -> int:
    """Return the size of the largest shard."""
    return -(-width // ranks)


def _align_matmul_width(plan: Plan, name: str, multiple: int) -> tuple[str, Plan | None]:
    """Return the fix that aligns one width, as text, and its plan; None if that cannot run."""
    # The number of tokens is a recipe's, so it needs no other model.
    if name == TOKENS:
        return _align_num_tokens(plan, multiple)
    # More tokens than the tokenizer has are common practice: the extra rows are never looked up.
    if name == "vocabulary":
        step = ALIGNED * plan.degrees.tp
        rows = -(-plan.architecture.vocab_size // step) * step
        return f"Pad the vocabulary to {rows:,} tokens", widen_model(plan, vocab_size=rows)
    # A smaller tp may align the width without changing the model. The largest such tp changes the plan least.
    for tp in reversed(list_divisors(plan.degrees.tp)[:-1]):
        smaller = replace_plan_fields(plan, layout={"tp": tp})
        if smaller is not None and not list_widths_on_rank(smaller)[name] % multiple:
            return f"tp={tp} instead of {plan.degrees.tp}", smaller
    return align_width(plan, name, multiple)


def _align_num_tokens(plan: Plan, multiple: int) -> tuple[str, Plan | None]:
    """Return the nearest longer sequence whose tokens on one rank are a multiple of ``multiple``, as text and
    as a plan; the nearest shorter one if no longer one is valid."""
    recipe, degrees = plan.recipe, plan.degrees
    # The tokens of all context-parallel ranks are micro_batch_size * seq_len: the micro-batch contributes its
    # own factors.
    together = multiple * degrees.cp
    step = together // math.gcd(together, recipe.micro_batch_size)
    longer = (recipe.seq_len // step + 1) * step
    # Layouts may require a multiple of 2 x cp and of tp as well: among so many steps there is one.
    reach = 2 * degrees.cp * degrees.tp * step
    shorter = range(longer - step, max(0, longer - step - reach), -step)
    for length in itertools.chain(range(longer, longer + reach, step), shorter):
        fixed = replace_plan_fields(plan, recipe={"seq_len": length})
        if fixed is not None:
            return f"seq_len={length} instead of {recipe.seq_len}", fixed
    return f"A seq_len that is a multiple of {step}", None
