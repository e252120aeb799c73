"""Tests of the cluster picker: host memory and NVMe of a node, from the catalogue, typed or unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardscope as ss
from shardscope_widgets import Studio
from shardscope_widgets.pickers import ClusterPicker

H100 = ss.Cluster.parse("8xh100-sxm-80gb")


def test_initial_host_memory_comes_from_the_catalogue() -> None:
    picker = ClusterPicker("8xh100-sxm-80gb")
    assert picker.value == H100
    assert H100.host_memory_bytes is not None
    assert picker.host.value == f"{H100.host_memory_bytes / 2**30:,.0f}" and picker.nvme.value == ""


@pytest.mark.parametrize(
    "cluster",
    [
        replace(
            H100,
            host_memory_bytes=123_456_789_012,
            nvme_bytes=2**30 + 1,
            nvme_bandwidth_bytes_per_second=3.3e9,
        ),
        replace(H100, host_memory_bytes=None),
        replace(H100, num_nodes=3, host_link=H100.inter_node_link),
        replace(H100, gpu=replace(H100.gpu, name="my-gpu")),
        ss.Cluster.parse("2xcpu"),
        ss.Cluster.detect(),
    ],
    ids=["bytes", "unknown", "links", "own card", "cpu", "detected"],
)
def test_set_value_preserves_every_field_exactly(cluster: ss.Cluster) -> None:
    picker = ClusterPicker()
    picker.set_value(cluster)
    assert picker.value == cluster and not picker.is_wrong
    picker.count.value = "1"
    assert picker.value == replace(cluster, gpus_per_node=1), "changing another input keeps the other fields"


def test_typed_host_memory_and_nvme_override_the_catalogue() -> None:
    picker = ClusterPicker("8xh100-sxm-80gb")
    picker.host.value, picker.nvme.value, picker.speed.value = "1,024", "3500.5", "6.4"
    assert picker.value.host_memory_bytes == 2**40
    assert picker.value.nvme_bytes == round(3500.5 * 2**30)
    assert picker.value.nvme_bandwidth_bytes_per_second == pytest.approx(6.4e9)
    picker.host.value = " "
    assert picker.value.host_memory_bytes is None, "an empty input means unknown"
    picker.type.value = "a100-sxm-80gb"
    assert picker.value == ss.Cluster.parse("8xa100-sxm-80gb"), "another GPU type resets the host fields"


@pytest.mark.parametrize(
    ("box", "typed", "field"),
    [
        ("host", "much", "Cluster.host_memory_bytes is 'much'"),
        ("host", "-1", "Cluster.host_memory_bytes"),
        ("nvme", "1e30", "Cluster.nvme_bytes"),
        ("nvme", "1,5", "Cluster.nvme_bytes is '1,5'"),
        ("speed", "0", "a number of GB/s from 0.001 to 10,000"),
        ("nvme", "inf", "Cluster.nvme_bytes is 'inf'"),
        ("speed", "fast", "Cluster.nvme_bandwidth_bytes_per_second is 'fast'"),
    ],
)
def test_invalid_size_is_reported_at_its_input_and_keeps_the_value(box: str, typed: str, field: str) -> None:
    picker = ClusterPicker("8xh100-sxm-80gb")
    getattr(picker, box).value = typed
    row = picker.rows["host_memory_bytes" if box == "host" else "nvme_bytes"]
    assert field in row.message.replace("&#x27;", "'") and picker.is_wrong
    assert picker.value == H100 and getattr(picker, box).value == typed
    getattr(picker, box).value = ""
    assert not picker.is_wrong and not row.message


@pytest.mark.parametrize(
    ("box", "typed", "shown"),
    [
        ("host", "much", "Allowed: a number of GiB from 0 to 1,048,576. Fix: 1,024."),
        ("host", "0.0001", "Allowed: 0 or a number of GiB from 0.001. Fix: 0.001."),
        ("host", "1e9", "Allowed: a number of GiB from 0 to 1,048,576. Fix: 1,048,576."),
        ("speed", "fast", "Allowed: a number of GB/s from 0.001 to 10,000. Fix: 10."),
        ("speed", "0", "Allowed: a number of GB/s from 0.001 to 10,000. Fix: 0.001."),
    ],
)
def test_message_at_an_input_has_its_unit_and_no_python_field(box: str, typed: str, shown: str) -> None:
    """It said "Cluster.nvme_bandwidth_bytes_per_second is '0'" and offered 1,024 GB/s."""
    picker = ClusterPicker("8xh100-sxm-80gb")
    getattr(picker, box).value = typed
    row = picker.rows["host_memory_bytes" if box == "host" else "nvme_bytes"]
    assert f">{shown}<" in row.children[-1].value


@pytest.mark.parametrize(
    ("cluster", "answer"),
    [
        ("256x8xh100-sxm-80gb", "2,048 × H100 80 GB, 256 nodes"),
        ("2048x8xh100-sxm-80gb", "16,384 × H100 80 GB"),
        ("2x8xrtx-pro-6000-blackwell-96gb", "16 × RTX PRO 6000 Blackwell 96 GB"),
    ],
)
def test_answer_of_the_folded_question_is_not_cut(cluster: str, answer: str) -> None:
    assert ClusterPicker(cluster).answer == answer


def test_answer_in_the_checks_tab_is_written_to_the_picker() -> None:
    studio = Studio()
    layout = ss.Layout.zero(offload_optimizer="nvme", offload_params="nvme")
    studio.apply(replace(studio.plan, layout=layout))
    studio.tabs.value = "Checks"
    assert "nvme-not-known" in [one.name for one in studio.checks.findings]
    studio.checks.list.submit_text("nvme-not-known", "lots")
    assert (
        "Cluster.nvme_bytes is 'lots'" in studio.checks.list.error and studio.plan.cluster.nvme_bytes is None
    )
    studio.checks.list.submit_text("nvme-not-known", "4,096")
    assert studio.plan.cluster.nvme_bytes == 2**42 and studio.cluster.nvme.value == "4,096"
    assert "nvme-not-known" not in [one.name for one in studio.checks.findings]
    assert not studio.checks.list.error


def test_only_the_wrong_one_of_two_inputs_in_a_row_is_marked() -> None:
    picker = ClusterPicker()
    for wrong, right, typed in ((picker.nodes, picker.count, "0"), (picker.speed, picker.nvme, "fast")):
        before, wrong.value = wrong.value, typed
        assert picker.is_wrong and "ss-wrong" in wrong._dom_classes and "ss-wrong" not in right._dom_classes
        wrong.value = before
        assert not picker.is_wrong and "ss-wrong" not in wrong._dom_classes
