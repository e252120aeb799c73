"""Architecture of a family without formulas, read by transformers from its config.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from shardscope.core.architecture import Architecture
from shardscope.core.errors import get_first_line, refuse
from shardscope.core.size_limits import check_size_field
from shardscope.families.parameter_shapes import Parameter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)

LAYER_LINEAR = re.compile(r"\.\d+\.(?:.+\.)?([A-Za-z_]\w*)$")
"""Name of a module within a layer, which is an entry of a ``ModuleList``: ``lm_head`` is not. Linears with
a number as their name are left out: peft would adapt the layers of that number (CTRL)."""
FUSED_IN_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj")
"""Names that peft gives to the fused experts as well, if files have each expert by itself (peft 0.21.2,
transformers_weight_conversion.py): their adapters would be many times those of the Linears."""
REFUSED_BY_PEFT: Mapping[str, tuple[str, ...]] = {"falcon_h1": ("out_proj",), "nemotron_h": ("out_proj",)}
"""Names that peft does not adapt, by ``model_type`` (peft 0.21.2, _check_lora_target_modules_mamba)."""


@dataclass(frozen=True, kw_only=True)
class UnknownFamily(Architecture):
    """Architecture whose plans can be rehearsed but not predicted.

    Its sizes are read by transformers from the config, so that degrees can be checked; the structure of its
    layers is unknown. ``plan.memory()`` raises ``ValueError``; ``plan.rehearse()`` runs transformers' code.
    """

    config_json: str
    """Text of the whole config.json, from which transformers builds the model."""

    def __post_init__(self) -> None:
        for field in SIZES:
            check_size_field("Architecture", self, field)
        self._check_heads()
        try:
            config = json.loads(self.config_json)
        except (TypeError, json.JSONDecodeError):
            config = None
        if not isinstance(config, dict) or config.get("model_type") != self.model_type:
            refuse(
                "Architecture.config_json",
                self.config_json,
                f"the text of a config.json whose model_type is {self.model_type!r}",
                "Architecture.from_hf(config, rehearse_only=True)",
            )

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str) -> Self:
        """Return the architecture of any config that transformers supports.

        Raises ``ValueError`` for a config that it does not support or that lacks the sizes, and
        ``ModuleNotFoundError``, which names the extra, if transformers is not installed.
        """
        hf_config = _read_with_transformers(config)
        sizes = {field: _read_size(hf_config, field) for field in SIZES}
        for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            if sizes[field] is None:
                refuse(
                    f"config.json {field}",
                    None,
                    "a whole number: a plan's degrees are checked against it, and transformers' config of "
                    f"{config['model_type']!r} has none",
                    "a model with attention heads in every layer",
                )
        heads = sizes["num_attention_heads"]
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
        if not sizes["head_dim"] and heads and sizes["hidden_size"]:
            sizes["head_dim"] = sizes["hidden_size"] // heads
        # Configs with experts only, or with a fixed multiple of the hidden width, have no such key.
        sizes["intermediate_size"] = sizes["intermediate_size"] or sizes["hidden_size"]
        # XLNet's -1 is for no limit.
        sizes["max_position_embeddings"] = max(1, sizes["max_position_embeddings"] or 1)
        return cls.from_dict({
            "name": name,
            "model_type": str(config["model_type"]),
            "tie_word_embeddings": bool(getattr(hf_config, "tie_word_embeddings", False)),
            "config_json": json.dumps(dict(config), sort_keys=True),
            **sizes,
        })  # fmt: skip

    @cached_property
    def llama_of_same_sizes(self) -> Architecture:
        """Llama of the same sizes, for values that depend on the layout only, such as communicators."""
        sizes = {field: getattr(self, field) for field in SIZES}
        return Architecture(name=self.name, model_type="llama", **sizes)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, counted on torch's meta device (imports torch)."""
        return sum(parameter.numel() for parameter in build_meta_model(self).parameters())

    @cached_property
    def lora_shapes(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Return distinct ``(target, (out_features, in_features))`` of the layers' Linears (imports torch).

        Without those that peft does not adapt one by one.
        """
        from torch.nn import Linear
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        model = build_meta_model(self)
        skipped = REFUSED_BY_PEFT.get(model.config.model_type, ())
        conversions = get_checkpoint_conversion_mapping(model.config.model_type) or ()
        if any(target.endswith("down_proj") for one in conversions for target in one.target_patterns):
            skipped += FUSED_IN_EXPERTS
        # Subclasses return more than a product, such as Llama 4's router.
        linears = [(name, module) for name, module in model.named_modules() if type(module) is Linear]
        return tuple(dict.fromkeys(
            (match[1], (module.out_features, module.in_features))
            for name, module in linears
            if (match := LAYER_LINEAR.search(name)) and match[1] not in skipped
        ))  # fmt: skip

    @property
    def outer_shapes(self) -> tuple[Parameter, ...]:
        """Raise ``ValueError``: the shapes are unknown."""
        self._build_no_formulas_error()

    def _get_layer(self, moe: bool) -> tuple[Parameter, ...]:
        self._build_no_formulas_error()

    def _get_layer_counts(self, moe: bool) -> NoReturn:
        self._build_no_formulas_error()

    def _build_no_formulas_error(self) -> NoReturn:
        raise ValueError(
            f"Architecture.model_type is {self.model_type!r}, which has no formulas; allowed: "
            "plan.rehearse(), which runs transformers' own code. Nearest fix: plan.rehearse()."
        )


@lru_cache(maxsize=4)
def build_meta_model(architecture: UnknownFamily) -> PreTrainedModel:
    """Return transformers' model on the meta device, without values; nothing in it must be changed."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(build_transformers_config(architecture))
    except Exception as error:  # Each family's code fails in its own way for values that do not fit.
        reason = f"{type(error).__name__}: {get_first_line(error)}"
        raise ValueError(
            f"config.json model_type is {architecture.model_type!r}; allowed: a config from which the "
            f"installed transformers can build its model. Its error: {reason[:300]}"
        ) from error
    return model


def build_transformers_config(architecture: UnknownFamily) -> PreTrainedConfig:
    """Return its own config.json as transformers' class, without a KV cache."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.for_model(**json.loads(architecture.config_json))
    config.get_text_config().use_cache = False
    return config


def is_causal_language_model(model_type: str) -> bool:
    """Return whether transformers' ``AutoModelForCausalLM`` builds it; True if transformers does not know it.

    An unknown one raises with transformers' own error when its config is read.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ModuleNotFoundError:
        return True
    return model_type in list_causal_language_models() or model_type not in CONFIG_MAPPING_NAMES


@cache
def list_causal_language_models() -> frozenset[str]:
    """Return every ``model_type`` that the installed transformers has a causal language model of.

    Without classes of a whole multimodal model (``Gemma4ForConditionalGeneration``): text alone never calls
    its towers, for which DDP fails. The table is read as text, because its import takes seconds, with torch.
    """
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    table = (Path(spec.origin).parent / "models/auto/modeling_auto.py").read_text(encoding="utf-8")
    table = table.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)")[0]
    classes = re.findall(r'\("([^"]+)", "(\w+)"\)', table)
    return frozenset(
        model_type for model_type, name in classes if not name.endswith("ForConditionalGeneration")
    )


