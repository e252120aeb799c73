"""Test of the system's high contrast, which removes colours: their information has to stay visible."""

from __future__ import annotations

from typing import Any

from tests.requirements import thorough

import shardscope as ss
from shardscope_widgets import MemoryView, StepView
from shardscope_widgets.kit.sheet import Sheet

pytestmark = thorough()

PLAN = ss.Plan(
    ss.models["gpt2"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(seq_len=512), ss.Layout.fsdp2()
)
PAGE = """<style>STYLE</style><div class="ss-root">TABLES
<i class="ss-swatch" style="background:#123456"></i>
<div class="ss-tabs"><button aria-selected="true">Memory</button><button>Time</button></div>
<div class="ss-seg"><button class="mod-active">one</button><button>two</button></div>
<div class="ss-toggles"><button class="ss-act" aria-pressed="true">on</button>
<button class="ss-act" aria-pressed="false">off</button></div></div>"""

COLOURS = """selector => [...document.querySelectorAll(selector)]
    .map(each => getComputedStyle(each))
    .map(style => [style.backgroundColor, style.borderBottomColor])"""


def test_fault_46_high_contrast_keeps_legends_and_selected_states(browser: Any) -> None:
    memory, step = MemoryView(), StepView()
    memory.show(PLAN)
    step.show(PLAN)
    tables = memory.table.value + step.table.value
    page = browser.new_page(color_scheme="dark", forced_colors="active")
    try:
        page.set_content(PAGE.replace("STYLE", str(Sheet._css)).replace("TABLES", tables))
        assert page.evaluate("matchMedia('(forced-colors: active)').matches")
        legend = "i[style*=background]"
        actual = [background for background, _ in page.evaluate(COLOURS, legend)]
        page.emulate_media(forced_colors="none")
        expected = [background for background, _ in page.evaluate(COLOURS, legend)]
        page.emulate_media(forced_colors="active")
        assert actual == expected and len(set(actual)) > 8, "swatches keep their colours"
        (_, chosen), (_, other) = page.evaluate(COLOURS, ".ss-tabs:not(.ss-analysis-tabs) button")
        assert chosen != other, "the chosen tab is underlined"
        (chosen, _), (other, _) = page.evaluate(COLOURS, ".ss-seg button")
        assert chosen != other, "the chosen segment is filled"
        (on, _), (off, _) = page.evaluate(COLOURS, ".ss-toggles button")
        assert on != off, "a toggle that is on is filled"
    finally:
        page.close()
