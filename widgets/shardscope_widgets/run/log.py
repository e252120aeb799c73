"""The logs of a run: the end of one rank's log in colour, or the lines that match a search."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import ipywidgets as widgets

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_tail_text
from shardscope.records.log_search import MAX_MATCHES, LogSearch
from shardscope.records.nodes import RunNode
from shardscope.records.redaction import redact
from shardscope.records.regular_files import check_regular
from shardscope_widgets.kit import controls
from shardscope_widgets.run import ansi
from shardscope_widgets.run.log_pane import LogPane

LOG_BYTES = 16 * 1024
"""Maximum bytes shown from the end of a log."""
SHORTEST_SEARCH = 2
LAUNCHER, SUPERVISOR = "launcher", "supervisor"
"""Processes that are not ranks: one of each on every node."""
PROFILER_TALK = re.compile(r"^USDT:.*\n?", re.MULTILINE)
"""Lines that torch's profiler prints; no setting suppresses them without hiding its errors as well."""


class RunLog(widgets.VBox):
    """Log selection, search and lines. ``refresh`` reads new output and may run in any thread."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._folder: RunFolder | None = None
        self._num_ranks = 0
        self._paths: dict[int | str, Path] = {}
        """Logs of processes that are not ranks, by their choice in the menu."""
        self._seen: object = None
        self._search: LogSearch | None = None
        self._is_chosen = False
        """Whether the user has selected a log of this run."""
        self._is_setting = False
        self.whose = controls.create_dropdown(
            options=[("rank 0", 0)],
            tooltip="Log of this rank or process",
            layout=controls.share_fixed_layout("116px"),
        )
        # Searched at every keystroke: refresh reads a large log a part at a time.
        self.words = controls.create_text_box(
            "", "Search this log", "200px", continuous_update=True, placeholder="Search this log"
        )
        self.found = controls.create_html("", "ss-hint")
        self.pane = LogPane(layout=controls.share_layout())
        head = widgets.HBox(
            [controls.create_html("<h2>Log</h2>"), self.whose, self.words, self.found],
            layout=controls.share_layout(),
        )
        head.add_class("ss-log-head")
        super().__init__([head, self.pane], layout=controls.share_layout())
        for control in (self.whose, self.words):
            control.observe(lambda _: on_change(), "value")
        self.whose.observe(self._note_choice, "value")

    def start_run(self, run: ss.Run) -> None:
        """Show the logs of ``run``, starting with rank 0."""
        self._folder = RunFolder(run.folder)
        self._seen, self._search = None, None
        self._num_ranks, nodes = run.world_size, run.nodes
        # Names of nodes take more room.
        self.whose.layout = controls.share_fixed_layout("208px" if nodes else "116px")
        # Set the value as well: equal options would keep the rank selected in the previous run.
        self._set_choice(options=self._list_choices(nodes), value=0)
        # The same key, rank 0's log, would keep the scroll position of the previous run.
        self.pane.num_runs += 1
        self._is_chosen = False
        self.words.value = ""

    def set_nodes(self, nodes: Sequence[RunNode]) -> None:
        """Name the nodes in the menu, and show their logs: each attempt may run on other nodes."""
        options, chosen = self._list_choices(nodes), self.whose.value
        if list(self.whose.options) != options:
            # Setting the options selects the first one.
            self._set_choice(options=options, value=chosen)

    def _list_choices(self, nodes: Sequence[RunNode]) -> list[tuple[str, int | str]]:
        """Return labels and values of the menu, and note the files of those that are no ranks."""
        assert self._folder is not None, "it is set first"
        of_rank = {rank: f" · {node.name}" for node in nodes for rank in node.ranks}
        choices: list[tuple[str, int | str]] = [
            (f"rank {rank}{of_rank.get(rank, '')}", rank) for rank in range(self._num_ranks)
        ]
        self._paths = {}
        # Failures before the ranks start are logged in these.
        for number, part in enumerate([node.folder for node in nodes] or [self._folder]):
            of_node = f" · {nodes[number].name}" if nodes else ""
            for process, path in ((LAUNCHER, part.launcher_log), (SUPERVISOR, part.supervisor_log)):
                choice = f"{process} {number}" if number else process
                choices.append((f"{process}{of_node}", choice))
                self._paths[choice] = path
        return choices

    def prefer_log(self, whose: int | str) -> None:
        """Show the log of this rank, or "launcher", unless the user has selected a log."""
        if not self._is_chosen and whose in [value for _, value in self.whose.options]:
            self._set_choice(value=whose)

    def _set_choice(self, **traits: object) -> None:
        # These changes are not the user's: prefer_log may still replace the log that they select.
        self._is_setting = True
        try:
            for name, value in traits.items():
                setattr(self.whose, name, value)
        finally:
            self._is_setting = False

    def _note_choice(self, change: object) -> None:
        self._is_chosen |= not self._is_setting

    def refresh(self, has_ended: bool) -> bool:
        """Show new output. Return whether a search has more to read."""
        if self._folder is None:
            return False
        path, wanted = self._find_path(self._folder), self.words.value.strip()
        if len(wanted) < SHORTEST_SEARCH:
            self._search = None
            self._show_end(path, has_ended)
            return False
        if self._search is None or (self._search.path, self._search.text) != (path, wanted):
            self._search = LogSearch(path, wanted)
        # A part of a large log at a time, so that the view stays responsive.
        more = self._search.search_next()
        self._show_found(self._search, more)
        return more

    def _find_path(self, folder: RunFolder) -> Path:
        whose = self.whose.value
        return self._paths.get(whose) or folder.log(int(whose or 0))

    def _show_end(self, path: Path, has_ended: bool) -> None:
        try:
            status = check_regular(path)
        except OSError:
            status = None
        size, changed = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
        # The supervisor masks secrets in place, so the file's length does not change.
        seen = (path, size, changed, has_ended)
        if seen == self._seen:
            return
        self._seen = seen
        text = redact(read_tail_text(path, LOG_BYTES))
        if size > LOG_BYTES:  # The first line is most likely truncated.
            text = text.partition("\n")[2] or text
        lines = ansi.to_html(PROFILER_TALK.sub("", text))
        nothing = "no output" if has_ended else "no output yet"
        self._show_lines(path, "", lines or f"<span class='ss-hint'>{nothing}</span>")
        shown = f"the last {LOG_BYTES // 1024} KiB of {size / 2**20:,.1f} MiB" if size > LOG_BYTES else ""
        self._show_count(shown)

    def _show_found(self, search: LogSearch, more: bool) -> None:
        seen = (search, search.num_matches, search.num_lines, more)
        if seen == self._seen:
            return
        self._seen = seen
        # Line numbers are padded to the last one, the widest.
        width = len(f"{search.matches[-1][0]:,}") if search.matches else 0
        lines = "\n".join(
            f"<span class='ss-line-number'>{number:>{width},}</span> {mark_matches(line, search.text)}"
            for number, line in search.matches
        )
        self._show_lines(search.path, search.text, lines or "<span class='ss-hint'>no matching line</span>")
        count = f"{search.num_matches:,} of {search.num_lines:,} lines"
        last = f", the last {MAX_MATCHES} shown" if search.num_matches > MAX_MATCHES else ""
        self._show_count(f"{count}{last}{' · still searching' if more else ''}")

    def _show_lines(self, path: Path, query: str, lines: str) -> None:
        # One message: the page decides by the key whether new lines keep the scroll position (log_pane.js),
        # so a value must not arrive with the key of another log.
        with self.pane.hold_sync():
            self.pane.name = f"log of {path.stem}" + (f": lines with {query}" if query else "")
            # Logs of two nodes or attempts have the same file name.
            relative = path.relative_to(self._folder.path) if self._folder is not None else path
            self.pane.key = f"{relative}/{query}"
            self.pane.value = lines

    def _show_count(self, text: str) -> None:
        self.found.value = text


def mark_matches(line: str, query: str) -> str:
    """Return ``line`` as HTML with ``query`` highlighted."""
    parts, end = [], 0
    for match in re.finditer(re.escape(query), line, re.IGNORECASE):
        parts.append(f"{escape(line[end : match.start()])}<mark>{escape(match[0])}</mark>")
        end = match.end()
    return "".join(parts) + escape(line[end:])
