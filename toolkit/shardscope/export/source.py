"""The model's config in a script, and what that asks of a checkpoint (--model): sizes that are the plan's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.export.text import literal

if TYPE_CHECKING:
    from shardscope.plan import Plan

NO_SIZES = frozenset({
    "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings", "sliding_window",
    "use_sliding_window", "layer_types",
})  # fmt: skip
"""Of a config: what makes no tensor of another shape, but for learned positions."""
SAID_BY_UNKNOWN = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
"""Of a family whose config nobody here has read."""

CONSTANTS = """\
SAME = @@SAME@@  # what a checkpoint's config has to say, as the plan's
ALWAYS = @@ALWAYS@@  # whatever it says itself
"""

CHECK = '''

def check_source(said):
    """Stop at a checkpoint that would train as another model: ``said`` is its config."""
    planned = AutoConfig.for_model(**MODEL_CONFIG)
    for name in SAME:
        own, plans = (@@VALUE@@ for config in (said, planned))
        if own != plans:
            raise SystemExit(
                f"--model: its {name} is {own!r}, and the plan's {plans!r}: take a model of the plan's "
                "sizes, or export a plan of this one's (ss.Architecture.from_hf)"
            )
@@MORE@@'''

HEADS = '''

def value_of(config, name):
    """What ``config`` says; some families say a head's width only where it is not an equal share."""
    found = getattr(config, name, None)
    return config.hidden_size // config.num_attention_heads if name == "head_dim" and not found else found
'''
GPT2 = '''

def value_of(config, name):
    """What ``config`` says; GPT-2's says an inner width only where it is not four times the outer."""
    found = getattr(config, name, None)
    return 4 * config.hidden_size if name == "n_inner" and not found else found
'''


class Check(NamedTuple):
    """What a script asks of a checkpoint."""

    constants: str
    functions: str


def check_of(plan: Plan, more: str = "", names: tuple[str, ...] = ()) -> Check:
    """The function ``check_source``. ``more`` are its last lines, ``names`` what it compares beside sizes."""
    from shardscope.unknown_family import UnknownFamily

    config = model_config(plan)
    if isinstance(plan.architecture, UnknownFamily):
        always, kept = {}, set(config) & set(SAID_BY_UNKNOWN)
    else:
        always = {name: value for name, value in config.items() if "drop" in name} | router_values(plan)
        kept = set(config) - set(always) - NO_SIZES
        kept |= {"max_position_embeddings"} if plan.architecture.position_embedding == "learned" else set()
    same = [*(name for name in config if name in kept), *(name for name in names if name not in kept)]
    value = HEADS if "head_dim" in same else GPT2 if "n_inner" in same else ""
    constants = CONSTANTS.replace("@@SAME@@", literal(tuple(same)))
    constants = constants.replace("@@ALWAYS@@", literal(always))
    check = CHECK.replace("@@VALUE@@", "value_of(config, name)" if value else "getattr(config, name, None)")
    return Check(constants, check.replace("@@MORE@@", more) + value)


def router_values(plan: Plan) -> dict[str, Any]:
    """As every engine trains: a router's own loss is none of a pipeline's, nor of Megatron's."""
    from transformers import AutoConfig

    from shardscope.unknown_family import UnknownFamily

    if isinstance(plan.architecture, UnknownFamily):
        return {}
    known = AutoConfig.for_model(plan.architecture.model_type)
    values = {"output_router_logits": False, "router_jitter_noise": 0.0}
    return {name: value for name, value in values.items() if hasattr(known, name)}


def model_config(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of ``AutoConfig.for_model``, model_type among them.

    Raises ``ModuleNotFoundError`` without transformers, which spells them.
    """
    from shardscope.training.model import DROPOUTS, config_values
    from shardscope.unknown_family import UnknownFamily

    architecture = plan.architecture
    if isinstance(architecture, UnknownFamily):
        stored: dict[str, Any] = json.loads(architecture.config_json)
        return stored
    from transformers import AutoConfig

    known = AutoConfig.for_model(architecture.model_type).to_dict()
    dropouts = {name: plan.recipe.dropout for name in DROPOUTS if name in known}
    return {"model_type": architecture.model_type, **config_values(architecture), **dropouts}
