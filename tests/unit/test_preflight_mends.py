"""The mended text of a finding about a script: only what was meant is other, and it is found no more."""

from __future__ import annotations

import ast
from difflib import ndiff

import pytest

import shardscope as ss
from shardscope.planner.preflight import Finding, findings_in

PLAN = ss.Plan(
    ss.models["llama-3.1-8b"], ss.Cluster.parse("2x8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2(tp=4)
)
HEAD = '"""Train."""\nfrom __future__ import annotations\nimport torch\n'
LOADER = "from torch.utils.data import DataLoader\n"


def one(source: str, name: str, plan: ss.Plan | None = None) -> Finding:
    (found,) = [finding for finding in findings_in(source, plan) if finding.name == name]
    return found


def changes(source: str, name: str, plan: ss.Plan | None = None) -> list[str]:
    """The lines that are other; the finding itself is gone."""
    after = one(source, name, plan).source
    assert after is not None
    assert name not in [finding.name for finding in findings_in(after, plan)]
    return [line.rstrip() for line in ndiff(source.splitlines(), after.splitlines()) if line[0] in "+-"]


def test_a_sampler_takes_the_place_of_shuffling() -> None:
    source = f"{HEAD}{LOADER}loader = DataLoader(data, batch_size=4, shuffle=True)  # é\nmodel(loader)\n"
    assert changes(source, "ranks-read-the-same-data") == [
        "+ from torch.utils.data.distributed import DistributedSampler",
        "- loader = DataLoader(data, batch_size=4, shuffle=True)  # é",
        "+ loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))  # é",
    ]


def test_a_loader_that_did_not_shuffle_does_not_now() -> None:
    source = f"{LOADER}run(DataLoader(dataset=self.data,))\n"
    assert changes(source, "ranks-read-the-same-data")[-1] == (
        "+ run(DataLoader(dataset=self.data, sampler=DistributedSampler(self.data, shuffle=False),))"
    )


@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(make_data())",
        "DataLoader(**options)",
        "DataLoader(data, 4, True)",
        "DataLoader(load_dataset('text', streaming=True))",
    ],
)
def test_what_the_text_does_not_say_is_left_to_a_person(loader: str) -> None:
    found = one(f"{LOADER}for batch in {loader}:\n    model(batch).backward()\n", "ranks-read-the-same-data")
    assert found.source is None


def test_no_sampler_is_written_for_ranks_that_work_together() -> None:
    source = f"{LOADER}for batch in DataLoader(data):\n    model(batch).backward()\n"
    assert one(source, "ranks-read-the-same-data", PLAN).source is None


def test_shares_are_the_data_parallel_ranks() -> None:
    source = (
        f"{LOADER}sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)\n"
    )
    assert changes(source, "sampler-over-all-ranks", PLAN) == [
        "- sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)",
        "+ sampler = DistributedSampler(data, num_replicas=4, rank=rank // 4 % 4, shuffle=False)",
    ]


def test_the_sampler_is_told_of_each_epoch() -> None:
    for sampler, told in {
        "sampler = DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)": "sampler",
        "loader = DataLoader(data, sampler=DistributedSampler(data))": "loader.sampler",
    }.items():
        source = (
            f"{LOADER}from torch.utils.data import DistributedSampler\n{sampler}\n"
            "for warm_up in range(2):\n    pass\n"
            "def train():\n    for epoch in range(3):\n        for i, batch in enumerate(loader):\n"
            "            model(batch)\n"
        )
        assert changes(source, "same-order-every-epoch") == [f"+         {told}.set_epoch(epoch)"]


def test_a_sampler_inside_another_function_is_not_reached_for() -> None:
    source = (
        f"{LOADER}from torch.utils.data import DistributedSampler\n"
        "def make():\n    loader = DataLoader(data, sampler=DistributedSampler(data))\n    return loader\n"
        "def train(loader):\n    for epoch in range(3):\n        for batch in loader:\n            batch.x\n"
    )
    assert one(source, "same-order-every-epoch").source is None


def test_reductions_are_in_fp32_beside_the_types_own_module() -> None:
    policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16{})"
    new = policy.format(", reduce_dtype=torch.float32")
    for given in ("", ", reduce_dtype=torch.bfloat16"):
        source = f"{HEAD}p = {policy.format(given)}\n"
        assert changes(source, "policy-reduces-in-half-precision")[1] == f"+ p = {new}"
    bare = "from torch import bfloat16\np = MixedPrecisionPolicy(param_dtype=bfloat16)\n"
    assert one(bare, "policy-reduces-in-half-precision").source is None


OLD = """
import functools
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

def prepare(model):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=0,
        use_orig_params=True,
    )
    return model
"""


