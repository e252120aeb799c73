"""The mended text of a finding about a script: only what was meant is other, and it is found no more."""

from __future__ import annotations

from difflib import ndiff

import pytest

import shardscope as ss
from shardscope.planner.preflight import Finding, findings_in

PLAN = ss.Plan(
    ss.models["llama-3.1-8b"], ss.Cluster.parse("2x8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2(tp=4)
)
HEAD = '"""Train."""\nfrom __future__ import annotations\nimport torch\n'
LOADER = (
    "from torch.utils.data import DataLoader\nfrom torch.distributed import init_process_group\n"
    "init_process_group()\n"
)


def one(source: str, name: str, plan: ss.Plan | None = None) -> Finding:
    (found,) = [finding for finding in findings_in(source, plan) if finding.name == name]
    return found


def changes(source: str, name: str, plan: ss.Plan | None = None) -> list[str]:
    """The lines that are other; the finding itself is gone."""
    after = one(source, name, plan).source
    assert after is not None
    assert name not in [finding.name for finding in findings_in(after, plan)]
    return [line.rstrip() for line in ndiff(source.splitlines(), after.splitlines()) if line[0] in "+-"]


# ---- samplers


def test_a_sampler_takes_the_place_of_shuffling() -> None:
    source = f"{HEAD}{LOADER}loader = DataLoader(data, batch_size=4, shuffle=True)  # é\nmodel(loader)\n"
    assert changes(source, "ranks-read-the-same-data") == [
        "+ from torch.utils.data.distributed import DistributedSampler",
        "- loader = DataLoader(data, batch_size=4, shuffle=True)  # é",
        "+ loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))  # é",
    ]


def test_a_loader_that_does_not_shuffle_may_be_of_a_test() -> None:
    assert one(f"{LOADER}run(DataLoader(data))\n", "ranks-read-the-same-data").source is None
    source = f"{LOADER}train = DataLoader(dataset=self.a, shuffle=on,)\nval = DataLoader(b)\n"
    for finding in findings_in(source):
        assert finding.source is not None
        assert "DataLoader(dataset=self.a, sampler=DistributedSampler(self.a, shuffle=on),)" in finding.source
        assert "val = DataLoader(b)\n" in finding.source


@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(make_data(), shuffle=True)",
        "DataLoader(shuffle=True, **options)",
        "DataLoader(data, *rest, shuffle=True)",
        "DataLoader(data, 4, True)",
        "DataLoader(load_dataset('text', streaming=True), shuffle=True)",
        "DataLoader(data.to_iterable_dataset(), shuffle=True)",
        # A sampler of its own, for all that it knows no rank.
        "DataLoader(data, shuffle=own is None, sampler=own)",
    ],
)
def test_what_the_text_does_not_say_is_left_to_a_person(loader: str) -> None:
    source = f"{LOADER}own = SubsetRandomSampler(rows)\nfor batch in {loader}:\n    model(batch).backward()\n"
    assert one(source, "ranks-read-the-same-data").source is None


IMPORTS = "from torch.utils.data import DataLoader\nimport torch.distributed as dist\n"
SHUFFLED = "loader = DataLoader(data, shuffle=True)\n"


