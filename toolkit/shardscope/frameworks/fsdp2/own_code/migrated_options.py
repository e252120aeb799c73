"""What PyTorch's first FSDP is told, as ``fully_shard``'s keywords."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shardscope.frameworks.fsdp2.old_names import STRATEGIES
from shardscope.frameworks.fsdp2.own_code.old_uses import CLIPPING
from shardscope.own_code.bindings import is_dotted_name, means_the_same, only_value, sees
from shardscope.own_code.script import Script, keywords

MODULE, MESHES = "torch.distributed.fsdp", "torch.distributed.device_mesh"
NO_EFFECT = ("use_orig_params", "limit_all_gathers", "backward_prefetch")
"""What FSDP2 always does, or has no choice of."""
LITERAL = ("sync_module_states", "forward_prefetch")
"""What can be left out where it is off: on, each takes more than a word elsewhere."""


LIBRARY, OF_IMAGES = "transformers", {"torchvision", "timm"}
"""A library whose models have no batch norms and cast what they make of buffers, and some that have."""


class UnknownError(Exception):
    """Something that the text does not settle."""


class Option(NamedTuple):
    """A keyword of ``fully_shard``."""

    name: str
    value: str
    """Its value, or with :attr:`made_of` that function's arguments."""
    made_of: str = ""
    home: str = MODULE
    """Where :attr:`made_of` is imported from."""
    of_a_layer: str = ""
    """Another value for what is in another unit; empty: the same."""

    def written(self, local: Mapping[str, str], *, of_a_layer: bool = False) -> str:
        """As code, with classes by the names that the script has for them."""
        value = self.of_a_layer if of_a_layer and self.of_a_layer else self.value
        return f"{self.name}={local.get(self.made_of, '')}{value}"


def options_of(script: Script, given: Mapping[str, ast.expr]) -> list[Option]:
    """What those arguments of FSDP1's class become.

    Raises ``UnknownError`` where one has no counterpart that the text settles.
    """
    if not set(given) <= set(_TRANSLATED):
        raise UnknownError
    return [option for name, value in given.items() for option in _TRANSLATED[name](script, value)]


def made(script: Script, value: ast.expr) -> ast.expr:
    """What a name stands for where the text settles that, here as there; anything else is itself."""
    if not isinstance(value, ast.Name):
        return value
    found = only_value(script, value.id, value)
    is_changed = any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == value.id
        for node in script.walk(ast.Attribute)
    )
    given = keywords(found).values() if isinstance(found, ast.Call) else ()
    is_plain = all(isinstance(one, ast.Constant) or is_dotted_name(one) for one in given)
    if found is None or is_changed or not is_plain or not means_the_same(script, found, value):
        raise UnknownError
    return found


def _strategy(script: Script, value: ast.expr) -> list[Option]:
    named = made(script, value)
    found = STRATEGIES.get(ast.unparse(named).rpartition(".")[2]) if is_dotted_name(named) else None
    if found is None or not found.shards:
        raise UnknownError
    resharding = [] if found.reshards else [Option("reshard_after_forward", "False")]
    return [*_mesh_of_nodes(script, value), *resharding] if found.is_hybrid else resharding


def _mesh_of_nodes(script: Script, value: ast.expr) -> list[Option]:
    """What FSDP1 makes by itself: groups of as many ranks as a node has GPUs
    (torch/distributed/fsdp/_init_utils.py)."""
    if not sees(script, "torch", value) or "cuda" not in script.names:
        raise UnknownError
    inside = "torch.cuda.device_count()"
    shape = f"(torch.distributed.get_world_size() // {inside}, {inside})"
    names = 'mesh_dim_names=("replicate", "shard")'
    return [Option("mesh", f'("cuda", {shape}, {names})', "init_device_mesh", MESHES)]


def _precision(script: Script, value: ast.expr) -> list[Option]:
    policy = made(script, value)
    if isinstance(policy, ast.Constant) and policy.value is None:
        return []
    if not isinstance(policy, ast.Call) or script.called(policy) != "MixedPrecision" or policy.args:
        raise UnknownError
    given = keywords(policy)
    if len(given) < len(policy.keywords):
        raise UnknownError
    if not {"param_dtype"} <= set(given) <= {"param_dtype", "reduce_dtype", "buffer_dtype"}:
        raise UnknownError
    roots = {name.partition(".")[0] for name in script.modules.values()}
    if any("BatchNorm" in name for name in script.names) or roots & OF_IMAGES:
        raise UnknownError  # FSDP1 leaves batch norms in fp32.
    if "buffer_dtype" in given and ("register_buffer" in script.names or LIBRARY not in roots):
        # Buffers keep their type in FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_api.py): transformers'
        # models cast what they make of them, and others may not.
        raise UnknownError
    kept = [f"{name}={ast.unparse(value)}" for name, value in given.items() if name != "buffer_dtype"]
    inner = ", ".join([*kept, "cast_forward_inputs=False"])  # FSDP1 casts what the model is given alone.
    return [
        Option("mp_policy", f"({', '.join(kept)})", "MixedPrecisionPolicy", of_a_layer=f"({inner})"),
    ]


def _offload(script: Script, value: ast.expr) -> list[Option]:
    found = made(script, value)
    called = found.func if isinstance(found, ast.Call) else found
    text = ast.unparse(found).rpartition(".")[2] if is_dotted_name(called) else ast.unparse(found)
    if text in ("None", "CPUOffload()", "CPUOffload(offload_params=False)"):
        return []
    if text != "CPUOffload(offload_params=True)":
        raise UnknownError
    if CLIPPING in script.names:
        raise UnknownError  # Ranks add their parts of a norm up on the CPU, for which there may be no group.
    return [Option("offload_policy", "()", "CPUOffloadPolicy")]


def _device(script: Script, value: ast.expr) -> list[Option]:
    """FSDP2 takes the current device, which has to be that one."""
    if ast.unparse(value) != "torch.cuda.current_device()" and "set_device" not in script.names:
        raise UnknownError
    return []


def _off(_script: Script, value: ast.expr) -> list[Option]:
    if not isinstance(value, ast.Constant) or value.value:
        raise UnknownError
    return []


def _nothing(_script: Script, _value: ast.expr) -> list[Option]:
    return []


_TRANSLATED: dict[str, Callable[[Script, ast.expr], list[Option]]] = {
    "sharding_strategy": _strategy,
    "mixed_precision": _precision,
    "cpu_offload": _offload,
    "device_id": _device,
    **dict.fromkeys(LITERAL, _off),
    **dict.fromkeys(NO_EFFECT, _nothing),
}
"""What each argument becomes, if anything has to be said."""
