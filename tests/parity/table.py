"""The rows of the parity table: frameworks, layouts, numbers of ranks and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardscope import Architecture, Cluster, Layout, Plan, Recipe
from shardscope.core.layer_parts import MixtureOfExperts

GLOBAL_ROWS = 8
"""Sequences of a global batch, however many ranks share them."""
SEQ_LEN = 32
VOCABULARY = 512
NUM_LAYERS = 4

Family = Literal["llama", "mixtral", "llama of many tokens"]
Trained = Literal["all weights", "LoRA", "QLoRA", "LoRA over int8"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    num_ranks: int
    framework: str
    """The constructor of ``Layout``."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    family: Family = "llama"
    trained: Trained = "all weights"
    """Trained part of the model; the rest is frozen."""
    num_nodes: int = 1
    """More than one: nodes of a real cluster on this machine, with the same share of the ranks on each."""
    scheduler: Literal["slurm", "ray"] = "slurm"
    """The cluster's, for more than one node."""
    num_micro_batches: int = 2
    """On each data-parallel rank: accumulation, or what a pipeline is filled with."""
    stopped_on_cpu: str = ""
    """Part of the error that the row raises on CPU ranks; the row passes if it does."""
    stopping_call: str = ""
    """The call in the framework's own code that fails on a CPU rank."""
    needs: tuple[str, ...] = ()
    """Packages that a machine may lack: an error that names one of them is "not here", not a failure."""
    fast: bool = False
    """Whether the tests run it; ``make parity`` runs all."""

    @property
    def framework_name(self) -> str:
        """Return the framework's name as in a recorded setup, in lower case."""
        return "deepspeed" if self.framework == "zero" else self.framework

    @property
    def modules(self) -> tuple[str, ...]:
        """Packages beyond torch that the row runs."""
        packed = "QLoRA" in self.trained or "int8" in self.trained
        own = {"zero": ("deepspeed",), "megatron": ("megatron",)}.get(self.framework, ())
        cluster = ("submitit" if self.scheduler == "slurm" else "ray",) if self.num_nodes > 1 else ()
        return (*own, *(("bitsandbytes",) if packed else ()), *cluster)

    @property
    def reference(self) -> Row:
        """Return the single process that the row is compared with; rows of one model share it."""
        what = "" if self.trained == "all weights" else f", {self.trained}"
        return Row(
            name=f"single {self.family}{what}",
            num_ranks=1,
            framework="ddp",
            family=self.family,
            trained=self.trained,
            num_micro_batches=1,
        )

    def plan(self, here: Cluster | None = None, **recipe: Any) -> Plan:
        """Return the plan on ``num_ranks`` of the GPUs ``here``, or on CPU ranks, in fp32 by default."""
        architecture = FAMILIES[self.family]()
        cluster = replace(
            here or Cluster.parse("1xcpu"),
            gpus_per_node=self.num_ranks // self.num_nodes,
            num_nodes=self.num_nodes,
        )
        layout = getattr(Layout, self.framework)(**self.layout)
        sizes: dict[str, Any] = {
            "seq_len": SEQ_LEN,
            "global_batch_size": GLOBAL_ROWS,
            "precision": "fp32",
            **TRAINED[self.trained],
        }
        # The degrees are needed to choose the micro-batch; a micro-batch of one row is valid for any of them.
        ranks = Plan(architecture, cluster, Recipe(**sizes), layout).degrees.data_parallel
        rows = GLOBAL_ROWS // (ranks * self.num_micro_batches)
        return Plan(architecture, cluster, Recipe(**{**sizes, "micro_batch_size": rows, **recipe}), layout)


