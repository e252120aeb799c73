"""Examples of each kind of refusal, which the page of errors raises when it is built."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """Code that raises an error."""

    title: str
    text: str
    """Which kind of error it is an example of."""
    code: str


PLAN = """\
plan = ss.Plan(
    ss.models["llama-3.1-8b"],
    ss.Cluster.parse("8xh100-sxm-80gb"),
    ss.Recipe({recipe}),
    ss.Layout.{layout},
)
"""


def _plan(layout: str, recipe: str = "") -> str:
    return PLAN.format(layout=layout, recipe=recipe)


REFUSALS = (
    Refusal(
        "A value that no plan can have",
        "Raised by the object itself: numbers out of range, wrong types, unknown choices.",
        'ss.Recipe(precision="bf8")\n',
    ),
    Refusal(
        "A name that the catalogue does not have",
        "A `KeyError`, for `ss.models` and `ss.gpus` are mappings; it names the nearest entry.",
        'ss.models["lama-3.1-8b"]\n',
    ),
    Refusal(
        "A cluster that cannot be read",
        "The same for the text of `Cluster.parse`.",
        'ss.Cluster.parse("8 x h1000")\n',
    ),
    Refusal(
        "An unknown key in a file",
        "Files are read strictly: a misspelled key would otherwise be a default that nobody chose.",
        'ss.Recipe.from_json(\'{"shardscope": "Recipe", "version": 1, "seq_length": 4096}\')\n',
    ),
    Refusal(
        "Degrees that do not divide",
        "Raised when the plan is made, by the layout together with the cluster and the model.",
        _plan("megatron(tp=3)"),
    ),
    Refusal(
        "A batch that does not divide",
        "The fix names every field that has to change, so that the plan can be made with it.",
        _plan("fsdp2()", "global_batch_size=12"),
    ),
    Refusal(
        "A recipe that the framework does not have",
        "From the layout's lists of supported recipes.",
        _plan("megatron()", 'method="lora"'),
    ),
    Refusal(
        "A model without formulas",
        "Unknown architectures have no formula and are never approximated. With `rehearse_only=True` they "
        "can be rehearsed.",
        'ss.Architecture.from_hf({"model_type": "mamba", "hidden_size": 768})\n',
    ),
    Refusal(
        "Planned, but not trained",
        "`ss.launch` raises before a rank starts. [Limits](../limits.md) lists such plans.",
        """\
plan = ss.Plan(
    ss.Architecture.of_size("2m"),
    ss.Cluster.parse("4xcpu"),
    ss.Recipe(seq_len=64),
    ss.Layout.fsdp2(cp=2, tp=2),
)
ss.launch(plan, ss.Pretrain(num_steps=1))
""",
    ),
    Refusal(
        "Planned, but not rehearsed",
        "Kernels that exist on GPUs only do not run on fake tensors.",
        _plan("fsdp2(cp=2)") + "plan.rehearse()\n",
    ),
    Refusal(
        "GPUs that are not here",
        "`ss.launch` compares the plan with the machine.",
        """\
plan = ss.Plan(
    ss.Architecture.of_size("2m"),
    ss.Cluster.parse("64xmi300x-192gb"),
    ss.Recipe(seq_len=64),
    ss.Layout.ddp(),
)
ss.launch(plan, ss.Pretrain(num_steps=1))
""",
    ),
    Refusal(
        "Data that cannot be read",
        "A task checks its data when it is made or launched.",
        'ss.Finetune("no-such-folder", "data.jsonl").preview()\n',
    ),
    Refusal(
        "A folder that is no run",
        "`Run.attach` reads run folders of anybody, and checks what it reads.",
        'ss.Run.attach("runs/none")\n',
    ),
    Refusal(
        "A trace that cannot be read",
        "Damaged files lose the damaged part only; a path without a trace raises.",
        'ss.Trace.load("traces")\n',
    ),
)
