"""The front-end loader for the JavaScript and CSS files shipped with the Python modules."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

CSS_COMMENT = re.compile(r"/\*.*?\*/\s*", re.DOTALL)


@cache
def front_end_text(folder: str, *names: str) -> str:
    """Return the concatenated text of ``names`` in ``shardscope_widgets/<folder>``, without comments.

    Text instead of a path: a file-backed front end keeps every widget instance alive (anywidget#929).
    """
    place = files("shardscope_widgets").joinpath(*folder.split("/"))
    text = "\n".join((place / name).read_text(encoding="utf-8") for name in names)
    # Each widget's state has its front end; a reloaded page must get all of them within two seconds.
    if all(name.endswith(".css") for name in names):
        return CSS_COMMENT.sub("", text)
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("//"))
