"""Megatron-core's plain script: its ``GPTModel``, schedules and optimizer, called directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.export.files import Absent, Exported
from shardscope.export.saving import IMPORTS as SAVE_IMPORTS
from shardscope.export.saving import SAVE_PART
from shardscope.export.script import SCRIPT_FILE, plain_script
from shardscope.export.stages import UNTIED
from shardscope.frameworks.megatron.export_cpu import cpu_imports, on_cpu
from shardscope.frameworks.megatron.export_model import core_model, source_bytes
from shardscope.frameworks.megatron.limits import check_trainable
from shardscope.frameworks.megatron.precision_aware import reduces_in_fp32
from shardscope.memory.words import gib

if TYPE_CHECKING:
    from shardscope.plan import Plan

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}

IMPORTS = """
import datetime
import re
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
"""

TRAINING = (
    r'''
def connect(device):
    """Meet the other ranks."""
@@ON_CPU@@    patience = datetime.timedelta(hours=6)  # with ranks that read the model one after another
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)


def disconnect():
    """Leave the other ranks."""
    dist.destroy_process_group()


def in_turns(make, device):
    """``make()`` on as many ranks of a node at once as its memory has room for whole models."""
    free = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and limit.read_text().strip() != "max":  # a container's or a job's own
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    ranks = @@ON_NODE@@  # of a node
    at_once = torch.tensor(max(1, min(ranks, int(0.8 * free / SOURCE_BYTES))), device=device)
    dist.all_reduce(at_once, op=dist.ReduceOp.MIN)
    own = int(os.environ["LOCAL_RANK"]) // at_once.item()
    for turn in range(-(-ranks // at_once.item())):
        if turn == own:
            make()
        dist.barrier()


def fill(chunks, name, said):
    """The weights of this rank's chunks, of a whole model that is gone then."""
    torch.manual_seed(0)
    state = build_source(name, said).state_dict()
    for chunk in chunks:
        load(chunk, state, said)


