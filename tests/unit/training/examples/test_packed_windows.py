"""Packed windows: which examples share one, and the contents of a batch."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.training.examples.packed_windows import PackedBatches, Packing, pack_lengths, pack_table
from shardscope.training.examples.token_table import TokenTable


def build_table(lengths: list[int]) -> TokenTable:
    """Return examples whose tokens are 100 x the example's number and the position; odd tokens bear loss."""
    ids = [100 * example + position for example, length in enumerate(lengths) for position in range(length)]
    return TokenTable(
        ids=np.asarray(ids, dtype=np.int32),
        bears_loss=np.asarray([token % 2 == 1 or token % 100 == 0 for token in ids]),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
    )


def build_batches(lengths: list[int], seq_len: int, rows: int, **options: bool) -> PackedBatches:
    table = build_table(lengths)
    packing = pack_table(table, seq_len)
    return PackedBatches(
        table=table, packing=packing, seq_len=seq_len, padding_id=0, rows=rows, rank=0, num_ranks=1, **options
    )


def test_the_longest_examples_are_placed_first_into_the_tightest_window() -> None:
    assert pack_lengths([5, 2, 3, 2], 6) == [[0], [2, 1], [3]]
    # The 3 goes to the window with 3 left, although the one with 4 left is older.
    assert pack_lengths([6, 7, 3], 10) == [[1, 2], [0]]
    assert pack_lengths([20, 4], 10) == [[0], [1]]
    assert pack_lengths([], 10) == []


def test_every_example_is_in_one_window_and_no_window_is_too_long() -> None:
    draw = Random(5)
    for seq_len in (16, 100, 512):
        lengths = [draw.randint(1, seq_len) for _ in range(500)]
        windows = pack_lengths(lengths, seq_len)
        assert sorted(index for window in windows for index in window) == list(range(500))
        filled = [sum(lengths[index] for index in window) for window in windows]
        assert max(filled) <= seq_len
        # Best fit decreasing needs at most 11/9 of the best possible number of windows, plus 4.
        assert len(windows) <= 11 / 9 * -(-sum(lengths) // seq_len) + 4


def test_there_are_as_many_windows_as_with_trl() -> None:
    draw = Random(7)
    lengths = [int(draw.lognormvariate(4, 1)) + 1 for _ in range(900)]
    # trl 1.16: len(pack_dataset(rows, seq_length=512, strategy="bfd")) of rows with these lengths.
    assert len(pack_lengths(lengths, 512)) == 150


def test_positions_begin_at_each_example_and_its_first_token_bears_no_loss() -> None:
    torch = needs("torch")
    batches = build_batches([3, 2, 4], 8, 2, in_order=True)
    assert batches.num_samples == 2 and batches.num_tokens == 9
    batch = batches.build_batch(0)
    # Examples 2 and 0 and a padding token; then example 1 and padding.
    assert batch["input_ids"].tolist() == [
        [200, 201, 202, 203, 0, 1, 2, 0],
        [100, 101, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [
        [-100, 201, -100, 203, -100, 1, -100, -100],
        [-100, 101, *[-100] * 6],
    ]
    # There is no third window.
    empty = batches.build_batch(1)
    assert (empty["labels"] == -100).all() and torch.equal(empty["position_ids"][1], torch.arange(8))


def test_a_packing_is_read_as_it_was_written(tmp_path: Path) -> None:
    packing = pack_table(build_table([3, 2, 4, 8]), 8)
    packing.save(tmp_path)
    again = Packing.load(tmp_path)
    assert len(again) == len(packing) == 3
    assert [again[window] for window in range(3)] == [packing[window] for window in range(3)]


def test_the_mask_hides_later_tokens_and_other_documents() -> None:
    torch = needs("torch")
    from shardscope.training.document_masks import build_document_mask

    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 0, 1, 2, 3]])
    for dtype in (torch.float32, torch.bfloat16):
        mask = build_document_mask(positions, dtype)
        assert mask.dtype == dtype and mask.shape == (2, 1, 10, 10)
        # Rows of a multiple of 8, or CUDA's kernel copies the mask in each layer.
        assert mask.stride()[-2] == 16 and mask.untyped_storage().nbytes() == 2 * 10 * 16 * dtype.itemsize
        for row, ids in enumerate(positions.tolist()):
            documents = np.cumsum([position == 0 for position in ids])
            for query in range(10):
                seen = [key <= query and documents[key] == documents[query] for key in range(10)]
                assert (mask[row, 0, query] == 0).tolist() == seen
                assert all(mask[row, 0, query][~torch.tensor(seen)] == torch.finfo(dtype).min)


