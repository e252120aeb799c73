"""The front-end loader for the JavaScript and CSS files shipped with the Python modules."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def front_end_text(folder: str, *names: str) -> str:
    """Return the concatenated text of ``names`` in ``shardscope_widgets/<folder>``.

    Text instead of a path: a file-backed front end keeps every widget instance alive (anywidget#929).
    """
    place = files("shardscope_widgets").joinpath(*folder.split("/"))
    return "\n".join((place / name).read_text(encoding="utf-8") for name in names)
