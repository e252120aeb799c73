"""How Megatron-core's plain script makes its model: ``GPTModel`` over the weights of a transformers one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.export.model import Model
from shardscope.export.source import check_of
from shardscope.export.text import literal
from shardscope.frameworks.megatron.config_limits import LLAMA3_SCALING
from shardscope.frameworks.megatron.core_config import padded_vocab_size, transformer_config
from shardscope.frameworks.megatron.export_weights import loads
from shardscope.memory.precision import FP32

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.plan import Plan

FUSED = (
    *("bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"),
    *("gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
    *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
)
"""What a rehearsal asks for and no training here: kernels of other libraries, and dropped tokens."""
DTYPES = {"bf16-mixed": "torch.bfloat16", "bf16": "torch.bfloat16", "fp16-mixed": "torch.float16"}

IMPORTS = """
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import AutoConfig, AutoModelForCausalLM
"""

MODEL = '''
DTYPE = @@DTYPE@@  # of weights and activations; of 16 bits the optimizer keeps fp32 copies
PP, VPP = @@STAGES@@
PADDED_VOCAB_SIZE = @@PADDED@@  # a multiple of 128 for each tensor-parallel rank
CONFIG = @@CORE@@  # TransformerConfig's
SOURCE_BYTES = @@SOURCE@@  # of the whole model in fp32
@@CHECKED@@
def source_config(name):
    """What transformers says of the model: the plan's, or the checkpoint called ``name``."""
    if not name:
        return AutoConfig.for_model(**MODEL_CONFIG)
    config = AutoConfig.from_pretrained(name, **ALWAYS)
    check_source(config)
    return config


def build_source(name, config):
    """The model of transformers whose weights are trained: fresh ones, or the checkpoint's."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
@@CHECK@@

class Norm:
    """torch's norm, with the mark by which its gradient is summed under sequence parallelism."""

    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        norm = torch.nn.@@NORM@@(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


@@FUSED@@def core_config(said):
    """Megatron-core's configuration of a model that computes what transformers' config ``said`` does."""
    as_it_is = ("init_method", "output_layer_init_method", "embedding_init_method")  # weights are loaded
    return TransformerConfig(
        **CONFIG,
        **dict.fromkeys(as_it_is, lambda tensor: tensor),
        layernorm_epsilon=said.@@EPSILON@@,
        activation_func=@@ACTIVATION@@,@@ROUTER@@
        params_dtype=DTYPE,
        pipeline_dtype=DTYPE,
        bf16=DTYPE == torch.bfloat16,
        fp16=DTYPE == torch.float16,
        overlap_p2p_comm=VPP > 1,
        batch_p2p_comm=VPP == 1,
    )


def build_chunk(config, said, number):
    """One of this stage's model chunks, of Megatron-core's own modules@@OWN@@."""
    virtual = number if VPP > 1 else None
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=virtual
    )
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
@@ATTENTION@@@@HEAD_NORMS@@@@ANGLES@@    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunk = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=Norm),
        PADDED_VOCAB_SIZE,
        @@POSITIONS@@,
        pre_process=stage == 0 and number == 0,
        post_process=stage == PP - 1 and number == VPP - 1,
@@EMBEDDED@@        share_embeddings_and_output_weights=said.tie_word_embeddings,
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

HEAD_NORMS = """\
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
"""
FUSED_ATTENTION = '''class FusedAttention(DotProductAttention):
    """Causal attention in torch's fused kernels, which keep no scores."""

    def forward(self, query, key, value, *_, **__):  # each of shape (tokens, rows, heads, width)
        # Copied, for values are a view of the whole product and would keep all of it for backward.
        parts = [tensor.contiguous().permute(1, 2, 0, 3) for tensor in (query, key, value)]
        options = {"scale": self.softmax_scale, "enable_gqa": key.shape[2] != query.shape[2]}
        attended = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, **options)
        return attended.permute(2, 0, 1, 3).flatten(2)


'''
ATTENTION = """\
        parts.self_attention.submodules.core_attention = @@CLASS@@
"""
TE_IMPORTS = "from megatron.core.extensions.transformer_engine import TEDotProductAttention\n"
FUSED_IMPORTS = "from megatron.core.transformer.dot_product_attention import DotProductAttention\n"
ROUTER = """
        moe_router_pre_softmax=not getattr(said, "norm_topk_prob", True),"""


class Family(NamedTuple):
    """What families' scripts differ in, beside the mapping of weights."""

    norm: str
    epsilon: str
    activation: str
    compared: tuple[str, ...]
    """Of a checkpoint's config, beside sizes."""
    check: str = ""
    """What else would train as another model."""
    constants: str = ""
    angles: str = ""
    positions: str = "SEQ_LEN"
    embedded: str = ""
    """Arguments of ``GPTModel`` for its positions."""


