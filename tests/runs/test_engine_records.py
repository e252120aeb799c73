"""Tests of options that engines record as applied; a run that contradicts its plan fails."""

from __future__ import annotations

from typing import Any

import pytest
from tests.requirements import needs

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks, tiny_plan  # noqa: E402

from shardscope.training.accounting.precision import check_precision, check_precision_of_copies  # noqa: E402
from shardscope.training.model.recompute import apply_recompute, check_recompute  # noqa: E402


def set_up(ctx: StandInContext, plan: Any, **replaced: Any) -> str | dict[str, Any]:
    """Return the record of a new engine of ``plan``, or its error; ``replaced``: names of its module."""
    from shardscope.frameworks.engines import get_engine_class
    from shardscope.frameworks.fsdp2.engine import engine
    from shardscope.training import micro_batch_engine
    from shardscope.training.model.model import build_model

    own = StandInContext(ctx.rank, ctx.world_size, plan, ctx.folder, ctx.device)
    own.engine = get_engine_class(plan)(own)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in replaced.items():
            patched.setattr(engine if hasattr(engine, name) else micro_batch_engine, name, value)
        try:
            own.engine.setup(lambda: build_model(plan.architecture))
        except RuntimeError as error:
            return str(error)
    record: dict[str, Any] = own.records["engine"]
    return record


ASKED: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "kept": {"layout": {"reshard_after_forward": False}},
    "offloaded": {"layout": {"offload": "cpu"}, "recompute": "full", "precision": "bf16-mixed"},
    "selective in bf16": {"recompute": "selective", "precision": "bf16"},
}


def read_errors(ctx: StandInContext) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

    def shard_differently(module: Any, **fields: Any) -> Any:
        """Call ``fully_shard`` with other options than the plan's."""
        changed = {name: value for name, value in others.items() if fields.get(name) is not None}
        return fully_shard(module, **{**fields, **changed})

    found: dict[str, Any] = {
        name: set_up(ctx, tiny_plan("fsdp2", 1, **fields)) for name, fields in ASKED.items()
    }
    others: dict[str, Any] = {"reshard_after_forward": False}
    found["resharded"] = set_up(ctx, tiny_plan("fsdp2", 1), fully_shard=shard_differently)
    others = {"offload_policy": OffloadPolicy()}
    found["at home"] = set_up(
        ctx, tiny_plan("fsdp2", 1, layout={"offload": "cpu"}), fully_shard=shard_differently
    )
    others = {"mp_policy": MixedPrecisionPolicy()}
    found["in fp32"] = set_up(
        ctx, tiny_plan("fsdp2", 1, precision="bf16-mixed"), fully_shard=shard_differently
    )
    nothing: Any = lambda *_: 0  # noqa: E731
    for framework in ("ddp", "fsdp2"):
        plan = tiny_plan(framework, 1, recompute="full")
        found[f"not recomputed, {framework}"] = set_up(ctx, plan, apply_recompute=nothing)
    found["ddp"] = set_up(ctx, tiny_plan("ddp", 1))
    found["accumulated, static"] = accumulated_in_a_static_graph()
    return found


def accumulated_in_a_static_graph() -> str:
    """Return torch's error for gradient accumulation with a static graph."""
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), static_graph=True)
    try:
        with module.no_sync():
            module(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "it went on"


@pytest.fixture(scope="module")
def errors_by_case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record or error of each case, all on one rank: it has shards, a policy and layers as many have."""
    one: dict[str, Any] = on_ranks(1, tiny_plan("fsdp2", 1), read_errors, tmp_path_factory.mktemp("finds"))[0]
    return one


def test_engine_records_contain_the_options_in_effect(errors_by_case: dict[str, Any]) -> None:
    names = ("reshard_after_forward", "offload", "recompute", "num_recomputed_layers", "precision")
    told = {case: tuple(errors_by_case[case][name] for name in names) for case in ASKED}
    assert told == {
        "as it comes": (True, None, "none", 0, "fp32"),
        "kept": (False, None, "none", 0, "fp32"),
        "offloaded": (True, "cpu", "full", 2, "bf16-mixed"),
        "selective in bf16": (True, None, "selective", 2, "bf16"),
    }


def test_engine_records_contain_prefetching_and_ddp_options(errors_by_case: dict[str, Any]) -> None:
    assert errors_by_case["as it comes"]["prefetch"] == {"forward": "implicit", "backward": "implicit"}
    assert (
        errors_by_case["ddp"]["static_graph"] is False
        and errors_by_case["ddp"]["find_unused_parameters"] is False
    )


def test_torch_still_cannot_accumulate_with_static_graph(errors_by_case: dict[str, Any]) -> None:
    """Where it can, DDP's engine may set ``static_graph`` for more than one micro-batch."""
    assert "expect_autograd_hooks_" in errors_by_case["accumulated, static"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("resharded", "the plan says reshard_after_forward=True, and the layers have False"),
        ("at home", "the plan says offload='cpu', and FSDP2 has None"),
        ("in fp32", "the plan says precision='bf16-mixed', and the engine has weights of float32 that are "),
        (
            "not recomputed, ddp",
            "the plan says recompute='full' in every layer, and the layers do: none, none",
        ),
        ("not recomputed, fsdp2", "the plan says recompute='full' in every layer"),
    ],
)
def test_another_option_than_the_plans_fails_the_run(
    case: str, words: str, errors_by_case: dict[str, Any]
) -> None:
    assert isinstance(errors_by_case[case], str), "it went on"
    assert words in errors_by_case[case]


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "offload"])
@pytest.mark.parametrize("interval", [1, 2])
def test_behaviour_of_layers_is_read_from_the_modules(recompute: str, interval: int) -> None:
    model = Layers()
    apply_recompute(model, recompute, interval)
    number = 0 if recompute == "none" else {1: 3, 2: 2}[interval]
    assert check_recompute(model, recompute, interval) == {
        "recompute": recompute,
        "num_recomputed_layers": number,
    }
    other = "full" if recompute != "full" else "selective"
    with pytest.raises(RuntimeError, match=f"the plan says recompute='{other}'"):
        check_recompute(model, other, interval)


def test_precision_is_read_from_dtypes() -> None:
    half, fp32 = torch.bfloat16, torch.float32
    assert check_precision("bf16-mixed", [fp32, fp32], half) == "bf16-mixed"
    assert check_precision("bf16", [half], half) == "bf16"
    for planned, kept, compute in (
        ("bf16-mixed", [half], half),
        ("bf16", [fp32, half], half),
        ("fp32", [fp32], torch.float16),
        ("bf16", [torch.float16], torch.float16),
    ):
        with pytest.raises(RuntimeError, match=f"the plan says precision='{planned}'"):
            check_precision(planned, kept, compute)
    # Frameworks with main copies of their own call both by one name.
    assert [check_precision_of_copies(name, half) for name in ("bf16", "bf16-mixed")] == [
        "bf16",
        "bf16-mixed",
    ]
    with pytest.raises(RuntimeError, match=r"fp16-mixed.*weights of bfloat16"):
        check_precision_of_copies("fp16-mixed", half)
