"""Weights of transformers in Megatron-core's model: the same logits, and back the same numbers.

One spawn of four gloo ranks goes through all cases: what a case finds comes back by its name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.requirements import needs, skip_without, thorough
from tests.runs import gloo_ranks
from tests.runs.gloo_ranks import StandInContext, on_ranks

from shardscope import Architecture, Cluster, Layout, Plan, Recipe
from shardscope.core.architecture import MixtureOfExperts
from shardscope.frameworks.megatron.hf_names import check_mapped
from shardscope.machine.processes import is_alive, read_start_time

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}
"""No size is another's, and 56 rows pad the vocabulary of one rank."""
EXPERTS = MixtureOfExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40)
GPT2 = {
    "num_key_value_heads": 4,
    "head_dim": 12,
    "norm": "layernorm",
    "gated_mlp": False,
    "position_embedding": "learned",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3": {"qk_norm": True},
    "gpt2": GPT2,
    "mixtral": {"mixture_of_experts": EXPERTS, "intermediate_size": 40},
    "qwen3_moe": {"qk_norm": True, "mixture_of_experts": EXPERTS},
}
CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp 2, pp 2": ("llama", {"tp": 2, "pp": 2}),
    "a tied head on another stage": ("gpt2", {"tp": 2, "pp": 2}),
    "tp 4 over 2 key-value heads": ("qwen2", {"tp": 4}),
    "interleaved stages": ("qwen3", {"pp": 2, "vpp": 2}),
    "pp 4": ("mistral", {"pp": 4}),
    "ep 4": ("mixtral", {"ep": 4}),
    "tp 2, ep 2": ("mixtral", {"tp": 2, "ep": 2}),
    "experts whole in tp": ("qwen3_moe", {"tp": 2, "ep": 4, "etp": 1}),
    "ep 2, pp 2": ("mixtral", {"ep": 2, "pp": 2}),
}
"""By name: a family and the degrees of four ranks."""


WITH_LOGITS = [*FAMILIES, *(n for n, (_, cut) in CUTS.items() if "pp" not in cut and cut.get("ep") != 2)]
"""Those whose ranks hold every layer; gloo has no gathering of unequal parts, as experts cut by tp need."""
CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "fp32": ({"family": "llama", "tp": 2, "pp": 2}, {"family": "llama"}, False),
    "bf16 with experts": (
        {"family": "mixtral", "precision": "bf16-mixed", "ep": 2, "pp": 2},
        {"family": "mixtral", "precision": "bf16-mixed", "tp": 2, "ep": 2},
        True,
    ),
    "an optimizer on every rank": (
        {"family": "gpt2", "precision": "bf16-mixed", "tp": 2, "distributed_optimizer": False},
        {"family": "gpt2", "precision": "bf16-mixed", "pp": 2, "distributed_optimizer": False},
        False,
    ),
}
"""By name: what saves, what goes on, and whether saving goes on beside a step."""
EXPORTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "one file": ("qwen2", {"tp": 2, "pp": 2}, 10**9),
    "several files": ("mixtral", {"ep": 2, "pp": 2}, 60_000),
}
"""By name: a family, degrees, and the most bytes of a file."""


def architecture(family: str) -> Architecture:
    return Architecture(name=family, model_type=family, **{**SHAPE, **FAMILIES[family]})


def plan(family: str, precision: str = "fp32", **layout: Any) -> Plan:
    recipe = Recipe(seq_len=32, micro_batch_size=1, global_batch_size=8, precision=precision)
    return Plan(architecture(family), Cluster.parse("4xcpu"), recipe, Layout.megatron(**layout))


_GROUPS_ARE_FOR: dict[str, Any] = {}
"""The degrees of this rank's process groups: two dozen of them, so they stay while degrees do."""


@contextlib.contextmanager
def make_model(plan: Plan) -> Iterator[tuple[Any, Any, Any]]:
    """transformers' model, this rank's chunks of Megatron's with its weights, and their config."""
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from shardscope.frameworks.megatron.engine import model
    from shardscope.frameworks.megatron.engine.cpu_ranks import cpu_ranks
    from shardscope.frameworks.megatron.weights.load import load_hf, mute_padding
    from shardscope.training.model.model import build_model

    torch.manual_seed(7)
    source = build_model(plan.architecture).eval()
    for parameter in source.parameters():
        # Norms of ones and biases of zeros would hide where they went.
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    with cpu_ranks():
        degrees = {**vars(plan.layout), "etp": plan.layout.expert_tp}
        if degrees != _GROUPS_ARE_FOR:
            model.init_model_parallel(plan)
            _GROUPS_ARE_FOR.clear()
            _GROUPS_ARE_FOR.update(degrees)
        model_parallel_cuda_manual_seed(7)
        config = model.build_config(plan, source.config)
        chunks = model.build_chunks(plan, config, source.config)
        load_hf(chunks, source.state_dict(), plan.architecture)
        mute_padding(chunks, plan.architecture)
        yield source, [chunk.eval() for chunk in chunks], config


