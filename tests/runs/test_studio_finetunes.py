"""The Studio's main button trains the model folder that was chosen, on real ranks."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, thorough

torch = needs("torch")
needs("transformers")

from finetuned_models import MODELS  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.training.data.tokenizer import SHIPPED_TOKENIZER  # noqa: E402
from shardscope.training.data.weights_tokenizer import WeightsTokenizer  # noqa: E402
from shardscope.training.data.windows import read_tokens  # noqa: E402
from shardscope.training.weights.weights_folder import WeightsFolder  # noqa: E402
from shardscope_widgets import Studio  # noqa: E402


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama that is surer of itself than random weights are, so that its loss is its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["llama"]))
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    model.save_pretrained(tmp_path / "whale")
    shutil.copy(SHIPPED_TOKENIZER, tmp_path / "whale" / "tokenizer.json")
    return tmp_path / "whale"


def typical_loss(folder: Path, seq_len: int) -> float:
    """The loss of the folder's weights on the text's first windows, by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = read_tokens(None, WeightsTokenizer(WeightsFolder.open(folder, "weights")).encode)
    rows = torch.tensor(tokens[: 64 * seq_len].astype("int64")).view(64, seq_len)
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


@thorough()
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_studios_main_button_fine_tunes_a_model_folder(folder: Path, method: str) -> None:
    studio: Any = Studio()
    studio.recipe.method.value = method
    studio.architecture.name.value = str(folder)
    studio.options.steps.value, studio.options.profile.value = "2", False
    assert studio.launch.button.description == "Fine-tune whale on 2 CPU ranks"
    studio.launch.button.click()
    run = studio.run
    assert run is not None and run.wait(300) == "finished", run and run.reason
    assert run.plan.architecture == ss.Architecture.from_hf(folder) and run.plan.recipe.method == method
    assert f"initial weights from {folder}" in run.logs(0)
    losses = [line["loss"] for line in run.metrics() if line["rank"] == 0]
    expected = typical_loss(folder, run.plan.recipe.seq_len)
    assert expected > 10, "random weights have 7.6, the logarithm of the vocabulary's size"
    assert losses[0] == pytest.approx(expected, rel=0.15), "the weights are the folder's"
    studio.close()


def find_epochs(studio: Any) -> float | None:
    """Return the epochs of the fine-tune that the main button would launch; None for another task."""
    task = studio.launch.task
    return task.num_epochs if isinstance(task, ss.Finetune) and not studio.launch.current.is_trial else None


@thorough()
def test_the_studios_fine_tune_on_rows_trains_its_epochs_in_fp32(folder: Path, tmp_path: Path) -> None:
    needs("datasets")
    rows = [{"prompt": "Who?", "completion": f" Ahab, number {number}."} for number in range(4)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    studio: Any = Studio()
    studio.tabs.value = "Fine-tune"
    form = studio.finetune.form
    form.inputs.weights.value, form.inputs.data.value = str(folder), str(data)
    form.settings.boxes["num_epochs"].value = "3"
    # Without a kernel's loop the Studio follows in another thread, which must have ended.
    assert wait_until(lambda: studio.launch.button.description == "Fine-tune on 2 CPU ranks", 60)
    assert wait_until(lambda: not studio.launch.button.disabled and find_epochs(studio) == 3, 60)
    studio.options.profile.value = False
    studio.launch.button.click()
    run = studio.run
    assert run is not None and run.wait(300) == "finished", run and run.reason
    # Two ranks read a row each: two steps an epoch.
    assert run.num_steps == 6 and run.plan.recipe.precision == "fp32"
    studio.close()
