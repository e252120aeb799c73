"""Colours of a terminal become classes; nothing that a rank prints becomes markup."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope_widgets.run.ansi import to_html
from shardscope_widgets.run.log import marked

PLAIN = re.compile(r"<span class='(?:ss-tb?-[a-z]+ ?)+'>|</span>")


def test_colours_and_weights_are_classes() -> None:
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
def test_many_colours_are_the_nearest_of_few(code: str, colour: str) -> None:
    assert to_html(f"\x1b[{code}mx") == f"<span class='ss-t-{colour}'>x</span>"


@pytest.mark.parametrize(
    "code", ["38", "38;5", "38;2;1;2", "38;9;1", "999999999999", ";;;", "12", "38;5;999"]
)
def test_damaged_codes_are_passed_over(code: str) -> None:
    assert re.sub(PLAIN, "", to_html(f"\x1b[{code}mx")) == "x"


def test_all_other_escapes_are_left_out() -> None:
    assert to_html("\x1b]0;title\x07a\x1b[2Kb\x1b[?25lc\x1b[10;4Hd\x08\x00") == "abcd"
    link = "\x1b]8;;javascript:alert(1)\x1b\\click\x1b]8;;\x1b\\"
    assert to_html(link) == "click"
    assert to_html("  1%|\x1b[31m#\x1b[0m |\r 50%|##|\r100%|###|\r\nnext") == "100%|###|\nnext"


@given(st.text(alphabet=st.sampled_from("\x1b[]0123456789;:mKH<>&'\"ab\r\n\t\x07\\"), max_size=80))
def test_fault_22_nothing_that_is_printed_becomes_markup(text: str) -> None:
    html = to_html(text)
    words = re.sub(PLAIN, "", html)
    assert "<" not in words and ">" not in words and "'" not in words and '"' not in words
    assert html.count("<span") == html.count("</span>")
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", unescape(words))


@given(st.text(max_size=60), st.text(min_size=1, max_size=5))
def test_marked_words_are_escaped_as_well(line: str, words: str) -> None:
    html = marked(line, words)
    assert unescape(re.sub(r"</?mark>", "", html)) == line
    assert re.sub(r"</?mark>", "", html).count("<") == 0


def test_marks_stand_where_the_words_are() -> None:
    assert marked("Loss <loss>", "loss") == "<mark>Loss</mark> &lt;<mark>loss</mark>&gt;"
    assert marked("a+b aab", "a+") == "<mark>a+</mark>b aab"