LLAMA = Family(
    norm="RMSNorm",
    epsilon="rms_norm_eps",
    activation="torch.nn.functional.silu",
    compared=("hidden_act",),
    constants=f"LLAMA3_SCALING = {literal(LLAMA3_SCALING)}  # megatron-core's own constants\n",
    check="""\
    rope = said.rope_parameters
    kind, scaling = rope.get("rope_type", "default"), {name: rope.get(name) for name in LLAMA3_SCALING}
    if kind != "default" and (kind != "llama3" or scaling != LLAMA3_SCALING):
        raise SystemExit(f"Megatron-core has default rotary angles, or llama3's {LLAMA3_SCALING}, not {rope}")
    window, kinds = getattr(said, "sliding_window", None), getattr(said, "layer_types", None)
    if window and SEQ_LEN > window and (kinds is None or "sliding_attention" in kinds):
        raise SystemExit(f"the model attends to {window} tokens, and all {SEQ_LEN} would be attended to here")
""",
    angles="""\
    rope = said.rope_parameters
    scales = rope.get("rope_type") == "llama3"
""",
    embedded="""\
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=scales,
        rope_scaling_factor=rope["factor"] if scales else 8.0,
""",
)
GPT2 = Family(
    norm="LayerNorm",
    epsilon="layer_norm_epsilon",
    activation='functools.partial(torch.nn.functional.gelu, approximate="tanh")',
    # Megatron-core divides all scores by the root of a head's width, and by nothing else.
    compared=("activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    positions="said.max_position_embeddings",
    embedded="""\
        position_embedding_type="learned_absolute",
""",
)
"""Learned positions, norms with biases, GELU; its matrices lie the other way round."""


def source_bytes(architecture: Architecture) -> int:
    """Of the whole model of transformers, which is read in fp32."""
    return FP32 * architecture.num_parameters


def core_model(plan: Plan) -> Model:
    """The functions ``source_config``, ``build_source``, ``core_config``, ``build_chunk`` and ``load``."""
    arch, degrees = plan.architecture, plan.degrees
    family = GPT2 if arch.model_type == "gpt2" else LLAMA
    check = check_of(plan, family.check, family.compared)
    attention = _attention(plan)
    parts = {
        "DTYPE": DTYPES.get(plan.recipe.precision, "torch.float32"),
        "STAGES": f"{degrees.pp}, {degrees.vpp}",
        "PADDED": repr(int(padded_vocab_size(arch.vocab_size, degrees.tp))),
        "CORE": literal(_core(plan)),
        "SOURCE": repr(source_bytes(arch)),
        "CHECKED": check.constants + family.constants,
        "CHECK": check.functions.rstrip("\n"),
        "ROUTER": ROUTER if arch.mixture_of_experts is not None else "",
        "HEAD_NORMS": HEAD_NORMS if arch.qk_norm else "",
        "FUSED": FUSED_ATTENTION if attention == "FusedAttention" else "",
        "ATTENTION": ATTENTION.replace("@@CLASS@@", attention) if attention else "",
        "OWN": " but for attention" if degrees.cp > 1 else ": no Transformer Engine",
        **{name.upper(): getattr(family, name) for name in ("norm", "epsilon", "activation", "angles")},
        **{name.upper(): getattr(family, name) for name in ("positions", "embedded")},
    }
    text = MODEL
    for name, value in parts.items():
        text = text.replace(f"@@{name}@@", value)
    imports = {"FusedAttention": FUSED_IMPORTS, "TEDotProductAttention": TE_IMPORTS}.get(attention, "")
    return Model(text + loads(plan), IMPORTS + imports)


def _attention(plan: Plan) -> str:
    """The class of the layers' core attention; "" for that which they have."""
    if plan.degrees.cp > 1:
        return "TEDotProductAttention"
    return "" if plan.recipe.attention == "eager" else "FusedAttention"


def _core(plan: Plan) -> dict[str, Any]:
    """``TransformerConfig``'s arguments that are not its defaults."""
    values = {name: value for name, value in transformer_config(plan).items() if name not in FUSED}
    values["bias_activation_fusion"] = plan.architecture.gated_mlp  # as the engine (engine_model.py)
    if plan.architecture.mixture_of_experts is not None:
        del values["moe_router_pre_softmax"]
        values |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    # None and False are the defaults of whatever they stand for, but of biases.
    biases = values["add_bias_linear"]
    told = {name: value for name, value in values.items() if value is not None and value is not False}
    return told | {"add_bias_linear": biases}