@pytest.mark.parametrize(
    "source",
    [
        f"{IMPORTS}{SHUFFLED}",
        f"{IMPORTS}{SHUFFLED}dist.init_process_group()\n",
        f"{IMPORTS}if ddp:\n    dist.init_process_group()\n{SHUFFLED}",
        f"{IMPORTS}def worker(data):\n    dist.init_process_group()\n{SHUFFLED}spawn(worker, loader)\n",
        f"{IMPORTS}@click.pass_context\ndef main(ctx):\n    {SHUFFLED}",
        # Ranks that work together, or are dealt to in another way.
        f"{IMPORTS}dist.init_process_group()\nmesh = init_device_mesh('cuda', (2, 4))\n{SHUFFLED}",
        f"{IMPORTS}dist.init_process_group()\n{SHUFFLED}for x in loader:\n    dist.broadcast(x, src=0)\n",
        f"{IMPORTS}dist.init_process_group()\nacc = Accelerator()\n{SHUFFLED}setup(acc, loader)\n",
        # Steps that are counted, and what not all ranks load, or measure with.
        f"{IMPORTS}dist.init_process_group()\n{SHUFFLED}schedule(len(data) // 8)\n",
        f"{IMPORTS}dist.init_process_group()\nif rank == 0:\n    {SHUFFLED}",
        f"{IMPORTS}dist.init_process_group()\n{SHUFFLED[:-1]} if is_main() else None\n",
        f"{IMPORTS}dist.init_process_group()\nval_{SHUFFLED}",
        f"{IMPORTS}dist.init_process_group()\n{SHUFFLED.replace('data', 'sets.test')}",
        # A mean over all that the loader has.
        f"{IMPORTS}dist.init_process_group()\n{SHUFFLED}print(hits / len(loader.dataset))\n",
        # Another class of that name.
        f"{IMPORTS}dist.init_process_group()\nclass DataLoader:\n    pass\n{SHUFFLED}",
        f"from my import DataLoader\nimport torch.distributed as dist\ndist.init_process_group()\n{SHUFFLED}",
    ],
)
def test_no_sampler_where_it_may_be_wrong_or_have_nobody_to_ask(source: str) -> None:
    found = [one for one in findings_in(source) if one.name == "ranks-read-the-same-data"]
    assert {finding.source for finding in found} <= {None}


@pytest.mark.parametrize(
    "source",
    [
        f"def train(ctx):\n    from torch.utils.data import DataLoader\n    {SHUFFLED}",
        f"{IMPORTS}def setup():\n    dist.init_process_group()\nsetup()\n{SHUFFLED}",
        f"import torch\ntorch.distributed.init_process_group()\ntorch.utils.data.{SHUFFLED[9:]}",
        f"{IMPORTS}dist.init_process_group()\nif __name__ == '__main__':\n    {SHUFFLED}",
    ],
)
def test_a_sampler_where_ranks_surely_know_of_each_other(source: str) -> None:
    after = one(source, "ranks-read-the-same-data").source
    assert after is not None
    assert "sampler=DistributedSampler(data, shuffle=True)" in after


def test_what_is_measured_with_is_not_dealt_beside_what_is_trained_on() -> None:
    measured = f"val_{SHUFFLED.replace('data', 'rest')}print(len(rest))\n"
    for finding in findings_in(f"{IMPORTS}dist.init_process_group()\n{SHUFFLED}{measured}"):
        assert finding.source is not None and finding.source.endswith(f"shuffle=True))\n{measured}")


def test_no_sampler_is_written_for_ranks_that_work_together() -> None:
    assert one(f"{LOADER}{SHUFFLED}", "ranks-read-the-same-data", PLAN).source is None


OF_ALL = "rank = dist.get_rank()\nworld_size = int(os.environ['WORLD_SIZE'])\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("num_replicas=world_size, rank=rank", "num_replicas=4, rank=rank // 4 % 4"),
        ("num_replicas=ctx.world_size, rank=ctx.rank", "num_replicas=4, rank=ctx.rank // 4 % 4"),
        ("rank=dist.get_rank()", "rank=dist.get_rank() // 4 % 4, num_replicas=4"),
        (
            "num_replicas=int(os.environ['WORLD_SIZE']), rank=int(os.environ['RANK'])",
            "num_replicas=4, rank=int(os.environ['RANK']) // 4 % 4",
        ),
    ],
)
def test_shares_are_the_data_parallel_ranks(before: str, after: str) -> None:
    source = f"{LOADER}{OF_ALL}sampler = DistributedSampler(data, shuffle=False, {before})\n"
    told = f"+ sampler = DistributedSampler(data, shuffle=False, {after})"
    assert changes(source, "sampler-over-all-ranks", PLAN)[1] == told


