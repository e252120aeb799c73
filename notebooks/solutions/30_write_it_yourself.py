"""Solutions of notebook 30."""

# %% 30-bucketed-all-reduce
import torch
import torch.distributed as dist


def average_gradients(parameters, bucket_bytes):
    buckets, bucket, size = [], [], 0
    for parameter in reversed(parameters):
        num_bytes = parameter.grad.numel() * parameter.grad.element_size()
        if bucket and size + num_bytes > bucket_bytes:
            buckets.append(bucket)
            bucket, size = [], 0
        bucket.append(parameter)
        size += num_bytes
    buckets.append(bucket)
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        slices = flat.split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, slices, strict=True):
            parameter.grad.copy_(part.view_as(parameter.grad))


# %% 30-sharded-optimizer
import torch
import torch.distributed as dist


class ShardedOptimizer:
    def __init__(self, parameters, learning_rate):
        self.parameters = list(parameters)
        self.owners, sizes = [], [0] * dist.get_world_size()
        for parameter in self.parameters:
            owner = sizes.index(min(sizes))
            self.owners.append(owner)
            sizes[owner] += parameter.numel()
        pairs = zip(self.parameters, self.owners, strict=True)
        own = [parameter for parameter, owner in pairs if owner == dist.get_rank()]
        self.optimizer = torch.optim.AdamW(own, lr=learning_rate)

    def step(self):
        self.optimizer.step()
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            dist.broadcast(parameter.data, src=owner)


# %% 30-one-layer-fsdp
import torch
import torch.distributed as dist


class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def gather(shard, shape):
        whole = shard.new_empty(shard.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(whole, shard.detach())
        return whole.view(shape)

    @staticmethod
    def forward(ctx, x, shard, shape):
        ctx.save_for_backward(x, shard)
        ctx.shape = shape
        return x @ GatheredLinear.gather(shard, shape).t()

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        weight = GatheredLinear.gather(shard, ctx.shape)
        grad_shard = torch.empty_like(shard)
        dist.reduce_scatter_tensor(grad_shard, (grad.t() @ x).flatten())
        return grad @ weight, grad_shard / dist.get_world_size(), None


class ShardedLinear(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.shape = linear.weight.shape
        slices = linear.weight.detach().flatten().chunk(dist.get_world_size())
        self.shard = torch.nn.Parameter(slices[dist.get_rank()].clone())

    def forward(self, x):
        return GatheredLinear.apply(x, self.shard, self.shape)
