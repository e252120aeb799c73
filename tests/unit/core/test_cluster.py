"""Tests of ``Cluster``: parsing, detection with a fake driver, errors and JSON."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.requirements import examples, needs

import shardscope as ss
from shardscope.catalog import gpus, links
from shardscope.core.cluster import Cluster, Gpu, Link
from shardscope.machine import detection, host

H100 = gpus["h100-sxm-80gb"]
CLUSTER = Cluster.parse("4x8xh100-sxm-80gb")


@pytest.mark.parametrize("name", list(gpus))
def test_every_gpu_name_parses_with_counts(name: str) -> None:
    assert Cluster.parse(name).num_gpus == 1
    eight = Cluster.parse(f"8x{name}")
    assert (eight.num_nodes, eight.gpus_per_node, eight.gpu.name) == (1, 8, name)
    if name != "cpu":
        many = Cluster.parse(f" 4 X 8 × {name.upper()}")
        assert (many.num_nodes, many.gpus_per_node, many.num_gpus) == (4, 8, 32)
        assert Cluster.parse(str(many)) == many


def test_links_and_host_come_from_the_catalogue() -> None:
    assert CLUSTER.intra_node_link == links["nvlink-4"]
    assert CLUSTER.inter_node_link == links["infiniband-ndr"]
    assert CLUSTER.host_link == links["pcie-5-x16"]
    assert CLUSTER.host_memory_bytes == 2 * 2**40
    assert CLUSTER.usable_bytes_per_gpu == H100.usable_bytes


def test_cpu_ranks_share_the_hosts_memory() -> None:
    two = Cluster.parse("2xcpu")
    assert two.usable_bytes_per_gpu == two.gpu.usable_bytes // 2
    assert two.host_memory_bytes == two.gpu.memory_bytes


@pytest.mark.parametrize(
    ("bad", "near"),
    [
        ("8xh100", "8xh100-sxm-80gb"),
        ("h200", "h200-sxm-141gb"),
        ("4x8xa100-80gb", "4x8xa100-sxm-80gb"),
        ("2xcpus", "2xcpu"),
        ("8xrtx-4090", "8xrtx-4090-24gb"),
        ("", "8xh100-sxm-80gb"),
        ("8x", "8xh100-sxm-80gb"),
        ("8", "8x"),
        ("-1xcpu", "8x"),
        ("1.5xcpu", "8x"),
        ("2x2x2xcpu", "8x"),
        ("nanxcpu", "cpu"),
        (None, "8x"),
        (8, "8x"),
        (True, "8x"),
        (["8xcpu"], "8x"),
        ("8xh100-sxm-80gb\0", "8x"),
        ("٨xcpu", "8x"),
        ("4*8*h100", "4x8xh100-sxm-80gb"),
        ("4 nodes x 8 l40s", "4x8xl40s-48gb"),
        ("a100 40gb", "a100-sxm-40gb"),
        ("8xa100-80", "8xa100-sxm-80gb"),
        ("8 H100 per node", "8xh100-sxm-80gb"),
        ("h100 * 8 * 4", "4x8xh100-sxm-80gb"),
        ("2x4090", "2xrtx-4090-24gb"),
        ("h100-sxm-80gb:8", "8xh100-sxm-80gb"),
        ("cpux2", "2xcpu"),
        ("2x8xh100_sxm_80gb", "2x8xh100-sxm-80gb"),
        ("2x8xNVIDIA H100 80GB HBM3", "2x8xh100-sxm-80gb"),
        ("Tesla V100", "v100-sxm-32gb"),
        ("4x4xgb200-nvl72", "4x4xgb200-186gb"),
        ("2x8xh100-sxm-80gb, 1x4xl40s-48gb", "2x8xh100-sxm-80gb"),
    ],
)
def test_invalid_text_raises_with_the_nearest_cluster(bad: Any, near: str) -> None:
    with pytest.raises(ValueError, match=f"cluster is .*Nearest fix: '{near}"):
        Cluster.parse(bad)


@pytest.mark.parametrize("bad", ["0xcpu", "2000xcpu", "0x8xl4-24gb", "999999x8xl4-24gb"])
def test_fault_18_absurd_counts_raise(bad: str) -> None:
    with pytest.raises(ValueError, match=r"Cluster\.(gpus_per_node|num_nodes) is"):
        Cluster.parse(bad)


@given(st.text(max_size=40))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    try:
        assert Cluster.parse(text).num_gpus >= 1
    except ValueError as error:
        assert "Nearest fix" in str(error)


# --------------------------------------------------------------------------------------------- errors

NUMBERS = [0, -1, 1e30, 10**30, math.nan, math.inf, True, "8"]


@pytest.mark.parametrize("field", ["gpus_per_node", "num_nodes"])
@pytest.mark.parametrize("bad", [*NUMBERS, None, 1.5])
def test_fault_18_invalid_counts_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Cluster\.{field} is"):
        dataclasses.replace(CLUSTER, **{field: bad})


def test_a_rack_of_nvl72_has_the_host_memory_of_its_18_trays() -> None:
    tray = Cluster.parse("18x4xgb200-186gb")
    rack = Cluster.parse("72xgb200-186gb")
    assert tray.host_memory_bytes and rack.host_memory_bytes == 18 * tray.host_memory_bytes
    assert Cluster.parse("gb200-186gb").host_memory_bytes == tray.host_memory_bytes


@pytest.mark.parametrize("field", ["host_memory_bytes", "nvme_bytes", "nvme_bandwidth_bytes_per_second"])
@pytest.mark.parametrize("bad", NUMBERS[1:])
def test_fault_33_invalid_host_figures_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Cluster\.{field} is"):
        dataclasses.replace(CLUSTER, **{field: bad})


@pytest.mark.parametrize("field", ["gpu", "intra_node_link", "inter_node_link", "host_link"])
@pytest.mark.parametrize("bad", [None, "h100", 7, {}])
def test_invalid_gpus_and_links_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Cluster\.{field} is"):
        dataclasses.replace(CLUSTER, **{field: bad})


@pytest.mark.parametrize(
    "field",
    ["memory_bytes", "usable_bytes", "memory_bandwidth_bytes_per_second", "tdp_watts", "price_per_hour_usd"],
)
@pytest.mark.parametrize("bad", NUMBERS[1:])
def test_fault_33_invalid_gpu_figures_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Gpu\.{field} is"):
        dataclasses.replace(H100, price_date="2026-11-20", **{field: bad})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("name", ""),
        ("name", None),
        ("name", "a\nb"),
        ("vendor", "intel"),
        ("vendor", None),
        ("architecture", 9),
        ("link", 4),
        ("memory_is_shared", 1),
        ("peak_flops", None),
        ("peak_flops", {"int4": 1e12}),
        ("peak_flops", {"bf16": math.nan}),
        ("peak_flops", {"bf16": True}),
        ("peak_flops", {"bf16": 0}),
        ("price_date", "yesterday"),
        ("price_date", "20261120"),
        ("price_date", 7),
    ],
)
def test_other_invalid_gpu_fields_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Gpu\.{field}"):
        dataclasses.replace(H100, **{field: bad})


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"host_memory_bytes": "2TB"}, str(2**41)),
        ({"nvme_bytes": "512 GiB"}, str(2**39)),
        ({"host_memory_bytes": 2048}, str(2**41)),
        ({"nvme_bytes": np.int64(512)}, str(2**39)),
        ({"inter_node_link": "infiniband-hdr"}, r"shardscope\.catalog\.links\['infiniband-hdr'\]"),
        ({"intra_node_link": "nvlink4"}, r"shardscope\.catalog\.links\['nvlink-4'\]"),
        ({"host_link": ""}, r"shardscope\.catalog\.links\['pcie-5-x16'\]"),
        ({"gpu": "a100-sxm-80gb"}, r"ss\.gpus\['a100-sxm-80gb'\]"),
        ({"gpu": "h100"}, r"ss\.gpus\['h100-sxm-80gb'\]"),
    ],
)
def test_the_fix_of_a_size_with_its_unit_and_of_a_name_is_what_is_meant(
    change: dict[str, Any], fix: str
) -> None:
    """The fixes were 0 bytes, another cluster, an H100 for an A100, and a link outside of the catalogue."""
    with pytest.raises(ValueError, match=rf"Nearest fix: {fix}\.$"):
        dataclasses.replace(CLUSTER, **change)


@pytest.mark.parametrize(
    ("field", "memory", "num_bytes"),
    [
        ("memory_bytes", 80, 80 * 2**30),
        ("memory_bytes", 80.0, 80 * 2**30),
        ("memory_bytes", 81_920, 80 * 2**30),
        ("memory_bytes", 24_564, 24_564 * 2**20),
        ("memory_bytes", 40_960, 40 * 2**30),
        ("usable_bytes", 79, 79 * 2**30),
        ("usable_bytes", 96, 80 * 2**30),
    ],
)
def test_a_gpu_memory_in_gib_or_mib_is_refused_with_its_bytes(
    field: str, memory: float, num_bytes: int
) -> None:
    """The fix was 1,048,576 bytes, and 43 TB for the 40,960 MiB that nvidia-smi prints of an A100."""
    with pytest.raises(ValueError, match=rf"Gpu\.{field} is .* bytes.*Nearest fix: {num_bytes}\.$"):
        dataclasses.replace(H100, **{field: memory})


def test_a_generation_is_found_as_its_vendor_writes_it() -> None:
    """ "Hopper" had the figures of an unknown generation, and a step that was 10 % longer."""
    assert dataclasses.replace(H100, architecture="Hopper") == H100
    assert not dataclasses.replace(gpus["v100-sxm-32gb"], architecture="Volta").has_flash_attention


def test_a_misspelt_link_is_led_to_the_nearest_one() -> None:
    """The fix was PCIe 4.0, a ninth of NVLink's bandwidth."""
    gpu = dataclasses.replace(H100, name="my-gpu", link="nvlink4")
    plan = ss.Plan(ss.models["llama-3.1-8b"], Cluster.of(gpu, 8), ss.Recipe(), ss.Layout.fsdp2())
    with pytest.raises(ValueError, match=r"Gpu\.link is 'nvlink4'.*Nearest fix: link='nvlink-4'\.$"):
        plan.step()