# ---- Gain of packing, before a run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("transformers")
    needs("datasets")
    return write_folder(tmp_path_factory.mktemp("weights") / "small", max_position_embeddings=2048)


def build_plan(folder: Path, cluster: str = "2xcpu", **recipe: object) -> ss.Plan:
    fields: dict[str, object] = {"seq_len": 512, "global_batch_size": 4, "precision": "fp32", **recipe}
    arch = ss.Architecture.from_hf(folder)
    return ss.Plan(arch, ss.Cluster.parse(cluster), ss.Recipe(**fields), ss.Layout.ddp())  # type: ignore[arg-type]


def answers(*counts: int) -> list[dict[str, str]]:
    return [{"prompt": "Who hunts?", "completion": " Ahab." + " The ship sails." * count} for count in counts]


def test_a_preview_reports_the_gain_of_packing(folder: Path) -> None:
    # Forty short rows, and one of nearly a window.
    preview = ss.Finetune(folder, answers(*[1] * 40, 90)).preview(seq_len=512)
    short, longest = preview.length_at(0.5), preview.length_at(1.0)
    assert 256 < longest <= 512 and 40 * short + longest <= 2 * 512
    assert preview.count_windows(512) == 2 and preview.compute_packing_gain(512) == 20.5
    line = next(line for line in preview.sentences if "padding" in line)
    assert "Packing makes 2 windows of 41 rows, 20.5 times fewer steps per epoch, with" in line
    # Nothing fits beside rows of over half a window.
    full = ss.Finetune(folder, answers(*[90] * 5)).preview(seq_len=512)
    assert "Packing" not in " ".join(full.sentences)


def test_a_preview_of_a_plan_shows_its_windows_and_what_it_predicts(folder: Path) -> None:
    task = ss.Finetune(folder, answers(*[1] * 40, 90), num_epochs=3)
    plan = build_plan(folder, "8xh100-sxm-80gb", packing=True, seq_len=512, global_batch_size=8)
    preview = task.preview(2, plan=plan)
    indices = [row.index for window in preview.windows for row in window.rows]
    assert sorted(indices) == list(range(41)), "two windows hold all rows"
    for window in preview.windows:
        assert sum(len(row.ids) for row in window.rows) + window.num_padding == 512
    html, text = preview.to_html(), str(preview)
    assert "Window 1" in html and "Row 41: " in html and "positions 0 to" in html
    assert "ss-length-bars" in html, "the histogram"
    assert "GiB usable" in text and "of 8 sequences in 3 epochs: about" in text
    price = plan.cluster.price_per_hour_usd
    assert price is not None and f"at ${price:,.2f} per hour" in text
    assert "Window" not in task.preview().to_html() and not task.preview().forecast
    on_cpu = str(task.preview(plan=build_plan(folder, seq_len=512)))
    assert "GiB usable" in on_cpu and "not known" in on_cpu


def test_packing_is_recommended_where_its_gain_is_large(folder: Path) -> None:
    rows = answers(*[1] * 40, 90)
    # In no order: a preview measures every third of them.
    many = Random(1).sample(rows * 150, 41 * 150)
    plan, task = build_plan(folder), ss.Finetune(folder, many, num_epochs=3)
    choices = task.choices(plan)
    assert choices["packing"].value is True and not choices["packing"].is_current
    assert "times fewer steps per epoch" in choices["packing"].why
    assert choices.plan.recipe.packing and choices["packing"].summary == "True instead of False"
    assert choices.num_steps == 4613, "3 epochs of 6,150 rows in batches of 4"
    again = task.choices(choices.plan)
    changed = [choice.name for choice in again if not choice.is_current]
    assert [name for name in changed if name.startswith("Recipe.")] == []
    packed = build_plan(folder, packing=True)
    # 41 rows fill 1.8 windows, and so 6,150 about 275.
    assert task.choices(packed).num_steps == pytest.approx(3 * 275 / 4, rel=0.2)
    few = ss.Finetune(folder, rows).choices(plan)["packing"]
    assert few.value is False and "three passes over so few would be at most 5 steps" in few.why
    assert ss.Finetune(folder, rows, num_steps=10).choices(plan)["packing"].value is True
    for data in (answers(*[90] * 50), None):
        other = ss.Finetune(folder, data).choices(packed)["packing"]
        assert other.value is False and not other.is_current
    stages = ss.Plan(plan.architecture, plan.cluster, plan.recipe, ss.Layout.fsdp2(pp=2))
    refused = task.choices(stages)["packing"]
    assert refused.value is False and "this plan cannot run with it" in refused.why
