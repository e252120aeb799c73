"""The words of a row about offload, optimizer, recomputation and attention; what is unknown is refused."""

from __future__ import annotations

import re
from typing import Any

from tests.accuracy.rows import Row, join_fields
from tests.accuracy.unmapped_rows import UnmappedError


def _split_words(said: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", said.lower()) if word]


_NONE = {"", "none", "no", "not", "false", "off", "disabled", "without", "w", "o", "nothing", "never", "0"}
_MOVED = {
    "optimizer": {
        "optimizer",
        "optimiser",
        "optim",
        "opt",
        "adam",
        "cpuadam",
        "states",
        "state",
        "os",
        "master",
    },
    "params": {"param", "params", "parameter", "parameters", "weight", "weights", "model"},
    "activations": {"activation", "activations", "act", "acts", "checkpoint", "checkpoints", "inputs"},
    "nvme": {"nvme", "ssd", "disk"},
}
_MOVED_ALL = {
    "cpu",
    "host",
    "ram",
    "dram",
    "all",
    "full",
    "everything",
    "both",
    "true",
    "yes",
    "on",
    "enabled",
}
_FILLING = set(
    _split_words(
        "offload offloading offloaded to and the only in with of fsdp fsdp1 gpu fsdp2 zero zero2 zero3 "
        "deepspeed ds memory mem pinned gradient gradients grad grads fp32 z2 z3 infinity policy "
        "cpuoffloadpolicy pin stage stage3 stage2"
    )
)


def _in_framework(words: str) -> str | None:
    """Return the offload that a framework's name contains: "ds_z3_offload", "FSDP + CPU offload"."""
    if "offload" not in words or re.search(r"(?:\bno|without|w/o)[-_ ]*(?:cpu[-_ ]*)?offload", words):
        return None
    return "activations" if "activation" in words else "cpu"


def read_offloaded(row: Row) -> frozenset[str]:
    """Return the offloaded kinds: ``optimizer``, ``params``, ``activations``; ``all`` if none is named.

    With ``nvme`` where it is on a disk. Raises ``UnmappedError`` for a word that is not known.
    """
    stated = row.get("offload")
    if stated is None:
        stated = _in_framework(join_fields(row, "framework"))
    if stated is None or stated is False:
        return frozenset()
    if isinstance(stated, dict):
        stated = " ".join(
            f"{key} {value}" for key, value in stated.items() if value not in (None, False, "none")
        )
    words = [word for word in _split_words(str(stated)) if word not in _FILLING]
    found = {what for what, names in _MOVED.items() if names.intersection(words)}
    known = _NONE | _MOVED_ALL | set().union(*_MOVED.values())
    negated = bool(_NONE.intersection(words))
    if any(word not in known for word in words) or (negated and (found or _MOVED_ALL.intersection(words))):
        raise UnmappedError(f"offload {stated!r}")
    if negated:
        return frozenset()
    if not found - {"nvme"} and (not words or _MOVED_ALL.intersection(words)):
        found.add("all")
    return frozenset(found)


_ADAMW = set(
    _split_words(
        "adam adamw fusedadam fusedadamw cpuadam deepspeedcpuadam distributedfusedadam adamwscale "
        "decoupledadamw pagedadamw adamw8bit pagedadamw8bit adam8bit"
    )
)
_OTHERS = ("adafactor", "muon", "lion", "sgd")
_PLAIN = set(
    _split_words(
        "w torch pytorch fused foreach apex te bnb bitsandbytes torchao ao deepspeed distributed dist "
        "optimizer hf megatron paged 8bit 8 bit 32bit 32 multi tensor fp32 states state with default cpu "
        "mcore anyprecision and the for momentum 0 9 moments composer decoupled non no not without zero "
        "zero1 1 standard in master weights multitensor loop nn optim float32"
    )
)


def read_optimizer(row: Row, family: str, default: str) -> tuple[str, bool]:
    """Return the optimizer, and whether its kernel is stated. Raises ``UnmappedError`` for unknown ones.

    A name that only contains a known one (Adam-mini, BAdam, GaLore's AdamW, 1-bit Adam) is another optimizer.
    """
    stated = row.get("optimizer")
    if stated is None:
        return default, False
    text = str(stated).lower().replace("-bit", "bit").replace("_bit", "bit").replace(" bit", "bit")
    # Betas and rates are no part of the name.
    text = re.sub(r"(fused|foreach)\s*[=:]\s*true", r"\1", text)
    text = re.sub(r"(?:\b(?:lr|beta|b[12]|eps|weight[-_ ]?decay|wd|learning[-_ ]rate)|β)[^,;)]*", "", text)
    words = _split_words(re.sub(r"\([^()]*[=<>][^()]*\)", "", text))
    eight = any("8bit" in word for word in words) or re.search(r"\bint8\b", text) is not None
    paged = any("paged" in word for word in words)
    if "1bit" in words or re.search(r"\b0/1\b|4bit|\bfp8\b|bf16|bfloat16|precision", text):
        raise UnmappedError(f"optimizer {stated!r}")
    names = {re.sub(r"(?:8|32)bit$|^paged|^dist(?:ributed)?", "", word) for word in words}
    glued = names - _PLAIN - {"", "int8"}
    if "muon" in glued:
        # Muon leaves vectors and embeddings to AdamW.
        glued -= _ADAMW
    if glued <= _ADAMW and glued:
        if family in ("deepspeed", "megatron") and not eight and not paged:
            return "adamw", True
        if eight:
            return ("paged_adamw_8bit" if paged else "adamw_8bit"), True
        if paged:
            return "paged_adamw", True
        if "foreach" in words or ("torch" in words and "fused" not in words):
            # transformers' adamw_torch is torch.optim.AdamW as it comes.
            return "adamw_foreach", True
        return ("adamw", True) if re.search(r"fused|apex|\bte\b|cpu|decoupled", text) else (default, False)
    if len(glued) == 1 and not eight and not paged:
        name = glued.pop()
        if name in _OTHERS and not re.search(r"(?:no|without|w/o)[- ]momentum", text):
            return name, True
    raise UnmappedError(f"optimizer {stated!r}")


_WHOLE = re.compile(
    r"full|true|yes|\bon\b|enabled|\ball\b|checkpoint|recomput|\bgc\b|\bac\b|uniform|\bblock|decoder|reentrant|\blayer"
    r"|every layer|per[-_ ]?layer|transformer[-_ ]?layer"
)
_NEGATED = re.compile(
    r"(?:none|no|false|off|disabled|0|not used|without|w/o|n)\b"
    r"(?! ?(?:selective|full))|.*\b(?:not used|disabled|: ?(?:none|off|no|false))$"
)
_INTERVAL = re.compile(
    r"every[-_ ]+(\d+|other|second|third)|1/(\d)\b|selective\D*\b(\d)\b(?!/)|(\d)(?:nd|rd|th)[-_ ]+layer"
)
_WORDS_FOR = {"other": 2, "second": 2, "third": 3}
_SOME_LAYERS = re.compile(
    r"(\d+)[-_ ]*(?:of[-_ ]*\d+[-_ ]*)?layers?|layers?[ :=]+(\d+)|(?:block|uniform|first)[ ,:=]+(\d+)"
)
_PARTS = re.compile(r"att(?:entio)?n\b|mlp|moe|expert|norm|softmax|_proj|\bffn")
_ONLY_SOME = re.compile(
    r"\bhalf\b|partial|\bsome\b|%|\b(?:mlp|moe|experts?|norms?|attn|attention)[-_ ]*only|dynamic"
)


def read_recomputation(stated: object, family: str) -> dict[str, Any]:
    """Return a ``Recipe``'s fields for the row's recomputation, except "selective", which has its own
    function. Raises ``UnmappedError`` for kinds without a formula, or unknown ones."""
    text = str(stated).strip().lower()
    if stated is False or _NEGATED.match(text):
        return {}
    offloads = re.search(r"offload|unsloth|\bcpu\b|\bhost\b", text)
    if offloads and (
        re.search(r"unsloth|smart", text) or _WHOLE.search(re.sub(r"activation[-_ ]?offload\w*", "", text))
    ):
        raise UnmappedError("recomputation whose layer inputs are in host memory: no formula")
    if offloads:
        return {"recompute": "offload"}
    if every := read_interval(text):
        return every
    counts = [int(part) for found in _SOME_LAYERS.findall(text) for part in found if part]
    if any(count != 1 for count in counts) or (counts and family == "megatron" and "block" in text):
        raise UnmappedError(f"recomputation of some layers: {stated!r}")
    in_parts = _PARTS.search(text) and not re.search(r"full|\ball\b|layers?\b", text)
    if in_parts or _ONLY_SOME.search(text) or not _WHOLE.search(text):
        raise UnmappedError(f"recomputation {stated!r}")
    return {"recompute": "full"}


def read_interval(said: str) -> dict[str, Any] | None:
    """Return the fields for every n-th layer ("1/2", "every 3 layers"); None if nothing states it."""
    found = _INTERVAL.search(said)
    if not found:
        return None
    word = next(part for part in found.groups() if part)
    every = _WORDS_FOR.get(word) or int(word)
    return {"recompute": "full", **({"recompute_interval": every} if every > 1 else {})}


_FUSED = re.compile(
    r"\bfa[-_ ]?[234]?\b|flash|sdpa|spda|mem(?:ory)?[-_ ]?eff|xformers|cudnn|\bte\b|transformer[-_ ]?engine"
    r"|fused|flex|\bck\b|aiter|triton|ring|default|true|yes|\bon\b|enabled"
)
_UNFUSED = re.compile(
    r"eager|math|naive|unfused|vanilla|standard|^(?:none|no|false|off|disabled|0|n)\b|core[-_ ]?att"
)


def read_attention(row: Row, family: str) -> tuple[str | None, bool]:
    """Return ``eager`` or None, and whether a plain no was read as PyTorch's own fused attention.

    transformers runs that wherever FlashAttention's own package is left out; Megatron runs plain operations.
    Raises ``UnmappedError`` for a kernel that is not known.
    """
    stated = row.get("flash_attention")
    if stated is None or stated is True:
        return None, False
    text = str(stated).lower()
    if stated is False or _UNFUSED.search(text):
        plain_no = stated is False or re.match(r"(?:none|no|false|off|disabled|0|n)\b", text)
        if plain_no and family != "megatron":
            return None, True
        return "eager", False
    if not _FUSED.search(text):
        raise UnmappedError(f"attention {stated!r}")
    # Megatron's and PyTorch's own fused kernels keep what FlashAttention keeps.
    return None, False
