"""Rows whose figure its own source contradicts elsewhere."""

from __future__ import annotations

from tests.accuracy.rows import Row, join_fields
from tests.accuracy.unmapped_rows import UnmappedError


def check_not_contradicted(row: Row) -> None:
    """Raises ``UnmappedError`` for a row that cannot be about the run that it describes.

    The playbook's dp_scaling.html draws one figure, 36.66, for every number of ranks. By their throughputs,
    equal to the digit, its runs are in banner.html too: there the ones on 64 and 256 ranks have micro-batches
    of 1 and 36.66 and 36.65 GiB reserved, and the one on 128 micro-batches of 2 and 48.55. So the chart shows
    the reserved memory of one micro-batch size, whatever ran.
    """
    if join_fields(row, "table").startswith("dp_scaling.html"):
        raise UnmappedError("one figure for all ranks, which the same source's banner contradicts")
