"""Megatron-core's plain script: its ``GPTModel``, schedules and optimizer, called directly."""

from __future__ import annotations

import pprint
from typing import TYPE_CHECKING, Any

from shardscope.export.files import Absent, Exported
from shardscope.export.script import SCRIPT_FILE, plain_script
from shardscope.export.text import WIDTH
from shardscope.frameworks.megatron.config_limits import LLAMA3_SCALING
from shardscope.frameworks.megatron.core_config import padded_vocab_size, transformer_config
from shardscope.frameworks.megatron.export_cpu import cpu_imports, on_cpu
from shardscope.frameworks.megatron.export_weights import loads
from shardscope.frameworks.megatron.limits import check_trainable
from shardscope.frameworks.megatron.precision_aware import reduces_in_fp32

if TYPE_CHECKING:
    from shardscope.plan import Plan

SCRIPTED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Families of one mapping; GPT-2's is another."""
SAME = (
    *("model_type", "num_hidden_layers", "vocab_size", "hidden_act", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    *("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "router_jitter_noise",
)
"""Of transformers' config: what a checkpoint may not have otherwise than the plan, though its tensors may be
copied all the same."""
FUSED = (
    *("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"),
    *("gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
    *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
)
"""What a rehearsal asks for and no training here: kernels of other libraries, and dropped tokens."""
DTYPES = {"bf16-mixed": "torch.bfloat16", "bf16": "torch.bfloat16", "fp16-mixed": "torch.float16"}
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}

IMPORTS = """
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
"""

MODEL = '''
DTYPE = @@DTYPE@@  # of weights and activations; of 16 bits the optimizer keeps fp32 copies
PP, VPP = @@STAGES@@
PADDED_VOCAB_SIZE = @@PADDED@@  # a multiple of 128 for each tensor-parallel rank
CONFIG = @@CORE@@  # TransformerConfig's
SAME = @@SAME@@  # of the model that is read and of the plan's
LLAMA3_SCALING = @@LLAMA3@@  # megatron-core's own constants


def build_source(name):
    """The model of transformers whose weights are trained: fresh ones, or the checkpoint called ``name``."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL_CONFIG), dtype=torch.float32)


def check_source(said):
    """Stop at a model that would train as another one: ``said`` is transformers' config of it."""
    planned = AutoConfig.for_model(**MODEL_CONFIG)
    for name in SAME:
        own, plans = (value_of(config, name) for config in (said, planned))
        if own != plans:
            raise SystemExit(f"the model's {name} is {own!r}, and the plan's {plans!r}: export a plan of it")
    rope = said.rope_parameters
    kind, scaling = rope.get("rope_type", "default"), {name: rope.get(name) for name in LLAMA3_SCALING}
    if kind != "default" and (kind != "llama3" or scaling != LLAMA3_SCALING):
        raise SystemExit(f"Megatron-core has default rotary angles, or llama3's {LLAMA3_SCALING}, not {rope}")
    window, kinds = getattr(said, "sliding_window", None), getattr(said, "layer_types", None)
    if window and SEQ_LEN > window and (kinds is None or "sliding_attention" in kinds):
        raise SystemExit(f"the model attends to {window} tokens, and all {SEQ_LEN} would be attended to here")


def value_of(config, name):
    """What ``config`` says; some families say a head's width only where it is not an equal share."""
    found = getattr(config, name, None)
    return config.hidden_size // config.num_attention_heads if name == "head_dim" and not found else found


class Norm:
    """torch's norm, with the mark by which its gradient is summed under sequence parallelism."""

    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def core_config(said):
    """Megatron-core's configuration of a model that computes what transformers' config ``said`` does."""
    as_it_is = ("init_method", "output_layer_init_method", "embedding_init_method")  # weights are loaded
    return TransformerConfig(
        **CONFIG,
        **dict.fromkeys(as_it_is, lambda tensor: tensor),
        layernorm_epsilon=said.rms_norm_eps,
        activation_func=torch.nn.functional.silu,@@ROUTER@@
        params_dtype=DTYPE,
        pipeline_dtype=DTYPE,
        bf16=DTYPE == torch.bfloat16,
        fp16=DTYPE == torch.float16,
        overlap_p2p_comm=VPP > 1,
        batch_p2p_comm=VPP == 1,
    )


def build_chunk(config, said, number):
    """One of this stage's model chunks, of Megatron-core's own modules: no Transformer Engine."""
    virtual = number if VPP > 1 else None
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual
    )
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        if config.qk_layernorm:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = Norm
    rope = said.rope_parameters
    scales = rope.get("rope_type") == "llama3"
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunk = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=Norm),
        PADDED_VOCAB_SIZE,
        SEQ_LEN,
        pre_process=stage == 0 and number == 0,
        post_process=stage == PP - 1 and number == VPP - 1,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=scales,
        rope_scaling_factor=rope["factor"] if scales else 8.0,
        share_embeddings_and_output_weights=said.tie_word_embeddings,
        vp_stage=virtual,
    )
    if chunk.post_process:
        chunk.output_layer.register_forward_hook(mute_padding)
    return chunk.to(DTYPE)


def mute_padding(module, inputs, output):
    """Rows that only pad the vocabulary have no share in the loss."""
    logits, bias = output
    width = logits.shape[-1]
    first = parallel_state.get_tensor_model_parallel_rank() * width
    padding = torch.arange(first, first + width, device=logits.device) >= MODEL_CONFIG["vocab_size"]
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min), bias
'''

TRAINING = '''
def connect(device):
    """Meet the other ranks."""
@@ON_CPU@@    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def disconnect():
    """Leave the other ranks."""
    dist.destroy_process_group()


class Training:
    """Megatron-core's gradient buffers, optimizer and schedule around this rank's model chunks."""

    def __init__(self, name, device, rate):
        source = build_source(name)
        check_source(source.config)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=@@TP@@,
            pipeline_model_parallel_size=PP,
            virtual_pipeline_model_parallel_size=VPP if VPP > 1 else None,
            expert_model_parallel_size=@@EP@@,
            expert_tensor_parallel_size=@@ETP@@,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(0)
        config = core_config(source.config)
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=@@FP32@@,
            use_distributed_optimizer=@@SHARDED@@,
            overlap_grad_reduce=@@OVERLAP@@,
            overlap_param_gather=@@GATHER@@,
        )
        self.chunks = []
        for number in range(VPP):
            chunk = build_chunk(config, source.config, number)
            load(chunk, source.state_dict(), source.config)
            chunk = chunk.to(device).train()
            wrapped = DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)
            self.chunks.append(wrapped)
        del source
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

        def loss(losses):
            mean = losses[:, :-1].float().mean()  # the last token of a window has no next one
            total.add_(mean.detach() / NUM_MICRO_BATCHES)
            return mean, {}

        def forward(micros, model):
            tokens = next(micros)
            positions = torch.arange(SEQ_LEN, device=tokens.device).expand_as(tokens)
            return model(tokens, positions, None, labels=tokens.roll(-1, dims=1)), loss

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
        return total.item() * PP  # the last stage's, of PP that have a share
'''

ROUTER = """
        moe_router_pre_softmax=not getattr(said, "norm_topk_prob", True),"""
SYNC = """\
        syncs = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = syncs if VPP > 1 else syncs[0]
        if VPP > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in self.chunks]
"""
GATHER = """\
        if VPP > 1:
            config.param_sync_func = [chunk.start_param_sync for chunk in self.chunks]
"""

NOTES = """Megatron-core directly, on its own modules. Every rank reads the whole model of transformers into
host memory, fresh or by --model, and keeps its own part. Of 16 bits, the optimizer's fp32 copies begin as
those left them. What the plan does not hold (rotary base, epsilons) is its family's own, or the model's that
--model names; one of other sizes, or that Megatron-core computes otherwise, is refused."""


def script(plan: Plan) -> Exported | Absent:
    """The script, or why there is none."""
    why = _why_not(plan)
    if why is not None:
        return Absent(name=SCRIPT_FILE, why=why)
    layout: Any = plan.layout
    degrees, arch = plan.degrees, plan.architecture
    overlaps = (SYNC if layout.overlap_grad_reduce else "") + (GATHER if layout.overlap_param_gather else "")
    parts = {
        "DTYPE": DTYPES.get(plan.recipe.precision, "torch.float32"),
        "STAGES": f"{degrees.pp}, {degrees.vpp}",
        "PADDED": repr(int(padded_vocab_size(arch.vocab_size, degrees.tp))),
        "CORE": pprint.pformat(_core(plan), width=WIDTH, sort_dicts=False),
        "SAME": pprint.pformat(SAME, width=WIDTH, compact=True),
        "LLAMA3": repr(LLAMA3_SCALING),
        "ROUTER": ROUTER if arch.mixture_of_experts is not None else "",
        "ON_CPU": "" if plan.on_gpu else "    cuda_means_cpu()\n",
        "TP": repr(degrees.tp),
        "EP": repr(degrees.ep),
        "ETP": repr(layout.expert_tp),
        "FP32": repr(reduces_in_fp32(layout, plan.recipe)),
        "SHARDED": repr(layout.distributed_optimizer),
        "OVERLAP": repr(layout.overlap_grad_reduce),
        "GATHER": repr(layout.overlap_param_gather),
        "OPTIMIZER": repr(OPTIMIZERS[plan.recipe.optimizer]),
        "SYNC": overlaps,
    }
    model, training = MODEL, ("" if plan.on_gpu else on_cpu(plan)) + TRAINING
    for name, value in parts.items():
        model, training = (text.replace(f"@@{name}@@", value) for text in (model, training))
    optimizers = dict.fromkeys(OPTIMIZERS, "")
    imports = IMPORTS if plan.on_gpu else cpu_imports(plan, IMPORTS)
    return plain_script(plan, training, imports, NOTES, optimizers, model + loads(plan))


def _core(plan: Plan) -> dict[str, Any]:
    """``TransformerConfig``'s arguments that are not its defaults."""
    values = {name: value for name, value in transformer_config(plan).items() if name not in FUSED}
    if plan.architecture.mixture_of_experts is not None:
        del values["moe_router_pre_softmax"]
        values |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    # None and False are the defaults of whatever they stand for, but of biases.
    biases = values["add_bias_linear"]
    told = {name: value for name, value in values.items() if value is not None and value is not False}
    return told | {"add_bias_linear": biases}


def _why_not(plan: Plan) -> str | None:
    layout: Any = plan.layout
    try:
        check_trainable(plan)
    except ValueError as refusal:
        return str(refusal)
    model_type = plan.architecture.model_type
    if model_type not in SCRIPTED:
        return f"a plain script has the mapping of {', '.join(SCRIPTED)}, and the model is {model_type!r}."
    if layout.overlap_grad_reduce and not plan.on_gpu:
        return (
            "overlap_grad_reduce launches several collectives as one, which gloo has not; a plain script "
            "for CPU ranks takes them one by one, with overlap_grad_reduce=False."
        )
    return None
