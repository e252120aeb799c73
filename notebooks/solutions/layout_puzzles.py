"""Solutions of the layout puzzles: for each, the changes of its plan."""

import shardscope as ss

SOLUTIONS = {
    "8b-on-one-node": (ss.Layout.zero(stage=3), {"micro_batch_size": 1}),
    "8b-on-gaming-gpus": (ss.Layout.megatron(tp=4, pp=2, vpp=2), {}),
    "7b-on-half-a-gpu": (ss.Layout.ddp(), {"method": "qlora", "recompute": "full"}),
    "70b-on-two-nodes": (ss.Layout.fsdp2(offload="cpu"), {"micro_batch_size": 2}),
    "70b-without-nvlink": (ss.Layout.fsdp2(offload="cpu"), {"micro_batch_size": 4}),
    "long-context": (ss.Layout.megatron(cp=8), {}),
    "mixture-of-experts": (ss.Layout.megatron(pp=2, vpp=4, cp=2, ep=8), {}),
    "405b-on-512": (ss.Layout.megatron(tp=4, pp=32, vpp=4, cp=4), {"recompute": "none"}),
    "405b-long-context": (ss.Layout.megatron(tp=4, pp=16, vpp=8, cp=16), {}),
    "70b-book-length": (ss.Layout.megatron(tp=2, pp=8, vpp=10, cp=4), {}),
}
"""Layout and fields of the recipe that differ from the puzzle's plan."""
