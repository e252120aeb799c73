"""Units that are too small, larger by a click: a policy's number, and loops over every module."""

from __future__ import annotations

from dataclasses import replace
from difflib import ndiff

import pytest
from own_models import SCRIPT

import shardscope as ss
from shardscope.planner.preflight import Finding, findings_in

PLAN = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())
FINE = "wrapped-too-finely"
LAYER = "218_112_000"
"""Parameters of a decoder layer of Llama 3.1 8B."""


def one(source: str, plan: ss.Plan | None = PLAN) -> Finding:
    (found,) = [finding for finding in findings_in(source, plan) if finding.name == FINE]
    return found


def changes(source: str, plan: ss.Plan | None = PLAN) -> list[str]:
    """The lines that are other; the finding itself is gone, and no other has come."""
    after = one(source, plan).source
    assert after is not None
    before = {finding.name for finding in findings_in(source, plan)}
    assert {finding.name for finding in findings_in(after, plan)} <= before - {FINE}
    return [line.rstrip() for line in ndiff(source.splitlines(), after.splitlines()) if line[0] in "+-"]


# ---- policies by size

HOME = "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy\n"
POLICY = "policy = partial(size_based_auto_wrap_policy, min_num_params=int(1e4))\n"


def test_a_policy_takes_the_size_of_a_layer_of_the_plan() -> None:
    source = HOME + POLICY
    assert changes(source)[1] == f"+ {POLICY.strip().replace('int(1e4)', LAYER)}"
    assert one(source).change == f"One unit for each decoder layer: min_num_params={LAYER}"


def test_a_policy_takes_what_is_worth_a_gather_without_a_plan() -> None:
    source = HOME + POLICY
    assert changes(source, None)[1] == f"+ {POLICY.strip().replace('int(1e4)', '1_000_000')}"
    assert one(source, None).change == "min_num_params=1_000_000"


@pytest.mark.parametrize(
    "source",
    [
        # The source of a function alone.
        POLICY,
        "import torch.distributed.fsdp.wrap as w\n"
        "policy = w.size_based_auto_wrap_policy(m, min_num_params=100)\n",
        "from torch.distributed.fsdp import wrap\n"
        "policy = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=20_000)\n",
        HOME.replace("policy\n", "policy as by_size\n") + "policy = partial(by_size, min_num_params=1e5)\n",
    ],
)
def test_however_it_is_imported(source: str) -> None:
    (line,) = [line for line in changes(source) if line.startswith("+")]
    assert f"min_num_params={LAYER})" in line


@pytest.mark.parametrize(
    "source",
    [
        # Somebody else's, which may count something else.
        "from mine import size_based_auto_wrap_policy\n" + POLICY,
        "def size_based_auto_wrap_policy(module, min_num_params):\n    return True\n" + POLICY,
        HOME + "if on:\n    from mine import size_based_auto_wrap_policy\n" + POLICY,
        # FSDP1 flattens no frozen weights with others, and loads what the same units saved.
        HOME + POLICY + "model.head.requires_grad_(False)\n",
        HOME + POLICY + "for p in model.parameters():\n    p.requires_grad = False\n",
        HOME + POLICY + "model = get_peft_model(model, config)\n",
        HOME + POLICY + "kind = StateDictType.LOCAL_STATE_DICT\n",
    ],
)
def test_a_policy_that_is_not_settled_gets_words(source: str) -> None:
    found = one(source)
    assert (found.source, found.change) == (None, "One unit for each decoder layer")


def test_layers_of_several_sizes_or_of_small_ones_have_no_number() -> None:
    small = replace(PLAN, architecture=replace(PLAN.architecture, hidden_size=64, intermediate_size=128))
    mixed = replace(PLAN, architecture=ss.models["deepseek-v3"])
    for plan in (small, mixed):
        assert one(HOME + POLICY, plan).source is None


# ---- loops over every module

HEAD = (
    "from torch.distributed.fsdp import fully_shard\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained(name)\n"
)
LOOP = "for module in model.modules():\n    fully_shard(module, mesh=mesh)\n"
PAIRS = LOOP.replace("module in model.modules", "name, module in model.named_modules")
IMPORT = "+ from transformers.modeling_layers import GradientCheckpointingLayer"


