"""What plain scripts have of pipeline stages over transformers' models, whichever framework feeds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.layout import even_stages

if TYPE_CHECKING:
    from shardscope.plan import Plan

CONSTANTS = """
PP = @@PP@@
LAYERS = @@LAYERS@@  # of each chunk of the pipeline, in its order
STAGE = int(os.environ["RANK"]) * PP // WORLD_SIZE  # this rank's chunks are every PP-th from here on
"""

STAGES = '''
class Stage(torch.nn.Module):
    """A chunk of the pipeline: token ids or hidden states in, hidden states or logits out."""

    def __init__(self, model, number):
        super().__init__()
        self.is_first, self.is_last = number == 0, number == len(LAYERS) - 1
        places = range(sum(LAYERS[:number]), sum(LAYERS[: number + 1]))
        part, body = shell(model), shell(model.model)
        part.config = body.config = copy.deepcopy(model.config)
        if getattr(model.config, "layer_types", None):
            part.config.layer_types = [model.config.layer_types[place] for place in places]
        body.layers = torch.nn.ModuleList()
        for place in places:  # under their numbers in the whole model
            body.layers.add_module(str(place), model.model.layers[place])
        if not self.is_first:
            body.embed_tokens = None@@UNSCALED@@
        if not self.is_last:
            body.norm, part.lm_head = torch.nn.Identity(), None
        part.model = body
        self.model = part

    def forward(self, x):
@@ENTERS@@        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        # The last chunk is the whole model's own forward, whatever that does to its logits.
        found = (self.model if self.is_last else self.model.model)(**given, use_cache=False)
@@LEAVES@@

def shell(module):
    """``module`` with the same children, which may be replaced without it noticing."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


def own_layers(model):
    """The decoder layers of this rank's chunks."""
    ends = [sum(LAYERS[:number]) for number in range(len(LAYERS) + 1)]
    chunks = [model.model.layers[first:last] for first, last in zip(ends, ends[1:])]
    return [layer for chunk in chunks[STAGE::PP] for layer in chunk]
'''

UNTIED = """\
        weights.pop("lm_head.weight", None)  # it is the embedding
"""
"""Before weights of stages are saved, of which the first and the last have a copy."""
LEAVES = """\
        return found.logits if self.is_last else found.last_hidden_state
"""
UNSCALED = "\n            body.embedding_multiplier = 1.0  # which the first chunk has applied"


def stage_constants(plan: Plan) -> str:
    """How ``plan`` cuts the model into stages."""
    degrees = plan.degrees
    layers = even_stages(plan.architecture.num_hidden_layers, degrees.pp * degrees.vpp)
    return CONSTANTS.replace("@@PP@@", repr(degrees.pp)).replace("@@LAYERS@@", repr(layers))


def stages(plan: Plan, *, enters: str = "", leaves: str = LEAVES) -> str:
    """The class ``Stage`` over those; ``enters`` and ``leaves`` are what a chunk does at its ends."""
    unscaled = UNSCALED if plan.architecture.model_type == "granite" else ""
    text = STAGES.replace("@@UNSCALED@@", unscaled)
    return text.replace("@@ENTERS@@", enters).replace("@@LEAVES@@", leaves)
