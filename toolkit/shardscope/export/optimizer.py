"""The optimizers that a script makes over torch's own: what decays, and what does not."""

from __future__ import annotations

OPTIMIZERS = {
    "adamw": 'torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device.type in ("cuda", "cpu"))',
    "adamw_foreach": "torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), foreach=True)",
    "sgd": "torch.optim.SGD(groups, lr=rate, momentum=0.9)",
    "adafactor": "torch.optim.Adafactor(groups, lr=rate)",
    "lion": "Lion(groups, lr=rate)",
}
"""By ``Recipe.optimizer``, over the groups of :data:`GROUPS`."""

GROUPS = """\
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]"""
"""Of every script's ``build_optimizer``."""

BUILD = '''
def build_optimizer(parameters, rate, device):
    """The plan's optimizer; vectors (norms, biases) are not decayed."""
@@GROUPS@@
    return @@MAKE@@

'''

LION = '''

class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2: one momentum a weight, and a step as long whatever the gradient."""

    def __init__(self, groups, lr, betas=(0.9, 0.99)):
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group["lr"], group["weight_decay"], *group["betas"])

    def update(self, parameter, rate, decay, beta1, beta2):
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        parameter.mul_(1 - rate * decay)
        parameter.add_(momentum.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-rate)
        momentum.lerp_(parameter.grad, 1 - beta2)

'''


MUON = '''

def build_optimizer(model, rate):
    """Muon for matrices inside of layers (Jordan et al. 2024), AdamW for the rest, without vectors' decay."""
    layers = [weight for layer in decoder_layers(model) for weight in layer.parameters()]
    hidden = [weight for weight in layers if weight.ndim == 2 and weight.requires_grad]
    taken = set(hidden)
    rest = [weight for weight in model.parameters() if weight.requires_grad and weight not in taken]
    groups = [
        {"params": [weight for weight in rest if weight.ndim >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in rest if weight.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    parts = [torch.optim.Muon(hidden, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")]
    if groups:
        parts.append(torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True))
    return Both(*parts)


class Both(torch.optim.Optimizer):
    """Optimizers as one: their groups are its own, and take their steps in turn."""

    def __init__(self, *parts):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure=None):
        for part in self.parts:
            part.step()

'''


def optimizer_of(name: str) -> str:
    """The function ``build_optimizer``, and the class that torch does not have.

    Muon's takes the model, which tells hidden matrices from others.
    """
    if name == "muon":
        return MUON
    made = BUILD.replace("@@GROUPS@@", GROUPS).replace("@@MAKE@@", OPTIMIZERS[name])
    return (LION if name == "lion" else "") + made
