"""Options of every exported ``train.py``, and the tokenizer that it saves; exports copy this file with it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's options for what a training leaves behind."""
    text = "a folder for weights and tokenizer, as transformers opens it, or peft with adapters"
    parser.add_argument("--save", help=text)
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


def save_tokenizer(options: argparse.Namespace) -> None:
    """Write the text's tokenizer, on rank 0, into the folder of the weights: transformers opens both.

    Where a token is a byte, there is none.
    """
    source = options.tokenizer or options.model
    if dist.get_rank() != 0 or not source:
        return
    if source.endswith(".json"):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=source)
        if "<|endoftext|>" in tokenizer.get_vocab():  # with which train.py ends the text
            tokenizer.eos_token = "<|endoftext|>"
        tokenizer.save_pretrained(options.save)
    else:
        AutoTokenizer.from_pretrained(source).save_pretrained(options.save)
