"""Units of one decoder layer each, by a click: of a model of transformers, or by the plan's size."""

from __future__ import annotations

from difflib import ndiff

import pytest

import shardscope as ss
from shardscope.planner.preflight import Finding, findings_in

PLAN = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())
WHOLE, FINE = "whole-model-as-one-unit", "wrapped-too-finely"
HEAD = (
    "from torch.distributed.fsdp import fully_shard\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained(name)\n"
)


def one(source: str, name: str, plan: ss.Plan | None = PLAN) -> Finding:
    (found,) = [finding for finding in findings_in(source, plan) if finding.name == name]
    return found


def changes(source: str, name: str) -> list[str]:
    """The lines that are other; the finding itself is gone."""
    after = one(source, name).source
    assert after is not None
    assert name not in [finding.name for finding in findings_in(after, PLAN)]
    return [line.rstrip() for line in ndiff(source.splitlines(), after.splitlines()) if line[0] in "+-"]


def test_each_layer_is_sharded_before_its_model() -> None:
    assert changes(f"{HEAD}fully_shard(model)  # all\n", WHOLE) == [
        "+ from transformers.modeling_layers import GradientCheckpointingLayer",
        "+ for fsdp2_layer in model.modules():",
        "+     if isinstance(fsdp2_layer, GradientCheckpointingLayer):",
        "+         fully_shard(fsdp2_layer)",
    ]


def test_what_the_model_is_told_holds_for_its_layers() -> None:
    source = (
        "import torch\nfrom torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard as shard\n"
        "from transformers import LlamaForCausalLM\n\ndef main():\n    net = LlamaForCausalLM(config)\n"
        "    whole = shard(net, mesh=mesh(2), mp_policy=MixedPrecisionPolicy(torch.bfloat16))\n"
    )
    assert changes(source, WHOLE) == [
        "+ from transformers.modeling_layers import GradientCheckpointingLayer",
        "-     whole = shard(net, mesh=mesh(2), mp_policy=MixedPrecisionPolicy(torch.bfloat16))",
        "+     fsdp2_options = dict(mesh=mesh(2), mp_policy=MixedPrecisionPolicy(torch.bfloat16))",
        "+     for fsdp2_layer in net.modules():",
        "+         if isinstance(fsdp2_layer, GradientCheckpointingLayer):",
        "+             shard(fsdp2_layer, **fsdp2_options)",
        "+     whole = shard(net, **fsdp2_options)",
    ]


@pytest.mark.parametrize(
    "source",
    [
        # Another's model, or one that the text does not show.
        "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n",
        "from torch.distributed.fsdp import fully_shard\nmodel = Model()\nfully_shard(model)\n",
        f"{HEAD}model = wrapped(model)\nfully_shard(model)\n",
        f"{HEAD}if on:\n    model = build()\nfully_shard(model)\n",
        f"{HEAD}fully_shard(model.model)\n",
        f"{HEAD}fully_shard(build(model))\n",
        HEAD.replace("AutoModelForCausalLM.from_pretrained(name)", "AutoModelForCausalLM(name)")
        + "fully_shard(model)\n",
        # What may not hold for each layer, or is not said.
        f"{HEAD}fully_shard(model, ignored_params=few)\n",
        f"{HEAD}fully_shard(model, mesh)\n",
        # No statement of its own.
        f"{HEAD}run(fully_shard(model))\n",
        f"{HEAD}a = b = fully_shard(model)\n",
        # A comment would go; a name would mean two things.
        f"{HEAD}fully_shard(  # all\n    model, mesh=mesh\n)\n",
        f"fsdp2_layer = 1\n{HEAD}fully_shard(model)\n",
        # Somebody else's function.
        "from mine import fully_shard\nfrom transformers import LlamaModel\nmodel = LlamaModel(c)\n"
        "fully_shard(model)\n",
    ],
)
def test_what_the_text_does_not_settle_gets_words(source: str) -> None:
    assert one(source, WHOLE).source is None


def test_a_size_becomes_that_of_a_decoder_layer() -> None:
    size = sum(PLAN.architecture.layer_parameters(0).values())
    source = "policy = partial(size_based_auto_wrap_policy, min_num_params=int(1e4))  # small\n"
    assert changes(source, FINE) == [
        "- policy = partial(size_based_auto_wrap_policy, min_num_params=int(1e4))  # small",
        f"+ policy = partial(size_based_auto_wrap_policy, min_num_params={size:_})  # small",
    ]
    assert one(source, FINE, plan=None).source is None
