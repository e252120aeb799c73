"""Checkpoints that FSDP1 gathers whole, by a click those of FSDP2: not where a person has to look."""

from __future__ import annotations

import pytest
from tests.unit.test_fsdp1_mended import CONFIGURED, GATHERED, saving
from tests.unit.test_preflight_mends import one

from shardscope.frameworks.fsdp2.own_code.migrated_state import OTHER_NAMES, by_function, gatherings
from shardscope.frameworks.fsdp2.own_code.old_uses import OLD_CLASS
from shardscope.own_code.edits import mended
from shardscope.own_code.script import Script


@pytest.mark.parametrize(
    "touch",
    [
        "    config.rank0_only = on\n",
        "    setattr(config, 'rank0_only', on)\n",
        "    setup(config)\n",
        "    other = config\n",
    ],
)
def test_a_config_that_something_else_may_change_is_left_to_a_person(touch: str) -> None:
    assert one(saving(config=CONFIGURED), "fsdp1").source is not None
    assert one(saving(config=CONFIGURED + touch), "fsdp1").source is None


@pytest.mark.parametrize(
    "line",
    [
        "model = torch.compile(model)",
        "net = torch.nn.parallel.DistributedDataParallel(net)",
        "net = DataParallel(net)",
        "state._metadata = None",
        "state.move_to_end('head')",
        "net._register_state_dict_hook(hook)",
        "net.register_state_dict_post_hook(hook)",
    ],
)
def test_weights_that_may_have_other_names_are_left_to_a_person(line: str) -> None:
    source = saving(f"{GATHERED}    {line}\n")
    assert any(name in line for name in OTHER_NAMES)
    assert one(source, "fsdp1").source is None
    assert gatherings(Script(source=source.replace(line, "pass")), OLD_CLASS)


@pytest.mark.parametrize("read", ["print(job.config)", "globals()['config']"])
def test_a_config_that_is_read_as_something_elses_stays(read: str) -> None:
    after = one(saving(f"{GATHERED}    {read}\n"), "fsdp1").source
    assert after is not None and CONFIGURED in after


def test_a_config_of_a_class_stays() -> None:
    body = "".join(f"    {line}\n" for line in (CONFIGURED + GATHERED).replace("\n    ", "\n").splitlines())
    script = Script(source=f"{FSDP}class Saved:\n{body.replace('        c', '    c')}")
    found = gatherings(script, OLD_CLASS)
    after = mended(script, *by_function(script, found))
    assert found and after is not None and CONFIGURED in after


FSDP = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, FullStateDictConfig\n"


def test_a_config_stays_for_a_block_that_is_not_understood() -> None:
    """Two that are, of which one has another config, are no two readers."""
    whole = GATHERED.replace(", config", "")
    by_hand = GATHERED.replace("model.state_dict()", "model.state_dict(prefix='a')")
    script = Script(source=f"{FSDP}def save(model):\n{CONFIGURED}{GATHERED}{whole}{by_hand}")
    found = gatherings(script, OLD_CLASS)
    after = mended(script, *by_function(script, found))
    assert len(found) == 2
    assert after is not None and CONFIGURED in after
    alone = Script(source=f"{FSDP}def save(model):\n{CONFIGURED}{GATHERED}{whole}")
    after = mended(alone, *by_function(alone, gatherings(alone, OLD_CLASS)))
    assert after is not None and CONFIGURED not in after
