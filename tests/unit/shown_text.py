"""The text that a reader sees in the HTML of a view."""

from __future__ import annotations

import re
from html import unescape


def strip_tags(html: str) -> str:
    """Return the text between the tags, with single spaces."""
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))).strip()
