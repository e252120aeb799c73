"""Tokenizer in a checkpoint's folder, checked against the rows of the model's embedding."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import get_first_line, refuse
from shardscope.training.data.tokenizer import split_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardscope.training.data.tokenizer import TokenIds
    from shardscope.training.weights.weights_folder import WeightsFolder

LOADING = threading.Lock()
"""Held while transformers opens a tokenizer: it loads modules when their names are first read, and two
threads see each other's half-loaded ones."""
FAST_FILE = "tokenizer.json"
VOCABULARY_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer.tiktoken")
"""Vocabulary files of tokenizers without a ``tokenizer.json``."""
CONFIG = "tokenizer_config.json"
TEMPLATES = "additional_chat_templates"
"""The only subfolder that tokenizers read."""
EXTRA_FILES = (CONFIG, "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja")
FILE_KEYS = ("fast_tokenizer_files", "gguf_file", "init_inputs")
"""Keys of tokenizer_config.json with names of further files that transformers opens."""
VALUE_OR_PATH_KEYS = ("vocab", "merges")
"""Keys whose value is the path of a file if it is a string."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of files that no tokenizer reads; ``WeightsFolder`` checks the model's weights."""
MIN_USED_ROWS, MIN_UNUSED_ROWS = 0.8, 1024
"""An embedding of which a smaller share is used, and more rows are not, most likely belongs to another
tokenizer. Embeddings are padded for fast matrix products and for tensor parallelism, by less: Qwen2.5 has
151,665 tokens and 151,936 or 152,064 rows, Phi-2 50,295 tokens and 51,200 rows."""
MAX_BYTES = 200_000_000
"""Maximum size of one tokenizer file; Gemma's, among the largest, has 33 million bytes."""


def describe_unused_rows(num_tokens: int, vocab_size: int) -> str:
    """Return a warning that a tokenizer is much smaller than the embedding; empty if the sizes are usual."""
    if num_tokens >= MIN_USED_ROWS * vocab_size or vocab_size - num_tokens < MIN_UNUSED_ROWS:
        return ""
    return (
        f"The tokenizer has {num_tokens:,} tokens and the model's embedding {vocab_size:,} rows, far more "
        "than padding explains: it is most likely not the tokenizer that the model was trained with, so that "
        "its ids mean other words to the model."
    )


