"""Options that every exported ``train.py`` has: it imports this file, which an export copies beside it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's options for checkpoints."""
    text = "a folder on a file system of all nodes; from its newest checkpoint training continues"
    parser.add_argument("--checkpoints", help=text)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")


def check_options(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options, or end the script with an error that names the wrong one."""
    if options.steps < 1:
        raise SystemExit(f"--steps is {options.steps}; allowed: 1 or more. Nearest fix: --steps 1")
    try:
        text = Path(options.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"allowed: a file with text in UTF-8: {error}"
        raise SystemExit(f"--text is {options.text!r}; {why}. Nearest fix: another file") from None
    if not text.strip():
        why = "allowed: a file with text in it: this one has none"
        raise SystemExit(f"--text is {options.text!r}; {why}. Nearest fix: another file")
    return options
