"""DeepSpeed's plain script of pipeline stages: ``PipelineModule`` over parts of a transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.export.saving import IMPORTS as SAVE_IMPORTS
from shardscope.export.saving import SAVE_PART
from shardscope.export.stages import UNTIED, stages

if TYPE_CHECKING:
    from shardscope.plan import Plan

IMPORTS = f"import copy\nfrom deepspeed.pipe import LayerSpec, PipelineModule\n{SAVE_IMPORTS}"

TRAINING = (
    '''
class Pipeline(PipelineModule):
    """A stage is one layer: the cut is the plan's, and angles and mask are made once for each."""

    def __init__(self, model):
        specs = [LayerSpec(Stage, model, number) for number in range(PP)]  # a rank builds its own
        super().__init__(specs, num_stages=PP, loss_fn=self.loss_of, partition_method="uniform")

    @property
    def stage(self):
        return self.forward_funcs[0]

    def loss_of(self, logits, labels):
        loss_function = self.stage.model.loss_function
        return loss_function(logits=logits, labels=labels, vocab_size=MODEL_CONFIG["vocab_size"])
@@TIED@@

class Training:
    """DeepSpeed's 1F1B: ``train_batch`` takes all micro-batches of a step, and the step."""

    def __init__(self, name, device, rate):
        source = build_model(name)
        self.config, model = source.config, Pipeline(source).train()
        CONFIG["gradient_clipping"] = @@CLIPPING@@
        offloads = "offload_optimizer" in CONFIG["zero_optimization"]
        optimizer = build_optimizer(model.parameters(), rate, device, offloads)
@@HOOK@@        made = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
        self.engine, self.optimizer = made[:2]

    def step(self, micro_batches):
        return self.engine.train_batch(iter([(micro, micro) for micro in micro_batches])).item()

    def save(self, folder):
        """The first rank of each stage has its layers, in the type that forward reads."""
        is_first = dist.get_rank() % (WORLD_SIZE // PP) == 0
        own = self.engine.module.stage.model.state_dict() if is_first else {}
        weights = {name: one.to("cpu", copy=True) for name, one in own.items()}
@@UNTIED@@        save_part(folder, self.config, weights, STAGE, PP)
'''
    + SAVE_PART
)

TIED = '''
    def _index_tied_modules(self):
        """The embedding on the first stage and the head on the last, whose gradients DeepSpeed sums.

        Its own way is a layer in two places (TiedLayerSpec), and a stage here is one layer."""
        grid, found = self._grid, {}
        for place in range(grid.data_parallel_size):
            ranks = [place, WORLD_SIZE - grid.data_parallel_size + place]
            group = dist.new_group(ranks)
            if grid.global_rank in ranks:
                model = self.stage.model
                tied = model.model.embed_tokens if self.stage.is_first else model.lm_head
                tied.weight.ds_pipe_replicated = grid.global_rank != ranks[0]  # a norm counts one of both
                both = {"ranks": ranks, "group": group, "module": tied, "weight_attr": ["weight"]}
                found["embedding"] = both
        return found

    def _synchronize_tied_weights(self):
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def get_tied_weights_and_groups(self):
        return [(tied["module"].weight, tied["group"]) for tied in self.tied_comms.values()]
'''

HOOK = """\
        optimizer.register_step_pre_hook(lambda *_: clip(model))
"""
CLIP = '''

def clip(model):
    """By the norm over all stages: without ZeRO, DeepSpeed takes that of the first alone."""
    parameters = list(model.parameters())
    counted = [one.grad for one in parameters if not getattr(one, "ds_pipe_replicated", False)]
    squares = torch.nn.utils.get_total_norm(counted) ** 2
    dist.all_reduce(squares, group=model._grid.get_pipe_parallel_group())
    torch.nn.utils.clip_grads_with_norm_(parameters, MAX_GRAD_NORM, squares.sqrt())
'''


def training(plan: Plan, *, by_hand: bool) -> str:
    """The classes ``Stage``, ``Pipeline`` and ``Training``; gradients clipped by hand, or by DeepSpeed."""
    tied = plan.architecture.tie_word_embeddings
    text = TRAINING.replace("@@TIED@@", TIED if tied else "").replace("@@UNTIED@@", UNTIED if tied else "")
    text = text.replace("@@CLIPPING@@", "0.0" if by_hand else "MAX_GRAD_NORM")
    text = text.replace("@@HOOK@@", HOOK if by_hand else "")
    return stages(plan) + text + (CLIP if by_hand else "")
