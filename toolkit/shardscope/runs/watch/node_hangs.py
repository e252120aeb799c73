"""Hangs of a run on several nodes: each node judges its own ranks, and node 0 reports for all of them.

A node writes what it has found to ``nodes/<n>/hang.json``, and its ranks' stacks into their logs. A rank that
waits for one of another node looks the same on every node: only all reports together name the one behind.
"""

from __future__ import annotations

import contextlib
import time

from shardscope.records.folder import NodeFolder
from shardscope.records.json_files import read_json, write_json
from shardscope.runs.watch.hang_reports import HangReport, describe_hang, merge_reports, parse_report

PEER_SECONDS = 10.0
"""Time for the other nodes to find the same: their clocks start at their own last step."""
READ_SECONDS = 10.0
"""Time between two looks at the other nodes' reports while the ranks of node 0 make progress."""


class NodeHangs:
    """The hangs of all nodes, as one node sees them. Call ``check`` once a second."""

    def __init__(self, folder: NodeFolder, world_size: int) -> None:
        self._folder = folder
        self._ranks_per_node = world_size // folder.num_nodes
        self._written: HangReport | None = None
        self._reported: set[int] = set()
        """The nodes that the run's status has named as hanging."""
        self._since_read = 0.0
        self._waited = 0.0
        """Seconds since the first node was found to hang."""

    @property
    def hangs(self) -> bool:
        """Return whether the run's status reports that a node's ranks hang."""
        return bool(self._reported)

    def check(self, report: HangReport | None, message: str | None, seconds: float) -> str | None:
        """Return a message for the status when a hang begins or ends, else None.

        ``report`` is that of this node's ranks, None while they make progress, and ``message`` its own.
        """
        if not self._folder.is_lead:
            self._write(report)
            return message
        self._since_read += seconds
        if report is None and not self._waited and not self._reported and self._since_read < READ_SECONDS:
            return None
        self._since_read = 0.0
        return self._judge(self._read_reports(report), seconds)

    def _judge(self, reports: dict[int, HangReport | None], seconds: float) -> str | None:
        found = {node: report for node, report in reports.items() if report is not None}
        hanging = {node: report for node, report in found.items() if report.hangs}
        if not hanging:
            self._waited = 0.0
            had_hung, self._reported = bool(self._reported), set()
            return "the ranks make progress again" if had_hung else None
        if self._reported.issuperset(hanging):
            return None
        self._waited += seconds
        if len(hanging) < len(reports):
            # A busy rank of any node explains the others, and so does work that nobody logs.
            is_explained = len(found) > len(hanging) or any(
                report.kind == "activity" for report in hanging.values()
            )
            if is_explained or self._waited < PEER_SECONDS:
                return None
        self._reported |= set(hanging)
        return describe_hang(merge_reports(list(hanging.values())), self._name_node)

    def _read_reports(self, own: HangReport | None) -> dict[int, HangReport | None]:
        """Return the reports of all nodes whose ranks have not ended."""
        reports = {0: own}
        for node in range(1, self._folder.num_nodes):
            peer = self._folder.create_peer(node)
            if not peer.ended.exists():
                reports[node] = parse_report((read_json(peer.hang) or {}).get("report"))
        return reports

    def _name_node(self, rank: int) -> str:
        return self._folder.create_peer(rank // self._ranks_per_node).title

    def _write(self, report: HangReport | None) -> None:
        if report == self._written:
            return
        record = None if report is None else report.to_record()
        with contextlib.suppress(OSError):  # A full disk: the next check tries again.
            write_json(self._folder.hang, {"time": time.time(), "report": record})
            self._written = report
