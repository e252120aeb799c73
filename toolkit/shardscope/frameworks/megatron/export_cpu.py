"""What Megatron-core's plain script says to CPU ranks: its CUDA calls mean the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.plan import Plan

MODE = '''
class CudaMeansCpu(TorchFunctionMode):
    """Megatron-core asks for CUDA devices by name: it gets CPU tensors, and .cuda() moves nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")  # its optimizers know no other names
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to:
            args = ["cpu" if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args]
        return function(*args, **kwargs)


class HappenedAlready:
    """A stream or an event of CUDA's; a CPU has finished a kernel when it returns."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


def cuda_means_cpu():
    """From here on, in this process: there is no CUDA in it."""
    torch.compiler.set_stance("force_eager")  # what megatron-core compiles runs as it is written
    cpu, stream = torch.device("cpu"), HappenedAlready()
    for name in ("current_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: cpu)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: stream
    torch.cuda.Stream = torch.cuda.Event = HappenedAlready
    torch.cuda.stream = lambda *args: nullcontext()
    torch.cuda.get_rng_state = random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # gloo has no collectives that are launched as one; here they are waited for one by one.
    param_and_grad_buffer._coalescing_manager = @@TOGETHER@@
@@MORE@@    CudaMeansCpu().__enter__()
'''

OVERLAPPED = '''
class OneByOne:
    """For collectives that are launched as one, and waited for by what the ``with`` gives."""

    def __init__(self, *args, **kwargs):
        self.works, self.calls = [], []

    def __enter__(self):
        names = ("dist_reduce_scatter_func", "dist_all_gather_func")
        places = [(dist, "all_reduce"), *((param_and_grad_buffer, name) for name in names)]
        self.calls = [(owner, name, getattr(owner, name)) for owner, name in places]
        for owner, name, call in self.calls:
            setattr(owner, name, functools.partial(self.launch, call))
        return self

    def launch(self, call, *args, **kwargs):
        work = call(*args, **kwargs)
        self.works += [] if work is None else [work]
        return work

    def __exit__(self, *_):
        for owner, name, call in self.calls:
            setattr(owner, name, call)

    def wait(self):
        while self.works:
            self.works.pop().wait()

'''

IMPORTS = """
from contextlib import nullcontext
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode
"""
STAGE_IMPORTS = "from megatron.core.pipeline_parallel import p2p_communication\n"
EXPERT_IMPORTS = "from megatron.core.transformer.moe import moe_utils, token_dispatcher\n"

STAGES = """\
    send = p2p_communication._p2p_ops

    def held_until_sent(**tensors):  # schedules empty what they have sent, and gloo may still read it
        sent = ("tensor_send_prev", "tensor_send_next")
        kept = {name: tensors[name].detach() for name in sent if tensors.get(name) is not None}
        return send(**tensors | kept)

    p2p_communication._p2p_ops = held_until_sent
"""
EXPERTS = """\
    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )
"""


def on_cpu(plan: Plan) -> str:
    """The function ``cuda_means_cpu`` for the parts of Megatron-core that ``plan`` runs."""
    more = STAGES if plan.degrees.pp > 1 else ""
    more += EXPERTS if plan.architecture.mixture_of_experts is not None else ""
    if plan.layout.overlap_grad_reduce:  # type: ignore[attr-defined]
        return OVERLAPPED + MODE.replace("@@MORE@@", more).replace("@@TOGETHER@@", "OneByOne")
    return MODE.replace("@@MORE@@", more).replace("@@TOGETHER@@", "lambda *args, **kwargs: nullcontext()")


def cpu_imports(plan: Plan) -> str:
    """What that imports."""
    found = IMPORTS + (STAGE_IMPORTS if plan.degrees.pp > 1 else "")
    return found + (EXPERT_IMPORTS if plan.architecture.mixture_of_experts is not None else "")
