"""How a script makes its model with transformers: no more of it than the plan's recipe asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.export import few_bits
from shardscope.export.source import check_of
from shardscope.export.text import literal
from shardscope.memory.head import LOSS_CHUNK_TOKENS, loss_in_force
from shardscope.memory.lora import adapter_targets

if TYPE_CHECKING:
    from shardscope.plan import Plan

ATTENTION = {"flash": "flash_attention_2", "eager": "eager", "sdpa": "sdpa"}
TYPES = {"bf16-mixed": "torch.bfloat16", "fp16-mixed": "torch.float16"}

CONSTANTS = """\
COMPUTE = @@COMPUTE@@  # what matrices are multiplied in; None: the parameters' own type
PARAMETERS = @@PARAMETERS@@
"""

BUILD = '''

def build_model(name):
    """The plan's model from fresh weights, or the checkpoint called ``name``."""
    if name:
        config = AutoConfig.from_pretrained(name, **ALWAYS)
        check_source(config)
        model = AutoModelForCausalLM.from_pretrained(@@READ@@)
@@FRESH@@    model.config.use_cache = False
@@STEPS@@    return model
'''

FRESH = """\
    else:  # drawn in fp32, whatever they are kept in
        config = AutoConfig.for_model(**MODEL_CONFIG)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32@@ATTENTION@@)
        for parameter in model.parameters():  # and no buffer: tables of angles need their fp32
            parameter.data = parameter.data.to(PARAMETERS)
"""

ADAPTERS = '''

def with_adapters(model):
    """``model`` frozen under adapters. In mixed precision the base is in half: it never updates."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(COMPUTE or PARAMETERS)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA), autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(PARAMETERS)
    return model
'''

DRAWN_ADAPTERS = '''

@torch.no_grad()
def draw_adapters(model):
    """Each from its own name: they begin the same however many ranks there are, and whatever was read."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            first = torch.empty(parameter.shape, dtype=parameter.dtype)
            bound = parameter.shape[-1] ** -0.5  # kaiming_uniform_(a=sqrt(5)), as peft's own
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(first.uniform_(-bound, bound, generator=generator))
'''

LAYERS = '''

def decoder_layers(model):
    """The repeated layers: the longest list of modules that is in no other list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    inner = {id(part) for outer in lists for part in outer.modules() if part is not outer}
    return list(max((found for found in lists if id(found) not in inner), key=len))
'''

STEP_OF_LAYERS = """\
    for layer in @@LAYERS@@(model)@@EVERY@@:
        layer.forward = functools.partial(@@WAY@@)
"""
WAYS = {
    "full": "checkpoint, layer.forward, use_reentrant=False",
    "selective": "checkpoint, layer.forward, use_reentrant=False, context_fn=keeping",
    "offload": "offloading, layer, layer.forward",
}
"""What a layer's forward becomes, by ``Recipe.recompute``."""
COMPILED_RECOMPUTE = """\
    for layer in @@LAYERS@@(model)@@EVERY@@:
        layer.forward = types.MethodType(recomputing, layer)
"""
RECOMPUTING = '''

def recomputing(layer, *args, **kwargs):
    """The layer's forward, of which a compiled graph keeps its input only."""
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, **kwargs)
'''
COMPILED = """\
    for layer in @@LAYERS@@(model):  # alike layers share one graph
        layer.forward = torch.compile(layer.forward, dynamic=False)
"""
RECOMPUTE_IMPORTS = {
    "full": "from torch.utils.checkpoint import checkpoint\n",
    "selective": "from torch.utils.checkpoint import (\n"
    "CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts)\n",
    "offload": "",
}
POLICY = '''

def policy(context, operation, *args, **kwargs):
    """Selective recomputation keeps what matrix products and attention put out."""
    name = operation.name().split("::")[-1].split(".")[0]
    kept = name in ("mm", "addmm", "bmm") or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


keeping = functools.partial(create_selective_checkpoint_contexts, policy)
'''
OFFLOADING = '''

def offloading(layer, forward, *args, **kwargs):
    """``forward``, of which backward needs nothing but weights on the device: the rest waits on the host."""

    def leave(tensor):
        weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
        if tensor.untyped_storage().data_ptr() in weights:
            return tensor.device, tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor)

    def come_back(packed):
        device, host = packed
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(leave, come_back):
        return forward(*args, **kwargs)
'''

CHUNKED_LOSS = '''

CHUNK = @@CHUNK@@  # tokens whose logits exist at once


def loss_in_chunks(model, input_ids, labels, **others):
    """In the place of ``model.forward``: the loss alone; backward makes each chunk's logits again."""
    hidden = model.base_model(input_ids=input_ids).last_hidden_state.flatten(0, 1)
    following = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    head, total = model.get_output_embeddings(), 0.0
    for states, targets in zip(hidden.split(CHUNK), following.split(CHUNK)):
        total = total + checkpoint(
            loss_of_chunk, states, head.weight, head.bias, targets@@CONFIG@@, use_reentrant=False
        )
    return CausalLMOutput(loss=total / (following != -100).sum())


def loss_of_chunk(states, weight, bias, targets@@ARGUMENT@@):
    logits = torch.nn.functional.linear(states, weight, bias)
@@FINISH@@    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
'''
FINISHES = {
    "logits_scaling": "    logits = logits / config.logits_scaling\n",
    "final_logit_softcapping": """\
    if cap := config.final_logit_softcapping:
        logits = torch.tanh(logits / cap) * cap
""",
}
"""What a family's own forward does to its logits before the loss, by the name in its config."""


