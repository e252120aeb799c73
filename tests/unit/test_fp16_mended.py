"""fp16 that nothing scales, as bf16 by a click: on a GPU that has it, where all of fp16 goes."""

from __future__ import annotations

from difflib import ndiff

import pytest

import shardscope as ss
from shardscope.planner.preflight import Finding, findings_in

RECIPE = ss.Recipe(precision="fp16-mixed")
H100, V100 = (
    ss.Plan(ss.models["llama-3.2-1b"], ss.Cluster.parse(f"8x{gpu}"), RECIPE, ss.Layout.fsdp2())
    for gpu in ("h100-sxm-80gb", "v100-sxm-32gb")
)
NAME = "fp16-without-loss-scaling"
HEAD = "import torch\nmodel = build()\noptimizer = torch.optim.SGD(model.parameters())\n"
TAIL = "loss = model(batch)\nloss.backward()\n"


def one(source: str, plan: ss.Plan | None) -> Finding:
    (found,) = [finding for finding in findings_in(source, plan) if finding.name == NAME]
    return found


def test_what_is_no_models_own_is_left_to_a_person() -> None:
    assert one(f"import torch\nx = x.half()\n{TAIL}", H100).source is None


def test_every_fp16_becomes_bf16() -> None:
    source = (
        "import torch as t\nmodel = Auto.from_pretrained(name, dtype=t.float16)  # small\nx.half(\n)\n"
        f"half = t.tensor(1.0).to(\n    t.half,  # here\n)\n{TAIL}"
    )
    after = one(source, H100).source
    assert after is not None
    assert NAME not in [finding.name for finding in findings_in(after, H100)]
    assert [line for line in ndiff(source.splitlines(), after.splitlines()) if line[0] in "+-"] == [
        "- model = Auto.from_pretrained(name, dtype=t.float16)  # small",
        "+ model = Auto.from_pretrained(name, dtype=t.bfloat16)  # small",
        "- x.half(",
        "+ x.bfloat16(",
        "-     t.half,  # here",
        "+     t.bfloat16,  # here",
    ]


@pytest.mark.parametrize(
    ("maker", "is_mended"),
    [
        ("model = Auto.from_pretrained(name, dtype=torch.float16).cuda()", True),
        ("model = Net(Auto.from_pretrained(name, dtype=torch.float16))", True),
        # One that makes what another is trained on.
        ("model = Net()\nencoder = Clip.from_pretrained(name, dtype=torch.float16)", False),
    ],
)
def test_the_model_that_is_trained_is_the_one_in_fp16(maker: str, is_mended: bool) -> None:
    source = f"import torch\n{maker}\noptimizer = torch.optim.SGD(model.parameters())\n{TAIL}"
    assert (one(source, H100).source is not None) == is_mended


@pytest.mark.parametrize("plan", [None, V100])
def test_a_gpu_that_may_have_no_bf16_gets_words(plan: ss.Plan | None) -> None:
    found = one(f"{HEAD}model.half()\n{TAIL}", plan)
    assert found.source is None and "GradScaler" in found.change


