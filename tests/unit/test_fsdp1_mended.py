"""FSDP1's call, its clipping and its accelerate configurations, as a click rewrites them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.needs import needs
from tests.unit.test_preflight_mends import HEAD, PLAN, changes, one

from shardscope.planner.preflight import findings_in

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
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )
    return model
"""


def test_a_call_of_fsdp1_becomes_fully_shard_layer_by_layer() -> None:
    after = one(OLD, "fsdp1").source
    assert after is not None
    (function,) = [node for node in ast.parse(after).body if isinstance(node, ast.FunctionDef)]
    assert [ast.unparse(line) for line in function.body] == [
        "fsdp2_options = dict(reshard_after_forward=False)",
        "for fsdp2_layer in reversed([module for module in list(model.modules())[1:] if "
        "isinstance(module, Block)]):\n"
        "    fully_shard(fsdp2_layer, **fsdp2_options, mp_policy=MixedPrecisionPolicy("
        "param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False))",
        "fully_shard(model, **fsdp2_options, mp_policy=MixedPrecisionPolicy("
        "param_dtype=torch.bfloat16, reduce_dtype=torch.float32))",
        "return model",
    ]
    assert "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard" in after
    assert "policy" not in after.replace("transformer_auto_wrap_policy", "").replace("mp_policy", "")
    assert findings_in(after) == []


def test_what_the_call_is_told_is_mended_with_it() -> None:
    found = findings_in(OLD)
    names = {finding.name for finding in found}
    assert {"fsdp1-shard-grad-op", "fsdp1-use-orig-params", "fsdp1-transformer-auto-wrap-policy"} < names
    assert {finding.source for finding in found} == {one(OLD, "fsdp1").source}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    return model", "    print(policy)\n    return model"),
        ("    return model", "    return locals()['policy']"),
        ("    policy = functools", "    global policy\n    policy = functools"),
    ],
)
def test_a_policy_that_something_else_may_read_stays(before: str, after: str) -> None:
    source = OLD.replace(before, after)
    after = one(source, "fsdp1").source
    assert after is not None and "policy = functools.partial(" in after
    assert {finding.name for finding in findings_in(after)} == {"fsdp1-transformer-auto-wrap-policy"}
    assert one(source, "fsdp1-transformer-auto-wrap-policy").source is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("auto_wrap_policy=policy,", "auto_wrap_policy=policies[0],"),
        ("{Block}", "{Block, Other}"),
        ("{Block}", "classes"),
        ("SHARD_GRAD_OP", "NO_SHARD"),
        ("use_orig_params=True", "sync_module_states=True"),
        ("use_orig_params=True", "ignored_modules=[model.head]"),
        ("use_orig_params=True", "**options"),
        ("torch.cuda.current_device()", "rank"),
        ("use_orig_params=True", "forward_prefetch=True"),
        # What FSDP2 has not, or does otherwise, and parameters that it replaces.
        ("    return model", "    save(model.state_dict())"),
        ("    return model", "    return model.module"),
        ("    return model", "    with other.no_sync():\n        pass"),
        ("    return model", "    assert isinstance(model, FSDP)"),
        ("    return model", "    other.clip_grad_norm_(1.0)"),
        ("    policy = functools", "    opt = AdamW(model.parameters())\n    policy = functools"),
        ("model = FSDP(", "return FSDP("),
        ("param_dtype=torch.bfloat16, ", "keep_low_precision_grads=True, "),
        ("param_dtype=torch.bfloat16, ", "param_dtype=torch.bfloat16, **more, "),
        ("        model,\n        auto", "        build(),\n        auto"),
        ("        model,\n", "        model,  # mine\n"),
        ("{Block}", "{*LAYERS}"),
        (
            "ShardingStrategy.SHARD_GRAD_OP",
            "ShardingStrategy.SHARD_GRAD_OP if a else ShardingStrategy.FULL_SHARD",
        ),
        ("def prepare(model):", "def prepare(model, policy=None):"),
        ("    policy = functools", "    if a:\n        policy = functools"),
        ("    return model", "    fsdp2_layer = 1"),
    ],
)
def test_a_call_with_something_that_has_no_counterpart_is_left_to_a_person(before: str, after: str) -> None:
    source = OLD.replace(before, after)
    assert source != OLD
    assert one(source, "fsdp1").source is None


GATHERED = """    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    torch.save(state, path)
"""
CONFIGURED = "    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)\n"


