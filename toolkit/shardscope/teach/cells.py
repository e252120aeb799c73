"""``needs``: a message instead of a traceback where a notebook's cell misses what another cell makes."""

from __future__ import annotations

import sys


class MissingCellError(NameError):
    """A cell uses a variable that no cell of this kernel has made yet. Notebooks show the message alone."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback.
        return [str(self)]


def needs(**cells: str) -> None:
    """Raise an error that names the cell to run if a variable is missing: ``needs(plan="Cell 2")``.

    Keywords are variables of the calling cell; values are the first words of the cell that makes each.
    After a restart, or where cells were run out of order, the learner reads which cell to run, without a
    traceback.
    """
    frame = sys._getframe(1)
    missing: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if name not in frame.f_locals and name not in frame.f_globals:
            missing.setdefault(cell, []).append(name)
    if missing:
        steps = "; ".join(
            f'run the cell that begins with "# {cell}", which makes {", ".join(names)}'
            for cell, names in missing.items()
        )
        raise MissingCellError(
            f"Not in this kernel yet: {steps}; then run this cell again. "
            "(After a restart every cell has to run again: Run > Run All Above Selected Cell.)"
        )
