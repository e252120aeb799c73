"""A row's model -> Architecture: by its name where it is a known one, else by its shape."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.accuracy.known_models import beyond_the_catalogue
from tests.accuracy.model_names import Shape, by_name, make_gpt, make_llama, with_layers
from tests.accuracy.nanotron import first_stage_layers
from tests.accuracy.rows import Row, join_fields, read_number
from tests.accuracy.unmapped_rows import UnmappedError

import shardscope as ss

_HYBRID = (
    "nemotron-3",
    "nemotron_3",
    "nemotron v3",
    "nemotron-h",
    "mamba",
    "jamba",
    "zamba",
    "falcon-h1",
    "qwen3-next",
    "qwen3.8",
    "lfm",
)
_GPT_LIKE = re.compile(r"\bopt[-_ ]?\d|bloom|\bmpt\b|turing|cerebras|galactica|gopher")
"""Decoders of GPT-2's layers: an MLP of two matrices, of four times the width if nothing else is said."""
_NO_DECODER = re.compile(
    r"\bvit\b|vision|\bvl\b|bert\b|bert[-_ ]|electra|\bt5\b|t5[-_ ]|\bbart\b|clip\b|whisper|wav2vec|swin"
    r"|u-?net|diffusion|\bdit\b|sdxl|flux|rwkv|resnet|\bswitch\b|pegasus|gpt-?j\b"
)
_GPT_VOCAB = 50_304
"""GPT-2's 50,257 words, padded to 128."""
_FAR = 0.2
"""How far a shape's parameters may be from those stated: rounded, or without embeddings."""


def read_architecture(row: Row) -> tuple[ss.Architecture, list[str]]:
    """Return the model and what had to be assumed. Raises ``UnmappedError`` where too little is known.

    Of nanotron's models all stages are like the first, of which alone its rows tell the memory.
    """
    found, assumed = whole_architecture(row)
    pp = read_number(row, "pp") or 1
    if "nanotron" in join_fields(row, "framework") and pp > 1:
        found = replace(found, num_hidden_layers=first_stage_layers(found, pp) * pp)
        assumed = [*assumed, "stages split by cost, as nanotron does: all like the first"]
    return found, assumed


def whole_architecture(row: Row) -> tuple[ss.Architecture, list[str]]:
    """The model with all its layers, however they are spread."""
    known = _find_named(row)
    if read_number(row, "layers") and read_number(row, "hidden"):
        same = _as_stated(row, known) if known and not _is_gpt(row) else None
        return (same, []) if same else _by_shape(row)
    if known is not None:
        layers = read_number(row, "layers")
        return (with_layers(known, layers) if layers else known), []
    if read_number(row, "hidden") and read_number(row, "n_params"):
        return _by_size(row)
    name = join_fields(row, "model_ref") or join_fields(row, "model")
    if any(part in name for part in _HYBRID):
        raise UnmappedError("hybrid model with state-space layers")
    if re.fullmatch(r"\W*[\d.]+\s*[mbt](?:\s*(?:model|params|parameters))?\W*", name):
        raise UnmappedError("model stated by its size only")
    raise UnmappedError(
        f"model not in the catalogue: {row.get('model') or row.get('model_ref') or 'not stated'}"
    )


def _find_named(row: Row) -> ss.Architecture | None:
    for field in ("model_ref", "model"):
        if row.get(field):
            name = str(row[field])
            architecture = beyond_the_catalogue(name) or by_name(name)
            if architecture is not None:
                return architecture
    return None


def _as_stated(row: Row, known: ss.Architecture) -> ss.Architecture | None:
    """The named model with the row's layers and vocabulary; None where the row's widths are others."""
    for key, own in (
        ("hidden", known.hidden_size),
        ("heads", known.num_attention_heads),
        ("kv_heads", known.num_key_value_heads),
    ):
        if read_number(row, key) not in (None, own):
            return None
    widths = {known.intermediate_size, getattr(known.mixture_of_experts, "moe_intermediate_size", None), None}
    if read_number(row, "ffn") not in widths:
        return None
    layers, vocab = read_number(row, "layers"), read_number(row, "vocab")
    found = known if layers in (None, known.num_hidden_layers) else with_layers(known, layers)
    return found if vocab in (None, known.vocab_size) else replace(found, vocab_size=vocab)