@pytest.mark.parametrize(
    "line",
    [
        "if weight.dtype == torch.float16:\n    weight = weight.float()",
        "kind = 'float16'",
        "train(fp16=True)",
        "if args.use_fp16:\n    pass",
        "def in_fp16(x):\n    return x",
        "x = x.type(torch.cuda.HalfTensor)",
        "rows = rows.astype(np.float16)",
        "cast = model.half",
        "table.half(2)",
        "from torch import half",
        "from torch import float16 as small",
        "with torch.autocast('cuda'):\n    pass",
        # Not the model's own type, or not all models'.
        "other = Auto.from_pretrained(name)",
        # Told to something that may be no model, or one that is not trained.
        "x = torch.empty(8, dtype=torch.float16)",
        "model = build(dtype=torch.float16)",
        "judge = LLM(path, dtype=torch.float16)",
        "judge = LLM(path, dtype='float16')",
        "tokenizer = AutoTokenizer.from_pretrained(name, dtype=torch.float16)",
        # Stored numbers, libraries and tables that have no bf16, and models beside the trained one.
        "x = torch.frombuffer(raw, dtype=torch.float16)",
        "x = raw.view(torch.float16)",
        "out = model(x).detach().cpu().numpy()",
        "kind = getattr(torch, name)",
        "torch.save({name: value.half() for name, value in weights}, path)",
        "torch.save(weights.half(), path)",
        "bits = rows.set_(stored)",
        "table = torch.arange(4, dtype=torch.int16)",
        "bits = rows.to(torch.uint16)",
        "model.save_pretrained(path)",
        "model.push_to_hub(name)",
        "save_file(weights, path)",
        "teacher = build().half().eval()",
        "kind = torch.float16 if old else torch.float32",
        "TOLERANCE = {torch.float16: 1e-3}",
        "match d:\n    case torch.float16:\n        pass",
        "other = other.to(torch.bfloat16)",
        "class Net:\n    def half(self):\n        return self",
        "import numpy as np\nx = np.half()",
        "config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float16)\nif d == torch.float16:\n    pass",
    ],
)
def test_fp16_that_would_stay_is_left_to_a_person(line: str) -> None:
    assert one(f"{HEAD}model.half()\n{line}\n{TAIL}", H100).source is None


@pytest.mark.parametrize(
    "line",
    [
        "with torch.autocast('cuda', dtype=torch.float16):\n    pass",
        "half = size // 2",
        "batch = batch.to(device, torch.float16)",
        "batch = batch.to(device, dtype=torch.float16)",
        "tokenizer = AutoTokenizer.from_pretrained(name)\nother = Auto.from_config(c, dtype=torch.half)",
    ],
)
def test_what_is_no_hindrance(line: str) -> None:
    after = one(f"{HEAD}model.half()\n{line}\n{TAIL}", H100).source
    assert after is not None and "torch.float16" not in after


TRAINED = f"{HEAD}for batch in batches:\n    model(batch).backward()\n    optimizer.step()\n"
SAVED = "model.half().save_pretrained(path)\n"


def inside(text: str, name: str = "main") -> str:
    return f"def {name}():\n" + "".join(f"    {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "source",
    [
        f"{TRAINED}{SAVED}",
        f"{TRAINED}model = model.to(torch.float16)\nif rank == 0:\n    torch.save(model, path)\n",
        f"{TRAINED}for one in model.parameters():\n    one.data = one.data.half()\n",
        f"{inside(TRAINED + SAVED)}if __name__ == '__main__':\n    main()\n",
    ],
)
def test_what_is_fp16_when_training_is_over_is_no_finding(source: str) -> None:
    assert findings_in(source, H100) == []


@pytest.mark.parametrize(
    "source",
    [
        # Trained again, or perhaps.
        f"for stage in stages:\n{inside(TRAINED + SAVED)[12:]}",
        f"{TRAINED}{SAVED}model(batch).backward()\n",
        f"{TRAINED}{SAVED}optimizer.step()\n",
        f"{inside(TRAINED, 'train')}train()\n{SAVED}train()\n",
        f"{inside(TRAINED + SAVED)}main()\nmain()\n",
        f"{inside(TRAINED + SAVED)}for seed in range(2):\n    main()\n",
        f"{inside(TRAINED + SAVED)}run(main)\n",
        f"{inside(TRAINED + SAVED)}main()\nrun(main)\n",
        f"@repeated\n{inside(TRAINED + SAVED)}main()\n",
        f"{inside(TRAINED + SAVED)}{inside('main()', 'run')}run()\nrun()\n",
        f"{inside('model.half()', 'export')}{TRAINED}export()\n",
        # By a name of its own.
        f"from torch.autograd import backward\n{HEAD}model.half()\nbackward(model(batch))\n",
    ],
)
def test_what_may_be_trained_in_fp16_is_still_found(source: str) -> None:
    assert one(source, H100).line is not None


def test_what_is_exported_in_fp16_stays_so() -> None:
    source = f"{HEAD}model.half()\n{TAIL}model = model.half()\n"
    assert one(source, H100).source is None
    assert one(source.replace(f"{TAIL}model = model.half()", TAIL), H100).source is not None