@pytest.mark.parametrize(
    "given",
    [
        "num_replicas=dp_world_size, rank=dp_rank",
        "num_replicas=dist.get_world_size(dp_group), rank=dist.get_rank(dp_group)",
        "num_replicas=world_size // 4, rank=rank // 4",
        "num_replicas=dp.world_size, rank=dp.rank",
        "num_replicas=mpu.get_data_parallel_world_size(), rank=mpu.get_data_parallel_rank()",
    ],
)
def test_shares_that_may_be_right_are_not_accused(given: str) -> None:
    found = findings_in(f"{LOADER}sampler = DistributedSampler(data, {given})\n", PLAN)
    assert "sampler-over-all-ranks" not in [finding.name for finding in found]
    # Nor under the plainest of names.
    mesh = "rank, world_size = 0, 0\nworld = mesh['dp'].size()\n"
    found = findings_in(f"{LOADER}{mesh}DistributedSampler(data, num_replicas=world, rank=rank)\n", PLAN)
    assert "sampler-over-all-ranks" not in [finding.name for finding in found]


@pytest.mark.parametrize(
    "given",
    [
        "world_size, rank=rank",
        "num_replicas=world_size, rank=local_rank",
        "num_replicas=world_size, rank=args.rank",
        "num_replicas=world_size, rank=rank, **more",
    ],
)
def test_another_rank_or_a_place_is_left_to_a_person(given: str) -> None:
    source = f"{LOADER}{OF_ALL}sampler = DistributedSampler(data, {given})\n"
    assert one(source, "sampler-over-all-ranks", PLAN).source is None
    # What nothing in the text explains may be of data-parallel ranks.
    handed = (
        f"{LOADER}def f(rank, world_size):\n    DistributedSampler(d, num_replicas=world_size, rank=rank)\n"
    )
    assert one(handed, "sampler-over-all-ranks", PLAN).source is None


# ---- epochs

EPOCHS = "for epoch in range(3):\n    for i, batch in enumerate(loader):\n        model(batch)\n"


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def test_the_sampler_is_told_of_each_epoch() -> None:
    for sampler, told in {
        "sampler = DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n": "sampler",
        "loader = DataLoader(data, sampler=DistributedSampler(data))\n": "loader.sampler",
    }.items():
        source = f"{LOADER}{sampler}for warm_up in range(2):\n    pass\ndef train():\n{indented(EPOCHS)}"
        assert changes(source, "same-order-every-epoch") == [f"+         {told}.set_epoch(epoch)"]


INLINE = "loader = DataLoader(data, sampler=DistributedSampler(data))\n"


@pytest.mark.parametrize(
    "source",
    [
        # Made in a function that the loop is not in, or handed on under the same name.
        f"def make():\n{indented(INLINE)}    return loader\ndef train(loader):\n{indented(EPOCHS)}",
        f"{INLINE}def train(loader):\n{indented(EPOCHS)}",
        # Made again and again, under a condition, or in two ways.
        f"for fold in range(5):\n{indented(INLINE + EPOCHS)}",
        f"if many:\n{indented(INLINE)}else:\n    loader = DataLoader(data)\n{EPOCHS}",
        f"{INLINE}loader = wrap(loader)\n{EPOCHS}",
        # Loops that count no epochs.
        f"{INLINE}for epoch in epochs:\n    for batch in loader:\n        model(batch)\n",
        f"{INLINE}for epoch in range(3):\n    while True:\n        for batch in loader:\n            x\n",
        f"{INLINE}for batch in loader:\n    model(batch)\n",
    ],
)
def test_a_loop_that_may_not_be_the_epochs_is_left_to_a_person(source: str) -> None:
    assert one(f"{LOADER}{source}", "same-order-every-epoch").source is None


def test_the_innermost_loop_counts_epochs() -> None:
    source = f"{LOADER}{INLINE}for seed in range(2):\n{indented(EPOCHS)}"
    assert changes(source, "same-order-every-epoch") == ["+         loader.sampler.set_epoch(epoch)"]


# ---- reductions


def test_reductions_are_in_fp32_beside_the_types_own_module() -> None:
    policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16{})"
    new = policy.format(", reduce_dtype=torch.float32")
    for given in ("", ", reduce_dtype=torch.bfloat16"):
        source = f"{HEAD}p = {policy.format(given)}\n"
        assert changes(source, "policy-reduces-in-half-precision")[1] == f"+ p = {new}"