class Training:
    """Megatron-core's gradient buffers, optimizer and schedule around this rank's model chunks."""

    def __init__(self, name, device, rate):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=@@TP@@,
            pipeline_model_parallel_size=PP,
            virtual_pipeline_model_parallel_size=VPP if VPP > 1 else None,
            context_parallel_size=@@CP@@,
            expert_model_parallel_size=@@EP@@,
            expert_tensor_parallel_size=@@ETP@@,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(0)
        self.said = source_config(name)
        config = core_config(self.said)
        chunks = [build_chunk(config, self.said, number) for number in range(VPP)]
        in_turns(functools.partial(fill, chunks, name, self.said), device)
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=@@FP32@@,
            use_distributed_optimizer=@@SHARDED@@,
            overlap_grad_reduce=@@OVERLAP@@,
            overlap_param_gather=@@GATHER@@,
        )
        self.chunks = [
            DistributedDataParallel(config, options, chunk.to(device).train(), disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        self.model = torch.nn.ModuleList(self.chunks)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=@@OPTIMIZER@@,
                lr=rate,
                weight_decay=0.1,
                adam_beta1=0.9,
                adam_beta2=0.95,
                sgd_momentum=0.9,
                params_dtype=DTYPE,
                bf16=DTYPE == torch.bfloat16,
                fp16=DTYPE == torch.float16,
                initial_loss_scale=2.0**12,
                loss_scale_window=2000,
                hysteresis=1,
                use_distributed_optimizer=@@SHARDED@@,
                overlap_param_gather=@@GATHER@@,
                clip_grad=MAX_GRAD_NORM,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        for group in self.optimizer.param_groups:  # matrices alone are decayed
            group["weight_decay"] = 0.1 * group["wd_mult"]
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
@@SYNC@@
    def step(self, micro_batches):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        total = torch.zeros((), device=micro_batches.device)

@@FORWARD@@
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=SEQ_LEN,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        self.optimizer.step()
        return total.item() * @@SHARES@@

    def save(self, folder):
        """Each pipeline stage's layers, joined, in the type of the chunks; its first rank writes them."""
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        is_first = data_rank == parallel_state.get_tensor_model_parallel_rank() == 0
        weights = {}
        for chunk in self.chunks:
@@GATHERED@@            for name, whole in taken(chunk.module, self.said):
                if is_first:
                    weights[name] = whole.to("cpu", copy=True)
@@UNTIED@@        save_part(folder, self.said, weights, parallel_state.get_pipeline_model_parallel_rank(), PP)
'''
    + SAVE_PART
)

SYNC = """\
        syncs = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = syncs if VPP > 1 else syncs[0]
        if VPP > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in self.chunks]
"""
GATHERED = """\
            chunk.start_param_sync(force_sync=True)  # what the next forward would gather
"""
GATHER = """\
        if VPP > 1:
            config.param_sync_func = [chunk.start_param_sync for chunk in self.chunks]
"""

FORWARD = """\
        def loss(losses):
            mean = losses[:, :-1].float().mean()  # the last token of a window has no next one
            total.add_(mean.detach() / NUM_MICRO_BATCHES)
            return mean, {}

        def forward(micros, model):
            tokens = next(micros)
            positions = torch.arange(SEQ_LEN, device=tokens.device).expand_as(tokens)
            return model(tokens, positions, None, labels=tokens.roll(-1, dims=1)), loss
"""
FORWARD_OF_PARTS = """\
        def loss(counts, losses):  # a share of the mean: the schedule multiplies by the ranks that have one
            share = (losses.float() * counts).sum() / (MICRO_BATCH_SIZE * (SEQ_LEN - 1))
            total.add_(share.detach() / NUM_MICRO_BATCHES)
            return share, {}

        def forward(micros, model):
            tokens = next(micros)
            positions = torch.arange(SEQ_LEN, device=tokens.device).expand_as(tokens)
            labels, counts = tokens.roll(-1, dims=1), positions < SEQ_LEN - 1  # the last has no next one
            whole = {"tokens": tokens, "positions": positions, "labels": labels, "counts": counts}
            own = get_batch_on_this_cp_rank(whole)  # a piece from the front and one from the back
            losses = model(own["tokens"], own["positions"], None, labels=own["labels"])
            return losses, functools.partial(loss, own["counts"])
"""
OF_PARTS_IMPORTS = "from megatron.core.utils import get_batch_on_this_cp_rank\n"
SHARES = "PP  # the last stage's, of PP that have a share"
SHARES_OF_PARTS = "PP * {cp}  # the last stage's, of PP that have a share, in {cp} parts"

NOTES = """Megatron-core directly, on its own modules. Every rank reads the whole model of transformers into
host memory ({whole} GiB in fp32), fresh or by --model, and keeps its own part; where a node has no room for
as many of them as ranks, its ranks take turns. Of 16 bits, the optimizer's fp32 copies begin as those left
them. What the plan does not hold (rotary base, epsilons) is its family's own, or the model's that
--model names; one of other sizes, or that Megatron-core computes otherwise, is refused."""


def script(plan: Plan) -> Exported | Absent:
    """The script, or why there is none."""
    why = _why_not(plan)
    if why is not None:
        return Absent(name=SCRIPT_FILE, why=why)
    layout: Any = plan.layout
    degrees = plan.degrees
    overlaps = (SYNC if layout.overlap_grad_reduce else "") + (GATHER if layout.overlap_param_gather else "")
    parts = {
        "ON_CPU": "" if plan.on_gpu else "    cuda_means_cpu()\n",
        "ON_NODE": repr(plan.cluster.gpus_per_node),
        "TP": repr(degrees.tp),
        "CP": repr(degrees.cp),
        "FORWARD": (FORWARD_OF_PARTS if degrees.cp > 1 else FORWARD).rstrip("\n"),
        "SHARES": SHARES_OF_PARTS.format(cp=degrees.cp) if degrees.cp > 1 else SHARES,
        "EP": repr(degrees.ep),
        "ETP": repr(layout.expert_tp),
        "FP32": repr(reduces_in_fp32(layout, plan.recipe)),
        "SHARDED": repr(layout.distributed_optimizer),
        "OVERLAP": repr(layout.overlap_grad_reduce),
        "GATHER": repr(layout.overlap_param_gather),
        "GATHERED": GATHERED if layout.overlap_param_gather else "",
        "OPTIMIZER": repr(OPTIMIZERS[plan.recipe.optimizer]),
        "SYNC": overlaps,
        "UNTIED": UNTIED if plan.architecture.tie_word_embeddings else "",
    }
    training = ("" if plan.on_gpu else on_cpu(plan)) + TRAINING
    for name, value in parts.items():
        training = training.replace(f"@@{name}@@", value)
    imports = IMPORTS + SAVE_IMPORTS + ("" if plan.on_gpu else cpu_imports(plan))
    imports += OF_PARTS_IMPORTS if degrees.cp > 1 else ""
    notes = NOTES.format(whole=gib(source_bytes(plan.architecture)))
    return plain_script(plan, training, imports, notes, optimizers=tuple(OPTIMIZERS), make_model=core_model)


def _why_not(plan: Plan) -> str | None:
    try:
        check_trainable(plan)
    except ValueError as refusal:
        return str(refusal)
    return None