def test_usable_memory_and_price_date_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Gpu\.usable_bytes"):
        dataclasses.replace(H100, usable_bytes=H100.memory_bytes + 1)
    with pytest.raises(ValueError, match=r"Gpu\.price_date is None"):
        dataclasses.replace(H100, price_per_hour_usd=2.0, price_date=None)
    priced = dataclasses.replace(H100, price_per_hour_usd=2.0, price_date="2026-11-20")
    assert Cluster.of(priced, 8, 4).price_per_hour_usd == 64.0
    unpriced = dataclasses.replace(H100, price_per_hour_usd=None, price_date=None)
    assert Cluster.of(unpriced, 8, 4).price_per_hour_usd is None


@pytest.mark.parametrize("field", ["bandwidth_bytes_per_second", "latency_seconds"])
@pytest.mark.parametrize("bad", [-1, 1e30, math.nan, math.inf, True, "8", None])
def test_fault_33_invalid_link_figures_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Link\.{field} is"):
        dataclasses.replace(links["nvlink-4"], **{field: bad})


def test_json_pickle_and_copy_round_trip() -> None:
    odd = dataclasses.replace(
        CLUSTER,
        nvme_bytes=2**43,
        nvme_bandwidth_bytes_per_second=5e10,
        inter_node_link=Link(name="my-net", bandwidth_bytes_per_second=1e9, latency_seconds=0.0),
    )
    for cluster in (CLUSTER, odd, Cluster.parse("2xcpu")):
        assert Cluster.from_json(cluster.to_json()) == cluster
        assert pickle.loads(pickle.dumps(cluster)) == cluster == copy.deepcopy(cluster)
        assert hash(copy.deepcopy(cluster)) == hash(cluster)
    with pytest.raises(ValueError, match=r"num_node.*'num_nodes'"):
        Cluster.from_dict({**CLUSTER.to_dict(), "num_node": 1})


