"""A model of a family without formulas here: what transformers makes of its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Self

from shardscope.core.architecture import Architecture
from shardscope.core.errors import refuse
from shardscope.core.size_limits import limited_field
from shardscope.families.parameter_shapes import Parameter

if TYPE_CHECKING:
    import torch

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


@dataclass(frozen=True, kw_only=True)
class UnknownFamily(Architecture):
    """An architecture that plans can be made of and rehearsed, but not predicted.

    Its sizes are what transformers reads from the config, so that degrees can be checked; how its layers are
    built nobody here knows. ``plan.memory()`` is refused, ``plan.rehearse()`` runs transformers' own classes.
    """

    config_json: str
    """The whole config.json, as text: what transformers builds the model from."""

    def __post_init__(self) -> None:
        for field in SIZES:
            limited_field("Architecture", self, field)
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
    def of_config(cls, config: Mapping[str, Any], name: str) -> Self:
        """The architecture of any config that transformers knows.

        Raises ``ValueError`` for one that it does not know or that has no such sizes, and
        ``ModuleNotFoundError`` naming the extra where transformers is not installed.
        """
        read = _read_by_transformers(config)
        sizes: dict[str, Any] = {field: getattr(read, field, None) for field in SIZES}
        heads = sizes["num_attention_heads"]
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
        if sizes["head_dim"] is None and heads and sizes["hidden_size"]:
            sizes["head_dim"] = sizes["hidden_size"] // heads
        # Only experts, or a multiple of the hidden width that the config does not say.
        sizes["intermediate_size"] = sizes["intermediate_size"] or sizes["hidden_size"]
        sizes["max_position_embeddings"] = sizes["max_position_embeddings"] or 1
        return cls(
            name=name,
            model_type=str(config["model_type"]),
            tie_word_embeddings=bool(getattr(read, "tie_word_embeddings", False)),
            config_json=json.dumps(dict(config), sort_keys=True),
            **sizes,
        )

    @cached_property
    def look_alike(self) -> Architecture:
        """A Llama of the same sizes: for what depends on the layout alone, such as communicators."""
        sizes: dict[str, Any] = {field: getattr(self, field) for field in SIZES}
        return Architecture(name=self.name, model_type="llama", **sizes)

    @cached_property
    def num_parameters(self) -> int:
        """Counted by making the model on torch's meta device, which imports torch."""
        import torch

        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build_unknown(self).parameters())

    @property
    def outer_shapes(self) -> tuple[Parameter, ...]:
        """Unknown. Raises ``ValueError``."""
        self._no_formulas()

    def _layer(self, moe: bool) -> tuple[Parameter, ...]:
        self._no_formulas()

    def _layer_counts(self, moe: bool) -> NoReturn:
        self._no_formulas()

    def _no_formulas(self) -> NoReturn:
        raise ValueError(
            f"Architecture.model_type is {self.model_type!r}, for which there are no formulas; allowed: "
            "plan.rehearse(), which runs transformers' own code. Nearest fix: plan.rehearse()."
        )


def build_unknown(architecture: UnknownFamily) -> torch.nn.Module:
    """The model of a family without formulas, from its own config.json, fp32, without a KV cache."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads(architecture.config_json))
    config.get_text_config().use_cache = False
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def _read_by_transformers(config: Mapping[str, Any]) -> Any:
    """The config as transformers' own class, its language part if it has several."""
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'A model_type without formulas is read by transformers: pip install "shardscope[train]".'
        ) from error
    try:
        return AutoConfig.for_model(**config).get_text_config()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"config.json model_type is {config.get('model_type')!r}; allowed: what the installed "
            f"transformers knows, which says: {reason[:300]}"
        ) from error
