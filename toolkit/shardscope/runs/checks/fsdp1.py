"""Migration from FSDP1 to FSDP2: every use of FSDP1 in a script or an accelerate configuration.

The two usual pitfalls of a migration, mixed precision and optimizer state, have their own warnings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.frameworks.fsdp2.old_names import CONFIG_REPLACEMENTS, REPLACEMENTS, STRATEGIES
from shardscope.runs.checks.script import Script, flag_line, is_constant, read_keywords

OLD_CLASS, PLUGIN = "FullyShardedDataParallel", "FullyShardedDataParallelPlugin"
PLUGIN_KEEPS = ("auto_wrap_policy", "cpu_offload", "ignored_modules", "state_dict_type")
"""Arguments that version 2 of Accelerate's plugin still takes (accelerate/utils/dataclasses.py)."""
STRATEGY_ARGUMENTS = ("fsdp", "sharding_strategy", "reshard_after_forward")
"""Arguments of transformers and Accelerate that name a strategy as text: ``fsdp="full_shard auto_wrap"``."""
OPTIMIZER_STATE = re.compile(r"(?!(get|set)_)(\w+_)?optim(izer)?_state_dict(_to_load)?")
"""FSDP1's functions of optimizer state: ``optim_state_dict``, ``full_optim_state_dict``, ..."""
LINE = re.compile(r"^\s*(?P<key>fsdp_(?!config\b)\w+)\s*:\s*['\"]?(?P<value>\w+)['\"]?\s*(?:#.*)?$")
"""One key of accelerate's YAML."""
BY_CONFIG_VALUE = {str(number): name for number, name in enumerate(STRATEGIES, 1)} | {
    name.strip("_"): name for name in STRATEGIES
}
"""Strategies by accelerate's numbers and names."""

PRECISION_WHY = (
    "MixedPrecision applied to the whole wrapped model. FSDP2's policy applies only to the "
    "fully_shard call that it is passed to: other layers are all-gathered and reduced in their own dtype. "
    "Buffers keep theirs (there is no buffer_dtype). The optimizer updates the shards in the dtype in which "
    "the model was loaded: in bf16 small updates are lost."
)
PRECISION_CHANGE = (
    "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) in every "
    "fully_shard call, the layers' and the model's, over a model that was loaded in fp32"
)
STATE_WHY = (
    "FSDP1 keeps the optimizer's state for flat parameters, FSDP2 for DTensors of the model's own: neither "
    "loads the other's. And an optimizer that was made before fully_shard updates tensors that the model no "
    "longer has."
)
STATE_CHANGE = (
    "Make the optimizer after fully_shard; save with get_optimizer_state_dict(model, optimizer), load with "
    "set_optimizer_state_dict. To convert an FSDP1 checkpoint, gather it once with FSDP1 "
    "(FSDP.optim_state_dict under FULL_STATE_DICT) and load that with "
    "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"
)


def check_fsdp1(script: Script) -> Iterator[Finding]:
    """Find every use of FSDP1, each with its replacement."""
    # The text is either accelerate's YAML or Python.
    matches = [(number, LINE.match(text)) for number, text in enumerate(script.source.splitlines(), 1)]
    lines = [(number, match["key"], match["value"]) for number, match in matches if match]
    # ``key: value`` also parses as Python, as an annotation.
    is_python = script.tree is not None and not all(
        isinstance(one, ast.AnnAssign) for one in script.tree.body
    )
    if lines and not is_python:
        yield from _check_config(lines)
        return
    yield from _check_calls(script)
    yield from _check_strategies(script)
    # Some of the names, such as ``no_sync``, are also DDP's: they count only beside the FSDP1 class.
    if OLD_CLASS in script.uses:
        yield from _check_names(script)
        yield from _check_optimizer_state(script)
    for call in script.find_calls("MixedPrecision"):
        yield flag_line(call.lineno, "fsdp1-mixed-precision", "warning", PRECISION_WHY, PRECISION_CHANGE)


def _flag_old_name(name: str, line: int, change: str) -> Finding:
    suffix = re.sub(r"_|(?<=[a-z])(?=[A-Z])", "-", name.removeprefix("fsdp_").strip("_")).lower()
    return flag_line(line, f"fsdp1-{suffix}", "hint", f"{name} is FSDP1's.", change)


