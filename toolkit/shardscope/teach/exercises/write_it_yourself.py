"""Code exercises of notebook 30: DDP's buckets, ZeRO-1 and FSDP, each run on two ranks."""

from __future__ import annotations

from shardscope.teach.exercises.exercise import Exercise
from shardscope.teach.two_ranks import CodeOnRanks

EXERCISES = (
    Exercise(
        name="30-bucketed-all-reduce",
        asks="It is a function: average_gradients(parameters, bucket_bytes). The check runs it on two "
        "ranks, for some ten seconds.",
        expected=CodeOnRanks(
            check="bucketed_all_reduce",
            signature="average_gradients(parameters, bucket_bytes)",
            num_arguments=2,
        ),
        hints=(
            "Three parts: sort the parameters into buckets; all-reduce each bucket as one flat tensor; "
            "copy the average back into every .grad.",
            "torch.cat([p.grad.flatten() for p in bucket]) is a bucket, dist.all_reduce sums it in place, "
            "and flat.split([p.numel() for p in bucket]) are its slices again. Divide by "
            "dist.get_world_size().",
            "for p in reversed(parameters): close the bucket if p would not fit any more, then add p. "
            "After the loop one bucket is left: it has to be reduced too. "
            "p.grad.copy_(slice.view_as(p.grad)) copies back.",
        ),
        why="DDP does the same from hooks that run while backward goes on, so that all but the last "
        "bucket hide behind it (Li et al. 2020, section 3.2).",
    ),
    Exercise(
        name="30-sharded-optimizer",
        asks="It is a class: ShardedOptimizer(parameters, learning_rate) with step(). The check runs it "
        "on two ranks, for some ten seconds.",
        expected=CodeOnRanks(
            check="sharded_optimizer",
            signature="ShardedOptimizer(parameters, learning_rate), with step()",
            num_arguments=2,
            method="step",
        ),
        hints=(
            "Give every parameter an owner. A rank has a torch.optim.AdamW of its own parameters only, "
            "and after its step each owner sends the new values to the others.",
            "All ranks have to compute the same owners. Weights are larger than biases: give each "
            "parameter to the rank with the fewest numbers so far. dist.broadcast(tensor, src=owner) "
            "sends a tensor, and every rank has to call it, owner or not.",
            "In step: self.optimizer.step(), then for p, owner in zip(self.parameters, self.owners): "
            "dist.broadcast(p.data, src=owner).",
        ),
        why="AdamW's moments are 8 of 16 bytes of a parameter, with the main copy 12: that is what ZeRO-1 "
        "divides by the ranks. It sends no more than DDP, if the gradients are only reduced to their owners "
        "(Rajbhandari et al. 2020, sections 5.1 and 7.2.1).",
    ),
    Exercise(
        name="30-one-layer-fsdp",
        asks="It is a class: ShardedLinear(linear), a torch.nn.Module. The check runs it on two ranks, "
        "for some ten seconds.",
        expected=CodeOnRanks(
            check="one_layer_fsdp",
            signature="ShardedLinear(linear), a torch.nn.Module with forward(x)",
            num_arguments=1,
            method="forward",
        ),
        hints=(
            "Keep rank r's slice of the flat weight as the only parameter. Forward gathers the weight and "
            "multiplies; backward gathers it again and reduce-scatters the weight's gradient.",
            "A torch.autograd.Function of (x, shard) saves x and shard, and not the gathered weight: "
            "dist.all_gather_into_tensor(whole, shard) makes it in forward, and again in backward.",
            "In backward: grad_x = grad @ weight, grad_weight = grad.t() @ x, then "
            "dist.reduce_scatter_tensor(grad_shard, grad_weight.flatten()) and grad_shard / world size. "
            "Copy the slice of the weight with .clone(), or all of it stays alive.",
        ),
        why="This is FSDP2's fully_shard with reshard_after_forward=True: two all-gathers and a "
        "reduce-scatter, three halves of an all-reduce, for weights, gradients and state that are all "
        "sharded (Zhao et al. 2023, section 3; Rajbhandari et al. 2020, section 7.2.2).",
    ),
)
