"""Units of one layer each, by a click, of a model whose classes the script defines."""

from __future__ import annotations

from difflib import ndiff

import pytest
from own_models import (
    BY_NAME,
    CHAIN,
    FORWARD,
    LOOP,
    MADE,
    MODEL,
    ONE_BY_ONE,
    POLICY,
    SCRIPT,
    TORCH,
    WHOLE,
    Change,
    asked,
    body,
    built,
    changed,
    clicked,
    earlier,
    given,
    held,
    method,
    over,
    set_up,
    turn,
)

from shardscope.planner.preflight import findings_in


def test_each_of_its_layers_is_sharded_before_the_model() -> None:
    after = clicked(SCRIPT)
    assert after is not None
    assert [line for line in ndiff(SCRIPT.splitlines(), after.splitlines()) if line[0] in "+-"] == [
        "+ for fsdp2_layer in model.modules():",
        "+     if isinstance(fsdp2_layer, Block):",
        "+         fully_shard(fsdp2_layer)",
    ]
    assert WHOLE not in [finding.name for finding in findings_in(after)]


@pytest.mark.parametrize(
    "changes",
    [
        [("self.parts.h", "self.parts['h']")],
        [("dict(\n", "{\n"), ("token=", "'token': "), ("h=nn.M", "'h': nn.M"), ("        ))", "        })")],
        [(MADE, MADE.replace("[", "").replace("]", ""))],
        [(MADE, CHAIN), body("x = self.parts.h(x)")],
        [(MADE, BY_NAME), over("block", "self.parts.h.values()")],
        [(MADE, BY_NAME), over("name, block", "self.parts.h.items()")],
        [over("i, block", "enumerate(self.parts.h)")],
        [
            *(ONE_BY_ONE, ("self.parts.h", "self.h")),
            built("self.h = nn.ModuleList()", "for i in range(3):", "    self.h.append(Block(config))"),
        ],
        [
            *(ONE_BY_ONE, ("self.parts.h:", "self.h.values():")),
            built("self.h = nn.ModuleDict()", "for i in range(3):", "    self.h[str(i)] = Block(config)"),
        ],
        given("int(config.width)"),
        given("width, kind=nn.Linear", "width = config.width"),
        [(TORCH, "import torch.nn as nn\n")],
        [("nn.Module)", "torch.nn.Module)")],
        [("nn.Module)", "Module)"), (TORCH, f"{TORCH}from torch.nn import Module\n")],
        [("super().__init__()\n        self.config", "super(GPT, self).__init__()\n        self.config")],
        [turn("with record():", "    x = block(x)")],
        [turn("x = block(x, len(self.parts.h))")],
        # A helper of the script's that computes, and gives no module.
        [
            ("return x +", "return grown(x) +"),
            ("class MLP", "def grown(x):\n    return x * 2\n\n\nclass MLP"),
        ],
        # Numbers of what somebody else's object knows.
        given("words", "words = config.words"),
        given("rates[0]", "rates = [p.item() for p in torch.linspace(0, 1, 3)]"),
        [("GPT(Config())", "GPT(rotary.Config(len(rotary.Tokenizer()), rotary.Tokenizer().size))")],
        [
            (
                "return x + self.mlp(x)",
                "print(x)\n        torch.manual_seed(0)\n        return x + self.mlp(x)",
            )
        ],
        [("return self.up(x)", "rows = []\n        rows.append(self.up(x))\n        return rows[0]")],
        # What layers do by themselves, and what others do.
        [("return self.up(x)", "'Up.'\n        self.check(x)\n        x += self.up(x)\n        return x")],
        [
            (
                "return self.up(x)",
                "torch.cuda.nvtx.mark('up')\n        self.up.scale.mul_(2)\n        return x",
            )
        ],
        [("return self.up(x)", "y = self.up(x)\n        return y, None")],
        held("nn.ModuleList()\n        self.up.append(nn.Linear(8, 8))"),
        [earlier("def log(x):", "    ALL.append(x)")],
        [POLICY],
    ],
)
def test_layers_however_they_are_made_and_called(changes: list[Change]) -> None:
    assert clicked(changed(*changes)) is not None


