"""Training functions of users over Accelerate, which know nothing of Shardscope."""

from __future__ import annotations

from typing import Any

FILE = """
import argparse

import torch
from accelerate import Accelerator
from beside import make_data
from torch.utils.data import DataLoader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps, losses = 0, []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"mine": sum(losses) / len(losses), "step": steps}, step=torch.tensor(steps))
            steps, losses = steps + 1, []
        if steps == args.steps:
            break
    accelerator.print("my own script took", steps, "steps")


if __name__ == "__main__":
    main()
"""

BESIDE = """
import torch
from torch.utils.data import TensorDataset


def make_data():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
"""


def train_llama(
    architecture: Any,
    steps: int = 3,
    *,
    optimizer: str = "AdamW",
    rows: int = 2,
    recomputes: bool = False,
    frozen: str = "",
    **accelerator_arguments: Any,
) -> None:
    """The same as a function: a model of transformers, labels that are its inputs."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardscope.training.model.model import config_values

    accelerator = Accelerator(**accelerator_arguments)
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture.model_type, **config_values(architecture))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    if recomputes:
        model.gradient_checkpointing_enable()
    own = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
    model, own, loader = accelerator.prepare(model, own, DataLoader(tokens, batch_size=rows))
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            own.step()
            own.zero_grad()
        if number + 1 == steps:
            break


def fails_in_a_helper() -> None:
    """An error two calls down, the last of them not the person's."""
    from accelerate import Accelerator

    Accelerator()
    shapes_that_do_not_fit()


def shapes_that_do_not_fit() -> None:
    """Calls what raises."""
    import torch

    torch.nn.functional.linear(torch.ones(2, 3), torch.ones(5, 4))


def never_accumulates(steps: int = 2) -> None:
    """A step after every micro-batch, whatever a plan says."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    # A gradient of one is one, though the plan divides by four.
    assert torch.equal(next(model.parameters()).detach(), torch.full((1, 4), -float(steps)))


def trains_nothing() -> None:
    """An Accelerator, and the end of the script."""
    from accelerate import Accelerator

    Accelerator()
    raise SystemExit(0)


def has_no_accelerator() -> None:
    """Nothing of Accelerate."""