class Model(NamedTuple):
    """The part of a script that makes its model."""

    text: str
    imports: str = ""


def whole_model(plan: Plan, layers: str = "decoder_layers", *, shards: bool = False) -> Model:
    """The functions ``build_model`` and ``check_source``, and ``decoder_layers``.

    ``layers`` is the function that says what is recomputed; ``shards``: whether the framework cuts
    parameters, and so has to be able to cut those in few bits.
    """
    recipe = plan.recipe
    own = ATTENTION.get(recipe.attention or "") or _own_attention(plan)
    attention = f", attn_implementation={own!r}" if own else ""
    constants, steps, functions = CONSTANTS, "", ""
    imports = "from transformers import AutoConfig, AutoModelForCausalLM\n"
    read = "name, config=config, dtype=PARAMETERS" + attention
    fresh = FRESH.replace("@@ATTENTION@@", attention)
    if loss_in_force(plan) == "chunked":
        steps += "    model.forward = functools.partial(loss_in_chunks, model)\n"
        functions += _chunked_loss(plan)
        imports += "from torch.utils.checkpoint import checkpoint\n"
        imports += "from transformers.modeling_outputs import CausalLMOutput\n"
    if recipe.has_adapters:
        constants += f"LORA = {_lora(plan)}  # arguments of peft.LoraConfig\n"
        steps += "    model = with_adapters(model)\n    if name:\n        draw_adapters(model)\n"
        imports += "import zlib\nfrom peft import LoraConfig, get_peft_model\n"
        if recipe.base_quantization:
            packed = few_bits.base_of(plan, attention, shards=shards)
            constants += packed.constants
            functions += packed.functions
            imports += packed.imports
            read, fresh = packed.read, packed.fresh
        else:
            functions += ADAPTERS
        functions += DRAWN_ADAPTERS
    if recipe.recompute != "none":
        again = _recomputed(plan)
        steps += again.step
        functions += again.functions
        imports += again.imports
    if plan.kernels == "compiled":
        steps += COMPILED
    steps = steps.replace("@@LAYERS@@", layers)
    check = check_of(plan)
    text = constants + check.constants
    text += BUILD.replace("@@READ@@", read).replace("@@FRESH@@", fresh).replace("@@STEPS@@", steps)
    text += check.functions + functions + LAYERS
    kept = "torch.bfloat16" if recipe.precision == "bf16" else "torch.float32"
    text = text.replace("@@COMPUTE@@", TYPES.get(recipe.precision, "None"))
    return Model(text.replace("@@PARAMETERS@@", kept), imports)


class _Recomputed(NamedTuple):
    step: str
    functions: str
    imports: str


def _recomputed(plan: Plan) -> _Recomputed:
    """What makes layers do so, as one of :data:`WAYS`, or as a compiler takes in "full"."""
    recipe = plan.recipe
    every = f"[::{recipe.recompute_interval}]" if recipe.recompute_interval > 1 else ""
    imports = RECOMPUTE_IMPORTS[recipe.recompute]
    if plan.kernels == "compiled":
        return _Recomputed(
            COMPILED_RECOMPUTE.replace("@@EVERY@@", every), RECOMPUTING, "import types\n" + imports
        )
    step = STEP_OF_LAYERS.replace("@@EVERY@@", every).replace("@@WAY@@", WAYS[recipe.recompute])
    functions = {"selective": POLICY, "offload": OFFLOADING}.get(recipe.recompute, "")
    return _Recomputed(step, functions, imports)


def _own_attention(plan: Plan) -> str | None:
    """What the run chooses where a recipe leaves it open, and transformers might not."""
    from shardscope.training.model import WITHOUT_SDPA

    return "eager" if plan.architecture.model_type in WITHOUT_SDPA else None


def _chunked_loss(plan: Plan) -> str:
    from transformers import AutoConfig

    known = AutoConfig.for_model(plan.architecture.model_type).to_dict()
    finish = "".join(text for name, text in FINISHES.items() if name in known)
    text = CHUNKED_LOSS.replace("@@CHUNK@@", repr(LOSS_CHUNK_TOKENS)).replace("@@FINISH@@", finish)
    text = text.replace("@@CONFIG@@", ", model.config" if finish else "")
    return text.replace("@@ARGUMENT@@", ", config" if finish else "")


def _lora(plan: Plan) -> str:
    """Arguments of ``LoraConfig`` as Python text."""
    recipe = plan.recipe
    values = {
        "r": recipe.adapter_rank,
        "lora_alpha": 2 * recipe.adapter_rank,
        "lora_dropout": recipe.lora_dropout,
        "target_modules": list(adapter_targets(plan.architecture, recipe)),
    }
    return literal(values)
