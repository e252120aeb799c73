"""Samples for validation: disjoint from those for training, each read once; and values that are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.requirements import needs

from shardscope import Finetune
from shardscope.training.data.batches import split_rows

needs("torch")


@pytest.mark.parametrize(("num_rows", "fraction", "expected"), [(100, 0.1, 10), (2, 0.1, 1), (3, 0.49, 1)])
def test_a_split_is_disjoint_complete_and_seeded(num_rows: int, fraction: float, expected: int) -> None:
    training, validation = split_rows(num_rows, fraction, seed=3)
    assert len(validation) == expected
    assert sorted(training + validation) == list(range(num_rows))
    assert split_rows(num_rows, fraction, seed=3) == (training, validation)


def test_another_seed_splits_otherwise() -> None:
    assert split_rows(100, 0.1, seed=3) != split_rows(100, 0.1, seed=4)


def test_ranks_read_each_window_once_and_pad_with_rows_without_labels() -> None:
    import numpy

    from shardscope.training.data.windows import Windows
    from shardscope.training.micro_batches import count_labels

    tokens = numpy.arange(5 * 8, dtype=numpy.int32)
    ranks = [
        Windows(tokens=tokens, seq_len=8, rows=2, rank=rank, num_ranks=2, in_order=True) for rank in range(2)
    ]
    # Two steps of four rows hold five windows.
    assert ranks[0].steps_per_epoch == 1.25
    batches = [windows.build_batch(step) for step in range(2) for windows in ranks]
    assert all(batch["input_ids"].shape == batch["labels"].shape == (2, 8) for batch in batches)
    assert [count_labels(batch) for batch in batches] == [14, 14, 7, 0]
    indices = [index for step in range(2) for windows in ranks for index in windows.list_indices(step)]
    assert indices == [0, 1, 2, 3, 4]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that passes for a Hugging Face checkpoint."""

    def open_anything(path: Path, field: str) -> SimpleNamespace:
        return SimpleNamespace(path=path)

    monkeypatch.setattr("shardscope.training.weights.weights_folder.WeightsFolder.open", open_anything)
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"validation": 0.5}, "validation"),
        ({"validation": True}, "validation"),
        ({"validation": [{"text": "a"}]}, "validation"),
        ({"validate_every": 5}, "validate_every"),
        ({"early_stopping": 5}, "early_stopping"),
        ({"num_epochs": 1, "num_steps": 5}, "num_epochs"),
        ({"num_epochs": 0}, "num_epochs"),
    ],
)
def test_values_that_mean_nothing_are_refused(fields: dict[str, object], named: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"Finetune.{named}"):
        Finetune(folder, **fields)


def test_without_a_number_of_steps_a_text_has_fifty(folder: Path) -> None:
    assert Finetune(folder).num_steps == 50
    assert Finetune(folder, [{"text": "a"}]).num_steps is None
    assert Finetune(folder, num_epochs=2).num_steps is None
