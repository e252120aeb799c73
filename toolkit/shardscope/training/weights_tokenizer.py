"""The tokenizer that lies beside a model's weights: the words that its embedding has rows for."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.training.tokenizer import pieces
from shardscope.validation import refuse

if TYPE_CHECKING:
    import numpy

    from shardscope.training.weights_folder import WeightsFolder

FAST = "tokenizer.json"
OTHERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer.tiktoken")
"""What tokenizers that are not in one JSON are made of."""
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
MAX_BYTES = 200_000_000
"""Of any of these; Gemma's, among the largest, has 33 million."""


class WeightsTokenizer:
    """Of one folder. Code that the folder brings is never run."""

    def __init__(self, folder: WeightsFolder) -> None:
        self._folder, self._field = folder, folder.field

    def check(self, vocab_size: int) -> None:
        """Raise ``ValueError`` if there is none, or one with more tokens than an embedding of ``vocab_size``.

        One that is not in ``tokenizer.json`` is counted by the ranks, which open it with transformers.
        """
        found = [name for name in (FAST, *OTHERS) if self._is_there(name)]
        if not found:
            allowed = f"a folder with the model's tokenizer: it has none of {', '.join((FAST, *OTHERS))}"
            refuse(self._field, str(self._folder.path), allowed, "copy the tokenizer's files into it")
        for name in (*found, *(name for name in BESIDE if self._is_there(name))):
            status = self._folder.file(name).stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                allowed = f"a file of at most {MAX_BYTES:,} bytes"
                refuse(f"{self._field}/{name}", status.st_size, allowed, "the model's own tokenizer")
        if FAST in found:
            from tokenizers import Tokenizer

            try:
                tokenizer = Tokenizer.from_file(str(self._folder.file(FAST)))
            except Exception as error:  # The library has no class of its own for it.
                refuse(f"{self._field}/{FAST}", str(error), "a tokenizer", "the model's own tokenizer")
            self._check_fits(tokenizer.get_vocab(), vocab_size)

    def encode(self, text: str) -> numpy.ndarray:
        """Token ids of ``text`` in one line: int32, shape ``[num_tokens]``, closed by the end of a text."""
        import numpy

        tokenizer = self._opened()
        made = [
            tokenizer(piece, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]
            for piece in pieces(text)
        ]
        if tokenizer.eos_token_id is not None:
            made.append([tokenizer.eos_token_id])
        return numpy.concatenate([numpy.asarray(ids, dtype=numpy.int32) for ids in made])

    def save(self, folder: Path) -> None:
        """Write it to ``folder``, as ``AutoTokenizer`` opens it."""
        self._opened().save_pretrained(folder)

    def _opened(self) -> Any:
        from transformers import AutoTokenizer

        path = self._folder.path
        try:
            found = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # A missing library, code of the folder's own, a damaged file.
            words = str(error).strip().splitlines() or [type(error).__name__]
            allowed = f"a folder whose tokenizer transformers opens as it is: {words[0]}"
            refuse(self._field, str(path), allowed, "the model's tokenizer saved as tokenizer.json")
        self._check_fits(found.get_vocab(), self._folder.architecture.vocab_size)
        return found

    def _check_fits(self, ids: dict[str, int], vocab_size: int) -> None:
        largest = max(ids.values(), default=0)
        if largest >= vocab_size:
            allowed = f"at most {vocab_size - 1:,}: the model's embedding has {vocab_size:,} rows"
            fix = "the tokenizer that the model was trained with"
            refuse(f"{self._field}: the last id of its tokenizer", largest, allowed, fix)

    def _is_there(self, name: str) -> bool:
        return (self._folder.path / name).exists() or (self._folder.path / name).is_symlink()
