"""gloo's groups with one thread: made as torch makes them, and known to torch as its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from requirements import needs, thorough

needs("torch")

# In a process of its own: what torch calls ProcessGroupGloo stays changed.
SCRIPT = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from shardscope.runs.launch.rendezvous.gloo import use_one_thread

use_one_thread()
os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[1]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
made = dist.group.WORLD._get_backend(torch.device("cpu"))
assert type(made) is dist.ProcessGroupGloo, type(made)
assert made.options._threads == 1, made.options._threads
assert made.options._timeout == timedelta(seconds=7), made.options._timeout
assert len(made.options._devices) == max(1, len([one for one in sys.argv[1].split(",") if one]))
# Torch looks for the class by its name where it sets a timeout, and makes further groups.
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=8), dist.group.WORLD)
assert made.options._timeout == timedelta(seconds=8), made.options._timeout
apart = dist.new_group([0])
assert apart._get_backend(torch.device("cpu")).options._threads == 1
dist.barrier(apart)
dist.destroy_process_group()
print("done")
"""


@thorough()
def test_gloo_groups_have_one_thread_on_the_configured_interfaces() -> None:
    for interfaces in ("lo", "lo,lo", ""):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, interfaces],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == "done\n", done.stderr[-2000:]


def test_an_interface_that_this_machine_lacks_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shardscope.runs.explain.exceptions import make_exception_record
    from shardscope.runs.launch.rendezvous import gloo

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(
        ValueError, match=r"GLOO_SOCKET_IFNAME is 'eth99'; allowed: .*\blo\b.*unset it"
    ) as error:
        gloo._make_devices()
    assert not make_exception_record(error.value)["peer_lost"]


LEAVES_AT_ONCE = """
import pathlib, sys, time
import torch.distributed as dist
from shardscope.runs.launch.rendezvous import gloo

rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
make = gloo.ProcessGroupGloo

class Slow:
    _Options, create_default_device = make._Options, staticmethod(make.create_default_device)

    def __new__(cls, *arguments):
        group = make(*arguments)
        if rank == 1:
            time.sleep(1)
            (folder / "connected").touch()
        return group

gloo.ProcessGroupGloo = Slow
store = dist.FileStore(str(folder / "store"), 2)
group = gloo.SerialGloo(dist.PrefixStore("group", store), rank, 2)
assert (folder / "connected").exists()
print("done")
"""


@thorough()
def test_a_group_is_returned_once_every_rank_has_connected(tmp_path: Path) -> None:
    """A rank that left before would close connections that the others are still making."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES_AT_ONCE, str(rank), str(tmp_path)], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == [b"done\n", b"done\n"]
