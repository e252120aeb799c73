// The pointer: the mark or track under it, dragging, clicking and the wheel.

/** @param {View} view @param {number} x @param {number} y @returns {Hit | null} */
function hitAt(view, x, y) {
  const { t0, t1 } = view;
  if (x < view.gutterWidth || y < RULER) return null;
  const top = contentAt(view, y);
  const band = view.places.bands.find((place) => top >= place.top && top < place.top + place.height);
  if (!band) return null;
  const row = band.track.first_row + Math.floor((top - band.top) / band.tall);
  const marks = view.rows.get(row);
  if (!marks) return null;
  const time = timeAt(view, x);
  const slack = (t1 - t0) / plotWidth(view); // a mark is drawn at least one pixel wide
  const mark = firstMarkAfter(marks, time - slack);
  const found = mark < marks.start.length && marks.start[mark] <= time + slack / 2;
  return found ? { mark, row, marks } : null;
}

/** @param {View} view @param {number} x @param {number} y */
function showTip(view, x, y) {
  const { tip } = view.page;
  const hover = hitAt(view, x, y);
  const other = describeMarkAt(view, x, y);
  view.pointer = [x, y];
  view.hover = other ? null : hover;
  tip.hidden = !hover && !other;
  if (other) return fillTip(view, x, y, other);
  if (!hover) return;
  const { mark, marks } = hover;
  const count = marks.count[mark];
  const title = view.names.get(marks.name[mark]) ?? "…";
  const facts = describeTimes(view, marks, mark);
  fillTip(view, x, y, [
    count > 1 ? `${counted(count, "slice")}, the longest ${title}` : title,
    count > 1 ? `${facts} in all · zoom in to tell them apart` : facts,
  ]);
}

/** Start and duration, to the nanosecond once they are known so. @param {View} view @param {RowMarks} marks
 * @param {number} mark */
function describeTimes(view, marks, mark) {
  const { exact } = view;
  const isKnown = !marks.isExact && exact?.slice === marks.slice[mark];
  const [start, duration] = isKnown ? [exact.start, exact.duration] : [marks.start[mark], marks.duration[mark]];
  if (marks.isExact || isKnown) return `start ${shownPoint(Math.round(start))} · ${shownTime(duration)}`;
  askForMark(view, marks, mark);
  return `start about ${shownTime(start)} · about ${shownTime(duration)}`;
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
  if (hit) askToPick(view, hit.marks, hit.mark);
  else askToSelect(view, null);
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