def compute_largest_difference(source: Any, found: dict[str, Any]) -> float:
    """Return the largest difference of ``found`` from transformers; infinite if names differ."""
    wanted = {name: parameter.detach() for name, parameter in source.named_parameters()}
    if wanted.keys() != found.keys():
        return float("inf")
    return max(float((wanted[name] - found[name]).abs().max()) for name in wanted)


def gather_state_dict(chunks: list[Any], arch: Architecture, optimizer: Any = None) -> dict[str, Any]:
    """Return the whole model's transformers state dict, on rank 0; empty on other ranks."""
    from shardscope.frameworks.megatron.weights.export import gather_tensors

    return {name: tensor for name, tensor in gather_tensors(chunks, arch, optimizer) if tensor is not None}


def compute_logits(chunk: Any, ids: Any) -> Any:
    """[batch, seq_len, vocab_size] of a model that is whole but for tensor parallelism."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        mine = chunk(ids, positions, None).contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, dim=-1)


def step_deterministically(chunks: list[Any], optimizer: Any) -> None:
    """Take one step whose gradient is a function of each weight alone, so that degrees do not change it."""
    import torch

    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.sin(7 * parameter.detach().float()))
    assert optimizer.step()[0]


@contextlib.contextmanager
def make_trained_chunks(plan: Plan) -> Iterator[tuple[list[Any], Any, Any]]:
    """Yield chunks in gradient buffers, their optimizer, and transformers' model with their weights."""
    from shardscope.frameworks.megatron.engine import model
    from shardscope.frameworks.megatron.engine.optimizer_numbers import OptimizerNumbers
    from shardscope.frameworks.megatron.weights.load import load_hf

    with make_model(plan) as (source, models, config):
        chunks = model.wrap_chunks(plan, config, models)
        numbers = OptimizerNumbers(learning_rate=0.01, weight_decay=0.1)
        optimizer = model.build_optimizer(plan, config, chunks, numbers, None)
        load_hf(chunks, source.state_dict(), plan.architecture, optimizer)
        yield chunks, optimizer, source


def resume_at_other_degrees(path: Path, rank: int, before: Plan, after: Plan, beside: bool) -> dict[str, Any]:
    """Take two steps, save, take one more; and take that one on ranks of other degrees that loaded it.

    ``beside``: the checkpoint is written while the third step is taken.
    """
    from shardscope.frameworks.megatron.engine import checkpointing

    arch, found = before.architecture, {}
    with make_trained_chunks(before) as (chunks, optimizer, source):
        weights = gather_state_dict(chunks, arch, optimizer)
        found["loaded"] = compute_largest_difference(source, weights) if rank == 0 else 0.0
        for _ in range(2):
            step_deterministically(chunks, optimizer)
        position = {"num_steps_done": 2}
        if beside:
            saving = checkpointing.AsyncSave(path, chunks, optimizer, position)
            step_deterministically(chunks, optimizer)
            saving.poll()
            saving.wait()
        else:
            checkpointing.save_checkpoint(path, chunks, optimizer, position)
            step_deterministically(chunks, optimizer)
        straight = gather_state_dict(chunks, arch, optimizer)
        found["moved"] = compute_largest_difference(source, straight) if rank == 0 else 1.0
    with make_trained_chunks(after) as (chunks, optimizer, _):
        found["num_steps"] = checkpointing.load_checkpoint(path, after, chunks, optimizer)
        step_deterministically(chunks, optimizer)
        again = gather_state_dict(chunks, arch, optimizer)
    found["apart"] = max((float((straight[name] - again[name]).abs().max()) for name in straight), default=0)
    return found


