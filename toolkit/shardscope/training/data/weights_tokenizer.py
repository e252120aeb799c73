"""Tokenizer in a checkpoint's folder, checked against the rows of the model's embedding."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.errors import refuse
from shardscope.training.data.tokenizer import pieces

if TYPE_CHECKING:
    import numpy

    from shardscope.training.weights.weights_folder import WeightsFolder

FAST = "tokenizer.json"
OTHERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer.tiktoken")
"""Vocabulary files of tokenizers without a ``tokenizer.json``."""
SAID = "tokenizer_config.json"
TEMPLATES = "additional_chat_templates"
"""The only subfolder that tokenizers read."""
BESIDE = (SAID, "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja")
OTHER_FILES = ("fast_tokenizer_files", "gguf_file", "init_inputs")
"""Keys of tokenizer_config.json with names of further files that transformers opens."""
OR_PATHS = ("vocab", "merges")
"""Keys whose value is the path of a file if it is a string."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of files that no tokenizer reads; the model's weights are checked elsewhere."""
MAX_BYTES = 200_000_000
"""Maximum size of one tokenizer file; Gemma's, among the largest, has 33 million bytes."""


class WeightsTokenizer:
    """Tokenizer of one checkpoint folder. Custom code in the folder is never executed."""

    def __init__(self, folder: WeightsFolder) -> None:
        self._folder, self._field = folder, folder.field

    def check(self, vocab_size: int) -> None:
        """Raise ``ValueError`` for a missing tokenizer or ids outside of an embedding of ``vocab_size`` rows.

        The ids of a tokenizer without ``tokenizer.json`` are checked by the ranks, with transformers.
        """
        found = [name for name in (FAST, *OTHERS) if self._is_there(name)]
        if not found:
            allowed = f"a folder with the model's tokenizer: it has none of {', '.join((FAST, *OTHERS))}"
            refuse(self._field, str(self._folder.path), allowed, "copy the tokenizer's files into it")
        self._check_places()
        for name in (*found, *(name for name in BESIDE if self._is_there(name)), *self._templates()):
            status = self._folder.file(name).stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                allowed = f"a file of at most {MAX_BYTES:,} bytes"
                refuse(f"{self._field}/{name}", status.st_size, allowed, "the model's own tokenizer")
        if self._is_there(SAID):
            self._check_said()
        if FAST in found:
            from tokenizers import Tokenizer

            try:
                tokenizer = Tokenizer.from_file(str(self._folder.file(FAST)))
            except Exception as error:  # The tokenizers library raises plain Exception.
                refuse(f"{self._field}/{FAST}", str(error), "a tokenizer", "the model's own tokenizer")
            self._check_fits(tokenizer.get_vocab(), vocab_size)

    def _check_places(self) -> None:
        """Raise ``ValueError`` for links out of the folder, of any name: tokenizers differ in their files."""
        for name in sorted(entry.name for entry in self._folder.path.iterdir()):
            is_read = not name.startswith(".") and not name.endswith(WEIGHTS)
            if is_read and (name == TEMPLATES or not (self._folder.path / name).is_dir()):
                self._folder.file(name)

    def _templates(self) -> Iterator[str]:
        for entry in sorted((self._folder.path / TEMPLATES).glob("*.jinja")):
            yield f"{TEMPLATES}/{entry.name}"

    def _check_said(self) -> None:
        """Raise ``ValueError`` for keys by which some version of transformers opens further files."""
        field, fix = f"{self._field}/{SAID}", "the model's own tokenizer, without that key"
        for key, value in self._said(field).items():
            if (key in OTHER_FILES and value) or (key in OR_PATHS and isinstance(value, str)):
                allowed = f"none: a tokenizer is read from {FAST} or its family's own files"
                refuse(f"{field} {key}", value, allowed, fix)
            if key.endswith("_file") and isinstance(value, str) and self._leads_out(value):
                allowed = f"a file in {self._folder.path}: nothing else is read"
                refuse(f"{field} {key}", value, allowed, fix)

    def _said(self, field: str) -> dict[str, Any]:
        try:
            said = json.loads(self._folder.file(SAID).read_bytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            refuse(field, f"no JSON: {error}", "a JSON object", "the model's own tokenizer")
        if not isinstance(said, dict):
            refuse(field, type(said).__name__, "a JSON object", "the model's own tokenizer")
        return said

    def _leads_out(self, name: str) -> bool:
        """Return whether ``name``, relative to here or to the folder, is a file outside of the folder."""
        try:
            seen = [path for path in (Path(name), self._folder.path / name) if path.is_file()]
        except (OSError, ValueError):  # Not a valid file name.
            return False
        return not all(self._folder.holds(path.resolve()) for path in seen)

    def encode(self, text: str) -> numpy.ndarray:
        """Return token ids of ``text``, int32, shape ``[num_tokens]``, ending with EOS if there is one."""
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
        """Write the tokenizer to ``folder`` in the format of ``AutoTokenizer``."""
        self._opened().save_pretrained(folder)

    def _opened(self) -> Any:
        from transformers import AutoTokenizer

        path = self._folder.path
        try:
            found = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # A missing library, custom code, a damaged file.
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
