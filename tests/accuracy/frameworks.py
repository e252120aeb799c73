"""A row's framework in its source's words -> whose memory model answers for it."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.accuracy.rows import Row, join_fields, read_number
from tests.accuracy.unmapped_rows import UnmappedError

_NOT_OURS = (
    (r"\bzb[- ]?[\dhv]|zero[- ]?bubble", "zero-bubble schedule"),
    (r"dual-?pipe", "DualPipe schedule"),
    (r"megatron[- ]?fsdp|custom[- ]fsdp", "Megatron-FSDP"),
    (r"colossal", "ColossalAI"),
    (r"in-?house|proprietary", "in-house framework"),
    (r"paddle", "Paddle"),
    (r"\bjax\b|maxtext|easylm|levanter|\bflax\b|\bt5x\b|praxis", "JAX"),
    (r"\balpa\b", "Alpa"),
    (r"tensorflow|keras", "TensorFlow"),
    (r"fairscale", "FairScale"),
    (r"zero ?\+\+|zeropp|\bhpz\b|\bqgz\b|\bqwz\b", "ZeRO++"),
    (r"\bmics\b", "MiCS"),
    (r"ulysses|\balst\b|arctic long", "Ulysses's sequence parallelism"),
    (r"\bnn\.dataparallel|^(?:py)?(?:torch )?data-?parallel$|^dp$", "nn.DataParallel"),
    (r"device ?map|naive (?:model|pipeline)|pipedream|gpipe", "layers spread without a framework of ours"),
    (r"galore|badam|\blomo\b|\badalomo\b", "a training method of its own"),
    (r"\bqat\b|quantization-aware", "quantisation-aware training"),
    (r"\b(?:ppo|grpo|dpo|rlhf|orpo|kto)\b", "training with several models"),
)
"""Pattern -> what it names, which is refused whatever else the row says."""
_ZERO_STAGE = re.compile(
    r"(?:zero|\bds|\bz|stage)[-_ ]*(?:dp|optimizer)?[-_ ]*(?:stage|z)?[-_ ]*([0-3])(?![\d.])|/([0-3])\b"
)
_TRAINERS = re.compile(
    r"transformers|hugging ?face|\bhf\b|trainer|\btrl\b|\bpeft\b|accelerate|axolotl|lla?ma[-_ ]?factory"
    r"|unsloth|xtuner|\bswift\b|torchtune|lit-?gpt|lit-?llama|lightning|torchtitan|automodel|composer|llm-?foundry"
    r"|\btorch\b|pytorch|single|q?lora|\b(?:1|one)[- ](?:gpu|device|card)|fms|llama[-_ ](?:recipes|cookbook)"
    r"|nano-?gpt|baseline|fastchat|autotrain"
)
"""Trainers over PyTorch, which on one GPU leave nothing to spread."""
_SHARDING = (
    ("torchtune", "FSDP2"),
    ("torchtitan", "FSDP2"),
    ("automodel", "FSDP2"),
    ("composer|llm-?foundry", "FSDP1"),
    ("lit-?gpt", "FSDP1"),
)
"""Trainers that on several GPUs shard in one way only, unless they say otherwise."""


class Framework(NamedTuple):
    """Whose memory model answers for the row."""

    family: str
    """``ddp``, ``fsdp2``, ``deepspeed`` or ``megatron``."""
    name: str
    """As the report groups rows: nanotron and Megatron-DeepSpeed apart from Megatron."""


def find_framework(row: Row) -> Framework:
    """Return the framework. Raises ``UnmappedError`` for those that we do not model."""
    words = read_framework_text(row)
    if not words:
        raise UnmappedError("framework not stated")
    for pattern, what in _NOT_OURS:
        if re.search(pattern, words.replace("_", " ")):
            raise UnmappedError(f"{what} is not modelled")
    return _find_engine(row, words) or _find_trainer(row, words) or _raise_unmapped(row)


def read_framework_text(row: Row) -> str:
    """Return the row's own text on its framework, or that of the script that its source runs."""
    if "QwenLM/Qwen@" in str(row.get("source_url")) and "Full" in str(row.get("table")):
        # finetune/finetune_ds.sh, on one GPU too: ds_config_zero3.json.
        return "deepspeed zero3"
    return join_fields(row, "framework")