def _read_size(hf_config: object, field: str) -> int | None:
    """Return a size of transformers' config, or None if it has none.

    Where layers differ (Gemma 3n and 4), it is the greatest common divisor of theirs: degrees that divide it
    divide the size of every layer.
    """
    try:
        value = getattr(hf_config, field, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        layers: list[object] = getattr(hf_config, "per_layer_config", [])
        value = [getattr(layer, field, None) for layer in layers]
    if isinstance(value, list | tuple) and value and all(type(size) is int for size in value):
        return math.gcd(*value)
    return value


def _read_with_transformers(config: Mapping[str, object]) -> object:
    """Return the config as transformers' class, or its text config if it has several parts.

    Raises ``ModuleNotFoundError`` without transformers, and ``ValueError`` for a config that it rejects.
    """
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Reading a model_type without formulas requires transformers. Nearest fix: "
            'pip install "shardscope[train]".'
        ) from error
    try:
        # transformers itself rejects values of wrong types.
        return AutoConfig.for_model(**config).get_text_config()  # type: ignore[arg-type]
    except Exception as error:
        reason = get_first_line(error)
        raise ValueError(
            f"config.json model_type is {config.get('model_type')!r}; allowed: a config that the installed "
            f"transformers can read. Its error: {reason[:300]}"
        ) from error
