"""Tables that commands print."""

from __future__ import annotations

import pytest

from shardscope.cli.output import WIDTH, print_table

NAME = "Megatron-core (etp=1, distributed_optimizer=False)"
DEGREES = "dp2 tp2 pp8 vpp10 cp2"


def test_wrapped_columns_break_at_spaces_only(capsys: pytest.CaptureFixture[str]) -> None:
    others = ["x" * 10] * 4
    head = ("", "layout", "degrees", *others)
    print_table(head, [(1, NAME, DEGREES, *others), (2, "DDP", "dp8", *others)], wrap=("layout", "degrees"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    printed = " ".join(lines).split()
    assert all(word in printed for word in (*NAME.split(), *DEGREES.split()))
    # The long option stands alone, below the cells on its right.
    assert [line.split() for line in lines if "distributed_optimizer" in line] == [NAME.split()[-1:]]


def test_a_table_that_is_not_too_wide_stays_on_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("layout", "degrees"), [(NAME, DEGREES)], wrap=("layout", "degrees"))
    assert capsys.readouterr().out.splitlines()[1] == f"{NAME}  {DEGREES}"
