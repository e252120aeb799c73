// The pointer: what it is on, and dragging, clicking and the wheel.

/** @param {View} view @param {number} x @param {number} y @returns {Hit | null} */
function hitAt(view, x, y) {
  const { tile, t0, t1 } = view;
  if (!tile || x < view.gutterWidth || y < RULER) return null;
  const top = contentAt(view, y);
  const band = view.places.bands.find((place) => top >= place.top && top < place.top + place.height);
  if (!band) return null;
  const row = band.track.first_row + Math.floor((top - band.top) / band.tall);
  const time = timeAt(view, x);
  const slack = (t1 - t0) / plotWidth(view); // a mark is drawn at least one pixel wide
  const mark = firstMarkAfter(tile, row, time - slack);
  const found = mark < tile.columns.row_first[row + 1] && tile.columns.start[mark] <= time + slack / 2;
  return found ? { mark, row } : null;
}

/** @param {View} view @param {number} x @param {number} y */
function showTip(view, x, y) {
  const { tile } = view;
  const { tip } = view.page;
  const hover = hitAt(view, x, y);
  const other = describeMarkAt(view, x, y);
  view.hover = other ? null : hover;
  tip.hidden = !hover && !other;
  if (other) return fillTip(view, x, y, other);
  if (!hover || !tile) return;
  const { name, count, start, duration } = tile.columns;
  const { mark } = hover;
  const run = count[mark] > 1;
  const title = view.names.get(name[mark]) ?? "…";
  const facts = `start ${shownPoint(Math.round(start[mark]))} · ${shownTime(duration[mark])}`;
  fillTip(view, x, y, [
    run ? `${counted(count[mark], "slice")}, the longest ${title}` : title,
    run ? `${facts} in all · zoom in to tell them apart` : facts,
  ]);
}

/** @param {View} view @param {number} x @param {number} y @param {[string, string]} texts title and facts */
function fillTip({ width, height, page: { tip } }, x, y, [title, facts]) {
  tip.replaceChildren(element("div", "", title), element("small", "", facts));
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 12, width - box.width - 8), 4)}px`;
  tip.style.top = `${y + 18 + box.height > height ? Math.max(y - box.height - 10, 0) : y + 18}px`;
}

/** @param {View} view @param {number} x @param {number} y */
function clickAt(view, x, y) {
  const header = headerAt(view, y);
  if (header) return foldOrUnfold(view, view.folded, header.rank);
  const named = namedBandAt(view, x, y);
  if (named) {
    view.currentTrack = named.track;
    return scheduleDraw(view);
  }
  const hit = hitAt(view, x, y);
  askToSelect(view, hit && view.tile ? view.tile.columns.index[hit.mark] : null);
}

/** @param {View} view @param {WheelEvent} event @param {number} x */
function turnWheel(view, event, x) {
  const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
  const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
  if (x < view.gutterWidth) scrollRowsTo(view, view.scroll + dy);
  else if (event.shiftKey) pan(view, dx || dy);
  else if (Math.abs(dx) > Math.abs(dy)) pan(view, dx);
  else zoom(view, Math.exp(Math.min(Math.max(dy, -240), 240) * (event.ctrlKey ? 0.01 : 0.002)), x);
}

/** @param {View} view */
function followPointer(view) {
  const { canvas, tip } = view.page;
  /** @type {{x: number, y: number, moved: boolean, marks: boolean, track?: Track} | null} */
  let grip = null;
  const at = (/** @type {MouseEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const letGo = () => {
    grip = null;
    canvas.classList.remove("ss-panning");
  };
  listen(view, canvas, "pointerdown", (/** @type {PointerEvent} */ event) => {
    if (event.button !== 0) return;
    const [x, y] = at(event);
    grip = { x, y, moved: false, marks: event.shiftKey && x >= view.gutterWidth && y > RULER };
    grip.track = namedBandAt(view, x, y)?.track;
    canvas.setPointerCapture(event.pointerId);
  });
  listen(view, canvas, "pointermove", (/** @type {PointerEvent} */ event) => {
    const [x, y] = at(event);
    if (grip?.marks) {
      if (Math.abs(x - grip.x) > 3) grip.moved = true;
      if (!grip.moved) return;
      const [t0, t1] = [grip.x, x].map((one) => timeAt(view, Math.max(one, view.gutterWidth))).sort((a, b) => a - b);
      tip.hidden = true;
      markArea(view, { t0, t1, tracks: tracksBetween(view, grip.y, y) });
      return;
    }
    if (grip?.track) {
      if (Math.abs(y - grip.y) > 3) grip.moved = true;
      if (grip.moved) carryTrack(view, grip.track, y);
      return;
    }
    if (grip && (grip.moved || Math.hypot(x - grip.x, y - grip.y) > 3)) {
      pan(view, grip.x - x);
      scrollRowsTo(view, view.scroll + grip.y - y);
      grip = { x, y, moved: true, marks: false };
      tip.hidden = true;
      canvas.classList.add("ss-panning");
      return;
    }
    view.hoverTrack = namedBandAt(view, x, y)?.track ?? null;
    showTip(view, x, y);
    scheduleDraw(view);
  });
  listen(view, canvas, "pointerup", (/** @type {PointerEvent} */ event) => {
    const clicked = grip && !grip.moved;
    letGo();
    if (!clicked) return;
    const [x, y] = at(event);
    clickAt(view, x, y);
  });
  listen(view, canvas, "pointercancel", letGo);
  listen(view, view.page.pin, "click", () => {
    const track = view.hoverTrack ?? view.currentTrack;
    if (track) pinOrUnpin(view, track);
  });
  listen(view, canvas, "pointerleave", (/** @type {PointerEvent} */ event) => {
    view.hover = null;
    if (event.relatedTarget !== view.page.pin) view.hoverTrack = null;
    tip.hidden = true;
    scheduleDraw(view);
  });
  listen(view, canvas, "dblclick", () => zoomToSelected(view));
  const onWheel = (/** @type {WheelEvent} */ event) => {
    event.preventDefault();
    const [x, y] = at(event);
    turnWheel(view, event, x);
    showTip(view, x, y);
  };
  listen(view, canvas, "wheel", onWheel, { passive: false });
}
