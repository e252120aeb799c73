"""``python -m tests.finetune_proof [--rows NAME ...]``: fine-tunes, asks, and writes docs/finetune.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.finetune_proof.fine_tunes import FINE_TUNES, launch, measure
from tests.finetune_proof.questions import GENERAL, HELD_OUT, Answers, ask_all
from tests.finetune_proof.report import DOCUMENT, find_shortfalls, write_document, write_row
from tests.parity.machine import Machine

import shardscope as ss

CALIBRATION_SECONDS = 30.0


def main(arguments: list[str] | None = None) -> int:
    """Run the fine-tunes one after another. Return 1 if one has not learned, or has forgotten."""
    parser = argparse.ArgumentParser(prog="python -m tests.finetune_proof", description=__doc__)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="rows whose names have one of these words")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the runs here; those that ended here are not trained again",
    )
    chosen = parser.parse_args(arguments)
    rows = [row for row in FINE_TUNES if not chosen.rows or any(word in row.name for word in chosen.rows)]
    if not rows:
        parser.error(f"no row has one of these words; rows: {', '.join(row.name for row in FINE_TUNES)}")
    weights = ss.example_model("smollm2-135m-instruct")
    ss.calibrate(ss.Cluster.parse("2xcpu"), seconds=CALIBRATION_SECONDS)
    base: Answers | None = None
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="shardscope-finetune-") as scratch:
        for row in rows:
            run = launch(row, weights, chosen.keep or Path(scratch))
            if base is None:
                base = ask_all(run, base=True)
                print(f"base: {base.num_learned} of {len(HELD_OUT)}, {base.num_kept} of {len(GENERAL)}")
            outcomes.append(measure(row, run))
            print(write_row(outcomes[-1]), flush=True)
    assert base is not None
    if len(rows) == len(FINE_TUNES):
        libraries = Machine.here().libraries
        DOCUMENT.write_text(write_document(base, outcomes, f"{libraries}."), encoding="utf-8")
    shortfalls = find_shortfalls(base, outcomes)
    print("\n".join(shortfalls) or f"{len(outcomes)} of {len(outcomes)} fine-tunes have learned")
    return int(bool(shortfalls))


if __name__ == "__main__":
    sys.exit(main())
