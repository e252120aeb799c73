"""The signals of a supervisor's process, and its lock on the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from shardscope.records.folder import RunFolder
from shardscope.runs.launch.supervision.supervisor_process import ReceivedSignals, lock_run

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def signals() -> Iterator[ReceivedSignals]:
    """Signals of this process, whose handlers are restored."""
    before = [signal.getsignal(number) for number in NUMBERS]
    signals = ReceivedSignals()
    signals.install_handlers()
    yield signals
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_stays_until_it_is_settled(signals: ReceivedSignals, number: int) -> None:
    assert signals.read(of_slurm=False) is None
    signal.raise_signal(number)
    assert signals.read(of_slurm=False) == signals.read(of_slurm=False) == number
    signals.settle(signal.SIGUSR2)
    assert signals.read(of_slurm=False) == number, "another signal was settled"
    signals.settle(number)
    assert signals.read(of_slurm=False) is None


def test_blocked_signals_of_slurm_are_read(signals: ReceivedSignals) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        signal.raise_signal(signal.SIGUSR2)  # To this thread only: other threads do not block it.
        assert signals.read(of_slurm=False) is None
        assert signals.read(of_slurm=True) == signals.read(of_slurm=True) == signal.SIGUSR2
    finally:
        signal.sigtimedwait({signal.SIGUSR2}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_run_has_one_supervisor(folder: RunFolder) -> None:
    descriptor = lock_run(folder)
    assert descriptor is not None
    with pytest.raises(ValueError, match="already has a running supervisor"):
        lock_run(folder)
    os.close(descriptor)
    folder.set_status("running", "1 rank at work")
    with pytest.raises(ValueError, match=r"was started before; its statuses: running\."):
        lock_run(folder)