def test_a_call_of_fsdp1_becomes_fully_shard_layer_by_layer() -> None:
    after = one(OLD, "fsdp1").source
    assert after is not None
    (function,) = [node for node in ast.parse(after).body if isinstance(node, ast.FunctionDef)]
    assert [ast.unparse(line) for line in function.body[1:]] == [
        "fsdp2_options = dict(reshard_after_forward=False, mp_policy=MixedPrecisionPolicy("
        "param_dtype=torch.bfloat16, reduce_dtype=torch.float32))",
        "for layer in [module for module in model.modules() if isinstance(module, Block)]:\n"
        "    fully_shard(layer, **fsdp2_options)",
        "model = fully_shard(model, **fsdp2_options)",
        "return model",
    ]
    assert "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard" in after
    # What is left of FSDP1 is told on: the policy that nobody reads any more.
    assert {finding.name for finding in findings_in(after)} == {"fsdp1-transformer-auto-wrap-policy"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("auto_wrap_policy=policy,", ""),
        ("{Block}", "{Block, Other}"),
        ("{Block}", "classes"),
        ("SHARD_GRAD_OP", "HYBRID_SHARD"),
        ("SHARD_GRAD_OP", "NO_SHARD"),
        ("use_orig_params=True", "sync_module_states=True"),
        ("use_orig_params=True", "ignored_modules=[model.head]"),
        ("use_orig_params=True", "**options"),
        ("device_id=0", "forward_prefetch=True"),
        ("model = FSDP(", "return FSDP("),
        ("param_dtype=torch.bfloat16, ", "keep_low_precision_grads=True, "),
    ],
)
def test_a_call_with_something_that_has_no_counterpart_is_left_to_a_person(before: str, after: str) -> None:
    source = OLD.replace(before, after)
    assert source != OLD
    assert one(source, "fsdp1").source is None


def test_norms_are_clipped_by_torch() -> None:
    source = f"{HEAD}from torch.distributed.fsdp import FullyShardedDataParallel\nnet.clip_grad_norm_(1.0)\n"
    assert changes(source, "fsdp1-clip-grad-norm")[1] == (
        "+ torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)"
    )


CONFIG = """compute_environment: LOCAL_MACHINE
fsdp_config:
  fsdp_version: 1   # old
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_use_orig_params: true
  fsdp_sync_module_states: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000
num_processes: 8
"""
NEW_CONFIG = """compute_environment: LOCAL_MACHINE
fsdp_config:
  fsdp_version: 2   # old
  fsdp_reshard_after_forward: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
num_processes: 8
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_configuration_is_mended_finding_by_finding_to_the_last(newline: str) -> None:
    text = CONFIG.replace("\n", newline)
    num_clicks = 0
    while found := findings_in(text, PLAN):
        assert found[-1].source is not None
        text, num_clicks = found[-1].source, num_clicks + 1
    assert text == NEW_CONFIG.replace("\n", newline)
    assert num_clicks == 7


def test_a_key_is_not_written_twice() -> None:
    source = "fsdp_cpu_ram_efficient_loading: true\nfsdp_sync_module_states: true\n"
    assert changes(source, "fsdp1-sync-module-states") == ["- fsdp_sync_module_states: true"]
    off = "fsdp_sync_module_states: false\n"
    assert changes(off, "fsdp1-sync-module-states") == ["- fsdp_sync_module_states: false"]


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD", "3"])
def test_a_strategy_that_is_no_bool_is_left_to_a_person(strategy: str) -> None:
    (found,) = findings_in(f"fsdp_sharding_strategy: {strategy}\n")
    assert found.source is None


def test_a_strategy_by_name_in_code_becomes_the_bool() -> None:
    source = 'plugin = Plugin(fsdp_version=2, reshard_after_forward="full_shard")\n'
    assert (
        changes(source, "fsdp1-full-shard")[1]
        == "+ plugin = Plugin(fsdp_version=2, reshard_after_forward=True)"
    )


def test_a_rate_in_a_task_is_the_advised_one() -> None:
    (found,) = [one for one in PLAN.findings(_task) if one.name == "learning-rate-against-batch"]
    assert found.source is not None
    assert f"AdamW(model.parameters(), {found.change})" in found.source
    assert found.source.startswith("def _task")


def _task(ctx):  # type: ignore[no-untyped-def]
    import torch

    model = torch.nn.Linear(1, 1)
    torch.optim.AdamW(model.parameters(), lr=0.5)


def test_text_in_lines_of_blanks_stays() -> None:
    source = f'{HEAD}TEXT = """\n   \n"""\np = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n'
    after = one(source, "policy-reduces-in-half-precision").source
    assert after is not None
    assert '"""\n   \n"""' in after
