"""Token ids of the shipped corpus, made once for a user: ranks would spend a second on them in every run."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.training.data.tokenizer import SHIPPED_TEXT, SHIPPED_TOKENIZER, encode_text

if TYPE_CHECKING:
    import numpy


def shipped_tokens() -> numpy.ndarray:
    """int32, shape ``[num_tokens]``, from ``~/.cache/shardscope/tokens`` (``XDG_CACHE_HOME`` moves it).

    The file's name is a hash of text and tokenizer; one that is damaged or cannot be written is done without.
    """
    import numpy

    text = SHIPPED_TEXT.read_bytes()
    version = hashlib.sha256(text + SHIPPED_TOKENIZER.read_bytes()).hexdigest()[:16]
    path = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardscope" / "tokens" / version
    )
    with suppress(OSError, ValueError, EOFError):
        kept: numpy.ndarray = numpy.load(path.with_suffix(".npy"), allow_pickle=False)
        if kept.dtype == numpy.int32 and kept.ndim == 1:
            return kept
    tokens = encode_text(text.decode("utf-8"))
    partial = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            numpy.save(file, tokens)
        partial.replace(path.with_suffix(".npy"))
    return tokens
