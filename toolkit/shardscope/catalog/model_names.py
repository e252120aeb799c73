"""What people call a model of the catalogue: its name there, or the repository that it was read from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from shardscope.validation import near

_REPOSITORY = re.compile(r"^https://huggingface\.co/([^/\s;]+/[^/\s;]+)/")


@cache
def repository_of(source: str) -> str | None:
    """``meta-llama/Llama-3.1-8B``: the Hub's repository that an entry's source begins with, if it does."""
    found = _REPOSITORY.match(source)
    return found[1] if found else None


class ModelNames:
    """The names of one catalogue of models: table name -> its entry."""

    def __init__(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._known = dict.fromkeys(entries)
        found = ((repository_of(entry["source"]), name) for name, entry in entries.items())
        self.repositories = {repository: name for repository, name in found if repository}
        """The Hub's repository, as it spells itself -> the model that was read there."""
        self._by_repository = {repository.lower(): name for repository, name in self.repositories.items()}

    def find(self, text: object) -> str | None:
        """The catalogue's name for what somebody calls a model, in whatever case; None for others."""
        if not isinstance(text, str):
            return None
        lower = text.lower()
        return lower if lower in self._known else self._by_repository.get(lower)

    def nearest(self, text: object) -> str | None:
        """Return the name in the catalogue that is spelled much like ``text``, or whose repository's is; None
        if none is near."""
        called = {name: name for name in self._known}
        called |= {repository.partition("/")[2]: name for repository, name in self._by_repository.items()}
        # Whose copy of a model it is says nothing of its shape.
        wanted = text.lower().rpartition("/")[2] if isinstance(text, str) else ""
        # "llama-3.1-8b-instruct" is the one of that size, though llama-3.3-70b-instruct is nearer by letters.
        begun = [name for name in called if wanted.startswith(f"{name}-")]
        close = max(begun, key=len) if begun else near(wanted, called)
        return None if close is None else called[close]
