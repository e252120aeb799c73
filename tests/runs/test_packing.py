"""Packed documents do not see each other: losses are those of unpacked rows, in one process and on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, architecture
from tests.requirements import few, needs, skip_without, thorough

torch = needs("torch")
needs("transformers")
needs("datasets")

from finetuned_models import small_model  # noqa: E402
from test_finetune_examples import ROWS, compute_loss, write_rows  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope import Layout, Recipe  # noqa: E402
from shardscope.families.registry import list_families_with  # noqa: E402
from shardscope.training.document_masks import add_document_mask  # noqa: E402
from shardscope.training.examples.packed_windows import pack_lengths  # noqa: E402
from shardscope.training.model.loss import apply_chunked_loss  # noqa: E402
from shardscope.training.model.model import build_model  # noqa: E402

LENGTHS = (9, 5, 17, 2)
SEQ_LEN = 40
PACKED = Recipe(packing=True, seq_len=SEQ_LEN)
PACKABLE = list_families_with("document_masks")
SMALL = [name for name in FAMILIES if architecture(name, 2).model_type in PACKABLE and "window" not in name]


def pack_documents(documents: list[Any]) -> dict[str, Any]:
    """Return one window of all documents, and padding."""
    rest = SEQ_LEN - sum(map(len, documents))
    labels = [label for one in documents for label in (-100, *one.tolist()[1:])] + [-100] * rest
    positions = [position for one in documents for position in range(len(one))] + list(range(rest))
    ids = [*torch.cat(documents).tolist(), *[0] * rest]
    tensors = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.tensor([values]) for name, values in tensors.items()}


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("family", few(SMALL, ["llama"]))
def test_packed_losses_are_those_of_the_documents(family: str, loss: str) -> None:
    torch.manual_seed(0)
    arch = architecture(family, 2)
    model = build_model(arch).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # Far from uniform attention.
    if loss == "chunked":
        apply_chunked_loss(model)
    documents = [torch.randint(1, arch.vocab_size, (length,)) for length in LENGTHS]
    num_labels = sum(LENGTHS) - len(LENGTHS)
    inputs = pack_documents(documents)
    with torch.no_grad():
        alone = sum(model(input_ids=one[None], labels=one[None]).loss * (len(one) - 1) for one in documents)
        packed = model(**add_document_mask(inputs, PACKED, torch.float32)).loss * num_labels
        mixed = model(**{**inputs, "position_ids": torch.arange(SEQ_LEN)[None]}).loss * num_labels
    assert float(packed) == pytest.approx(float(alone), rel=1e-5)
    assert abs(float(mixed) - float(alone)) > 1e-3, "documents that see each other have another loss"


def test_rows_without_position_ids_are_one_document_each() -> None:
    ids = torch.randint(1, 300, (2, SEQ_LEN))
    micro = {"input_ids": ids, "labels": ids}
    assert add_document_mask(micro, Recipe(), torch.float32) is micro
    model = build_model(architecture("llama", 2))
    with torch.no_grad():
        losses = [model(**inputs).loss for inputs in (micro, add_document_mask(micro, PACKED, torch.float32))]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)


LAYOUTS = {"ddp": Layout.ddp(), "fsdp2": Layout.fsdp2(), "zero-2": Layout.zero(stage=2)}


@thorough()
@pytest.mark.usefixtures("bounded_time", "nothing_left")
@pytest.mark.parametrize("name", few(LAYOUTS, ["fsdp2"]))
def test_ranks_train_packed_windows_in_the_predicted_memory(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    skip_without("deepspeed" if name == "zero-2" else "torch")
    folder = small_model(tmp_path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{**row, "completion": row["completion"] * times} for times in range(1, 13) for row in ROWS]
    tokens = [[tokenizer(row[part])["input_ids"] for part in ("prompt", "completion")] for row in rows]
    lengths = [sum(map(len, row)) for row in tokens]
    num_windows = len(pack_lengths(lengths, 512))
    assert num_windows == 4 and sum(lengths) > 3 * 512
    # One step reads each window once.
    recipe = Recipe(
        seq_len=512, micro_batch_size=2, global_batch_size=num_windows, precision="fp32", packing=True
    )
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, LAYOUTS[name])
    data = write_rows(tmp_path / "rows.jsonl", rows)
    task = ss.Finetune(folder, data, num_steps=3, validation=data)
    run = ss.launch(plan, task, folder=tmp_path / "runs")
    assert run.wait(200) == "finished", run.error
    expected = compute_loss(folder, tokens)
    losses = [line["loss"] for line in run.metrics() if "loss" in line]
    assert losses[0] == pytest.approx(expected, abs=1e-4)
    validated = [line["validation_loss"] for line in run.metrics() if "validation_loss" in line]
    assert validated[0] == pytest.approx(expected, abs=1e-4), "validation is packed, too"
    assert "packing: 48 examples in 4 windows of 512 tokens" in run.logs(0)
    report, predicted = run.memory(), plan.memory()
    assert report is not None and report.tier == "measured"
    forward, planned = report.at("forward"), predicted.at("forward")
    # The measured tensors also include the numbers of the loop, such as the loss.
    assert forward["activations"] > 2 * 512 * 512 * 4
    assert forward["activations"] == pytest.approx(planned["activations"], rel=0.001)
    assert report.error == pytest.approx(0, abs=0.01)