def with_degrees(row: Row) -> Row:
    """The row with degrees that only its framework's words have: "TP8", "FSDP + PP=4".

    Raises ``UnmappedError`` where those name a parallelism whose degree nobody says.
    """
    words, found = read_framework_text(row), dict[str, int]()
    for key in ("tp", "pp", "cp", "ep"):
        if read_number(row, key) is not None:
            continue
        if match := re.search(rf"(?<![a-z]){key}[-_ =:]?(\d+)(?![a-z\d])", words):
            found[key] = int(match[1])
        elif re.search(rf"(?<![a-z]){key}(?![a-z])", words):
            raise UnmappedError(f"degree of {key} not stated")
    return {**row, **found} if found else row


def zero_stages(row: Row) -> set[int]:
    """The ZeRO stages that the row names, in numbers or in the words of the ZeRO papers."""
    words = read_framework_text(row)
    stages = {int(one) for found in _ZERO_STAGE.findall(words) for one in found if one}
    if not stages:
        # Rajbhandari et al. 2020, section 5: P_os, P_os+g, P_os+g+p; Ren et al. 2021 is stage 2, and
        # Rajbhandari et al. 2021 stage 3.
        for pattern, stage in (
            (r"p?[-_]?os\s*\+\s*g\s*\+\s*p", 3),
            (r"p?[-_]?os\s*\+\s*g", 2),
            (r"\bp_?os\b|zero[-_ ]?os\b", 1),
            (r"zero[-_ ]?offload", 2),
            (r"zero[-_ ]?infinity", 3),
        ):
            if re.search(pattern, words):
                stages = {stage}
                break
    own = row.get("zero_stage")
    if not stages and isinstance(own, int):
        return {own}
    return stages


def _find_engine(row: Row, words: str) -> Framework | None:
    """Return the engine that the words name; names that contain others come first."""
    is_megatron = re.search(r"megatron|\bmcore\b|flagscale", words) or (
        "nemo" in words and not re.search(r"automodel|fsdp", words)
    )
    is_neox = re.search(r"gpt-?neox", words)
    is_zero = re.search(r"zero|deepspeed|\bds[-_]|\bz[123]\b", words)
    is_fsdp = re.search(r"fsdp|hsdp|fully[-_ ]?shard", words)
    if "nanotron" in words:
        return Framework("megatron", "nanotron")
    if is_neox or (is_megatron and "deepspeed" in words):
        # Megatron's layers and pipeline; ZeRO-1 splits what its distributed optimizer does. Stages 2 and 3
        # are DeepSpeed's engine.
        if zero_stages(row) & {2, 3}:
            return Framework("deepspeed", "DeepSpeed")
        return Framework("megatron", "Megatron-DeepSpeed")
    if is_megatron:
        if is_fsdp:
            raise UnmappedError("Megatron with FSDP is not modelled")
        # The ZeRO papers call their tensor parallelism by the name of Megatron.
        if zero_stages(row) & {2, 3}:
            return Framework("deepspeed", "DeepSpeed")
        return Framework("megatron", "Megatron")
    if is_fsdp:
        if re.search(r"no_shard", words):
            return Framework("ddp", "DDP")
        return Framework("fsdp2", "FSDP1" if re.search(r"fsdp[- _]?(?:v)?1\b", words) else "FSDP2")
    if is_zero:
        return Framework("deepspeed", "DeepSpeed")
    if re.search(r"\bddp\b|distributed[-_ ]?data[-_ ]?parallel", words):
        return Framework("ddp", "DDP")
    return None


def _find_trainer(row: Row, words: str) -> Framework | None:
    """Return a trainer that names no engine: one GPU, or its own way of sharding."""
    if not _TRAINERS.search(words):
        return None
    if read_number(row, "n_gpus") == 1 or re.search(r"single|\b(?:1|one)[- ](?:gpu|device|card)", words):
        return Framework("ddp", "one GPU")
    for pattern, name in _SHARDING:
        if re.search(pattern, words):
            return Framework("fsdp2", name)
    raise UnmappedError(f"how {row['framework']!r} spreads the model over several GPUs is not stated")


def _raise_unmapped(row: Row) -> Framework:
    raise UnmappedError(f"framework {row['framework']!r} is not one of ours, and is not modelled")