@pytest.mark.parametrize(
    "changes",
    [
        # ---- classes that may be others
        [earlier("class GPT(nn.Module):", "    pass")],
        [earlier("class Block(nn.Module):", "    pass")],
        [(TORCH, f"{TORCH}from mine import *\n")],
        [(TORCH, "from mine import nn\n")],
        [(TORCH, f"{TORCH}nn = mine\n")],
        [("class GPT(nn.Module)", "class GPT(Base)")],
        [("class GPT(nn.Module)", "class GPT(nn.Module, Mixin)")],
        [("class GPT(nn.Module)", "class GPT(nn.Module, metaclass=Meta)")],
        [("class Block(nn.Module)", "class Block(Base)")],
        [("class GPT", "@register\nclass GPT")],
        [("class Block", "@register\nclass Block")],
        [method("def __getattr__(self, name):", "    return None")],
        [method("def train(self, mode=True):", "    return self")],
        [method("def forward(self, x):", "    return x")],
        [("    def forward(self, x, y", "    @traced\n    def forward(self, x, y")],
        [(f"{FORWARD}        return x +", f"    @traced\n{FORWARD}        return x +")],
        # ---- layers of several kinds or places, or that are used for more
        [(MADE, f"{MADE}, more=nn.ModuleList([MLP(config) for _ in range(3)])")],
        [(MADE, f"{MADE}, more=nn.ModuleList([Block(config) for _ in range(3)])")],
        [(MADE, "h=nn.ModuleList([Block(config) if i else MLP(config) for i in range(3)])")],
        [(MADE, "h=nn.ModuleList([torch.compile(Block(config)) for i in range(3)])")],
        [(MADE, "h=[Block(config) for _ in range(3)]")],
        [
            *(ONE_BY_ONE, ("self.parts.h", "self.h")),
            built("self.h = []", "for i in range(3):", "    self.h.append(Block(config))"),
        ],
        [
            *(ONE_BY_ONE, ("self.parts.h", "self.h")),
            built(
                "self.h = nn.ModuleList()",
                *("for i in range(3):", "    self.h.append(Block(config))", "    self.h.append(MLP(config))"),
            ),
        ],
        [(MADE, MADE.replace("nn.ModuleList", "tuple"))],
        [
            *(ONE_BY_ONE, ("self.parts.h", "self.h")),
            built("self.h = list()", "for i in range(3):", "    self.h.append(Block(config))"),
        ],
        [
            *(ONE_BY_ONE, ("self.parts.h", "self.h")),
            built("self.h = nn.ModuleList()", "for i in range(3):", "    self.h.push(Block(config))"),
        ],
        [built("self.last = Block(config)")],
        [(f"{FORWARD}        return x +", "    def run(self, x):\n        return x +")],
        [("class Block(nn.Module):\n", "if on:\n  class Block(nn.Module):\n")],
        [earlier("class Wide(Block):", "    pass")],
        [earlier("Kind = Block")],
        [("return x + self.mlp(x)", "return Result(x + self.mlp(x))")],
        [("return x + self.mlp(x)", "yield x + self.mlp(x)")],
        [("return x + self.mlp(x)", "return")],
        [("return x + self.mlp(x)", "self.mlp(x)")],
        # ---- weights that may be another's
        [set_up("setattr(self, 'more', 1)")],
        [set_up("self.register_forward_hook(look)")],
        given("self.parts"),
        given("nn.Linear(8, 8)"),
        given("share(config)"),
        given("head=self.head"),
        given("shared", "shared = nn.Linear(8, 8).to(0)"),
        given("shared", "shared = MLP(config)"),
        given("shared[0]", "shared = [MLP(config) for _ in range(3)]"),
        given("shared[0]", "shared = [one for one in other.parameters()]"),
        given("shared", "shared = rotary.Rotary(8)"),
        given("**more", "more = dict(a=rotary.Rotary(8).to(0))"),
        given("**more", "more = {'a': rotary.Rotary(8) if on else None}"),
        [*given("shared"), ("GPT(Config())", "GPT(Config(), nn.Linear(8, 8))"), (MODEL, f"{MODEL}, shared")],
        [*given("shared"), ("GPT(Config())", "GPT(Config(), rotary.Rotary(8))"), (MODEL, f"{MODEL}, shared")],
        held("SHARED", "SHARED = rotary.Rotary(8)"),
        [*held("config.up"), earlier("config = Config()", "config.up = rotary.Rotary(8)")],
        [*given("shared", "shared = made()"), earlier("def made():", "    return nn.Linear(8, 8)")],
        [("class Block(nn.Module):\n", "class Block(nn.Module):\n    shared = nn.Linear(8, 8)\n\n")],
        [("def __init__(self, config):", "def __init__(self, config, up=nn.Linear(8, 8)):")],
        held("SHARED", "SHARED = nn.Linear(8, 8)"),
        held("made()", "SHARED = nn.Linear(8, 8)", "def made():", "    return SHARED"),
        [
            *held("config.up"),
            *(earlier("config = Config()", "config.up = nn.Linear(8, 8)"), ("GPT(Config())", "GPT(config)")),
        ],
        [("nn.init.normal_(module.weight)", "module.weight = self.head.weight")],
        [("self.parts.token.weight = self", "self.head.weight = self.parts.h[0].mlp.up")],
        # ---- layers that backward may come to by another way than what they return
        [("return x + self.mlp(x)", "losses.append(x)\n        return x + self.mlp(x)")],
        [("return self.up(x)", "rotary.LOSSES.add(x)\n        return self.up(x)")],
        [
            ("return self.up(x)", "return kept(x)"),
            earlier("def kept(x):", "    ALL.append(x)", "    return x"),
        ],
        [("return self.up(x)", "x['h'] = self.up(x['h'])\n        return x")],
        [("return self.up(x)", "self.losses.append(x)\n        return self.up(x)")],
        [("return self.up(x)", "self.losses += [x]\n        return self.up(x)")],
        [("return x + self.mlp(x)", "return x, self.mlp.up.weight")],
        [("return x + self.mlp(x)", "return {'x': x, 'w': [self.mlp.up.weight]}")],
        [("return x + self.mlp(x)", "w = self.mlp.up.weight\n        return x, w")],
        [("return self.up(x)", "x.h = self.up(x.h)\n        return x")],
        [("return self.up(x)", "return replace(x, h=self.up(x.h))"), ("import data", "import replace, data")],
        # ---- layers that are reached into, or left out now and then
        [turn("x = block.mlp(x)")],
        [turn("x = block(x) * block.mlp.up.weight.sum()")],
        [turn("x = checkpoint(block, x)")],
        [turn("x = block(x)", "x = block(x)")],
        [turn("if keep():", "    x = block(x)")],
        [turn("if skip():", "    continue", "x = block(x)")],
        [turn("x = block(x)", "if last():", "    break")],
        [turn("x = block(x)", "if last():", "    return x")],
        [turn("x = block(x) if keep() else x")],
        [turn("x = keep() and block(x)")],
        [turn("x = block(x)", "x = once(lambda: block)")],
        [body("for block in self.parts.h:", "    x = block(x)", "x = block(x)")],
        [body("for block in self.parts.h:", "    x = block(x)", "else:", "    pass")],
        [body("for _ in range(2):", "    for block in self.parts.h:", "        x = block(x)")],
        [body("if deep:", "    for block in self.parts.h:", "        x = block(x)")],
        [(LOOP, f"        if empty(x):\n            return x\n{LOOP}")],
        [body("for i in range(n):", "    x = self.parts.h[i](x)")],
        [(LOOP, LOOP * 2)],
        [(LOOP, "")],
        [(MADE, CHAIN), body("x = self.parts.h(x)", "x = self.parts.h(x)")],
        [over("block", "self.parts.h[:2]")],
        [over("block", "reversed(self.parts.h)")],
        [over("i, block", "zip(y, self.parts.h)")],
        [over("i, block", "enumerate(self.parts.h, 1)")],
        [over("block", "more(self.parts.h)")],
        [over("self.block", "self.parts.h")],
        [over("block", "enumerate(self.parts.h)")],
        [over("i, block", "self.parts.h")],
        [over("i, block, j", "enumerate(self.parts.h)")],
        [over("block", "self.parts.h.children()")],
        [method("def run(self, x):", *LOOP.rstrip().splitlines()), body("self.run(x)")],
        [(LOOP, f"        blocks = self.parts.h\n{LOOP}")],
        [(LOOP, f"        parts = self.parts\n{LOOP}")],
        [(LOOP, f"        first = list(self.parts.values())\n{LOOP}")],
        [(LOOP, f"        norm = sum(p.pow(2).sum() for p in self.parameters())\n{LOOP}")],
        [(LOOP, f"        look(self)\n{LOOP}")],
        [(LOOP, f"        self.forward(x)\n{LOOP}")],
        [(MADE, CHAIN), body("x = self.parts.h(x) if deep else x")],
        [set_up("self.forward = torch.compile(self.forward)")],
        [set_up("self.compile()")],
        [set_up("init_all(self)")],
        [set_up("print(list(self.parts.values()))")],
        [set_up("self.parts = nn.ModuleDict()")],
        [set_up("self.parts.h.append(other)")],
        [set_up("first = self.parts.h[0].mlp")],
        [set_up("self.reach()")],
        [("return sum(p.numel()", "return sum(p.norm()")],
        # ---- what a layer's unit would cast
        [POLICY, turn("x = block(x, self.angles)")],
        [POLICY, turn("x = block(self.angles + x)")],
        [POLICY, (LOOP, f"        x = x.float()\n{LOOP}")],
        [POLICY, ("model(ids)", "torch.autocast('cuda')\nmodel(ids)")],
        # ---- a method for the optimizer that does more
        [asked("return decayed")],
        [asked("return optimizer, decayed")],
        [asked("self.decayed = decayed", "return optimizer")],
        [asked("print(decayed[0] * 2)", "return optimizer")],
        [asked("print(self.head)", "return optimizer")],
        [asked("print(self.parameters)", "return optimizer")],
        [asked("keep(decayed)", "return optimizer")],
        [asked("decayed[0].grad = None", "return optimizer")],
        [("print(sum(p.numel() for p in decayed)", "print(sum(p for p in decayed)")],
        [("optimizer = torch.optim.AdamW([", "optimizer = list([")],
        [("model.groups(0.1)", "model.count()")],
        # ---- models that are more than made and called
        [("model.parameters() if p.requires_grad", "model.parameters() if p.sum()")],
        [("p.numel() for p in model.", "p.norm() for p in model.")],
        [("p.numel() for p in model.parameters()", "p.numel() for p in model.buffers()")],
        [("optimizer = model", "step = torch.compile(evaluate)\noptimizer = model")],
        [("optimizer = model", "model = torch.compile(model)\noptimizer = model")],
        [("optimizer = model", "net = DistributedDataParallel(model)\noptimizer = model")],
        [("GPT(Config()).to(device)", "wrapped(GPT(Config()))")],
        [("GPT(Config()).to(device)", "GPT(Config()).half()")],
        [("model(ids).sum", "model.generate(ids).sum")],
        [("model(ids).sum", "model.parts.h[0](ids).sum")],
    ],
)
def test_what_the_text_does_not_settle_gets_words(changes: list[Change]) -> None:
    source = changed(*changes)
    compile(source, "script", "exec")
    assert clicked(source) is None


