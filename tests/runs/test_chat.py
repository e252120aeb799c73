"""A trained model: a chat streams what transformers generates, and merged adapters equal those of peft."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.requirements import few, needs, thorough

torch = needs("torch")
needs("transformers")
needs("peft")

from finetuned_models import small_model  # noqa: E402
from run_helpers import seconds_until  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.machine.processes import read_start_time  # noqa: E402
from shardscope.runs.trained.loading import add_trained_adapters  # noqa: E402
from shardscope.runs.trained.merge import PHASES, merge_with_progress  # noqa: E402
from shardscope.runs.trained.model_files import find_model  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [{"prompt": "Who hunts the whale?", "completion": " Captain Ahab does."}] * 4
MAX_NEW_TOKENS = 12
GENERATION_CONFIG = '{"temperature": 0.9, "top_p": 0.6}'

pytestmark = pytest.mark.usefixtures("bounded_time")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ss.Run]:
    """A finished run of adapters over a small random model, whose tokenizer has a chat template."""
    parent = tmp_path_factory.mktemp("chat")
    base = small_model(parent, "llama")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    # As Llama 2's, which transformers opens and refuses to save.
    (base / "generation_config.json").write_text(GENERATION_CONFIG)
    recipe = ss.Recipe(
        seq_len=32, micro_batch_size=2, global_batch_size=4, precision="fp32", method="lora", lora_rank=4
    )
    plan = ss.Plan(ss.Architecture.from_hf(base), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    task = ss.Finetune(base, ROWS, num_steps=4, learning_rate=0.05, export=True)
    run = ss.launch(plan, task, folder=parent / "runs")
    assert run.wait(150) == "finished", run.error
    yield run


def load_with_peft(run: ss.Run, *, base: bool = False) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.recorded_base["weights"], dtype=torch.float32)
    return model.eval() if base else PeftModel.from_pretrained(model, run.model).eval()


def generate(model: Any, run: ss.Run, messages: Sequence[dict[str, str]]) -> str:
    """Return the answer by transformers' own ``generate``, all at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.recorded_base["weights"])
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    generated = model.generate(
        input_ids=ids["input_ids"],
        attention_mask=ids["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    text: str = tokenizer.decode(generated[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def has_ended(pid: int) -> bool:
    return read_start_time(pid) is None


def test_the_exported_adapters_have_a_model_card(run: ss.Run) -> None:
    card = (run.model / "README.md").read_text()
    assert card == run.model_card()
    assert "library_name: peft" in card and "base_model: llama" in card
    assert "| rows | 4 |" in card and "| SHA-256 of its tokens | `" in card
    assert re.search(r"\| tensors at the peak, fullest rank \| [\d.]+ MiB \| [\d.]+ MiB \|", card)
    assert str(run.folder.parent.parent) not in card


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chat_streams_what_transformers_generates(run: ss.Run) -> None:
    model = load_with_peft(run)
    with run.chat(max_new_tokens=MAX_NEW_TOKENS) as chat, run.chat(MAX_NEW_TOKENS, base=True) as base:
        pieces = list(chat.send("Who?"))
        first = generate(model, run, [ask("Who?")])
        assert "".join(pieces) == first and len(pieces) > 1
        # The second turn is generated from the whole conversation.
        conversation = [ask("Who?"), {"role": "assistant", "content": first}, ask("Where?")]
        assert "".join(chat.send("Where?")) == generate(model, run, conversation)
        assert chat.messages[:3] == conversation and len(chat.messages) == 4
        chat.reset()
        assert chat.messages == [] and "".join(chat.send("Who?")) == first
        answer = "".join(base.send("Who?"))
        assert answer == generate(load_with_peft(run, base=True), run, [ask("Who?")]) != first
        pids = [chat.pid, base.pid]
    assert all(has_ended(pid) for pid in pids) and chat.is_closed
    with pytest.raises(ValueError, match="chat is 'closed'"):
        chat.send("Who?")


@thorough()
def test_an_answer_can_be_left_and_the_chat_goes_on(run: ss.Run) -> None:
    with run.chat(max_new_tokens=30) as chat:
        answer = chat.send("Who?")
        piece = next(answer)
        answer.close()
        assert chat.messages == [ask("Who?"), {"role": "assistant", "content": piece}]
        chat.reset()
        forgotten = chat.send("Where?")
        assert len("".join(chat.send("Who?"))) > len(piece)
        assert list(forgotten) == [] and chat.messages[0] == ask("Who?")
        # Longer than the model's 64 positions.
        with pytest.raises(RuntimeError, match=r"tokens; the model reads 64.*chat\.reset\(\)"):
            list(chat.send("Whale. " * 60))
        assert len(chat.messages) == 2
        chat.reset()
        assert "".join(chat.send("Who?"))


@thorough()
def test_sampling_differs_from_the_most_likely_text(run: ss.Run) -> None:
    with run.chat(max_new_tokens=30, temperature=5.0) as chat:
        answers = set()
        for _ in range(3):
            answers.add("".join(chat.send("Who?")))
            chat.reset()
        assert len(answers) > 1


def test_the_process_ends_with_its_parent(run: ss.Run) -> None:
    program = (
        "import sys, time\nimport shardscope as ss\n"
        f"chat = ss.Run.attach({str(run.folder)!r}).chat(max_new_tokens=2)\n"
        "''.join(chat.send('Who?'))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(chat.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert not has_ended(pid)
        parent.kill()
    seconds_until(lambda: has_ended(pid), 10)


def test_a_chat_without_references_ends(run: ss.Run) -> None:
    chat = run.chat()
    pid = chat.pid
    del chat
    seconds_until(lambda: has_ended(pid), 10)


@thorough()
def test_merged_adapters_equal_those_of_peft(run: ss.Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # An older one is replaced.
    (run.folder / "merged").mkdir()
    (run.folder / "merged" / "old").touch()
    program = (
        f"import sys\nimport shardscope as ss\nprint(ss.merge({str(run.folder)!r}))\n"
        "assert 'torch' not in sys.modules"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    merged = Path(printed.stdout.strip())
    assert merged == run.folder / "merged"
    model = AutoModelForCausalLM.from_pretrained(merged)
    expected = load_with_peft(run).merge_and_unload().state_dict()
    base = load_with_peft(run, base=True).state_dict()
    weights = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
    moved = [name for name in weights if not torch.allclose(weights[name], base[name], atol=1e-4)]
    assert moved and all("proj" in name for name in moved)
    assert AutoTokenizer.from_pretrained(merged).chat_template == TEMPLATE
    assert (merged / "generation_config.json").read_text() == GENERATION_CONFIG
    assert "library_name: transformers" in (merged / "README.md").read_text()
    # It is an ordinary model: another fine-tune starts from it.
    ss.Finetune(merged, ROWS)
    assert not (merged / "old").exists()
    phases: list[str] = []
    wanted = tmp_path / "new" / "out"
    out = merge_with_progress(run.folder / "export", wanted, lambda phase, _: phases.append(phase))
    assert out == wanted and phases[0] == "starting" and len(phases) > 3
    assert set(phases) <= set(PHASES) and "loading the base" in phases
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    assert not [path for path in run.folder.iterdir() if path.name.startswith(".")]


@thorough()
@pytest.mark.parametrize("variant", few(["use_dora", "use_rslora"], ["use_dora"]))
def test_dora_and_rslora_are_merged_as_by_peft(variant: str, run: ss.Run, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path / run.folder.name
    shutil.copytree(run.folder, folder)
    changed = ss.Run.attach(folder)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **{variant: True}
    )
    adapted = get_peft_model(load_with_peft(run, base=True), config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    shutil.rmtree(folder / "export")
    adapted.save_pretrained(folder / "export")
    weights = AutoModelForCausalLM.from_pretrained(ss.merge(changed)).state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
    # Were the variant not read, the same tensors would be another model.
    plain = replace(find_model(changed, "run").adapters, **{variant: False})
    if variant == "use_dora":
        with pytest.raises(ValueError, match="does not fit its base"):
            add_trained_adapters(load_with_peft(run, base=True), plain)
        return
    other = add_trained_adapters(load_with_peft(run, base=True), plain).merge_and_unload().state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(other[name], weights[name], atol=1e-3)


def test_a_cancelled_merge_leaves_nothing(run: ss.Run, tmp_path: Path) -> None:
    def cancel(phase: str, fraction: float) -> None:
        raise KeyboardInterrupt

    before = psutil.Process().children()  # such as the browser of other tests
    with pytest.raises(KeyboardInterrupt):
        merge_with_progress(run, tmp_path / "new" / "out", cancel)
    assert not list((tmp_path / "new").iterdir()) and psutil.Process().children() == before


@thorough()
def test_adapters_that_do_not_fit_are_an_error_message(run: ss.Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.folder, copy)
    config = copy / "export" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": ["q_proj"]}))
    with pytest.raises(RuntimeError, match="does not fit its base"):
        ss.merge(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    with ss.Run.attach(copy).chat() as chat, pytest.raises(RuntimeError, match="does not fit its base"):
        list(chat.send("Who?"))
