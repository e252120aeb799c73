"""Token windows of a text."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse
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
    if not path.is_file():
        refuse(field, str(path), "a text file, or None for the shipped corpus", Value(None))
    check_can_be_read(field, path)
    return (encode or encode_text)(path.read_text(encoding="utf-8"))


# eq=False: comparing arrays of tokens gives an array and no bool.
@dataclass(frozen=True, kw_only=True, eq=False)
class Windows(Batches):
    """Tokens of a text split into non-overlapping windows of ``seq_len``."""

    tokens: TokenIds
    """Token ids, int32, shape ``[num_tokens]``."""
    seq_len: int
    """Tokens in one window."""

    def __post_init__(self) -> None:
        if len(self.tokens) < self.seq_len:
            refuse(
                "Recipe.seq_len",
                self.seq_len,
                f"at most the {len(self.tokens):,} tokens of the text",
                f"seq_len={len(self.tokens)}, or a longer text",
            )

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
    if windows.num_samples < 2:
        allowed = f"a text of at least two windows of {windows.seq_len:,} tokens, one of them for validation"
        refuse(field, fraction, allowed, {"validation": None})
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
    path = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardscope" / "tokens" / version
    )
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