def make_llama() -> Architecture:
    """Build a Llama with four layers and grouped heads, which trains a step in milliseconds."""
    return Architecture(
        name="4-layer Llama",
        model_type="llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )


def make_mixtral() -> Architecture:
    """Build the same with four experts per layer, two of them active per token."""
    experts = MixtureOfExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    return replace(make_llama(), name="4-expert Mixtral", model_type="mixtral", mixture_of_experts=experts)


def many_token_llama() -> Architecture:
    """Build a Llama whose embedding and head have 2 MiB per rank: ZeRO writes no file below 1 MiB."""
    return replace(make_llama(), name="Llama of 16,384 tokens", vocab_size=16_384)


_ADAPTERS: Mapping[str, Any] = {
    "lora_rank": 32,
    "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
TRAINED: Mapping[Trained, Mapping[str, Any]] = {
    "all weights": {},
    "LoRA": {"method": "lora", **_ADAPTERS},
    "QLoRA": {"method": "qlora", **_ADAPTERS},
    "LoRA over int8": {"method": "lora", "quantization": "int8", **_ADAPTERS},
}
"""Fields of the recipe."""

FAMILIES: Mapping[Family, Callable[[], Architecture]] = {
    "llama": make_llama,
    "mixtral": make_mixtral,
    "llama of many tokens": many_token_llama,
}


def _make_row(name: str, num_ranks: int, framework: str, **fields: Any) -> Row:
    names = (
        *(
            "family",
            "trained",
            "num_nodes",
            "scheduler",
            "num_micro_batches",
            "stopped_on_cpu",
            "stopping_call",
            "needs",
        ),
        "fast",
    )
    own = {key: fields.pop(key) for key in names if key in fields}
    return Row(name=name, num_ranks=num_ranks, framework=framework, layout=fields, **own)


ON_TWO_NODES: tuple[Row, ...] = tuple(
    _make_row(f"{name}, two Slurm nodes", num_ranks, framework, num_nodes=2, **fields)
    for name, num_ranks, framework, fields in (
        ("ddp(2)", 2, "ddp", {}),
        ("fsdp2(2)", 2, "fsdp2", {}),
        ("hsdp(2x2)", 4, "fsdp2", {"shard": 2, "replicate": 2}),
        ("zero-1(2)", 2, "zero", {"stage": 1}),
        ("zero-2(2)", 2, "zero", {"stage": 2}),
        ("zero-3(2)", 2, "zero", {"stage": 3}),
        ("megatron pp2", 2, "megatron", {"pp": 2, "num_micro_batches": 4}),
        ("megatron tp2 x dp2", 4, "megatron", {"tp": 2, "sequence_parallel": False}),
    )
)
"""Replicas, pipeline stages or shards across the nodes; tensor parallelism inside."""

ON_TWO_RAY_NODES: tuple[Row, ...] = tuple(
    replace(row, name=row.name.replace("Slurm", "Ray"), scheduler="ray") for row in ON_TWO_NODES
)

ROWS: tuple[Row, ...] = (
    _make_row("ddp(2)", 2, "ddp", fast=True),
    _make_row("fsdp2(2)", 2, "fsdp2", fast=True),
    _make_row("fsdp2(4)", 4, "fsdp2"),
    _make_row("hsdp(2x2)", 4, "fsdp2", shard=2, replicate=2, fast=True),
    _make_row("fsdp2(2) x tp(2)", 4, "fsdp2", shard=2, tp=2, fast=True),
    _make_row("fsdp2 cp(2)", 2, "fsdp2", cp=2, fast=True),
    _make_row("fsdp2(2) x cp(2)", 4, "fsdp2", shard=2, cp=2),
    _make_row("hsdp(2) x cp(2)", 4, "fsdp2", shard=1, replicate=2, cp=2),
    _make_row("fsdp2 pp(2)", 2, "fsdp2", pp=2, num_micro_batches=4, fast=True),
    _make_row("fsdp2 pp(2) vpp(2)", 2, "fsdp2", pp=2, vpp=2, num_micro_batches=4),
    _make_row("fsdp2 pp(2), GPipe", 2, "fsdp2", pp=2, num_micro_batches=4, pipeline_schedule="GPipe"),
    _make_row("zero-0(2)", 2, "zero", stage=0),
    _make_row("zero-1(2)", 2, "zero", stage=1),
    _make_row("zero-2(2)", 2, "zero", stage=2),
    _make_row("zero-3(2)", 2, "zero", stage=3, fast=True),
    _make_row("zero-0 tp(2)", 2, "zero", stage=0, tp=2),
    _make_row("zero-1(2) x tp(2)", 4, "zero", stage=1, tp=2),
    _make_row("zero-2(2) x tp(2)", 4, "zero", stage=2, tp=2),
    _make_row("zero-0 pp(2) x dp(2)", 4, "zero", stage=0, pp=2, num_micro_batches=4),
    _make_row("zero-1 pp(2)", 2, "zero", stage=1, pp=2, num_micro_batches=4),
    _make_row("zero-1 pp(2) x dp(2)", 4, "zero", stage=1, pp=2, num_micro_batches=4),
    _make_row("zero-3(2) + cpu", 2, "zero", stage=3, offload_optimizer="cpu", offload_params="cpu"),
    _make_row(
        "zero-3(2) + nvme, many tokens",
        2,
        "zero",
        family="llama of many tokens",
        stage=3,
        offload_optimizer="nvme",
        offload_params="nvme",
        needs=("libaio", "async_io"),
    ),
    _make_row("megatron tp2", 2, "megatron", tp=2, sequence_parallel=False),
    _make_row("megatron tp2 + sequence parallel", 2, "megatron", tp=2, sequence_parallel=True),
    _make_row("megatron pp2", 2, "megatron", pp=2, num_micro_batches=4),
    _make_row("megatron tp2 x pp2", 4, "megatron", tp=2, pp=2, sequence_parallel=False, num_micro_batches=4),
    _make_row("megatron pp2 vpp2", 2, "megatron", pp=2, vpp=2, num_micro_batches=4, fast=True),
    _make_row("megatron dp2", 2, "megatron", distributed_optimizer=False),
    _make_row("megatron dp2 + distributed optimizer", 2, "megatron"),
    _make_row("ddp(2), LoRA", 2, "ddp", trained="LoRA"),
    _make_row("fsdp2(2), LoRA", 2, "fsdp2", trained="LoRA"),
    _make_row("zero-2(2), LoRA", 2, "zero", stage=2, trained="LoRA"),
    _make_row("zero-3(2), LoRA", 2, "zero", stage=3, trained="LoRA"),
    _make_row("ddp(2), QLoRA", 2, "ddp", trained="QLoRA"),
    _make_row("fsdp2(2), QLoRA", 2, "fsdp2", trained="QLoRA", fast=True),
    _make_row("hsdp(2x2), QLoRA", 4, "fsdp2", shard=2, replicate=2, trained="QLoRA"),
    _make_row("ddp(2), LoRA over int8", 2, "ddp", trained="LoRA over int8"),
    _make_row("ddp(2), Mixtral", 2, "ddp", family="mixtral"),
    _make_row("fsdp2(2), Mixtral", 2, "fsdp2", family="mixtral"),
    _make_row("zero-1 ep(2), Mixtral", 2, "zero", stage=1, ep=2, family="mixtral"),
    _make_row("zero-2 ep(2), Mixtral", 2, "zero", stage=2, ep=2, family="mixtral"),
    _make_row("megatron ep2, Mixtral", 2, "megatron", ep=2, family="mixtral", fast=True),
    _make_row(
        "megatron cp2",
        2,
        "megatron",
        cp=2,
        stopped_on_cpu="Layout.cp is 2",
        stopping_call='DotProductAttention.__init__, which asserts "Context parallelism is only supported by '
        'TEDotProductAttention!" (megatron/core/transformer/dot_product_attention.py). TEDotProductAttention '
        "is Transformer Engine's and has kernels of FlashAttention and cuDNN only (get_attention_backend)",
        # In 32 bits it has none on a GPU either: tests/gpu/test_megatron_context_gpu.py runs it in 16.
        needs=("Transformer Engine",),
    ),
    *ON_TWO_NODES,
    *ON_TWO_RAY_NODES,
)

QUICK: tuple[Row, ...] = tuple(row for row in ROWS if row.name in ("ddp(2)", "fsdp2(2)"))
"""Rows that run in seconds on CPU ranks, for the notebook."""

ONE_GPU_ROWS: tuple[Row, ...] = (
    _make_row("ddp(1)", 1, "ddp"),
    _make_row("fsdp2(1)", 1, "fsdp2"),
    _make_row("zero-1(1)", 1, "zero", stage=1),
    _make_row("zero-3(1)", 1, "zero", stage=3),
    _make_row("zero-3(1) + cpu", 1, "zero", stage=3, offload_optimizer="cpu", offload_params="cpu"),
    _make_row("megatron(1)", 1, "megatron"),
    _make_row("ddp(1), QLoRA", 1, "ddp", trained="QLoRA"),
    _make_row("fsdp2(1), QLoRA", 1, "fsdp2", trained="QLoRA"),
    _make_row("ddp(1), LoRA over int8", 1, "ddp", trained="LoRA over int8"),
)
"""Each engine on one GPU: real kernels without communication."""
