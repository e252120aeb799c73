"""Tokenizer that ships with the corpus: byte-level BPE, which encodes any UTF-8 text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

    TokenIds = numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]
    """Token ids, int32, shape ``[num_tokens]``."""

CORPUS_FOLDER = Path(__file__).parent / "corpus"
SHIPPED_TEXT = CORPUS_FOLDER / "moby_dick.txt"
SHIPPED_TOKENIZER = CORPUS_FOLDER / "tokenizer.json"

VOCAB_SIZE = 2048
"""Tokens of the shipped tokenizer: the minimum vocabulary of a model trained on text with it."""
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
"""Id of the end-of-text token: the BPE trainer numbers special tokens first."""

_ENCODE_CHARACTERS = 1 << 20
"""Maximum number of characters that are encoded at once."""


def encode_text(text: str) -> TokenIds:
    """Return the token ids of ``text``, int32, shape ``[num_tokens]``, terminated by ``<|endoftext|>``."""
    import numpy
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHIPPED_TOKENIZER))
    # Documents are separated by the end-of-text token; a file counts as one document.
    encoded = [numpy.asarray(tokenizer.encode(piece).ids, dtype=numpy.int32) for piece in split_text(text)]
    return numpy.concatenate([*encoded, numpy.asarray([END_OF_TEXT_ID], dtype=numpy.int32)])


def write_tokenizer(folder: Path, seq_len: int) -> None:
    """Write the shipped tokenizer to ``folder`` in the format of ``transformers.AutoTokenizer``."""
    shutil.copy(SHIPPED_TOKENIZER, folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": seq_len,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def split_text(text: str) -> list[str]:
    """Split ``text`` at line ends: encoding a whole book at once needs 100 bytes of offsets per token."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + _ENCODE_CHARACTERS
        if end < len(text):
            # A line end is rarely inside of a token. A piece without any is split where it is full.
            line_end = text.rfind("\n", start, end)
            end = line_end + 1 if line_end > start else end
        pieces.append(text[start:end])
        start = end
    return pieces
