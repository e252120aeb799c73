"""Token windows of a text."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.machine.user_folders import find_cache_folder
from shardscope.training.data.batches import Batches
from shardscope.training.data.plain_text import check_can_be_read
from shardscope.training.data.tokenizer import SHIPPED_TEXT, SHIPPED_TOKENIZER, encode_text

if TYPE_CHECKING:
    import torch

    from shardscope.training.data.tokenizer import TokenIds


def read_tokens(
    text: Path | None, encode: Callable[[str], TokenIds] | None = None, field: str = "text"
) -> TokenIds:
    """Return the int32 token ids of a UTF-8 text file (None: the shipped corpus).

    ``encode`` defaults to the shipped tokenizer. Raises ``ValueError``, naming ``field``, for a file that is
    missing, empty, over 1 GiB or not UTF-8.
    """
    if text is None and encode is None:
        return read_shipped_tokens()
    path = text or SHIPPED_TEXT
    check_can_be_read(field, path)
    # Without the mark that Windows' editors put before the text, which would be tokens of it.
    return (encode or encode_text)(path.read_text(encoding="utf-8-sig"))


MAX_TOKEN_BYTES, MAX_SHORT_BYTES = 16, 2**20
"""Bytes for each token of a sequence from which a text is long enough with any tokenizer, and the largest
text that is tokenized before a launch, which takes about half a second."""


def check_text_length(
    path: Path, encode: Callable[[str], TokenIds] | None, field: str, seq_len: int, fraction: float | None
) -> None:
    """Raise ``ValueError`` for a text of fewer tokens than a run reads, as ranks do after their start.

    ``field`` names the text. ``fraction`` is that of ``Finetune.validation``, which needs a window of its
    own; None: none. A file that is large enough for any tokenizer is not read.
    """
    if path.stat().st_size > min(MAX_SHORT_BYTES, MAX_TOKEN_BYTES * seq_len * (1 if fraction is None else 2)):
        return
    num_tokens = len(read_tokens(path, encode, field))
    _check_num_tokens(num_tokens, seq_len)
    if fraction is not None:
        _check_num_windows(f"{field.partition('.')[0]}.validation", num_tokens // seq_len, seq_len, fraction)


def _check_num_tokens(num_tokens: int, seq_len: int) -> None:
    if num_tokens < seq_len:
        allowed = f"at most the {num_tokens:,} tokens of the text"
        refuse("Recipe.seq_len", seq_len, allowed, f"seq_len={num_tokens}, or a longer text")


def _check_num_windows(field: str, num_windows: int, seq_len: int, fraction: float) -> None:
    if num_windows < 2:
        allowed = f"a text of at least two windows of {seq_len:,} tokens, one of them for validation"
        refuse(field, fraction, allowed, {"validation": None})


# eq=False: comparing arrays of tokens gives an array and no bool.
@dataclass(frozen=True, kw_only=True, eq=False)
class Windows(Batches):
    """Tokens of a text split into non-overlapping windows of ``seq_len``."""

    tokens: TokenIds
    """Token ids, int32, shape ``[num_tokens]``."""
    seq_len: int
    """Tokens in one window."""

    def __post_init__(self) -> None:
        _check_num_tokens(len(self.tokens), self.seq_len)

    @property
    def num_samples(self) -> int:
        """Number of windows in the text; the tokens after the last full one are never read."""
        return len(self.tokens) // self.seq_len

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text."""
        return len(self.tokens)

    @property
    def title(self) -> str:
        """See :class:`Batches`."""
        return f"{self.num_samples:,} windows of {self.seq_len:,} tokens"

    def build_batch(self, step: int) -> dict[str, torch.Tensor]:
        """See :class:`Batches`."""
        import numpy
        import torch
        import torch.nn.functional as F  # noqa: N812

        from shardscope.training.micro_batches import IGNORED_LABEL

        # One index of [rows, seq_len] copies all windows at once.
        starts = numpy.asarray(self.list_indices(step), dtype=numpy.int64) * self.seq_len
        picked = self.tokens[starts[:, None] + numpy.arange(self.seq_len)]
        # Pad with the rows that are empty after the last window.
        num_empty = self.rows - len(starts)
        windows = torch.from_numpy(picked.astype(numpy.int64))
        return {
            name: F.pad(windows, (0, 0, 0, num_empty), value=value)
            for name, value in (("input_ids", 0), ("labels", IGNORED_LABEL))
        }


def split_windows(field: str, windows: Windows, fraction: float) -> tuple[Windows, Windows]:
    """Return the windows for training, and a ``fraction`` at the end of the text for validation.

    Raises ``ValueError`` naming ``field`` for a text of one window.
    """
    _check_num_windows(field, windows.num_samples, windows.seq_len, fraction)
    num_validation = max(1, round(windows.num_samples * fraction))
    cut = (windows.num_samples - num_validation) * windows.seq_len
    validation = replace(windows, tokens=windows.tokens[cut:], in_order=True)
    return replace(windows, tokens=windows.tokens[:cut]), validation


# ---- Token ids of the shipped corpus, cached per user: tokenizing takes every rank a second


def read_shipped_tokens() -> TokenIds:
    """Return int32 ids, shape ``[num_tokens]``, cached in ``~/.cache/shardscope/tokens`` (XDG_CACHE_HOME).

    The file's name is a hash of text and tokenizer. A damaged or unwritable cache is ignored.
    """
    import numpy

    text = SHIPPED_TEXT.read_bytes()
    # Another version of Shardscope may ship another text or tokenizer, and shares the cache.
    version = hashlib.sha256(text + SHIPPED_TOKENIZER.read_bytes()).hexdigest()[:16]
    try:
        path = find_cache_folder() / "tokens" / version
    except FileNotFoundError:
        return encode_text(text.decode("utf-8"))
    with suppress(OSError, ValueError, EOFError):
        cached: TokenIds = numpy.load(path.with_suffix(".npy"), allow_pickle=False)
        if cached.dtype == numpy.int32 and cached.ndim == 1:
            return cached
    tokens = encode_text(text.decode("utf-8"))
    # Renamed when it is complete: all ranks of a run may write it at the same time.
    partial = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            numpy.save(file, tokens)
        partial.replace(path.with_suffix(".npy"))
    return tokens