def export_and_reload(
    path: Path, rank: int, family: str, layout: dict[str, Any], limit: int
) -> dict[str, Any]:
    """Return what transformers loads from an export in files of up to ``limit`` bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from shardscope.frameworks.megatron.weights.export import export_hf

    with make_model(plan(family, **layout)) as (source, chunks, _):
        export_hf(chunks, architecture(family), source.config, path, max_file_bytes=limit)
    if rank:
        return {}
    opened = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.arange(32)[None]
    with torch.no_grad():
        apart = float((opened(ids).logits - source(ids).logits).abs().max())
    return {"apart": apart, "files": sorted(file.name for file in path.iterdir())}


def found_on_a_rank(folder: Path, ctx: StandInContext) -> dict[str, Any]:
    import torch

    results: dict[str, Any] = {}
    torch.manual_seed(3)
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 32))
    for name, (family, layout) in ({family: (family, {}) for family in FAMILIES} | CUTS).items():
        with make_model(plan(family, **layout)) as (source, chunks, _):
            back = gather_state_dict(chunks, architecture(family))
            case: dict[str, Any] = {
                "back": compute_largest_difference(source, back) if ctx.rank == 0 else len(back)
            }
            if name in WITH_LOGITS:
                with torch.no_grad():
                    wanted = source(ids).logits
                logits = compute_logits(chunks[0], ids)
                case["logits"] = float((logits[..., : wanted.shape[-1]] - wanted).abs().max())
                case["size"] = float(wanted.abs().max())
                case["padding"] = float(logits[..., wanted.shape[-1] :].max())
        results[name] = case
    for name, (before, after, beside) in CHECKPOINTS.items():
        path = folder / name.replace(" ", "-")
        results[name] = resume_at_other_degrees(path, ctx.rank, plan(**before), plan(**after), beside)
    for name, case in EXPORTS.items():
        results[name] = export_and_reload(folder / name.replace(" ", "-"), ctx.rank, *case)
    results["processes"] = [[child.pid, read_start_time(child.pid)] for child in psutil.Process().children()]
    return results


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each of four ranks, by case."""
    skip_without("megatron")
    folder = tmp_path_factory.mktemp("megatron-weights")
    import transformers  # noqa: F401

    with pytest.MonkeyPatch.context() as patched:
        # Seconds on a quiet machine; every case forks writers and talks to three others.
        patched.setattr(gloo_ranks, "RANK_SECONDS", 300)
        return on_ranks(4, plan("llama"), partial(found_on_a_rank, folder), folder)


@thorough()
@pytest.mark.parametrize("name", [*FAMILIES, *CUTS])
def test_weights_round_trip_bit_by_bit(rank_results: list[dict[str, Any]], name: str) -> None:
    assert rank_results[0][name]["back"] == 0.0
    assert all(rank[name]["back"] == 0 for rank in rank_results[1:])  # rank 0 alone holds the model


@thorough()
@pytest.mark.parametrize("name", WITH_LOGITS)
def test_logits_equal_those_of_transformers(rank_results: list[dict[str, Any]], name: str) -> None:
    for rank in rank_results:
        assert rank[name]["logits"] < 1e-5 * max(rank[name]["size"], 1.0)
        # Rows that pad the vocabulary have no share in a softmax.
        assert rank[name]["padding"] < -1e30


@thorough()
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_fault_31_a_checkpoint_resumes_exactly_at_other_degrees(
    rank_results: list[dict[str, Any]], name: str
) -> None:
    case = rank_results[0][name]
    assert case["loaded"] == 0.0  # fp32 copies of 16-bit weights have every bit of what was built
    assert case["moved"] > 1e-3
    assert case["apart"] == 0.0
    assert all(rank[name]["num_steps"] == 2 for rank in rank_results)


@thorough()
def test_saving_a_checkpoint_leaves_no_process_behind(rank_results: list[dict[str, Any]]) -> None:
    """Ranks end here as killed ones do, past whatever Python would tidy up."""
    begun = [tuple(process) for rank in rank_results for process in rank["processes"]]
    assert begun, "megatron-core has a process beside a rank that saved; without one this test is void"
    deadline = time.monotonic() + 5
    while (left := [process for process in begun if is_alive(*process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@thorough()
@pytest.mark.parametrize("name", EXPORTS)
def test_transformers_opens_an_export(rank_results: list[dict[str, Any]], name: str) -> None:
    assert rank_results[0][name]["apart"] == 0.0
    files = rank_results[0][name]["files"]
    assert "config.json" in files
    several = EXPORTS[name][2] < 10**6
    assert ("model.safetensors.index.json" in files) == several
    assert ("model.safetensors" in files) != several


def test_a_family_without_a_weight_mapping_raises() -> None:
    gemma = Architecture(name="gemma", model_type="gemma", **{**SHAPE, "tie_word_embeddings": True})
    with pytest.raises(ValueError, match=r"Architecture\.model_type.*'gemma'.*mapping.*fsdp2"):
        check_mapped(gemma)


def test_rotary_settings_are_converted_or_raise() -> None:
    needs("torch")
    needs("transformers")
    from transformers import LlamaConfig

    from shardscope.frameworks.megatron.weights.config import convert_rope

    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    numbers = convert_rope(LlamaConfig(rope_parameters=llama3))
    assert numbers["rotary_base"] == 500_000.0
    assert numbers["rope_scaling"] and numbers["rope_scaling_factor"] == 8.0
    with pytest.raises(ValueError, match="rope_parameters"):
        convert_rope(LlamaConfig(rope_parameters={**llama3, "high_freq_factor": 2.0}))
    with pytest.raises(ValueError, match="rope_parameters"):
        convert_rope(LlamaConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}))