def _by_shape(row: Row) -> tuple[ss.Architecture, list[str]]:
    hidden, layers = read_number(row, "hidden"), read_number(row, "layers")
    assert hidden and layers
    assumed: list[str] = []
    _check_dense(row)
    heads = read_number(row, "heads")
    if heads is None:
        heads = _likely_heads(hidden, read_number(row, "tp") or 1)
        assumed.append("heads not stated")
    ffn, vocab = read_number(row, "ffn"), read_number(row, "vocab")
    if vocab is None:
        vocab = _GPT_VOCAB
        assumed.append(f"vocabulary not stated: {vocab:,}")
    name, stated = str(row.get("model")), read_number(row, "n_params")
    if _is_gpt(row) or _GPT_LIKE.search(name.lower()):
        if not _is_gpt(row):
            assumed.append("modules as in GPT-2")
        shape = Shape(layers, hidden, heads, heads, ffn or 4 * hidden, vocab)
        made = make_gpt(name, shape, read_number(row, "seq_len") or 2048)
        _check_size(made, stated)
        if re.search(r"\bmpt\b", name.lower()):
            # llm-foundry's MPT has torch.nn.GELU, one kernel, where transformers' GPT-2 writes it out.
            made, assumed[-1] = replace(made, model_type="starcoder2"), "modules as in StarCoder2"
        return made, assumed
    kv_heads = read_number(row, "kv_heads") or heads
    if ffn is None and stated and read_number(row, "vocab"):
        ffn = _likely_ffn(stated, layers, hidden, heads, kv_heads, vocab)
        assumed.append("MLP width not stated: from the parameters")
    if ffn is None:
        raise UnmappedError("MLP width not stated")
    shape = Shape(layers, hidden, heads, kv_heads, ffn, vocab)
    one, tied = (make_llama(name, shape, tied=tied) for tied in (False, True))
    if stated is None:
        return one, assumed
    # An MLP of two matrices has a third fewer weights than a gated one of the same width.
    plain_mlp = [make_gpt(name, shape, read_number(row, "seq_len") or 2048)] if kv_heads == heads else []
    found = min((one, tied, *plain_mlp), key=lambda arch: abs(arch.num_parameters - stated))
    if not found.gated_mlp:
        assumed.append("MLP of two matrices: from the parameters")
    _check_size(found, stated)
    return found, assumed


def _by_size(row: Row) -> tuple[ss.Architecture, list[str]]:
    """Layers from parameters, rounded to whole pipeline stages."""
    if not _is_gpt(row):
        raise UnmappedError("layers not stated")
    hidden, stated = read_number(row, "hidden"), read_number(row, "n_params")
    assert hidden and stated
    vocab, pp = read_number(row, "vocab") or _GPT_VOCAB, read_number(row, "pp") or 1
    ideal = (stated - vocab * hidden) / (12 * hidden * hidden)
    layers = max(pp, round(ideal / pp) * pp)
    found, assumed = _by_shape({**row, "layers": layers})
    return found, ["layers not stated: from the parameters", *assumed]


def _check_dense(row: Row) -> None:
    """A shape that the row's keys give is a dense decoder's."""
    if any(part in join_fields(row, "model_ref", "model") for part in _HYBRID):
        raise UnmappedError("hybrid model with state-space layers")
    if _NO_DECODER.search(join_fields(row, "model_ref", "model")):
        raise UnmappedError(f"model of another kind: {row.get('model') or row.get('model_ref')}")
    experts = re.compile(r"experts?|moe")
    said = [
        key for key, value in row.items() if experts.search(key) and value not in (None, 0, 1, False, "1")
    ]
    if said or re.search(
        r"\bmoe\b|\d+x\d+(?:\.\d+)?b\b|\d+b[-_ ]?a\d+|mixtral|experts", join_fields(row, "model")
    ):
        raise UnmappedError("experts by a shape that does not say what they are")


def _check_size(found: ss.Architecture, stated: int | None) -> None:
    if stated and abs(found.num_parameters / stated - 1) > _FAR:
        raise UnmappedError("the shape has other parameters than the row states")


def _likely_ffn(stated: int, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int) -> int:
    """The width of a gated MLP that takes what attention and embeddings leave, in steps of 64."""
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * kv_heads
    left = stated - 2 * vocab * hidden - layers * attention
    found = round(left / (layers * 3 * hidden) / 64) * 64
    if found < hidden:
        raise UnmappedError("MLP width not stated")
    return found


def _is_gpt(row: Row) -> bool:
    return bool(re.search(r"gpt(?![-_ ]?(?:oss|j\b|neo))", join_fields(row, "model")))


def _likely_heads(hidden: int, tp: int) -> int:
    """The number of heads of about 128 that divides the width, and is divided by tp."""
    fitting = [heads for heads in range(tp, hidden // 32 + 1, tp) if hidden % heads == 0]
    if not fitting:
        raise UnmappedError("heads not stated")
    return min(fitting, key=lambda heads: abs(hidden / heads - 128))