@pytest.mark.parametrize(
    "name",
    [
        *("apply", "buffers", "children", "get_parameter", "get_submodule", "items", "keys"),
        *("load_state_dict", "modules", "named_buffers", "named_children", "named_modules"),
        *("named_parameters", "parameters", "requires_grad_", "state_dict", "values"),
    ],
)
def test_methods_that_get_at_layers(name: str) -> None:
    assert clicked(changed((LOOP, f"        look(self.{name}())\n{LOOP}"))) is None


@pytest.mark.parametrize(
    "name",
    [
        *("_apply", "_call_impl", "apply", "children", "compile", "config", "cuda", "eval"),
        *("gradient_checkpointing_enable", "load_state_dict", "modules", "named_children"),
        *("named_modules", "named_parameters", "parameters", "register_forward_hook"),
        *("register_forward_pre_hook", "requires_grad_", "state_dict", "to", "train"),
        *("zero_grad",),
    ],
)
def test_methods_of_torchs_that_are_a_persons_own(name: str) -> None:
    assert clicked(changed(method(f"def {name}(self):", "    return self"))) is None


@pytest.mark.parametrize(
    "name",
    [
        *("__class__", "__dict__", "_modules", "_parameters", "add_module", "functional_call"),
        *("globals", "register_module", "register_parameter", "setattr"),
    ],
)
def test_ways_to_plant_weights(name: str) -> None:
    assert clicked(changed(earlier(f"one.{name}(0)"))) is None


@pytest.mark.parametrize(
    "name",
    [
        *("float", "double", "half", "bfloat16", "to", "type", "type_as"),
    ],
)
def test_casts_before_layers_that_cast(name: str) -> None:
    assert clicked(changed(POLICY, (LOOP, f"        x = x.{name}()\n{LOOP}"))) is None