def saving(block: str = GATHERED, config: str = CONFIGURED) -> str:
    imports = "from torch.distributed.fsdp import FullStateDictConfig, StateDictType\n"
    return imports + OLD.replace("    return model\n", config + block)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("offload_to_cpu=True, rank0_only=True", "full_state_dict=True, cpu_offload=True"),
        ("rank0_only=True", "full_state_dict=True, cpu_offload=True"),
        ("", "full_state_dict=True"),
    ],
)
def test_a_whole_checkpoint_is_gathered_by_the_function_of_fsdp2(config: str, options: str) -> None:
    after = one(saving(config=f"    config = FullStateDictConfig({config})\n"), "fsdp1").source
    assert after is not None and "config" not in after
    assert f"state = get_model_state_dict(model, options=StateDictOptions({options}))\n" in after
    found = findings_in(after)
    assert [finding.name for finding in found] == ["checkpoint-gathered-on-one-rank"]
    assert "full_state_dict=True gathers" in found[0].why


def test_in_another_function_and_without_a_config() -> None:
    block = "def save(net):\n    with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT):\n"
    block += "        weights = net.state_dict()\n    return weights\n"
    after = one(saving(block, ""), "fsdp1").source
    assert after is not None
    assert "weights = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))" in after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        ("rank0_only=True", "rank0_only=False"),
        ("rank0_only=True", "rank0_only=on"),
        ("rank0_only=True", "**more"),
        ("        state = model", "        print(1)\n        state = model"),
        ("        state = model", "        # all of it\n        state = model"),
        ("        state = model.", "        state = other."),
        ("        state = model.", "        self.state = model."),
        ("model.state_dict()", "model.state_dict(prefix='a')"),
        ("model.state_dict()", "FSDP.optim_state_dict(model, optimizer)"),
        ("config):", "config) as kind:"),
        ("config):", "config, other):"),
        ("torch.save(state", "torch.save(model.state_dict()"),
        ("with FSDP", "with other"),
    ],
)
def test_a_checkpoint_that_is_not_understood_is_left_to_a_person(before: str, after: str) -> None:
    source = saving(GATHERED.replace(before, after), CONFIGURED.replace(before, after))
    assert source != saving()
    assert one(source, "fsdp1").source is None


def test_a_name_that_is_something_else_is_not_used() -> None:
    """A person's own function of that name, or another library's."""
    for line in ("from mine import fully_shard", "def fully_shard(x):\n    return x"):
        after = one(OLD.replace("import functools", f"import functools\n{line}"), "fsdp1").source
        assert after is not None
        assert "import MixedPrecisionPolicy, fully_shard as torch_fully_shard\n" in after
        assert "\n    torch_fully_shard(model, **fsdp2_options, mp_policy=" in after


CLIPPED = f"{HEAD}from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"


@pytest.mark.parametrize(
    ("arguments", "after"), [("1.0", "1.0"), ("(1.0)", "(1.0)"), ("max_norm=1.0", "max_norm=1.0")]
)
def test_norms_of_fsdp2_are_clipped_by_torch(arguments: str, after: str) -> None:
    source = f"{CLIPPED}net = fully_shard(net)\nnet.clip_grad_norm_({arguments})\n"
    assert changes(source, "fsdp1-clip-grad-norm")[1] == (
        f"+ torch.nn.utils.clip_grad_norm_(net.parameters(), {after})"
    )


@pytest.mark.parametrize(
    "lines",
    [
        "accelerator.clip_grad_norm_(net.parameters(), 1.0)",
        # Its own method knows the other ranks' parts; torch's function would not.
        "net = FSDP(net, **more)\nnet.clip_grad_norm_(1.0)",
        "net = fully_shard(net)\nother = FSDP(other)\nnet.clip_grad_norm_(1.0)",
    ],
)
def test_norms_of_others_are_left_to_a_person(lines: str) -> None:
    found = [one for one in findings_in(f"{CLIPPED}{lines}\n") if one.name == "fsdp1-clip-grad-norm"]
    assert [finding.source for finding in found] in ([], [None])


# ---- configurations

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


def test_a_policy_that_is_changed_afterwards_is_left_to_a_person() -> None:
    source = OLD.replace(
        "    model = FSDP", "    mp = MixedPrecision(param_dtype=torch.bfloat16)\n    model = FSDP"
    )
    source = source.replace("MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),", "mp,")
    assert one(source, "fsdp1").source is not None
    changed = source.replace("    model = FSDP", "    mp.reduce_dtype = torch.float32\n    model = FSDP")
    assert one(changed, "fsdp1").source is None


