"""Units of one decoder layer each, by a click, of a model of transformers whose layers are known."""

from __future__ import annotations

from difflib import ndiff

import pytest

import shardscope as ss
from shardscope.planner.preflight import Finding, findings_in

PLAN = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())
WHOLE = "whole-model-as-one-unit"
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
        "    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n"
        "    shard(net, mesh=mesh(2), mp_policy=half)\n    net.train()\n"
        "    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)\n    net(x).loss.backward()\n"
        "    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    state = get_model_state_dict(net)\n"
    )
    assert changes(source, WHOLE) == [
        "+ from transformers.modeling_layers import GradientCheckpointingLayer",
        "-     shard(net, mesh=mesh(2), mp_policy=half)",
        "+     fsdp2_options = dict(mesh=mesh(2), mp_policy=half)",
        "+     for fsdp2_layer in net.modules():",
        "+         if isinstance(fsdp2_layer, GradientCheckpointingLayer):",
        "+             shard(fsdp2_layer, **fsdp2_options)",
        "+     shard(net, **fsdp2_options)",
    ]


def test_an_import_stays_behind_what_is_set_up_for_it() -> None:
    source = (
        "'Train.'\nimport os\nfrom torch.distributed.fsdp import fully_shard\n"
        "os.environ['HF_HOME'] = here\n"
        "def main():\n    from transformers import GPT2LMHeadModel, LlamaForCausalLM\n"
        "    model = LlamaForCausalLM(config)\n    fully_shard(model)\n"
    )
    assert changes(source, WHOLE)[0] == (
        "+     from transformers.modeling_layers import GradientCheckpointingLayer"
    )


def test_an_auto_class_is_known_by_its_plan() -> None:
    assert one(f"{HEAD}fully_shard(model)\n", WHOLE).source is not None
    assert one(f"{HEAD}fully_shard(model)\n", WHOLE, plan=None).source is None


@pytest.mark.parametrize(
    "source",
    [
        HEAD.replace("(name)", "(name).to(device).train()") + "fully_shard(model)\n",
        f"{HEAD}fully_shard(model)\nprint(sum(p.numel() for p in model.parameters()))\n",
    ],
)
def test_a_model_that_is_moved_or_counted_is_the_same(source: str) -> None:
    assert one(source, WHOLE).source is not None


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
        # Models whose layers are not known, or code of their own.
        HEAD.replace("name", "name, trust_remote_code=True") + "fully_shard(model)\n",
        HEAD.replace("name", "name, **options") + "fully_shard(model)\n",
        HEAD.replace("AutoModelForCausalLM", "SwinModel") + "fully_shard(model)\n",
        HEAD.replace("AutoModelForCausalLM", "AutoTokenizer") + "fully_shard(model)\n",
        # What a layer's unit would do otherwise.
        f"{HEAD}fully_shard(model)\nmodel.set_gradient_divide_factor(1.0)\n",
        f"{HEAD}fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))\n",
        f"{HEAD}shard_blocks(model)\nfully_shard(model)\n",
        f"{HEAD}fully_shard(model)\nmodel.unshard()\n",
        f"{HEAD}fully_shard(model)\nloss += sum(p.pow(2).sum() for p in model.parameters())\n",
        f"{HEAD}fully_shard(model)\nweight = model.model.layers[0].mlp.up_proj.weight\n",
        f"{HEAD}fully_shard(model)\nmodel.lm_head = other\n",
        f"{HEAD}fully_shard(model)\nnet = model.to(device)\n",
        f"{HEAD}fully_shard(model)\nprint(model.eval().lm_head.weight)\n",
        f"{HEAD}whole = fully_shard(model)\n",
        # The first FSDP's class wraps what it returns.
        HEAD.replace("fully_shard", "FullyShardedDataParallel as FSDP") + "net = FSDP(model)\n",
        HEAD.replace("fully_shard", "FullyShardedDataParallel as FSDP") + "FSDP(model)\n",
        # Somebody else's function.
        "from mine import fully_shard\nfrom transformers import LlamaModel\nmodel = LlamaModel(c)\n"
        "fully_shard(model)\n",
    ],
)
def test_what_the_text_does_not_settle_gets_words(source: str) -> None:
    assert one(source, WHOLE).source is None
