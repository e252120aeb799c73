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


def optimizer_of(name: str) -> str:
    """The function ``build_optimizer``, and the class that torch does not have."""
    made = BUILD.replace("@@GROUPS@@", GROUPS).replace("@@MAKE@@", OPTIMIZERS[name])
    return (LION if name == "lion" else "") + made
