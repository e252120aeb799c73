"""Tests of bytes counted on a rank's device. The meta device is the host of these tests' "GPU", the CPU."""

from __future__ import annotations

from tests.requirements import needs

torch = needs("torch")

from shardscope.training.accounting.census import Census  # noqa: E402
from shardscope.training.accounting.tensors import count_optimizer_bytes, count_tensor_bytes  # noqa: E402
from shardscope.training.engine import LiveTensors  # noqa: E402

DEVICE = torch.device("cpu")


def test_offloaded_tensors_are_not_on_the_device() -> None:
    here, offloaded = torch.zeros(10), torch.zeros(1000, device="meta")
    assert count_tensor_bytes([here, here, offloaded]) == 4040
    assert count_tensor_bytes([here, here, offloaded], DEVICE) == 40

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(10))], foreach=False)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"exp_avg": here, "exp_avg_sq": offloaded}
    assert count_optimizer_bytes(optimizer) == 4040
    assert count_optimizer_bytes(optimizer, DEVICE) == 40


def test_a_census_counts_the_device_alone() -> None:
    weights, offloaded = torch.zeros(10), torch.zeros(1000, device="meta")
    live = LiveTensors(parameters=[weights, offloaded], gradients=[], optimizer=[offloaded])
    with Census(lambda: live, device=DEVICE, vocab_sizes=()) as census:
        census.begin_phase("forward")
        kept = [weights * 2, offloaded * 2]
        census.update_peak("forward")
    assert len(kept) == 2
    assert census.phases["forward"]["parameters"] == 40
    assert census.phases["forward"]["optimizer"] == 0
    assert census.phases["forward"]["activations"] == 40
