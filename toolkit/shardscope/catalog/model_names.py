"""Names of catalogue models: the catalogue's own, and the Hub repository of each model's config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from shardscope.core.errors import find_nearest, find_similar

# A model's source begins with the address of its config.json on the Hub.
_REPOSITORY = re.compile(r"^https://huggingface\.co/([^/\s;]+/[^/\s;]+)/")


@cache
def parse_repository(source: str) -> str | None:
    """Return the Hub repository (``meta-llama/Llama-3.1-8B``) that ``source`` starts with; None if none."""
    match = _REPOSITORY.match(source)
    return match[1] if match else None


class ModelNames:
    """Lookup of models by name or by Hub repository, exact and approximate."""

    def __init__(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """Create the lookup of the catalogue's ``entries`` by name; each entry has its ``source``."""
        self._names = dict.fromkeys(entries)
        # TOML reads [llama-3.1-8b] without quotes as a table "1-8b" inside of "llama-3".
        unsourced = [name for name, entry in entries.items() if "source" not in entry]
        assert not unsourced, f"no source in models.toml: {unsourced}; a name with a dot needs quotes there"
        repositories = ((parse_repository(str(entry["source"])), name) for name, entry in entries.items())
        self.repositories = {repository: name for repository, name in repositories if repository}
        """Hub repository, as spelled there -> name in the catalogue."""
        self._by_repository = {repository.lower(): name for repository, name in self.repositories.items()}

    def find(self, text: object) -> str | None:
        """Return the name of the model that ``text`` names, case-insensitively; None if there is none."""
        if not isinstance(text, str):
            return None
        lower = text.lower()
        return lower if lower in self._names else self._by_repository.get(lower)

    def find_similar(self, text: object) -> str | None:
        """Return the model whose name or repository is spelled like ``text``; None if there is none."""
        model, names = _drop_owner(text), self._list_spellings()
        # A prefix first: an instruction-tuned or quantized copy has the base model's name and a suffix.
        spelling = _find_longest_prefix(model, names) or find_similar(model, names)
        return None if spelling is None else names[spelling]

    def find_nearest(self, text: object) -> str:
        """Return the model whose name or repository is spelled most like ``text``, however different."""
        model, names = _drop_owner(text), self._list_spellings()
        return names[_find_longest_prefix(model, names) or find_nearest(model, list(names))]

    def _list_spellings(self) -> dict[str, str]:
        """Return known spelling -> name in the catalogue: names, and repositories without their owner."""
        # Without the owner, whose letters would count as similarity.
        spellings = {name: name for name in self._names}
        spellings |= {repository.partition("/")[2]: name for repository, name in self._by_repository.items()}
        return spellings


def _drop_owner(text: object) -> str:
    """Return the model's name in lower case: copies of a model by other owners have the same shape."""
    return text.lower().rpartition("/")[2] if isinstance(text, str) else ""


def _find_longest_prefix(model: str, names: Iterable[str]) -> str | None:
    """Return the longest name that ``model`` starts with.

    "llama-3.1-8b-instruct" is the model of that size, though llama-3.3-70b-instruct is nearer by letters.
    """
    return max((name for name in names if model.startswith(f"{name}-")), key=len, default=None)