def test_norms_are_clipped_by_torch_in_the_same_click() -> None:
    source = OLD.replace("    return model", "    model.clip_grad_norm_(1.0)\n    return model")
    after = one(source, "fsdp1").source
    assert after is not None
    assert "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n" in after


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("version", ["  fsdp_version: 1   # old\n", ""])
@pytest.mark.parametrize("place", [0, -1])
def test_a_configuration_is_mended_finding_by_finding_to_the_last(
    newline: str, version: str, place: int
) -> None:
    text = CONFIG.replace("  fsdp_version: 1   # old\n", version).replace("\n", newline)
    while found := findings_in(text, PLAN):
        text = [finding.source for finding in found if finding.source is not None][place]
    expected = NEW_CONFIG if version else NEW_CONFIG.replace("   # old", "")
    assert text == expected.replace("\n", newline)


def test_version_and_strategy_change_at_once() -> None:
    """Accelerate's first version takes no bool, and its second no name (1.15, dataclasses.py)."""
    for name in ("fsdp1", "fsdp1-shard-grad-op"):
        after = one(CONFIG, name).source
        assert after is not None
        assert "fsdp_version: 2" in after
        assert "fsdp_reshard_after_forward: false" in after


def test_what_the_first_version_reads_stays_until_it_is_the_second() -> None:
    found = [one for one in findings_in(CONFIG) if "prefetch" in one.name or "params" in one.name]
    assert [finding.source for finding in found] == [None, None]


def test_a_key_is_not_written_twice() -> None:
    head = "fsdp_version: 2\n"
    source = f"{head}fsdp_cpu_ram_efficient_loading: true\nfsdp_sync_module_states: true\n"
    assert changes(source, "fsdp1-sync-module-states") == ["- fsdp_sync_module_states: true"]
    off = f"{head}fsdp_sync_module_states: false\n"
    assert changes(off, "fsdp1-sync-module-states") == ["- fsdp_sync_module_states: false"]


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD", "3"])
def test_a_strategy_that_is_no_bool_is_left_to_a_person(strategy: str) -> None:
    found = findings_in(f"fsdp_version: 1\nfsdp_sharding_strategy: {strategy}\n")
    assert [finding.source for finding in found] == [None, None]


@pytest.mark.parametrize(
    "lines",
    [
        "fsdp_state_dict_type: LOCAL_STATE_DICT",
        "fsdp_reshard_after_forward: FULL_SHARD\nfsdp_sharding_strategy: SHARD_GRAD_OP",
        "fsdp_sharding_strategy: !!str SHARD_GRAD_OP",
        "fsdp_reshard_after_forward: true",
    ],
)
def test_what_version_2_would_read_otherwise_is_left_to_a_person(lines: str) -> None:
    found = findings_in(f"fsdp_version: 1\n{lines}\n")
    assert {one.source for one in found if one.name != "checkpoint-gathered-on-one-rank"} == {None}


def test_a_configuration_of_another_kind_has_no_version() -> None:
    assert findings_in("distributed_type: 'NO'\nfsdp_config: null\n") == []


def test_checkpoints_stay_whole_where_nothing_is_said_of_them() -> None:
    after = one("fsdp_config:\n  fsdp_offload_params: false\n", "fsdp1").source
    assert after == (
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
        "  fsdp_offload_params: false\n"
    )


def test_annotations_of_a_class_are_no_configuration() -> None:
    source = "class Config:\n    fsdp_use_orig_params: bool\n    fsdp_sharding_strategy: str\n"
    assert findings_in(source) == []


def test_a_strategy_by_name_in_code_becomes_the_bool() -> None:
    source = 'plugin = Plugin(fsdp_version=2, reshard_after_forward="full_shard")\n'
    assert changes(source, "fsdp1-full-shard")[1] == (
        "+ plugin = Plugin(fsdp_version=2, reshard_after_forward=True)"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        'reshard_after_forward="full_shard"',
        'fsdp_version=2, reshard_after_forward="full_shard" if a else b',
        'fsdp_version=2, sharding_strategy="full_shard"',
        'fsdp_version=2, reshard_after_forward=cfg.get("s", "full_shard")',
    ],
)
def test_a_strategy_that_is_chosen_elsewhere_is_left_to_a_person(arguments: str) -> None:
    assert one(f"plugin = Plugin({arguments})\n", "fsdp1-full-shard").source is None


def test_accelerate_reads_what_is_written(tmp_path: Path) -> None:
    needs("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    (tmp_path / "old.yaml").write_text(f"distributed_type: FSDP\nmachine_rank: 0\n{NEW_CONFIG}")
    assert load_config_from_file(str(tmp_path / "old.yaml")).fsdp_config == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