# ------------------------------------------------------------------------------------------ detection


class NvmlError(Exception):
    pass


def pretend_driver(
    monkeypatch: pytest.MonkeyPatch, devices: list[tuple[str, int]], visible: str | None = None
) -> None:
    """Replace pynvml by a fake whose GPUs are (name, bytes); handles are their indices."""

    def get_memory_info(handle: int, version: object = None) -> SimpleNamespace:
        return SimpleNamespace(total=devices[handle][1], reserved=2**29)

    def raise_nvml_error(_: int) -> None:
        raise NvmlError

    fake = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlMemory_v2=2,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}abc",
        nvmlDeviceGetName=lambda handle: devices[handle][0],
        nvmlDeviceGetMemoryInfo=get_memory_info,
        nvmlDeviceGetCudaComputeCapability=lambda _: (12, 0),
        nvmlDeviceGetPowerManagementDefaultLimit=lambda _: 575_000,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda _: 5,
        nvmlDeviceGetMaxPcieLinkWidth=raise_nvml_error if visible == "no-pcie" else lambda _: 16,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    if visible in (None, "no-pcie"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


HOPPER = ("NVIDIA H100 80GB HBM3", 85_520_809_984)
ADA = ("NVIDIA L4", 24_152_899_584)


def test_detects_known_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch, [HOPPER] * 8)
    cluster = Cluster.detect()
    assert str(cluster) == "8xh100-sxm-80gb"
    assert cluster.host_memory_bytes == host.get_host_memory_bytes()


def test_detects_the_largest_group_of_equal_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch, [ADA, HOPPER, HOPPER])
    assert str(Cluster.detect()) == "2xh100-sxm-80gb"
    pretend_driver(monkeypatch, [ADA, HOPPER, HOPPER], visible="0")
    assert str(Cluster.detect()) == "1xl4-24gb"


