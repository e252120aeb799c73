"""What people call a model of the catalogue: its name there, or the repository that it was read from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from shardscope.core.errors import find_nearest, find_similar

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

    def find_similar(self, text: object) -> str | None:
        """Return the name in the catalogue that is spelled much like ``text``, or whose repository's is; None
        if none is near."""
        wanted, called = self._spellings(text)
        close = _longest_beginning(wanted, called) or find_similar(wanted, called)
        return None if close is None else called[close]

    def find_nearest(self, text: object) -> str:
        """Return the name in the catalogue that is spelled most like ``text``, however far that is."""
        wanted, called = self._spellings(text)
        return called[_longest_beginning(wanted, called) or find_nearest(wanted, list(called))]

    def _spellings(self, text: object) -> tuple[str, dict[str, str]]:
        """Return ``text`` without an owner, and the catalogue's name of every spelling that is known."""
        called = {name: name for name in self._known}
        called |= {repository.partition("/")[2]: name for repository, name in self._by_repository.items()}
        # Whose copy of a model it is says nothing of its shape.
        return text.lower().rpartition("/")[2] if isinstance(text, str) else "", called


def _longest_beginning(wanted: str, called: Mapping[str, str]) -> str | None:
    """Return the longest name that ``wanted`` begins with.

    "llama-3.1-8b-instruct" is the model of that size, though llama-3.3-70b-instruct is nearer by letters.
    """
    return max((name for name in called if wanted.startswith(f"{name}-")), key=len, default=None)
