"""A frozen base in NF4 or int8 in a script: transformers packs a checkpoint, a short loop fresh weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.building import is_drawn_in_parts

if TYPE_CHECKING:
    from shardscope.plan import Plan

NF4 = """\
BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=@@DOUBLE@@,  # scales in few bits too
    bnb_4bit_compute_dtype=COMPUTE or PARAMETERS,
    bnb_4bit_quant_storage=@@STORAGE@@,
)
"""
CUT = "COMPUTE or PARAMETERS,  # a type that shards are cut and gathered in"
INT8 = """\
BITS = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
"""

FRESH = """\
    else:  # drawn in fp32, and packed from what matrices are multiplied in
        config = AutoConfig.for_model(**MODEL_CONFIG)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32@@ATTENTION@@)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(COMPUTE or PARAMETERS)
        model = in_few_bits(model)
"""
NO_FRESH = """\
    else:
        raise SystemExit("--model: random weights of this size are nothing to pack; name a checkpoint")
"""

ADAPTERS = '''

def with_adapters(model):
    """``model``, whose base is frozen, under adapters; in mixed precision these are in fp32."""
    config = LoraConfig(task_type="CAUSAL_LM", **LORA)
    return get_peft_model(model, config, autocast_adapter_dtype=COMPUTE is not None)
'''

PACK = '''

def in_few_bits(model):
    """``model`` with the matrices of its layers as ``from_pretrained`` packs those of a checkpoint."""
    for parent in [module for layer in decoder_layers(model) for module in layer.modules()]:
        for name, linear in list(parent.named_children()):
            if isinstance(linear, @@LINEAR@@):
                setattr(parent, name, packed(linear))
    model.@@FLAG@@ = True  # which peft asks
    return model


def packed(linear):
@@SIZES@@'''
SIZES = "    outer, inner = linear.weight.shape\n    weight = linear.weight.detach()\n"
TURNED = "    inner, outer = linear.weight.shape  # a Conv1D holds its matrix the other way round\n"
TURNED += "    weight = linear.weight.detach().t().contiguous()\n"
PACKED_NF4 = """\
    kind = {
        "quant_type": BITS.bnb_4bit_quant_type,
        "compress_statistics": BITS.bnb_4bit_use_double_quant,
        "quant_storage": BITS.bnb_4bit_quant_storage,
    }
    dtype = BITS.bnb_4bit_compute_dtype
    made = bnb.nn.Linear4bit(inner, outer, bias=False, compute_dtype=dtype, device="meta", **kind)
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=made, **kind)
    made.bias = linear.bias
    return made.to(weight.device)  # packs it
"""
PACKED_INT8 = """\
    made = bnb.nn.Linear8bitLt(inner, outer, bias=False, has_fp16_weights=False, device="meta")
    made.weight = bnb.nn.Int8Params(weight, requires_grad=False)
    made.bias = linear.bias
    return made.to(weight.device)  # packs it
"""


class Base(NamedTuple):
    """What a script has of a base in few bits."""

    constants: str
    functions: str
    imports: str
    read: str
    """Arguments of ``from_pretrained``."""
    fresh: str
    """What ``build_model`` does without a checkpoint."""


def base_of(plan: Plan, attention: str, *, shards: bool) -> Base:
    """Of a plan whose adapters train over one; ``attention`` is an argument of ``from_config``."""
    recipe = plan.recipe
    is_nf4, double = recipe.base_quantization == "nf4", recipe.method == "qlora"
    constants = NF4.replace("@@DOUBLE@@", repr(double)) if is_nf4 else INT8
    constants = constants.replace("@@STORAGE@@,", CUT if shards else "torch.uint8,")
    # Shards are cut on the host; a replica's base is packed where it stays.
    home = "torch.cuda.current_device()" if plan.on_gpu and not shards else '"cpu"'
    read = f"""
            name,
            config=config,
            quantization_config=BITS,
            device_map={{"": {home}}},
            dtype=COMPUTE or PARAMETERS{attention},
        """
    imports = "from transformers import BitsAndBytesConfig\n"
    if is_drawn_in_parts(plan):
        return Base(constants, ADAPTERS, imports, read, NO_FRESH)
    turned = plan.architecture.model_type == "gpt2"
    pack = PACK.replace("@@SIZES@@", (TURNED if turned else SIZES) + (PACKED_NF4 if is_nf4 else PACKED_INT8))
    pack = pack.replace("@@LINEAR@@", "Conv1D" if turned else "torch.nn.Linear")
    pack = pack.replace("@@FLAG@@", "is_loaded_in_4bit" if is_nf4 else "is_loaded_in_8bit")
    imports += "import bitsandbytes as bnb\n"
    imports += "from transformers.pytorch_utils import Conv1D\n" if turned else ""
    fresh = FRESH.replace("@@ATTENTION@@", attention)
    return Base(constants, ADAPTERS + pack, imports, read, fresh)