def test_a_loop_leaves_out_what_is_no_layer_and_the_model_comes_after_it() -> None:
    assert changes(HEAD + LOOP + "model.train()\n") == [
        IMPORT,
        "+     if isinstance(module, GradientCheckpointingLayer):",
        "-     fully_shard(module, mesh=mesh)",
        "+         fully_shard(module, mesh=mesh)",
        "+ fully_shard(model, mesh=mesh)",
    ]


def test_a_model_that_is_sharded_after_the_loop_is_not_sharded_twice() -> None:
    for ending in ("fully_shard(model, mesh=mesh)\n", "fully_shard(model)  # all\n"):
        after = one(HEAD + LOOP + ending).source
        assert after is not None
        assert after.count("fully_shard(model") == 1


@pytest.mark.parametrize(
    "loop",
    [
        "for name, module in model.named_modules():\n    fully_shard(module)\n",
        "for module in reversed(list(model.modules())):\n    # Each.\n    fully_shard(module)\n",
        "for _, module in reversed(list(model.named_modules())):  fully_shard(module)\n",
    ],
)
def test_however_the_loop_goes(loop: str) -> None:
    line = loop.replace("\n", " ").split(":")[0]
    after = one(HEAD + loop).source
    assert after is not None
    lines = [each.rstrip() for each in after.splitlines() if "#" not in each]
    assert lines[lines.index(f"{line}:") + 1 :] == [
        "    if isinstance(module, GradientCheckpointingLayer):",
        "        fully_shard(module)",
        "fully_shard(model)",
    ]


def test_a_loop_outside_in_is_told_to_fail() -> None:
    """``tests/runs/test_mended_units.py`` has it fail."""
    assert "the next call fails" in one(HEAD + LOOP).why
    assert "fails" not in one(HEAD + LOOP.replace("model.modules()", "reversed(list(model.modules()))")).why


def test_layers_of_a_model_of_the_scripts_own() -> None:
    loop = "for part in model.modules():\n    fully_shard(part)\n"
    after = one(SCRIPT.replace("fully_shard(model)\n", loop), None).source
    assert after is not None
    assert "    if isinstance(part, Block):\n        fully_shard(part)\nfully_shard(model)\n" in after


@pytest.mark.parametrize(
    "source",
    [
        # Layers that are not known, and models that are used for more.
        "from torch.distributed.fsdp import fully_shard\n" + LOOP,
        HEAD.replace("AutoModelForCausalLM", "SwinModel") + LOOP,
        HEAD + LOOP + "model.unshard()\n",
        HEAD + LOOP.replace("model.m", "model.model.m"),
        HEAD + PAIRS.replace("named_modules()", "named_modules(prefix='a')"),
        HEAD + LOOP.replace("model.modules()", "model.modules(True)"),
        # Loops that do more.
        HEAD + LOOP + "else:\n    print(1)\n",
        HEAD + LOOP + "    print(module)\n",
        HEAD + LOOP.replace("fully_shard(module, mesh=mesh)", "units.append(fully_shard(module))"),
        HEAD + LOOP.replace("fully_shard(module,", "fully_shard(module.inner,"),
        HEAD + LOOP.replace("fully_shard(module, mesh=mesh)", "fully_shard(module, mesh)"),
        HEAD + LOOP.replace("for module", "for self.module").replace("(module", "(self.module"),
        HEAD + PAIRS.replace("name, module", "module"),
        HEAD + LOOP.replace("module, mesh", "  # Each.\n        module, mesh"),
        # What may not hold for each layer.
        HEAD + LOOP.replace("mesh=mesh", "ignored_params=few"),
        HEAD + LOOP.replace("mesh=mesh", "**options"),
        HEAD + LOOP + "fully_shard(model, ignored_params=few)\n",
        HEAD + LOOP + "print(1)\nfully_shard(model)\n",
        HEAD + LOOP + "fully_shard(model.lm_head)\n",
        HEAD + "fully_shard(model.lm_head)\n" + LOOP,
        # Somebody else's function, and the first FSDP's class, which the loop throws away.
        HEAD.replace("torch.distributed.fsdp", "mine") + LOOP,
        HEAD.replace("fully_shard", "FullyShardedDataParallel as FSDP")
        + "for module in model.modules():\n    FSDP(module)\n",
    ],
)
def test_a_loop_that_is_not_settled_gets_words(source: str) -> None:
    assert one(source).source is None
