"""Tests of the trace view in a real browser: its ES module, and real tiles from Python.

A small page on the loopback address stands in for JupyterLab, so that the tests take seconds.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.requirements import few, sample, thorough
from tests.unit.trace.trace_events import all_reduce, kernel, launch, operator, step, write_ranks

from shardscope.trace import Trace
from shardscope_widgets.trace import TraceView

SYNCED_TRAITS = [
    "viewport_seconds", "search", "selected", "num_matches", "error", "height", "_revealed", "_path_number",
]  # fmt: skip
FIXTURE = Path(__file__).parents[1] / "fixtures" / "trace_2_ranks"

PAGE = """<!doctype html><html><head><meta charset="utf-8">
<style>body{margin:16px;background:BACKGROUND}</style>
<link rel="stylesheet" href="/style.css"></head><body><div id="view"></div><script type="module">
import front from "/index.js";
const state = await (await fetch("/state")).json();
const handlers = {};
const fire = (event, ...rest) => (handlers[event] ?? []).forEach((handler) => handler(...rest));
let changed = {};
// One at a time and in order, as a kernel's channel is.
let queue = Promise.resolve();
const post = (path, body) => (queue = queue.then(() => deliver(path, body)));
async function deliver(path, body) {
  const reply = await (await fetch(path, { method: "POST", body: JSON.stringify(body) })).json();
  for (const [key, value] of Object.entries(reply.state)) {
    state[key] = value;
    fire("change:" + key);
  }
  for (const { content, buffers } of reply.messages) {
    const bytes = buffers.map((text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
    fire("msg:custom", content, bytes.map((part) => new DataView(part.buffer)));
  }
}
const model = {
  get: (key) => state[key],
  set: (key, value) => { state[key] = changed[key] = value; fire("change:" + key); },
  save_changes: () => { post("/state", changed); changed = {}; },
  send: (content) => post("/message", content),
  on: (event, handler) => (handlers[event] ??= []).push(handler),
  off: (event, handler) => { handlers[event] = handlers[event].filter((one) => one !== handler); },
};
window.model = model;
window.sync = () => post("/sync", {}); // fetches what Python changed
window.handlers = handlers;
window.close_view = front.render({ model, el: document.getElementById("view") });
</script></body></html>"""


# Counts what the page still has to do: short timers, frames, and messages that are sent or unpacked.
WATCH = """(() => {
  const later = window.setTimeout, atFrame = window.requestAnimationFrame;
  const [endTimer, endFrame] = [window.clearTimeout, window.cancelAnimationFrame];
  const [timers, frames] = [new Set(), new Set()];
  let numReplies = 0;
  window.setTimeout = (call, ms = 0, ...rest) => {
    const id = later(() => { timers.delete(id); call(...rest); }, ms);
    if (ms < 1000) timers.add(id); // a longer one waits for a reply that does not come
    return id;
  };
  window.clearTimeout = (id) => { timers.delete(id); endTimer(id); };
  window.requestAnimationFrame = (call) => {
    const id = atFrame((time) => { frames.delete(id); call(time); });
    frames.add(id);
    return id;
  };
  window.cancelAnimationFrame = (id) => { frames.delete(id); endFrame(id); };
  const count = (owner, name) => {
    const plain = owner[name];
    owner[name] = function (...rest) {
      numReplies += 1;
      const reply = plain.apply(this, rest);
      const end = () => { numReplies -= 1; };
      reply.then(end, end);
      return reply;
    };
  };
  count(window, "fetch");
  for (const name of ["json", "text", "arrayBuffer"]) count(Response.prototype, name);
  window.settled = async () => {
    // Two calm frames: input and changes of size are handled in the first.
    for (let numCalm = 0; numCalm < 2; ) {
      await new Promise((resolve) => atFrame(() => later(resolve, 0)));
      numCalm = timers.size || frames.size || numReplies ? 0 : numCalm + 1;
    }
  };
})();"""


@contextmanager
def serve_page(view: TraceView, background: str = "white") -> Iterator[str]:
    """Serve a page that shows ``view`` and passes messages both ways; yield its address."""
    sent: list[dict[str, Any]] = []
    known: dict[str, Any] = {}
    """The traits as the page has them."""
    lock = threading.Lock()

    def record_message(content: dict[str, Any], buffers: list[Any] | None = None) -> None:
        texts = [base64.b64encode(bytes(buffer)).decode() for buffer in buffers or []]
        sent.append({"content": content, "buffers": texts})

    view.send = record_message

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def respond(self, body: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            if self.path == "/index.js":
                self.respond(str(view._esm), "text/javascript")
            elif self.path == "/style.css":
                self.respond(str(view._css), "text/css")
            elif self.path == "/state":
                known.update(view.get_state(SYNCED_TRAITS))
                self.respond(json.dumps(view.get_state()), "application/json")
            else:
                self.respond(PAGE.replace("BACKGROUND", background), "text/html")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                if self.path == "/state":
                    known.update(body)
                    view.set_state(body)
                elif self.path == "/message":
                    view._handle_custom_msg(body, [])
                messages, sent[:] = list(sent), []
                after = view.get_state(SYNCED_TRAITS)
                state = {key: value for key, value in after.items() if value != known[key]}
                known.update(state)
            self.respond(json.dumps({"messages": messages, "state": state}), "application/json")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def open_page(
    browser: Any, *, dark: bool = False, width: int = 1180, height: int = 800, scale: float = 1
) -> Any:
    """Open an empty page that :func:`wait_until_settled` can watch."""
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        device_scale_factor=scale,
    )
    page.add_init_script(WATCH)
    return page


@pytest.fixture
def open_view(browser: Any) -> Callable[..., AbstractContextManager[Any]]:
    """``with open_view(view) as page:`` shows ``view`` in a page of its own."""
    return partial(_open_view, browser)


@contextmanager
def _open_view(
    browser: Any, view: TraceView, *, dark: bool = False, width: int = 1180, scale: float = 1
) -> Iterator[Any]:
    """Open a page that shows ``view``; fail if a request left the machine or a script failed."""
    page = open_page(browser, dark=dark, width=width, scale=scale)
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    try:
        with serve_page(view, "#111518" if dark else "white") as address:
            page.goto(address)
            page.wait_for_selector(".ss-trace canvas[data-t0]")
            if len(view.trace):
                page.wait_for_function("+document.querySelector('canvas').dataset.slices > 0")
            wait_until_settled(page)
            yield page
            assert not failures, failures
            assert not [url for url in requests if not url.startswith(address)]
    finally:
        page.close()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.load(FIXTURE)


@pytest.fixture
def view(trace: Trace) -> TraceView:
    return TraceView(trace)


def read_viewport(page: Any) -> tuple[float, float]:
    data = page.evaluate("({...document.querySelector('.ss-trace canvas').dataset})")
    return float(data["t0"]), float(data["t1"])


def wait_until_settled(page: Any) -> None:
    """Wait until the page has handled all input, sent every message, and drawn every reply."""
    page.evaluate("settled()")


def find_center(page: Any) -> tuple[float, float]:
    box = page.locator(".ss-trace canvas").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + 70


def find_pixel(page: Any, view: TraceView, index: int) -> tuple[float, float]:
    """Return the pixel in the middle of a slice of the first track, below the ruler and a header."""
    box = page.locator(".ss-trace canvas").bounding_box()
    t0, t1 = read_viewport(page)
    time = (int(view.trace.start_ns[index]) + int(view.trace.duration_ns[index]) / 2) / 1e9
    x = box["x"] + 168 + (time - t0) / (t1 - t0) * (box["width"] - 168)
    return x, box["y"] + 24 + 24 + 3 + int(view.trace.depth[index]) * 18 + 9


def test_every_slice_of_both_ranks_is_drawn_on_one_axis(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        drawn = int(page.locator("canvas").get_attribute("data-slices"))
        assert drawn == len(view.trace)
        assert page.locator(".ss-trace-rank").all_text_contents() == ["rank 0", "rank 1"]
        assert read_viewport(page) == pytest.approx((0, view.trace.duration_seconds))


def test_wheel_zooms_at_the_pointer_and_updates_the_viewport(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        x, y = find_center(page)
        page.mouse.move(x, y)
        before = read_viewport(page)
        page.mouse.wheel(0, -400)
        wait_until_settled(page)
        after = read_viewport(page)
        assert after[1] - after[0] < 0.8 * (before[1] - before[0])
        assert before[0] < after[0] and after[1] < before[1]
        assert view.viewport_seconds == pytest.approx(after)


@thorough()
def test_drag_pans_without_zooming(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        x, y = find_center(page)
        page.mouse.move(x, y)
        page.mouse.wheel(0, -1000)
        wait_until_settled(page)
        before = read_viewport(page)
        page.mouse.down()
        page.mouse.move(x - 120, y, steps=6)
        page.mouse.up()
        wait_until_settled(page)
        after = read_viewport(page)
        assert after[0] > before[0]
        assert after[1] - after[0] == pytest.approx(before[1] - before[0])
        assert view.selected is None  # a drag is not a click


def test_fault_46_keys_zoom_pan_and_fit(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        page.locator("canvas").focus()
        whole = read_viewport(page)
        page.keyboard.press("w")
        page.keyboard.press("w")
        wait_until_settled(page)
        zoomed = read_viewport(page)
        assert zoomed[1] - zoomed[0] == pytest.approx(0.64 * whole[1])
        page.keyboard.press("d")
        wait_until_settled(page)
        right = read_viewport(page)
        assert right[0] > zoomed[0]
        page.keyboard.press("a")
        wait_until_settled(page)
        assert read_viewport(page) == pytest.approx(zoomed)
        page.keyboard.press("s")
        wait_until_settled(page)
        assert read_viewport(page)[1] - read_viewport(page)[0] == pytest.approx(0.8 * whole[1])
        for _ in range(4):
            page.keyboard.press("s")
        wait_until_settled(page)
        # Zoomed out as far as it goes, no more than the whole trace is visible.
        assert read_viewport(page)[1] - read_viewport(page)[0] == pytest.approx(1.2 * whole[1])
        visible, _, total = page.locator(".ss-trace-span").inner_text().partition(" of ")
        assert visible == total
        page.keyboard.press("0")
        wait_until_settled(page)
        assert read_viewport(page) == pytest.approx(whole)


def test_hover_and_click_describe_the_slice(open_view: Any, view: TraceView) -> None:
    index = int(view.trace.duration_ns[: view.trace.tracks[0].num_slices].argmax())
    name = view.trace.names[view.trace.name_index[index]]
    with open_view(view) as page:
        page.mouse.move(*find_pixel(page, view, index))
        page.wait_for_selector(".ss-trace-tip:not([hidden])")
        text = page.locator(".ss-trace-tip").text_content()
        assert name in text and "start" in text and "ms" in text
        page.mouse.click(*find_pixel(page, view, index))
        page.wait_for_selector(".ss-trace-details.ss-on")
        wait_until_settled(page)
        assert view.selected is not None and view.selected["name"] == name
        expect(page.locator(".ss-trace-details")).to_contain_text(f"rank {view.selected['rank']}")


def test_hover_and_click_are_exact_where_tiles_are_rounded(
    open_view: Any, view: TraceView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.trace.tile_encoding._EXACT_BYTES", 1e9)
    index = int(view.trace.duration_ns[: view.trace.tracks[0].num_slices].argmax())
    with open_view(view) as page:
        page.mouse.move(*find_pixel(page, view, index))
        tip = page.locator(".ss-trace-tip")
        expect(tip).to_contain_text(f"start {int(view.trace.start_ns[index]) / 1e6:.6f} ms")
        page.mouse.click(*find_pixel(page, view, index))
        page.wait_for_selector(".ss-trace-details.ss-on")
        wait_until_settled(page)
        assert view.selected is not None and view.selected["index"] == index


def test_rows_are_sent_when_they_come_into_view(open_view: Any) -> None:
    view = TraceView(PYTHON_STACKS, height=160)
    sent: set[int] = set()
    with open_view(view) as page:
        send = view.send

        def record_rows(content: dict[str, Any], buffers: list[Any] | None = None) -> None:
            sent.update(content.get("rows", []) if content["type"] == "tile" else [])
            send(content, buffers)

        view.send = record_rows
        position = next(i for i, track in enumerate(view.trace.tracks) if track.kind == "python")
        first, last = view._tiler.first_row_of_track[position : position + 2].tolist()
        wait_until_settled(page)
        assert not sent & set(range(first, last))  # other rows may still arrive on a slow machine
        page.locator(".ss-trace-stack").focus()  # scrolls to it
        page.keyboard.press("Enter")
        wait_until_settled(page)
        assert first in sent and last - 1 not in sent
        page.locator("canvas").focus()
        for _ in range(30):
            page.keyboard.press("PageDown")
        wait_until_settled(page)
        assert view._tiler.num_rows - 1 in sent
        assert int(page.locator("canvas").get_attribute("data-slices")) > 0


def test_search_counts_highlights_and_visits_the_matches(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        pixels = "document.querySelector('canvas').toDataURL()"
        before = page.evaluate(pixels)
        page.locator(".ss-trace-search").fill("ADDMM")
        page.wait_for_function("+document.querySelector('canvas').dataset.matches > 0")
        wait_until_settled(page)
        assert page.evaluate(pixels) != before  # the others are dimmed
        assert (
            f"{view.num_matches} of {len(view.trace):,} slices"
            in page.locator(".ss-trace-count").text_content()
        )
        page.keyboard.press("Enter")
        wait_until_settled(page)
        first = dict(view.selected or {})
        assert "addmm" in first["name"].lower()
        expect(page.locator(".ss-trace-count")).to_have_text(f"match 1 of {view.num_matches}")
        page.keyboard.press("Enter")
        wait_until_settled(page)
        assert view.selected is not None and view.selected["start_seconds"] >= first["start_seconds"]
        page.keyboard.press("Shift+Enter")
        wait_until_settled(page)
        assert view.selected["index"] == first["index"]
        t0, t1 = read_viewport(page)
        assert t0 <= first["start_seconds"] <= t1


@thorough()
def test_fault_46_rank_is_collapsed_by_keyboard(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        first, second = page.locator(".ss-trace-rank").all()
        before = second.bounding_box()["y"] - first.bounding_box()["y"]
        first.focus()
        page.keyboard.press("Enter")
        wait_until_settled(page)
        expect(first).to_have_attribute("aria-expanded", "false")
        assert second.bounding_box()["y"] - first.bounding_box()["y"] < before / 3
        page.keyboard.press("Enter")
        wait_until_settled(page)
        expect(first).to_have_attribute("aria-expanded", "true")
        assert second.bounding_box()["y"] - first.bounding_box()["y"] == pytest.approx(before)


@thorough()
def test_totals_table_follows_the_viewport(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        page.locator(".ss-trace-totals summary").click()
        page.wait_for_selector(".ss-trace-totals td")
        first = page.locator(".ss-trace-totals td").first.text_content()
        assert first == view._tiler.sum_by_name(0, view._span_ns)[0]["name"]


@thorough()
def test_viewport_is_set_from_python(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        page.evaluate("model.set('viewport_seconds', [0.002, 0.004])")
        wait_until_settled(page)
        assert read_viewport(page) == pytest.approx((0.002, 0.004))


@thorough()
def test_fault_46_canvas_follows_jupyterlabs_theme(open_view: Any, view: TraceView) -> None:
    corner = (
        "[...document.querySelector('canvas').getContext('2d').getImageData(4, 4, 1, 1).data].slice(0, 3)"
    )
    with open_view(view, dark=True) as page:
        assert max(page.evaluate(corner)) < 60
        page.evaluate(
            "document.body.style.setProperty('--jp-layout-color0', 'white'),"
            "document.body.setAttribute('data-jp-theme-light', 'true')"
        )
        wait_until_settled(page)
        assert min(page.evaluate(corner)) > 240


def test_fault_38_script_in_a_name_is_escaped(open_view: Any, tmp_path: Path) -> None:
    name = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": name, "ts": 1.0, "dur": 100.0}
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": [event]}))
    view = TraceView(tmp_path)
    with open_view(view) as page:
        page.mouse.move(*find_pixel(page, view, 0))
        page.wait_for_selector(".ss-trace-tip:not([hidden])")
        page.mouse.click(*find_pixel(page, view, 0))
        page.locator(".ss-trace-totals summary").click()
        page.wait_for_selector(".ss-trace-totals td")
        expect(page.locator(".ss-trace-tip")).to_contain_text(name)
        assert page.evaluate("window.hacked") is None


@thorough()
def test_empty_trace_shows_a_message(open_view: Any, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text('{"traceEvents": []}')
    with open_view(TraceView(tmp_path)) as page:
        expect(page.locator(".ss-trace-empty")).to_contain_text("recorded no slices")


@thorough()
def test_fault_44_invalid_message_is_reported_and_the_view_keeps_working(
    open_view: Any, view: TraceView
) -> None:
    with open_view(view) as page:
        page.evaluate("model.send({type: 'format the disk', id: 1})")
        page.wait_for_function("document.querySelector('.ss-trace-error').textContent.includes('allowed')")
        page.locator("canvas").focus()
        page.keyboard.press("w")
        wait_until_settled(page)
        assert read_viewport(page)[1] < view.trace.duration_seconds


@thorough()
def test_fault_46_nothing_overflows_on_narrow_pages(open_view: Any, view: TraceView) -> None:
    with open_view(view, width=320) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_fault_43_closing_removes_all_event_handlers(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        page.evaluate("close_view()")
        assert page.evaluate("Object.values(handlers).flat().length") == 0


PYTHON_STACKS = FIXTURE.parent / "trace_with_stacks"


def test_gpu_streams_are_visible_and_python_stacks_collapsed(open_view: Any) -> None:
    view = TraceView(PYTHON_STACKS)
    frames = next(track for track in view.trace.tracks if track.kind == "python")
    with open_view(view) as page:
        line = page.locator(".ss-trace-stack")
        expect(line).to_have_text(f"Python stacks, {frames.num_rows} rows: show")
        drawn = int(page.locator("canvas").get_attribute("data-slices"))
        assert drawn == len(view.trace) - frames.num_slices  # everything else is visible without scrolling
        texts = read_drawn_texts(page)
        assert texts.index("stream 7") < texts.index("main thread (python)") < texts.index("pt_autograd_0")
        line.focus()
        page.keyboard.press("Enter")
        wait_until_settled(page)
        assert line.get_attribute("aria-expanded") == "true" and "hide" in line.text_content()
        assert int(page.locator("canvas").get_attribute("data-slices")) > drawn - 100
        page.keyboard.press("Enter")
        wait_until_settled(page)
        assert int(page.locator("canvas").get_attribute("data-slices")) == drawn


@thorough()
def test_match_in_a_collapsed_stack_expands_it(open_view: Any) -> None:
    view = TraceView(PYTHON_STACKS)
    with open_view(view) as page:
        page.locator(".ss-trace-search").fill("call_through")
        page.wait_for_function("+document.querySelector('canvas').dataset.matches > 0")
        page.keyboard.press("Enter")
        page.wait_for_selector(".ss-trace-stack[aria-expanded=true]")
        wait_until_settled(page)
        assert view.selected is not None and view.selected["track"].startswith("Python stacks of")


def read_drawn_texts(page: Any) -> list[str]:
    """Return the texts of the next frame in drawing order; check that each is within the canvas."""
    page.evaluate("""() => {
      window.texts = [];
      const plain = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        const left = this.textAlign === "right" ? x - this.measureText(text).width : x;
        const right = left + this.measureText(text).width;
        const size = parseFloat(this.font);
        texts.push([text, left >= 0 && right <= this.canvas.clientWidth && size >= 11]);
        return plain.call(this, text, x, y);
      };
    }""")
    box = page.locator(".ss-trace canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 10)
    page.mouse.move(box["x"] + box["width"] - 22, box["y"] + 12)
    wait_until_settled(page)
    texts = page.evaluate("texts")
    assert not [text for text, is_inside in texts if not is_inside]
    return [str(text) for text, _ in texts]


@sample(1)
@pytest.mark.parametrize(("width", "scale"), [(390, 1), (390, 3), (590, 2), (1180, 1)])
def test_track_names_are_not_cut_off_on_narrow_or_scaled_pages(
    open_view: Any, width: int, scale: float
) -> None:
    with open_view(TraceView(PYTHON_STACKS), width=width, scale=scale) as page:
        texts = read_drawn_texts(page)
        assert {"stream 7", "stream 20", "pt_autograd_0"} <= set(texts)
        assert "main thread (python)" in texts
        line = page.locator(".ss-trace-stack").bounding_box()
        assert line["x"] + line["width"] <= width
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@sample(1)
@pytest.mark.parametrize("width", [390, 700, 1180])
def test_canvas_keeps_its_position_while_the_search_reports(
    open_view: Any, view: TraceView, width: int
) -> None:
    with open_view(view, width=width) as page:
        canvas = page.locator(".ss-trace canvas")
        before = canvas.bounding_box()
        page.locator(".ss-trace-search").fill("a")
        page.wait_for_function("+document.querySelector('canvas').dataset.matches > 0")
        wait_until_settled(page)
        assert canvas.bounding_box() == before
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('.ss-trace-count').textContent.startsWith('match')")
        wait_until_settled(page)
        assert canvas.bounding_box() == before


@thorough()
def test_focus_ring_of_the_search_box_is_not_cut_off(open_view: Any, view: TraceView) -> None:
    """JupyterLab clips an output to the view."""
    with open_view(view) as page:
        page.locator(".ss-trace-search").focus()
        inside = page.evaluate("""() => {
          const box = document.activeElement.getBoundingClientRect();
          const style = getComputedStyle(document.activeElement);
          const ring = parseFloat(style.outlineWidth) + parseFloat(style.outlineOffset);
          const root = document.querySelector(".ss-trace").getBoundingClientRect();
          return style.outlineStyle !== "none" && ring > 0 &&
            box.left - ring >= root.left && box.top - ring >= root.top;
        }""")
        assert inside


CORNER_PIXEL = "[...canvas.getContext('2d').getImageData(4, 4, 1, 1).data].slice(0, 3)"


@sample(1)
@pytest.mark.parametrize("dark", [False, True])
def test_fault_64_view_rendered_before_it_is_attached_has_the_theme(
    open_view: Any, view: TraceView, dark: bool
) -> None:
    with open_view(view, dark=dark) as page:
        expected = page.evaluate(
            f"(() => {{ const canvas = document.querySelector('canvas'); return {CORNER_PIXEL}; }})()"
        )
        page.evaluate("""async () => {
          close_view();
          document.getElementById("view").replaceChildren();
          const { default: front } = await import("/index.js");
          const el = document.createElement("div");
          window.close_view = front.render({ model, el });
          await new Promise((resolve) => setTimeout(resolve, 200));
          document.getElementById("view").append(el);
        }""")
        page.wait_for_function("+document.querySelector('canvas')?.dataset.slices > 0")
        wait_until_settled(page)
        corner = page.evaluate(
            f"(() => {{ const canvas = document.querySelector('canvas'); return {CORNER_PIXEL}; }})()"
        )
        assert corner == expected and (max(corner) < 60 if dark else min(corner) > 240)


@thorough()
def test_fault_64_canvas_is_readable_without_css_variables(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        page.evaluate("document.querySelector('link').remove()")
        page.evaluate("document.body.setAttribute('data-jp-theme-light', 'true')")
        wait_until_settled(page)
        colours = page.evaluate(
            "(() => { const { data } = document.querySelector('canvas').getContext('2d')"
            ".getImageData(172, 4, 40, 16);"
            "return [...data].filter((_, i) => i % 4 === 0); })()"
        )
        assert max(colours) > 240 and min(colours) < 140


@thorough()
def test_interval_shown_from_python_scrolls_to_the_track_and_unfolds_it(open_view: Any) -> None:
    view = TraceView(PYTHON_STACKS, height=200)
    with open_view(view) as page:
        page.locator(".ss-trace-rank").first.click()
        frames = next(track for track in view.trace.tracks if track.kind == "python")
        view.show_interval(0.001, 0.002, rank=0, track=frames.name)
        page.evaluate("sync()")
        page.wait_for_selector(".ss-trace-stack[aria-expanded=true]")
        wait_until_settled(page)
        t0, t1 = read_viewport(page)
        assert 0 < t0 < 0.001 and 0.002 < t1 < 0.003
        stage, line = (page.locator(f".ss-trace-{part}").first.bounding_box() for part in ("stage", "stack"))
        assert stage["y"] <= line["y"] < stage["y"] + stage["height"] - 20


@pytest.mark.parametrize("dark", few([False, True], kept=[False]))
def test_critical_path_is_outlined_over_the_slices(open_view: Any, view: TraceView, dark: bool) -> None:
    reds = """(() => { const canvas = document.querySelector("canvas");
      const { data } = canvas.getContext("2d").getImageData(170, 26, canvas.width - 180, canvas.height - 30);
      let count = 0;
      for (let i = 0; i < data.length; i += 4) {
        count += data[i] > 180 && data[i + 1] < 100 && data[i + 2] < 100;
      }
      return count; })()"""
    with open_view(view, dark=dark) as page:
        assert page.evaluate(reds) == 0
        view.highlight_path(view.trace.critical_path())
        page.evaluate("sync()")
        wait_until_settled(page)
        assert page.evaluate(reds) > 300
        view.highlight_path(None)
        page.evaluate("sync()")
        wait_until_settled(page)
        assert page.evaluate(reds) == 0


def write_gpu_ranks(folder: Path) -> Path:
    """Write two ranks with a launch, its kernel and an all-reduce, for which rank 1 is late."""
    group = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": 2, "In msg nelems": 8}
    ranks = {
        rank: [
            step(1, 0, 100_000),
            operator(1_000, 30_000, "aten::linear"),
            operator(2_000, 20_000, "aten::addmm", **{"Input Dims": [[8, 16], [16, 4]]}),
            launch(4_000, 9_000, 5),
            kernel(15_000, 40_000, "gemm_kernel", correlation=5),
            launch(31_000, 33_000, 6),
            kernel(41_000, 45_000, "gemm_kernel", correlation=6),
            launch(46_000, 48_000, 7),
            all_reduce(50_000 + 20_000 * rank, 90_000, correlation=7, **group),
        ]
        for rank in (0, 1)
    }
    return write_ranks(folder, ranks)


def find_index(view: TraceView, name: str, rank: int = 0, nth: int = 0) -> int:
    """Return the slice with this name of a rank."""
    trace = view.trace
    named = [i for i in range(len(trace)) if name in trace.names[trace.name_index[i]]]
    return [i for i in named if trace.tracks[trace.track_index[i]].rank == rank][nth]


def select(page: Any, index: int) -> None:
    page.evaluate(f"model.send({{type: 'select', id: 1, index: {index}}})")
    page.wait_for_selector(".ss-trace-details.ss-on")
    wait_until_settled(page)


def test_arrows_and_links_lead_from_a_kernel_to_its_launch_and_back(open_view: Any, tmp_path: Path) -> None:
    view = TraceView(write_gpu_ranks(tmp_path))
    pixels = "document.querySelector('canvas').toDataURL()"
    with open_view(view) as page:
        select(page, find_index(view, "gemm_kernel"))
        details = page.locator(".ss-trace-details")
        expect(details).to_contain_text("2 calls")
        expect(details).to_contain_text("total 29.00 µs, 29.0 % of its time")
        expect(details).to_contain_text("min 4.000 µs · max 25.00 µs")
        expect(details).to_contain_text("2 calls on other ranks")
        assert details.locator("li").all_text_contents()[:3] == [
            "cudaLaunchKernel",
            "aten::addmm",
            "aten::linear",
        ]
        with_arrow = page.evaluate(pixels)
        page.evaluate("model.set('selected', {...model.get('selected'), connections: []})")
        wait_until_settled(page)
        assert page.evaluate(pixels) != with_arrow
        select(page, find_index(view, "gemm_kernel", nth=1))
        link = details.locator("button", has_text="Launched by cudaLaunchKernel")
        link.focus()
        page.keyboard.press("Enter")
        wait_until_settled(page)
        assert view.selected is not None and view.selected["name"] == "cudaLaunchKernel"
        page.keyboard.press("Escape")  # the drawing has the focus again
        wait_until_settled(page)
        assert view.selected is None


@thorough()
@pytest.mark.parametrize("dark", few([True, False], kept=[True]))
def test_collective_is_connected_with_that_of_the_other_rank(
    open_view: Any, tmp_path: Path, dark: bool
) -> None:
    view = TraceView(write_gpu_ranks(tmp_path))
    with open_view(view, dark=dark) as page:
        select(page, find_index(view, "AllReduce"))
        link = page.locator(".ss-trace-link", has_text="on rank 1:")
        expect(link).to_contain_text("20.00 µs later")
        link.click()
        wait_until_settled(page)
        assert view.selected is not None and view.selected["rank"] == 1


@thorough()
def test_click_shows_the_python_callers_of_an_operator(open_view: Any) -> None:
    view = TraceView(PYTHON_STACKS)
    trace = view.trace
    with open_view(view) as page:
        operators = [i for i in range(len(trace)) if trace.names[trace.name_index[i]] == "aten::linear"]
        select(page, operators[0])
        callers = page.locator(".ss-trace-details li").all_text_contents()
        assert any(".py(" in name for name in callers)
        expect(page.locator(".ss-trace-details")).to_contain_text("Module: MultiheadAttention_")


@pytest.mark.parametrize("dark", few([True, False], kept=[True]))
def test_area_is_measured_and_added_up(open_view: Any, tmp_path: Path, dark: bool) -> None:
    view = TraceView(write_gpu_ranks(tmp_path))
    with open_view(view, dark=dark) as page:
        x, y = find_pixel(page, view, find_index(view, "gemm_kernel"))
        page.keyboard.down("Shift")
        page.mouse.move(x - 200, y)
        page.mouse.down()
        page.mouse.move(x + 250, y + 2, steps=4)
        page.mouse.up()
        page.keyboard.up("Shift")
        details = page.locator(".ss-trace-details")
        expect(details.locator("tr", has_text="gemm_kernel")).to_contain_text("29.00 µs")
        expect(details.locator("tr", has_text="kernel").last).to_contain_text("29.00 µs")
        expect(details).to_contain_text("on 1 track")
        assert read_viewport(page) == pytest.approx((0, view.trace.duration_seconds))  # it did not pan
        duration = page.locator(".ss-trace-head b").text_content().split(" of ")[1].split(" on ")[0]
        assert duration in read_drawn_texts(page)  # the bracket on the ruler
        page.locator("canvas").focus()
        page.keyboard.press("Escape")
        expect(details).not_to_contain_text("Area")


@thorough()
def test_area_is_marked_by_keyboard(open_view: Any, tmp_path: Path) -> None:
    view = TraceView(write_gpu_ranks(tmp_path))
    with open_view(view) as page:
        select(page, find_index(view, "aten::linear"))
        page.locator("canvas").focus()
        page.keyboard.press("m")
        title = page.locator(".ss-trace-head b")
        expect(title).to_have_text("Area of 29.00 µs on 1 track")
        page.keyboard.press("m")
        expect(title).to_have_text("Area of 29.00 µs on 3 tracks")
        page.keyboard.press("Shift+ArrowRight")
        expect(title).to_have_text("Area of 31.00 µs on 3 tracks")
        page.keyboard.press("Escape")
        expect(title).to_have_text("aten::linear")


def write_counters(folder: Path) -> Path:
    """Write a rank with memory records, a counter and an instant."""
    events = [operator(0, 100_000), operator(10_000, 20_000, "aten::empty")]
    for time, total in [(5, 1), (20, 3), (60, 2)]:
        args = {"Device Type": 1, "Device Id": 0, "Bytes": 1, "Total Allocated": total << 30}
        events.append({"ph": "i", "name": "[memory]", "pid": 100, "tid": 100, "ts": time, "args": args})
    for time, value in [(0, 10), (50, 90)]:
        args = {"percent": value}
        events.append({"ph": "C", "name": "GPU use", "pid": 0, "tid": 0, "ts": time, "args": args})
    events.append({"ph": "i", "name": "checkpoint saved", "pid": 100, "tid": 100, "ts": 30, "s": "t"})
    return write_ranks(folder, {0: events})


@thorough()
@pytest.mark.parametrize("dark", few([True, False], kept=[True]))
def test_counters_are_step_lines_and_instants_are_ticks(open_view: Any, tmp_path: Path, dark: bool) -> None:
    view = TraceView(write_counters(tmp_path))
    with open_view(view, dark=dark) as page:
        texts = read_drawn_texts(page)
        assert {"cuda:0 allocated", "up to 3 GiB", "GPU use", "up to 90"} <= set(texts)
        box = page.locator(".ss-trace canvas").bounding_box()
        left, wide = box["x"] + 168, box["width"] - 168
        tip = page.locator(".ss-trace-tip")
        top = box["y"] + 24 + 24 + 6 + 36 + 8 + 20  # ruler, header, a track of two rows
        page.mouse.move(left + 0.4 * wide, top)
        expect(tip).to_contain_text("cuda:0 allocated: 3 GiB")
        page.mouse.move(left + 0.8 * wide, top)
        expect(tip).to_contain_text("cuda:0 allocated: 2 GiB")
        page.mouse.move(left + 0.3 * wide, box["y"] + 24 + 24 + 3)
        expect(tip).to_contain_text("checkpoint saved")


@thorough()
def test_counter_is_pinned_like_a_track(open_view: Any, tmp_path: Path) -> None:
    view = TraceView(write_counters(tmp_path), height=200)
    with open_view(view) as page:
        page.locator("canvas").focus()
        for key in ("j", "j", "p"):  # the track, then its first counter
            page.keyboard.press(key)
        expect(page.locator(".ss-trace-status")).to_contain_text("cuda:0 allocated of rank 0 is pinned")
        for _ in range(4):
            page.keyboard.press("PageDown")
        texts = read_drawn_texts(page)
        assert any(text.startswith("rank 0 · cuda:0") for text in texts)
        box = page.locator(".ss-trace canvas").bounding_box()
        left, wide = box["x"] + 168, box["width"] - 168
        page.mouse.move(left + 0.4 * wide, box["y"] + 24 + 8 + 20)
        expect(page.locator(".ss-trace-tip")).to_contain_text("cuda:0 allocated: 3 GiB")
        page.locator("canvas").focus()
        page.keyboard.press("p")
        texts = read_drawn_texts(page)
        assert not any(text.startswith("rank 0 · cuda:0") for text in texts)


def test_track_is_pinned_and_moved_by_keyboard(open_view: Any) -> None:
    view = TraceView(PYTHON_STACKS, height=220)
    with open_view(view) as page:
        page.locator("canvas").focus()
        for key in ("j", "j", "p"):
            page.keyboard.press(key)
        texts = read_drawn_texts(page)
        assert "rank 0 · stream 20" in texts and "stream 20" not in texts
        for _ in range(4):
            page.keyboard.press("PageDown")
        assert "rank 0 · stream 20" in read_drawn_texts(page)  # it does not scroll
        page.keyboard.press("p")
        page.keyboard.press("Shift+K")
        texts = read_drawn_texts(page)
        assert texts.index("stream 20") < texts.index("stream 7")
        page.keyboard.press("Shift+J")
        texts = read_drawn_texts(page)
        assert texts.index("stream 7") < texts.index("stream 20")
        expect(page.locator(".ss-trace-status")).to_contain_text("stream 20 of rank 0, place 2")


@thorough()
def test_track_is_pinned_and_carried_by_pointer(open_view: Any) -> None:
    view = TraceView(PYTHON_STACKS)
    with open_view(view) as page:
        box = page.locator(".ss-trace canvas").bounding_box()
        first = box["y"] + 24 + 24 + 3 + 9
        page.mouse.move(box["x"] + 40, first)
        page.locator(".ss-trace-pin").click()
        assert "rank 0 · stream 7" in read_drawn_texts(page)
        page.mouse.move(box["x"] + 40, box["y"] + 24 + 10)
        page.locator(".ss-trace-pin").click()
        page.mouse.move(box["x"] + 40, first)
        page.mouse.down()
        page.mouse.move(box["x"] + 40, first + 42, steps=3)
        page.mouse.up()
        texts = read_drawn_texts(page)
        assert texts.index("stream 20") < texts.index("stream 7")


@thorough()
@pytest.mark.parametrize("width", few([390, 1180], kept=[1180]))
def test_question_mark_lists_all_keys(open_view: Any, view: TraceView, width: int) -> None:
    with open_view(view, width=width) as page:
        page.locator("canvas").focus()
        page.keyboard.press("?")
        sheet = page.locator(".ss-trace-help")
        expect(sheet).to_be_visible()
        expect(sheet).to_contain_text("next match")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.keyboard.press("Escape")
        expect(sheet).to_be_hidden()
        assert page.evaluate("document.activeElement.tagName") == "CANVAS"


def test_drawing_is_as_high_as_its_content(open_view: Any, view: TraceView) -> None:
    """Two folded ranks left an empty canvas below them, and the hint a box of the height of details."""
    with open_view(view, width=836) as page:
        stage, details = page.locator(".ss-trace-stage"), page.locator(".ss-trace-details")
        unfolded = stage.bounding_box()["height"]
        for rank in (0, 1):
            page.get_by_role("button", name=f"rank {rank}").click()
        folded = stage.bounding_box()["height"]
        assert folded < unfolded <= view.height and folded < 160
        assert page.locator("canvas").bounding_box()["height"] == pytest.approx(folded, abs=3)
        page.locator(".ss-trace-help-button").click()
        assert stage.bounding_box()["height"] == view.height, "the sheet of keys has room"
        page.get_by_role("button", name="Close").click()
        assert stage.bounding_box()["height"] == folded
        assert details.bounding_box()["height"] < 80
        # The Studio's page is this wide in a window of 1,600 pixels.
        count = page.locator(".ss-trace-count")
        assert count.evaluate("each => each.scrollWidth <= each.clientWidth")


@thorough()
def test_buttons_and_n_visit_the_matches(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        expect(page.locator(".ss-trace-next")).to_be_disabled()
        page.locator(".ss-trace-search").fill("addmm")
        page.wait_for_function("+document.querySelector('canvas').dataset.matches > 0")
        page.locator(".ss-trace-next").click()
        count = page.locator(".ss-trace-count")
        expect(count).to_have_text(f"match 1 of {view.num_matches}")
        page.locator("canvas").focus()
        page.keyboard.press("n")
        expect(count).to_have_text(f"match 2 of {view.num_matches}")
        page.keyboard.press("Shift+N")
        expect(count).to_have_text(f"match 1 of {view.num_matches}")
        page.keyboard.press("Escape")
        expect(count).to_have_text(f"{view.num_matches} of {len(view.trace):,} slices")


def test_a_new_search_has_no_number_of_the_last_one(open_view: Any, view: TraceView) -> None:
    with open_view(view) as page:
        page.locator(".ss-trace-search").fill("addmm")
        page.wait_for_function("+document.querySelector('canvas').dataset.matches > 0")
        page.locator(".ss-trace-next").click()
        count = page.locator(".ss-trace-count")
        expect(count).to_have_text(f"match 1 of {view.num_matches}")
        view.search = "no such name"  # from Python
        page.evaluate("window.sync()")
        expect(count).to_have_text(f"0 of {len(view.trace):,} slices")
        view.search = "addmm"
        page.evaluate("window.sync()")
        expect(count).to_have_text(f"{view.num_matches} of {len(view.trace):,} slices")
        # The reply to the request before comes after the new search.
        page.evaluate(
            """() => {
              document.querySelector(".ss-trace-next").click();
              const key = new KeyboardEvent("keydown", { key: "Escape", bubbles: true });
              document.querySelector(".ss-trace-search").dispatchEvent(key);
            }"""
        )
        wait_until_settled(page)
        expect(count).to_have_text(f"{len(view.trace):,} slices")


def read_details(page: Any, index: int) -> str:
    page.evaluate(f"window.model?.send({{type: 'select', id: 1, index: {index}}})")
    page.wait_for_selector(".ss-trace-details.ss-on")
    wait_until_settled(page)
    return str(page.locator(".ss-trace-details").inner_text())


@pytest.mark.parametrize("dark", few([True, False], kept=[True]))
def test_saved_page_works_from_disk_without_a_network(browser: Any, tmp_path: Path, dark: bool) -> None:
    view = TraceView(write_gpu_ranks(tmp_path / "trace"))
    path = view.to_html(tmp_path / "trace.html")
    page = open_page(browser, dark=dark)
    requests: list[str] = []
    failures: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.context.set_offline(True)
    try:
        page.goto(path.as_uri())
        page.wait_for_function("+document.querySelector('canvas')?.dataset.slices > 0")
        assert int(page.locator("canvas").get_attribute("data-slices")) == len(view.trace)
        assert {"stream 7", "gemm_kernel", "ProfilerStep#1"} <= set(read_drawn_texts(page))
        page.mouse.click(*find_pixel(page, view, find_index(view, "gemm_kernel")))
        details = page.locator(".ss-trace-details")
        expect(details).to_contain_text("2 calls · total 29.00 µs, 29.0 % of its time")
        expect(details.locator("li").first).to_have_text("cudaLaunchKernel")
        details.locator("button", has_text="Launched by").click()
        expect(page.locator(".ss-trace-head b")).to_have_text("cudaLaunchKernel")
        page.locator(".ss-trace-search").fill("allreduce")
        expect(page.locator(".ss-trace-count")).to_contain_text("2 of 18 slices")
        page.keyboard.press("Enter")
        expect(details).to_contain_text("Same collective on rank 1: 20.00 µs later")
        expect(details).to_contain_text("Group size")
        page.locator(".ss-trace canvas").focus()
        page.keyboard.press("m")
        expect(details.locator("tr", has_text="AllReduce")).to_contain_text("40.00 µs")
        page.locator(".ss-trace-totals summary").click()
        expect(page.locator(".ss-trace-totals td").first).to_have_text(
            view._tiler.sum_by_name(0, view._span_ns)[0]["name"]
        )
        assert requests == [path.as_uri()] and not failures
    finally:
        page.close()


def test_found_slice_is_shown_in_a_folded_rank(open_view: Any, tmp_path: Path) -> None:
    with open_view(TraceView(write_gpu_ranks(tmp_path))) as page:
        second = page.locator(".ss-trace-rank").nth(1)
        second.click()
        expect(second).to_have_attribute("aria-expanded", "false")
        page.locator(".ss-trace-search").fill("AllReduce")
        expect(page.locator(".ss-trace-count")).to_contain_text("2 of 18 slices")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(page.locator(".ss-trace-count")).to_have_text("match 2 of 2")
        expect(second).to_have_attribute("aria-expanded", "true")


@pytest.mark.parametrize("dark", [False, True])
def test_names_that_a_search_leaves_out_are_readable(open_view: Any, tmp_path: Path, dark: bool) -> None:
    """White on the pale colour of communication would not be."""
    with open_view(TraceView(write_gpu_ranks(tmp_path)), dark=dark) as page:
        page.evaluate("""() => {
          window.colours = {};
          const plain = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            const { data } = this.getImageData(x * devicePixelRatio - 2, y * devicePixelRatio, 1, 1);
            window.colours[text] = [this.fillStyle, [...data.slice(0, 3)]];
            return plain.call(this, text, x, y);
          };
        }""")
        page.locator(".ss-trace-search").fill("gemm")
        expect(page.locator(".ss-trace-count")).to_contain_text("4 of 18 slices")
        wait_until_settled(page)
        named = {text: pair for text, pair in page.evaluate("colours").items() if text.startswith("nccl")}
        assert named
        for text, background in named.values():
            assert measure_contrast(parse_colour(text), background) > 3, (text, background)


def parse_colour(text: str) -> list[float]:
    if text.startswith("#"):
        return [int(text[at : at + 2], 16) for at in (1, 3, 5)]
    return [float(value) for value in re.findall(r"[\d.]+", text)[:3]]


def measure_contrast(one: list[float], other: list[float]) -> float:
    """Return WCAG's contrast ratio of two colours."""

    def measure_luminance(colour: list[float]) -> float:
        parts = [
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour)
        ]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    low, high = sorted((measure_luminance(one), measure_luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_name_of_a_tall_track_stays_in_sight(open_view: Any) -> None:
    """Scrolled below a track's first row, the view has its name with its rank at the upper edge."""
    view = TraceView(FIXTURE, height=160)
    with open_view(view) as page:
        first = page.locator(".ss-trace-rank").first
        if first.get_attribute("aria-expanded") == "false":
            first.click()
        page.locator("canvas").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        wait_until_settled(page)
        assert any(text.startswith("rank 0 · ") for text in read_drawn_texts(page))


@thorough()
@pytest.mark.parametrize("folder", [FIXTURE, FIXTURE.parent / "trace_with_stacks"])
def test_saved_page_says_what_the_live_view_says(
    browser: Any, open_view: Any, tmp_path: Path, folder: Path
) -> None:
    view = TraceView(folder)
    indices = [5, len(view.trace) // 3, len(view.trace) // 2, len(view.trace) - 1]
    with open_view(view) as page:
        live = [read_details(page, index) for index in indices]
        drawn = page.locator("canvas").get_attribute("data-slices")
    page = open_page(browser)
    try:
        text = view.to_html(tmp_path / "trace.html").read_text()
        (tmp_path / "trace.html").write_text(
            text.replace("render({ model, el: place", "render({ model: (window.model = model), el: place")
        )
        page.goto((tmp_path / "trace.html").as_uri())
        page.wait_for_function("+document.querySelector('canvas')?.dataset.slices > 0")
        assert page.locator("canvas").get_attribute("data-slices") == drawn
        assert [read_details(page, index) for index in indices] == live
    finally:
        page.close()


def test_saved_page_of_a_part_says_so_above_the_view(browser: Any, tmp_path: Path) -> None:
    """A tall window shows more rows, and the sentences are those of ``trace.summary()``."""
    view = TraceView(FIXTURE, height=300)
    half = view.trace.duration_seconds / 2
    path = view.to_html(tmp_path / "trace.html", start_seconds=0.0, end_seconds=half)
    page = open_page(browser, height=1000)
    try:
        page.goto(path.as_uri())
        page.wait_for_function("+document.querySelector('canvas')?.dataset.slices > 0")
        header = page.locator("header")
        drawn = int(page.locator("canvas").get_attribute("data-slices"))
        assert drawn < len(view.trace)
        expect(header).to_contain_text(f"This page has {drawn:,} of {len(view.trace):,} slices")
        first, *_, last = view.trace.summary().sentences
        expect(header).to_contain_text(first)
        expect(header.get_by_text(last)).to_be_hidden()
        header.locator("summary").click()
        expect(header.get_by_text(last)).to_be_visible()
        assert page.locator("canvas").bounding_box()["height"] > 500
    finally:
        page.close()


PERFETTO_STAND_IN = """<!doctype html><title>stand-in</title><script>
window.addEventListener("message", async ({ data, source, origin }) => {
  if (data === "PING") return ANSWERS && source.postMessage("PONG", origin);
  if (!data.perfetto) return;
  const stream = new Blob([data.perfetto.buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
  window.received = { ...JSON.parse(await new Response(stream).text()), title: data.perfetto.title };
});
</script>"""


@contextmanager
def serve_perfetto_stand_in(answers: bool) -> Iterator[str]:
    """Serve a page that takes part in Perfetto's handshake as documented, and yield its origin.

    It is a stand-in: tests do not reach ui.perfetto.dev.
    """

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PERFETTO_STAND_IN.replace("ANSWERS", str(answers).lower()).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("answers", [True, False])
def test_trace_is_handed_to_a_stand_in_of_perfetto(
    open_view: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    with serve_perfetto_stand_in(answers) as origin:
        monkeypatch.setattr("shardscope_widgets.trace.view.PERFETTO_ORIGIN", origin)
        view = TraceView(write_gpu_ranks(tmp_path / "trace"))
        with open_view(view) as page:
            button = page.locator(".ss-trace-perfetto")
            with page.expect_popup() as waiting:
                button.click()
            window = waiting.value
            if answers:
                window.wait_for_function("window.received")
                events = window.evaluate("received.traceEvents")
                assert sum(event["ph"] == "X" for event in events) == len(view.trace)
                assert window.evaluate("received.title") == "Shardscope: 2 ranks"
                expect(page.locator(".ss-trace-error")).to_have_text("")
            else:
                error = page.locator(".ss-trace-error")
                expect(error).to_contain_text("did not answer. Fix: press Download", timeout=60_000)
            expect(button).to_have_text("Open in Perfetto")
            window.close()


def test_download_is_one_chrome_trace_of_all_ranks(open_view: Any, tmp_path: Path) -> None:
    view = TraceView(write_gpu_ranks(tmp_path / "trace"))
    with open_view(view) as page:
        with page.expect_download() as waiting:
            page.locator(".ss-trace-download").click()
        waiting.value.save_as(tmp_path / "trace.json.gz")
        events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == len(view.trace)
        assert {event["pid"] for event in events} == {0, 1}
        expect(page.locator(".ss-trace-download")).to_have_text("Download")