def _check_calls(script: Script) -> Iterator[Finding]:
    """Yield findings for calls of the FSDP1 class and of Accelerate's plugin, and for their arguments."""
    for call in script.find_calls(OLD_CLASS, PLUGIN):
        is_class = script.resolve_name(call.func) == OLD_CLASS
        if is_class:
            why = (
                f"{OLD_CLASS} is PyTorch's first FSDP, which flattens parameters; FSDP2 shards each by "
                "itself, so that frozen ones, adapters and tensor parallelism work with it."
            )
            change = "fully_shard(layer) for each decoder layer, then fully_shard(model)"
            yield flag_line(call.lineno, "fsdp1", "hint", why, change)
        elif not is_constant(read_keywords(call).get("fsdp_version"), 2):
            why = "without fsdp_version=2 Accelerate's plugin is PyTorch's first FSDP."
            yield flag_line(call.lineno, "fsdp1", "hint", why, f"{PLUGIN}(fsdp_version=2, ...)")
        for name, value in read_keywords(call).items():
            if name in REPLACEMENTS and name != "mixed_precision" and (is_class or name not in PLUGIN_KEEPS):
                yield _flag_old_name(name, value.lineno, REPLACEMENTS[name])


def _check_names(script: Script) -> Iterator[Finding]:
    """Yield findings for each use of FSDP1's methods and classes."""
    for node in script.nodes:
        name = script.resolve_name(node)
        # Skip variables with the name of an argument, and torch.nn.utils.clip_grad_norm_.
        is_variable = isinstance(node, ast.Name) and node.id not in script.aliases
        is_torchs = isinstance(node, ast.Attribute) and "nn.utils" in ast.unparse(node.value)
        if name in REPLACEMENTS and not (is_variable or is_torchs or OPTIMIZER_STATE.fullmatch(name)):
            yield _flag_old_name(name, node.lineno, REPLACEMENTS[name])  # type: ignore[attr-defined]
    for line in script.uses.get("BACKWARD_POST", ()):
        why = "FSDP2 has no BACKWARD_POST, which all-gathered later and used less memory."
        change = "module.set_modules_to_backward_prefetch([]) where memory is short"
        yield flag_line(line, "fsdp1-backward-post", "hint", why, change)


def _check_strategies(script: Script) -> Iterator[Finding]:
    """Yield findings for sharding strategies, as enumeration members or as text."""
    matches = [(line, name) for name in STRATEGIES for line in script.uses.get(name, ())]
    for keyword in script.nodes:
        if isinstance(keyword, ast.keyword) and keyword.arg in STRATEGY_ARGUMENTS:
            texts = (node.value for node in ast.walk(keyword.value) if isinstance(node, ast.Constant))
            names = (strategy for text in texts for strategy in str(text).upper().split())
            matches += [(keyword.value.lineno, strategy) for strategy in names if strategy in STRATEGIES]
    for line, name in matches:
        yield _flag_old_name(name, line, STRATEGIES[name].replacement)


def _check_optimizer_state(script: Script) -> Iterator[Finding]:
    """Yield findings for FSDP1's optimizer state functions and the optimizer's own ``state_dict``."""
    for node in script.nodes:
        name = script.resolve_name(node)
        owner = script.resolve_name(node.value) if isinstance(node, ast.Attribute) else ""
        is_own = name in ("state_dict", "load_state_dict") and re.fullmatch(r"\w*optim\w*|opt", owner, re.I)
        if is_own or OPTIMIZER_STATE.fullmatch(name):
            yield flag_line(node.lineno, "fsdp1-optimizer-state", "warning", STATE_WHY, STATE_CHANGE)  # type: ignore[attr-defined]


def _check_config(lines: list[tuple[int, str, str]]) -> Iterator[Finding]:
    """Yield findings for accelerate's YAML: a missing ``fsdp_version: 2``, and FSDP1's keys."""
    version = [(line, value) for line, key, value in lines if key == "fsdp_version"]
    if not version or version[0][1] == "1":
        line = version[0][0] if version else lines[0][0]
        why = "without fsdp_version: 2 Accelerate runs PyTorch's first FSDP."
        yield flag_line(
            line, "fsdp1", "hint", why, "fsdp_version: 2 (`accelerate to-fsdp2` rewrites the file)"
        )
    for line, key, value in lines:
        if (
            key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
            and value.upper() in BY_CONFIG_VALUE
        ):
            name = BY_CONFIG_VALUE[value.upper()]
            yield _flag_old_name(name, line, STRATEGIES[name].replacement)
        elif key in CONFIG_REPLACEMENTS:
            yield _flag_old_name(key, line, CONFIG_REPLACEMENTS[key])
        elif key == "fsdp_state_dict_type" and value.upper() == "FULL_STATE_DICT":
            # FSDP2 has both.
            why = "rank 0 gathers the full model for every checkpoint."
            change = "fsdp_state_dict_type: SHARDED_STATE_DICT: each rank writes its shards"
            yield flag_line(line, "fsdp1-state-dict-type", "hint", why, change)
