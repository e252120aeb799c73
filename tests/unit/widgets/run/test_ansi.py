"""Tests of ANSI escapes in logs: colours become CSS classes, and printed text never becomes markup."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import write_json
from shardscope.records.terminal_text import plain_text
from shardscope.runs.run import Run
from shardscope_widgets.run.ansi import to_html
from shardscope_widgets.run.log import mark_matches

PLAIN = re.compile(r"<span class='(?:ss-tb?-[a-z]+ ?)+'>|</span>")


def test_colours_and_bold_become_css_classes() -> None:
    assert to_html("\x1b[31mred\x1b[0m not") == "<span class='ss-t-red'>red</span> not"
    assert to_html("\x1b[1;4;92mok") == "<span class='ss-t-bold ss-t-underline ss-t-green'>ok</span>"
    assert to_html("\x1b[1;31ma\x1b[22mb\x1b[39mc") == (
        "<span class='ss-t-bold ss-t-red'>a</span><span class='ss-t-red'>b</span>c"
    )
    assert to_html("\x1b[37;41mx\x1b[49my") == (
        "<span class='ss-t-white ss-tb-red'>x</span><span class='ss-t-white'>y</span>"
    )
    assert to_html("\x1b[33mone\ntwo\x1b[mthree") == (
        "<span class='ss-t-yellow'>one</span>\n<span class='ss-t-yellow'>two</span>three"
    )


@pytest.mark.parametrize(
    ("code", "colour"),
    [
        ("38;5;1", "red"),
        ("38;5;203", "red"),
        ("38;5;8", "grey"),
        ("38;5;232", "black"),
        ("38;5;255", "white"),
        ("38;2;20;200;30", "green"),
        ("38:2:20:30:220", "blue"),
        ("38;2;200;190;20", "yellow"),
        ("90", "grey"),
    ],
)
def test_256_and_rgb_colours_map_to_the_nearest_class(code: str, colour: str) -> None:
    assert to_html(f"\x1b[{code}mx") == f"<span class='ss-t-{colour}'>x</span>"


@pytest.mark.parametrize(
    "code", ["38", "38;5", "38;2;1;2", "38;9;1", "999999999999", ";;;", "12", "38;5;999"]
)
def test_malformed_codes_are_ignored(code: str) -> None:
    assert re.sub(PLAIN, "", to_html(f"\x1b[{code}mx")) == "x"


def test_other_escape_sequences_are_removed() -> None:
    assert to_html("\x1b]0;title\x07a\x1b[2Kb\x1b[?25lc\x1b[10;4Hd\x08\x00") == "abcd"
    link = "\x1b]8;;javascript:alert(1)\x1b\\click\x1b]8;;\x1b\\"
    assert to_html(link) == "click"
    assert to_html("  1%|\x1b[31m#\x1b[0m |\r 50%|##|\r100%|###|\r\nnext") == "100%|###|\nnext"


@given(st.text(alphabet=st.sampled_from("\x1b[]0123456789;:mKH<>&'\"ab\r\n\t\x07\\"), max_size=80))
def test_fault_22_printed_text_never_becomes_markup(text: str) -> None:
    html = to_html(text)
    words = re.sub(PLAIN, "", html)
    assert "<" not in words and ">" not in words and "'" not in words and '"' not in words
    assert html.count("<span") == html.count("</span>")
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", unescape(words))


@given(st.text(max_size=60), st.text(min_size=1, max_size=5))
def test_lines_with_marked_matches_are_escaped(line: str, words: str) -> None:
    html = mark_matches(line, words)
    assert unescape(re.sub(r"</?mark>", "", html)) == line
    assert re.sub(r"</?mark>", "", html).count("<") == 0


def test_search_matches_are_marked() -> None:
    assert mark_matches("Loss <loss>", "loss") == "<mark>Loss</mark> &lt;<mark>loss</mark>&gt;"
    assert mark_matches("a+b aab", "a+") == "<mark>a+</mark>b aab"


CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
ESCAPES = {
    "\x1bcreset": "reset",  # RIS
    "\x9b31mred\x9b0m": "red",  # CSI as a C1 control
    "\x1b]0;title\x07text": "text",
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\": "link",
    "\x9d0;title\x9ctext": "text",
    "\x1bPq#0\x1b\\sixel": "sixel",
    "\x1b[3\x1b[1m1m nested": "1m nested",
    "\x1b\x1b[0m[31mformed": "[31mformed",
    "\x1b]0;\x1b]0;title\x07twice": "twice",
    "\x1b(Bcharset \x1b7saved": "charset saved",
    "nobody ends it \x1b]0;title\nnext": "nobody ends it \nnext",
    "cut \x1b[38;5": "cut ",
    "alone \x1b": "alone ",
    "\x07bell\x08\x7f\x85": "bell",
    "tab\tand\rreturn\n": "tab\tand\rreturn\n",
}


@pytest.mark.parametrize(("printed", "shown"), ESCAPES.items())
def test_fault_61_terminal_control_sequences_are_removed_from_logs(
    printed: str, shown: str, folder: RunFolder
) -> None:
    write_json(folder.run_json, {"world_size": 1, "created": 1.0})
    folder.log(0).write_text(printed, newline="")
    assert Run(folder).logs(0) == shown
    assert PLAIN.sub("", unescape(to_html(printed))).rstrip() == shown.rpartition("\r")[2].rstrip()


@given(st.text(st.sampled_from("\x1b\x9b\x9d\x9c\x90[]()P^_cm;0m1\\\x07\n\rab")))
def test_fault_61_nested_escape_sequences_are_removed(printed: str) -> None:
    assert not CONTROLS.search(plain_text(printed))
    assert not CONTROLS.search(to_html(printed))
    assert plain_text(printed).count("\n") == printed.count("\n")