@pytest.mark.parametrize(
    "compute",
    [
        *("bfloat16", "cfg.float16_type", "torch.bfloat16 if a else torch.float16", "th.bfloat16"),
        "torch.bfloat16, **more",
    ],
)
def test_a_type_that_is_chosen_elsewhere_is_left_to_a_person(compute: str) -> None:
    source = f"{HEAD}from torch import bfloat16\np = MixedPrecisionPolicy(param_dtype={compute})\n"
    assert one(source, "policy-reduces-in-half-precision").source is None


# ---- imports


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("import torch  # noqa: E402\n", 2),
        ("import torch; x = 1\n", 2),
        ("import os\nos.environ['A'] = '1'\nimport torch\n", 4),
        ("#!/usr/bin/env python\n# -*- coding: utf-8 -*-\nimport torch\n", 4),
        ("import torch\rimport json\r", 3),
    ],
)
def test_an_import_follows_the_last_of_the_module_before_its_use(before: str, line: int) -> None:
    source = before + OLD_CALL
    after = one(source, "fsdp1").source
    assert after is not None
    added = "from torch.distributed.fsdp import fully_shard"
    lines = after.replace("\r", "\n").split("\n")
    # The class itself is imported last of all here.
    assert lines.index(added) + 1 == line + 2


@pytest.mark.parametrize(
    "before",
    [
        # Hides the module's own in all of that function, or may not be done.
        "def f():\n    from torch.distributed.fsdp import fully_shard\nimport torch\n",
        "import torch\nif new:\n    from torch.distributed.fsdp import fully_shard\n",
        "try:\n    from torch.distributed.fsdp import fully_shard\nexcept ImportError:\n    pass\n",
        # Something else of that name, or of a name that nobody knows.
        "from torch.distributed.fsdp import FSDPModule as fully_shard\n",
        "from .torch.distributed.fsdp import fully_shard\n",
        "from torch.distributed._composable import fully_shard\n",
        "try:\n    pass\nexcept OSError as fully_shard:\n    pass\n",
        "match 1:\n    case [*fully_shard]:\n        pass\n",
        "match {}:\n    case {**fully_shard}:\n        pass\n",
        "from mine import *\n",
    ],
)
def test_a_name_that_another_import_may_hide_is_imported_under_another(before: str) -> None:
    after = one(before + OLD_CALL, "fsdp1").source
    assert after is not None
    assert "\nfrom torch.distributed.fsdp import fully_shard as torch_fully_shard\n" in after
    assert "\ntorch_fully_shard(model)\n" in after


def test_a_name_that_is_taken_twice_gets_one_that_is_free() -> None:
    after = one(f"fully_shard = torch_fully_shard = None\n{OLD_CALL}", "fsdp1").source
    assert after is not None and "\ntorch_torch_fully_shard(model)\n" in after


def test_an_import_that_is_there_is_used() -> None:
    head = "from torch.distributed.fsdp import fully_shard as shard\n"
    after = one(head + OLD_CALL, "fsdp1").source
    assert after is not None and "\nshard(model)\n" in after
    assert after.count("import") == (head + OLD_CALL).count("import")


OLD_CALL = """from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
"""


# ---- rates, and texts as they are


def test_a_rate_in_a_task_is_the_advised_one() -> None:
    (found,) = [one for one in PLAN.findings(_task) if one.name == "learning-rate-against-batch"]
    assert found.source is not None
    assert f"AdamW(model.parameters(), {found.change})" in found.source
    assert found.source.startswith("def _task")


def _task(ctx):  # type: ignore[no-untyped-def]
    import torch

    model = torch.nn.Linear(1, 1)
    torch.optim.AdamW(model.parameters(), lr=0.5)


def test_text_in_lines_of_blanks_stays() -> None:
    source = f'{HEAD}TEXT = """\n   \n"""\np = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n'
    after = one(source, "policy-reduces-in-half-precision").source
    assert after is not None
    assert '"""\n   \n"""' in after


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_comment_is_not_lost_whatever_ends_its_line(end: str) -> None:
    call = OLD_CALL.replace("FSDP(model,", "FSDP(model,  # whole\n").replace("\n", end)
    assert one(call, "fsdp1").source is None
    assert one(call.replace("  # whole", ""), "fsdp1").source is not None
