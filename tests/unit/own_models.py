"""A script with a model of its own, as people write them, and ways in which it could be another."""

from __future__ import annotations

from shardscope.planner.preflight import findings_in

WHOLE = "whole-model-as-one-unit"
SCRIPT = """
import inspect
from dataclasses import dataclass

import rotary
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass
class Config:
    width: int = 8


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, config.width)

    def forward(self, x):
        return self.up(x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mlp = MLP(config)

    def forward(self, x):
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.parts = nn.ModuleDict(dict(
            token=nn.Embedding(8, config.width),
            h=nn.ModuleList([Block(config) for _ in range(3)]),
        ))
        self.head = nn.Linear(config.width, 8, bias=False)
        self.parts.token.weight = self.head.weight
        self.apply(self.fill)
        print(self.count())

    def fill(self, module):
        nn.init.normal_(module.weight)

    def count(self):
        return sum(p.numel() for p in self.parameters()) - self.parts.token.weight.numel()

    def forward(self, x, y=None):
        x = self.parts.token(x)
        for block in self.parts.h:
            x = block(x)
        x = self.head(x)
        if y is None:
            return x
        return x, loss(x, y)

    def groups(self, rate):
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        decayed = [p for name, p in named.items() if p.dim() >= 2]
        print(sum(p.numel() for p in decayed), "fused" in inspect.signature(torch.optim.AdamW).parameters)
        optimizer = torch.optim.AdamW([{"params": decayed}], lr=rate)
        return optimizer

    def reach(self):
        for block in self.parts.h:
            block.mlp.up = self.head


model = GPT(Config()).to(device)
fully_shard(model)
print(sum(p.numel() for p in model.parameters() if p.requires_grad))
optimizer = model.groups(0.1)
model(ids).sum().backward()
"""
Change = tuple[str, str]
"""A text of the script, and what stands in its place."""
LOOP = "        for block in self.parts.h:\n            x = block(x)\n"
MADE = "h=nn.ModuleList([Block(config) for _ in range(3)])"
HEAD = "        self.head = nn"
FORWARD = "    def forward(self, x):\n"
POLICY = (
    "fully_shard(model)",
    "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
)
"""What has units cast what they are given."""
BY_NAME = "h=nn.ModuleDict({str(i): Block(config) for i in range(3)})"
CHAIN = MADE.replace("ModuleList([", "Sequential(*[")
ONE_BY_ONE = (f"            {MADE},\n", "")
"""No comprehension."""
MODEL = "class GPT(nn.Module):\n    def __init__(self, config"
TORCH = "from torch import nn\n"


def indented(lines: tuple[str, ...], width: int) -> str:
    return "".join(f"{' ' * width}{line}\n" for line in lines)


def body(*lines: str) -> Change:
    """Forward's loop over its layers, otherwise."""
    return LOOP, indented(lines, 8)


def turn(*lines: str) -> Change:
    """What that loop does."""
    return "            x = block(x)\n", indented(lines, 12)


def over(target: str, layers: str) -> Change:
    """What that loop goes over."""
    return "for block in self.parts.h:\n            x =", f"for {target} in {layers}:\n            x ="


def built(*lines: str) -> Change:
    """The model's layers, made in statements of their own."""
    return HEAD, indented(lines, 8) + HEAD


def set_up(line: str) -> Change:
    """What the model does last as it is made."""
    return "        self.apply(", f"        {line}\n        self.apply("


def given(value: str, *made: str) -> list[Change]:
    """Another argument of each layer, and how the model makes it."""
    config = "        self.config ="
    return [("Block(config) for", f"Block(config, {value}) for"), (config, indented(made, 8) + config)]


def held(value: str, *above: str) -> list[Change]:
    """What a layer holds, and what stands above its class."""
    made = ("self.up = nn.Linear(config.width, config.width)", f"self.up = {value}")
    return [made, ("class MLP", indented(above, 0) + "class MLP")]


def earlier(*lines: str) -> Change:
    """Lines before the model is made."""
    return "model = GPT", indented(lines, 0) + "model = GPT"


def method(*lines: str) -> Change:
    """One more method of the model."""
    return "    def reach", indented(lines, 4) + "    def reach"


def asked(*lines: str) -> Change:
    """How the method that makes the optimizer ends."""
    return "        return optimizer\n", indented(lines, 8)


def clicked(source: str) -> str | None:
    (found,) = [finding for finding in findings_in(source) if finding.name == WHOLE]
    return found.source


def changed(*changes: Change) -> str:
    source = SCRIPT
    for before, after in changes:
        assert before in source, before
        source = source.replace(before, after)
    return source