@pytest.mark.parametrize(
    ("capability", "generation"),
    [((5, 2), None), ((8, 6), "ampere"), ((8, 9), "ada"), ((9, 0), "hopper"), ((10, 3), "blackwell-ultra")],
)
def test_unknown_gpus_have_the_generation_of_their_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], generation: str | None
) -> None:
    pretend_driver(monkeypatch, [("NVIDIA Unknown", 34_190_917_632)])
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetCudaComputeCapability", lambda _: capability)
    assert Cluster.detect().gpu.architecture == generation


def test_unknown_gpus_have_only_the_figures_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_driver(monkeypatch, [("NVIDIA GeForce RTX 5080", 34_190_917_632)] * 2)
    cluster = Cluster.detect()
    assert cluster.gpu == Gpu(
        name="nvidia-geforce-rtx-5080",
        vendor="nvidia",
        architecture="blackwell-rtx",
        memory_bytes=34_190_917_632,
        usable_bytes=34_190_917_632 - 2**29,
        link="pcie-5-x16",
        tdp_watts=575.0,
    )
    assert cluster.intra_node_link == cluster.host_link == links["pcie-5-x16"]
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_a_slice_of_a_known_gpu_is_not_detected_as_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch, [(HOPPER[0], 10 * 2**30)], visible="no-pcie")
    gpu = Cluster.detect().gpu
    assert (gpu.name, gpu.memory_bytes, gpu.link) == ("nvidia-h100-80gb-hbm3", 10 * 2**30, None)


@pytest.mark.parametrize("visible", ["", "-1", "9", "none", "NoDevFiles", "GPU-zzz"])
def test_fault_20_detects_the_cpu_if_no_gpu_is_visible(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    pretend_driver(monkeypatch, [HOPPER] * 2, visible=visible)
    assert Cluster.detect().gpu.name == "cpu"


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("0,9,1", [0]),
        ("0,-1,1", [0]),
        ("9,0", []),
        ("0,x,1", [0]),
        ("0,0", []),
        ("GPU-b", [1]),
        ("GPU-c3,GPU-a1", [2, 0]),
        ("GPU-", []),
        ("GPU-b,0", [1]),
        ("MIG-1", []),
        ("99999999999999999999", []),
        ("1,", [1]),
    ],
)
def test_fault_20_cuda_visible_devices_is_read_as_cuda_does(visible: str | None, indices: list[int]) -> None:
    assert detection.parse_visible_devices(visible, ["GPU-a1", "GPU-b2", "GPU-c3"]) == indices


ENTRIES = ["0", "1", "2", "9", "-1", "+1", "x", "1x", "", " 2", "GPU-a1", "GPU-b", "GPU-", "GPU-x", " GPU-c3"]


@settings(max_examples=examples(400))
@given(st.lists(st.sampled_from(ENTRIES), min_size=1, max_size=5).map(",".join))
def test_fault_20_number_of_visible_gpus_equals_that_of_torch(visible: str) -> None:
    """torch parses the variable itself; only the driver's answers are fake."""
    cuda = needs("torch").cuda
    uuids = ["GPU-a1", "GPU-b2", "GPU-c3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        patch.setattr(cuda, "_raw_device_count_nvml", lambda: len(uuids))
        patch.setattr(cuda, "_raw_device_uuid_nvml", lambda: uuids)
        assert len(detection.parse_visible_devices(visible, uuids)) == cuda._device_count_nvml()


def test_detects_the_cpu_without_a_driver_or_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch, [HOPPER])

    def fail() -> None:
        raise NvmlError

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", fail)
    assert Cluster.detect().gpu.name == "cpu"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    cluster = Cluster.detect()
    assert cluster.gpu.name == "cpu"
    assert cluster.num_gpus == min(2, host.count_cores())


def test_detects_the_cpu_if_the_gpu_fell_off_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch, [HOPPER])

    def fail(_: int) -> None:
        raise NvmlError

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetName", fail)
    assert Cluster.detect().gpu.name == "cpu"


# ---------------------------------------------------------------------------------------- host memory


def test_host_memory_is_the_lowest_cgroup_limit(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    (tmp_path / "root/a/b").mkdir(parents=True)
    root = tmp_path / "root"
    whole = host.get_host_memory_bytes(membership, root)
    (root / "a/memory.max").write_text(f"{2**28}\n")
    (root / "a/b/memory.max").write_text("max\n")
    assert host.get_host_memory_bytes(membership, root) == 2**28 < whole
    (tmp_path / "memory.max").write_text("1")  # outside of the cgroup tree
    assert host.get_host_memory_bytes(membership, root) == 2**28


def test_host_memory_with_cgroup_v1_and_without_cgroups(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,memory:/docker/x\n1:name=systemd:/\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(str(2**27))
    assert host.get_host_memory_bytes(membership, tmp_path) == 2**27
    assert host.get_host_memory_bytes(tmp_path / "nothing", tmp_path) > 2**28
