"""Tokens and keys, kept out of everything that a run writes.

Records are cleaned before they are written. What ranks print goes to a file without a process between, so
that nothing is lost or held up; the supervisor overwrites secrets there, in place, a moment later.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path

MASK = "*"
SECRET_NAMES = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_KEY|SECRET_KEY"
    r"|PRIVATE_KEY|KEY|PAT)$",
    re.IGNORECASE,
)
"""Names of environment variables whose values are secrets: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY."""
MIN_LENGTH = 8
"""Shorter values are words that a log may rightly have."""
KNOWN_FORMS = (
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",  # Hugging Face
    r"\b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}",
    r"\bsk-[A-Za-z0-9_-]{20,}",  # OpenAI and those that copied it
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS
    r"\bwandb_v1_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{20,}",
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    r"(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{12,}",
    r"(?<=://)[^\s/:@]{1,256}:[^\s/@]{1,256}(?=@)",  # user:password@host
)
CHUNK_BYTES = 2**20
OVERLAP_BYTES = 1024
"""Of what was looked at, so much is looked at again: a secret may be printed in two writes."""


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """The values in ``environment`` that are secrets by their names, the longest first."""
    found = {
        value
        for name, value in environment.items()
        if SECRET_NAMES.search(name) and len(value) >= MIN_LENGTH and not value.startswith(("/", "~"))
    }
    return sorted(found, key=len, reverse=True)


def redact(text: str) -> str:
    """``text`` with every secret overwritten by as many asterisks."""
    if len(text) < MIN_LENGTH:
        return text
    # Asked anew each time: a notebook sets its tokens whenever it likes.
    return _text_pattern(tuple(secret_values(os.environ))).sub(lambda found: MASK * len(found[0]), text)


@functools.lru_cache(maxsize=8)
def _text_pattern(values: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(re.escape, values), *KNOWN_FORMS]))


@functools.lru_cache(maxsize=8)
def _byte_pattern(values: tuple[str, ...]) -> re.Pattern[bytes]:
    return re.compile(_text_pattern(values).pattern.encode(errors="surrogateescape"))


class LogCleaner:
    """Overwrites secrets in a file that others append to, byte for byte: nothing moves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def clean(self) -> int:
        """Look at what is new; how many secrets were overwritten. Raises ``OSError``."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return 0
        if size <= self.offset:
            return 0
        num_found, pattern = 0, _byte_pattern(tuple(secret_values(os.environ)))
        with self.path.open("r+b") as file:
            place = max(0, self.offset - OVERLAP_BYTES)
            while place < size:
                file.seek(place)
                data = file.read(min(CHUNK_BYTES, size - place))
                if not data:
                    break
                for found in pattern.finditer(data):
                    if found[0].strip(MASK.encode()):
                        file.seek(place + found.start())
                        file.write(MASK.encode() * len(found[0]))
                        num_found += 1
                end = place + len(data)
                place = end if end >= size else end - OVERLAP_BYTES
        self.offset = size
        return num_found
