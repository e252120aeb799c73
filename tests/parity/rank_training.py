"""The training loop of each rank of a row: equal weights, batches and number of steps.

It uses only the public methods of an engine, ``setup``, ``step`` and ``set_learning_rate``, and byte counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

NUM_STEPS = 20
PEAK_RATE = 3e-3
WARMUP_STEPS = 5
WEIGHT_DECAY = 0.1
CLIPPED_TO = 1.0
SPREAD = 5.0
"""Factor by which initial matrices are larger than transformers': attention is then not uniform, so swapped
or misplaced heads change the loss."""
USED_TOKENS = 64
"""Of the vocabulary, so that there is something to learn in a few steps."""


def rate_at(step: int) -> float:
    """Return the learning rate of a step: warm-up, then linear decay to half."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    return PEAK_RATE * (1 - 0.5 * (step - WARMUP_STEPS) / NUM_STEPS)


def build(plan: Any) -> torch.nn.Module:
    """Build the model with weights from the current seed, and vectors that all differ."""
    import torch

    from shardscope.training.model.model import build_model

    model = build_model(plan.architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(SPREAD)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def global_batch(seed: int, step: int, rows: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Return the batch of a step. Rows ignore different numbers of labels, so counting labels matters."""
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    tokens = torch.randint(0, USED_TOKENS, (rows, seq_len), generator=generator)
    labels = tokens.clone()
    for row in range(rows):
        labels[row, : (5 * row + step) % (seq_len // 2)] = -100
    return {"input_ids": tokens, "labels": labels}


class SingleProcess:
    """The reference: plain PyTorch, no engine, the whole batch at once."""

    preload: ClassVar[tuple[str, ...]] = ("transformers.models.llama.modeling_llama",)

    def __init__(self, seed: int, num_steps: int = NUM_STEPS) -> None:
        self.seed, self.num_steps = seed, num_steps

    def __call__(self, ctx: Any) -> None:
        """Train, log ``loss`` and ``grad_norm`` of every step."""
        import torch
        from tests.parity.adapters import with_adapters

        from shardscope.training.optimizers.optimizers import ADAM_BETAS

        recipe = ctx.plan.recipe
        torch.manual_seed(self.seed)
        # On the host, like in every engine: a GPU's generator has other random numbers.
        model = build(ctx.plan)
        if recipe.has_adapters:
            model = with_adapters(model, recipe)
        model = model.to(ctx.device)
        model.train()
        weights = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in weights if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=ADAM_BETAS)
        for step in range(self.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step)
            batch = global_batch(self.seed, step, recipe.global_batch_size, recipe.seq_len)
            loss = model(**{name: tensor.to(ctx.device) for name, tensor in batch.items()}).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(weights, CLIPPED_TO)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ctx.log(step=step, loss=float(loss), grad_norm=float(norm))
        ctx.record("engine", {"sentence": "plain PyTorch, one process, the whole batch at once"})


class Curve:
    """A row: the plan's engine on this rank's share of the same batches."""

    preload: ClassVar[tuple[str, ...]] = SingleProcess.preload

    def __init__(self, seed: int, num_steps: int = NUM_STEPS, rate: Callable[[int], float] = rate_at) -> None:
        self.seed, self.num_steps, self.rate = seed, num_steps, rate

    def __call__(self, ctx: Any) -> None:
        """Train, log ``loss`` and ``grad_norm`` of every step, record the bytes held."""
        plan, engine = ctx.plan, ctx.engine
        engine.seed, engine.learning_rate, engine.weight_decay = self.seed, PEAK_RATE, WEIGHT_DECAY
        engine.max_grad_norm = CLIPPED_TO
        engine.setup(lambda: build(plan))
        for step in range(self.num_steps):
            engine.set_learning_rate(self.rate(step))
            whole = global_batch(self.seed, step, plan.recipe.global_batch_size, plan.recipe.seq_len)
            share = {
                name: rows.chunk(engine.num_data_ranks)[engine.data_rank] for name, rows in whole.items()
            }
            loss = engine.step(share)
            ctx.log(step=step, loss=loss, grad_norm=engine.grad_norm)
        held = engine.memory()
        parameters, optimizer = held["parameters"], held["optimizer"]
        # Parameters and moments stay; what was there beside them at the step's fullest are gradients.
        gradients = engine.peak_tensor_bytes - parameters - optimizer
        ctx.record(
            "parity",
            {
                "held": {"parameters": parameters, "gradients": gradients, "optimizer": optimizer},
                "files": sum(file.stat().st_size for file in ctx.folder.rglob(f"nvme/**/rank{ctx.rank}/*")),
                "data_rank": engine.data_rank,
                "num_data_ranks": engine.num_data_ranks,
            },
        )
