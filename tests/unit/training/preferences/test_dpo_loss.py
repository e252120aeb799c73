"""The DPO loss against numbers computed by hand, its gradient, and the stored reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs

torch = needs("torch")

import numpy  # noqa: E402

from shardscope.training.examples.token_table import TokenTable  # noqa: E402
from shardscope.training.preferences import reference  # noqa: E402
from shardscope.training.preferences.dpo import Dpo, sum_log_probabilities  # noqa: E402
from shardscope.training.preferences.pairs import LABELS, REFERENCE  # noqa: E402

# Four rows of three tokens over a vocabulary of three, two pairs: chosen, chosen, rejected, rejected. Row by
# row the probability of the label after each of the first two tokens; the third predicts nothing.
PROBABILITIES = [[1 / 2, 1 / 4], [1 / 2, 1 / 2], [1 / 2, 1 / 2], [1 / 4, 1 / 2]]
# The first label of row 1 and of row 3 is ignored, as a prompt's is.
LEARNED = [[True, True], [False, True], [True, True], [False, True]]
POLICY = [1 / 8, 1 / 2, 1 / 4, 1 / 2]
"""Products of the probabilities that are learned."""
OTHERS = [1 / 16, 1, 1 / 4, 1 / 4]
"""The same under the reference."""
# Ratios of chosen and rejected: 2 and 1 for the first pair, 1/2 and 2 for the second. With beta = 1/2 the
# margins are ln(2) / 2 and -ln(4) / 2, whose sigmoids are sqrt(2) / (1 + sqrt(2)) and 1/3.
LOSSES = [0.5347999, 1.0986123]
"""-ln(0.5857864) and ln(3)."""


def make_micro() -> tuple[Any, dict[str, Any]]:
    logits = torch.zeros(4, 3, 3)
    labels = torch.full((4, 3), -100)
    for row, places in enumerate(PROBABILITIES):
        for place, probability in enumerate(places):
            # The label is token 1; the other two share the rest.
            logits[row, place] = torch.tensor(
                [(1 - probability) / 2, probability, (1 - probability) / 2]
            ).log()
            if LEARNED[row][place]:
                labels[row, place + 1] = 1
    micro = {LABELS: labels, REFERENCE: torch.tensor(OTHERS).log()}
    return logits.requires_grad_(), micro


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)


def test_log_probabilities_of_a_row_are_those_of_its_labels() -> None:
    logits, micro = make_micro()
    found = sum_log_probabilities(logits, micro[LABELS])
    assert found.tolist() == pytest.approx([math.log(number) for number in POLICY], abs=1e-6)


def test_loss_and_metrics_are_those_computed_by_hand() -> None:
    logits, micro = make_micro()
    dpo = Dpo(beta=0.5)
    assert dpo.compute_loss(logits, micro).item() == pytest.approx(sum(LOSSES) / 2, abs=1e-6)
    metrics = dpo.take_metrics()
    assert metrics.loss == pytest.approx(0.8167061, abs=1e-6)
    # Rewards are half of ln 2 and ln(1/2), and of ln 1 and ln 2.
    assert metrics.rewards == pytest.approx({
        "reward_margin": -0.1732868,
        "reward_accuracy": 0.5,
        "chosen_reward": 0.0,
        "rejected_reward": 0.1732868,
    }, abs=1e-6)  # fmt: skip


def test_the_loss_is_ln_2_where_policy_and_reference_agree() -> None:
    logits, micro = make_micro()
    micro[REFERENCE] = sum_log_probabilities(logits, micro[LABELS]).detach()
    for beta in (0.01, 0.1, 5.0):
        assert Dpo(beta).compute_loss(logits, micro).item() == pytest.approx(math.log(2), abs=1e-7)


def test_the_gradient_raises_the_chosen_and_lowers_the_rejected_answer() -> None:
    logits, micro = make_micro()
    Dpo(beta=0.5).compute_loss(logits, micro).backward()
    # d loss / d log p = -beta * sigmoid(-margin) / 2 pairs; times 1 - p for the label's own logit.
    for pair, margin in enumerate([0.3465736, -0.6931472]):
        weight = 0.5 / (1 + math.exp(margin)) / 2
        for row, sign in ((pair, -1), (2 + pair, 1)):
            for place in (0, 1):
                expected = sign * weight * (1 - PROBABILITIES[row][place]) * LEARNED[row][place]
                assert logits.grad[row, place, 1].item() == pytest.approx(expected, abs=1e-6)
    assert not logits.grad[:, 2].any()


def test_empty_pairs_of_a_last_batch_do_not_count() -> None:
    logits, micro = make_micro()
    dpo = Dpo(beta=0.5)
    micro[LABELS][[1, 3]] = -100
    micro[REFERENCE][[1, 3]] = 0.0
    assert dpo.compute_loss(logits, micro).item() == pytest.approx(LOSSES[0], abs=1e-6)
    nothing = {LABELS: torch.full((4, 3), -100), REFERENCE: torch.zeros(4)}
    assert dpo.compute_loss(logits, nothing).item() == 0
    assert dpo.take_metrics().loss == pytest.approx(LOSSES[0], abs=1e-6)


# ---- The stored reference


def make_table(first: int = 0) -> TokenTable:
    return TokenTable(
        ids=numpy.arange(first, first + 6, dtype=numpy.int32),
        bears_loss=numpy.array([False, True] * 3),
        offsets=numpy.array([0, 2, 6]),
    )


def store(run: Path, table: TokenTable, values: Any) -> Path:
    """Store ``values`` as the reference of ``table`` in a run folder. Return a checkpoint of that run."""
    from shardscope.records.json_files import write_json

    (run / "tokens").mkdir(parents=True)
    numpy.save(run / "tokens" / reference.REFERENCE_FILE, values)
    write_json(run / "tokens" / reference.REFERENCE_HASH, {"sha256": reference.hash_tokens(table)})
    return run / "checkpoints" / "step-000002"


def test_a_stored_reference_is_read_back_for_the_same_pairs_only(tmp_path: Path) -> None:
    table, values = make_table(), numpy.array([-1.5, -2.5], dtype=numpy.float32)
    checkpoint = store(tmp_path / "run", table, values)
    found = reference.read_reference(checkpoint, "tokens", table, "Finetune.resume")
    assert found.tolist() == [-1.5, -2.5]
    with pytest.raises(ValueError, match=r"Finetune\.resume is .*same pairs.*the data and the Recipe"):
        reference.read_reference(checkpoint, "tokens", make_table(1), "Finetune.resume")
    with pytest.raises(ValueError, match=r"its own DPO run.*no readable reference\.npy"):
        reference.read_reference(tmp_path / "other" / "checkpoints" / "c", "tokens", table, "Finetune.resume")


@pytest.mark.parametrize(
    "values", [numpy.array([-1.5, numpy.nan], dtype=numpy.float32), numpy.zeros(3, dtype=numpy.float32)]
)
def test_a_damaged_reference_is_refused(values: Any, tmp_path: Path) -> None:
    checkpoint = store(tmp_path / "run", make_table(), values)
    with pytest.raises(ValueError, match="one finite number for each row"):
        reference.read_reference(checkpoint, "tokens", make_table(), "Finetune.resume")


def test_a_pickled_reference_is_not_loaded(tmp_path: Path) -> None:
    values = numpy.array([{"a": 1}, {"b": 2}], dtype=object)
    checkpoint = store(tmp_path / "run", make_table(), values)
    with pytest.raises(ValueError, match="no readable"):
        reference.read_reference(checkpoint, "tokens", make_table(), "Finetune.resume")