class WeightsTokenizer:
    """Tokenizer of one checkpoint folder. Custom code in the folder is never executed."""

    def __init__(self, folder: WeightsFolder) -> None:
        self._folder, self._field = folder, folder.field

    def is_there(self) -> bool:
        """Return whether the folder has the files of a tokenizer."""
        return bool(self._list_vocabulary_files())

    def _list_vocabulary_files(self) -> list[str]:
        return [name for name in (FAST_FILE, *VOCABULARY_FILES) if self._has_file(name)]

    def check(self, vocab_size: int) -> None:
        """Raise ``ValueError`` for a missing tokenizer or ids outside of an embedding of ``vocab_size`` rows.

        The ids of a tokenizer without ``tokenizer.json`` are checked by the ranks, with transformers.
        """
        vocabulary_files = self._list_vocabulary_files()
        if not vocabulary_files:
            names = ", ".join((FAST_FILE, *VOCABULARY_FILES))
            allowed = f"a folder with the model's tokenizer: it has none of {names}"
            refuse(self._field, str(self._folder.path), allowed, "copy the tokenizer's files into it")
        # Check paths and sizes before any library opens a file.
        self._check_links()
        for name in (
            *vocabulary_files,
            *(name for name in EXTRA_FILES if self._has_file(name)),
            *self._list_templates(),
        ):
            status = self._folder.resolve_file(name).stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                allowed = f"a file of at most {MAX_BYTES:,} bytes"
                refuse(f"{self._field}/{name}", status.st_size, allowed, "the model's own tokenizer")
        if self._has_file(CONFIG):
            self._check_config()
        # tokenizers is a small library; other formats need transformers, which takes seconds to import.
        if FAST_FILE in vocabulary_files:
            from tokenizers import Tokenizer

            try:
                tokenizer = Tokenizer.from_file(str(self._folder.resolve_file(FAST_FILE)))
            except Exception as error:  # The tokenizers library raises plain Exception.
                refuse(f"{self._field}/{FAST_FILE}", str(error), "a tokenizer", "the model's own tokenizer")
            self._check_fits(tokenizer.get_vocab(), vocab_size)

    def _check_links(self) -> None:
        """Raise ``ValueError`` for links out of the folder, of any name: tokenizers differ in their files."""
        for name in sorted(entry.name for entry in self._folder.path.iterdir()):
            is_read = not name.startswith(".") and not name.endswith(WEIGHT_SUFFIXES)
            if is_read and (name == TEMPLATES or not (self._folder.path / name).is_dir()):
                self._folder.resolve_file(name)

    def _list_templates(self) -> Iterator[str]:
        for entry in sorted((self._folder.path / TEMPLATES).glob("*.jinja")):
            yield f"{TEMPLATES}/{entry.name}"

    def _check_config(self) -> None:
        """Raise ``ValueError`` for keys by which some version of transformers opens further files."""
        field, fix = f"{self._field}/{CONFIG}", "the model's own tokenizer, without that key"
        for key, value in self._read_config(field).items():
            if (key in FILE_KEYS and value) or (key in VALUE_OR_PATH_KEYS and isinstance(value, str)):
                allowed = f"none: a tokenizer is read from {FAST_FILE} or its family's own files"
                refuse(f"{field} {key}", value, allowed, fix)
            if key.endswith("_file") and isinstance(value, str) and self._is_outside(value):
                allowed = f"a file in {self._folder.path}: nothing else is read"
                refuse(f"{field} {key}", value, allowed, fix)

    def _read_config(self, field: str) -> dict[str, object]:
        try:
            config = json.loads(self._folder.resolve_file(CONFIG).read_bytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            refuse(field, f"not JSON: {error}", "a JSON object", "the model's own tokenizer")
        if not isinstance(config, dict):
            refuse(field, type(config).__name__, "a JSON object", "the model's own tokenizer")
        return config

    def _is_outside(self, name: str) -> bool:
        """Return whether ``name``, relative to here or to the folder, is a file outside of the folder."""
        try:
            files = [path for path in (Path(name), self._folder.path / name) if path.is_file()]
        except (OSError, ValueError):  # Not a valid file name.
            return False
        return not all(self._folder.contains(file.resolve()) for file in files)

    def count_tokens(self) -> int | None:
        """Return the number of tokens in ``tokenizer.json``; None without one that can be read.

        It takes up to seconds, so the number is kept until the file changes.
        """
        try:
            file = self._folder.resolve_file(FAST_FILE)
            status = file.stat()
        except (ValueError, OSError):
            return None
        return _count_tokens(file, (status.st_mtime_ns, status.st_size))

    def encode(self, text: str) -> TokenIds:
        """Return token ids of ``text``, int32, shape ``[num_tokens]``, ending with EOS if there is one."""
        import numpy

        tokenizer = self.load()
        # Without special tokens, which would mark a begin or an end at every piece. ``verbose`` would warn
        # that the text is longer than the context of the model; no window is.
        encoded = [
            tokenizer(piece, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]
            for piece in split_text(text)
        ]
        if tokenizer.eos_token_id is not None:
            encoded.append([tokenizer.eos_token_id])
        return numpy.concatenate([numpy.asarray(ids, dtype=numpy.int32) for ids in encoded])

    def save(self, folder: Path) -> None:
        """Write the tokenizer to ``folder`` in the format of ``AutoTokenizer``."""
        self.load().save_pretrained(folder)

    def load(self) -> PreTrainedTokenizerBase:
        """Return transformers' tokenizer of the folder. Raises ``ValueError`` if it cannot be opened."""
        from transformers import AutoTokenizer

        path = self._folder.path
        try:
            with LOADING:
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                    path, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # A missing library, custom code, a damaged file.
            allowed = f"a folder whose tokenizer transformers opens as it is: {get_first_line(error)}"
            refuse(self._field, str(path), allowed, "the model's tokenizer saved as tokenizer.json")
        self._check_fits(tokenizer.get_vocab(), self._folder.architecture.vocab_size)
        return tokenizer

    def _check_fits(self, ids: dict[str, int], vocab_size: int) -> None:
        largest = max(ids.values(), default=0)
        if largest >= vocab_size:
            allowed = f"at most {vocab_size - 1:,}: the model's embedding has {vocab_size:,} rows"
            fix = "the tokenizer that the model was trained with"
            refuse(f"{self._field}: the last id of its tokenizer", largest, allowed, fix)

    def _has_file(self, name: str) -> bool:
        return (self._folder.path / name).exists() or (self._folder.path / name).is_symlink()


@lru_cache(maxsize=16)
def _count_tokens(file: Path, stamp: tuple[int, int]) -> int | None:
    try:
        from tokenizers import Tokenizer

        return len(Tokenizer.from_file(str(file)).get_vocab())
    except Exception:  # Not installed, or not readable: the check before a launch has the reason.
        return None
