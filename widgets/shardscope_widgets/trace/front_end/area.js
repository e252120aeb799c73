// An area: an interval of time on some tracks. Shift and drag marks one, M marks the selected slice's; Python sums it.

/** @typedef {{t0: number, t1: number, tracks: Track[]}} Area */

const AREA_TOTALS = "Self time excludes nested calls, so self times add up; total time includes them.";

/** @param {View} view @param {Area | null} area */
function markArea(view, area) {
  view.area = area;
  view.areaSums = null;
  view.isAreaShown = Boolean(area);
  scheduleDraw(view);
  clearTimeout(view.areaTimer);
  if (area) view.areaTimer = setTimeout(() => askForArea(view), SETTLE_MS);
  showDetails(view);
}

/** @param {View} view */
function askForArea(view) {
  const { area, scene } = view;
  if (!area || area.t1 <= area.t0 || !scene.num_slices) return;
  view.pending.area = askPython(view, {
    type: "area",
    t0_ns: area.t0,
    t1_ns: area.t1,
    tracks: area.tracks.map((track) => scene.tracks.indexOf(track)),
  });
}

/** The tracks between two heights of the canvas. @param {View} view @param {number} y0 @param {number} y1 */
function tracksBetween(view, y0, y1) {
  const [low, high] = [y0, y1].sort((a, b) => a - b);
  return view.places.bands
    .filter(({ top, height }) => {
      const y = yOfTop(view, top);
      return y < high && y + height > Math.max(low, upperEdge(view, top));
    })
    .map(({ track }) => track);
}

/** Mark the selected slice's time on its track; again: on its rank, then on all ranks. @param {View} view */
function markSelected(view) {
  const { scene, area, t0, t1 } = view;
  const selected = view.model.get("selected");
  if (!selected) {
    const quarter = (t1 - t0) / 4;
    const shown = view.places.bands.map(({ track }) => track);
    return markArea(view, area ? null : { t0: t0 + quarter, t1: t1 - quarter, tracks: shown });
  }
  const from = Math.round(selected.start_seconds * 1e9);
  const to = from + Math.max(Math.round(selected.duration_seconds * 1e9), 1);
  const own = scene.tracks.filter(({ first_row: first, num_rows: rows }) => selected.row >= first && selected.row < first + rows);
  const ofRank = scene.tracks.filter((track) => track.rank === selected.rank);
  const isSame = area && area.t0 === from && area.t1 === to;
  const wider = [own, ofRank, scene.tracks].find((tracks) => !isSame || tracks.length > area.tracks.length) ?? own;
  markArea(view, { t0: from, t1: to, tracks: wider });
}

/** @param {View} view @param {number} direction */
function moveAreaEnd(view, direction) {
  const { area } = view;
  if (!area) return markSelected(view);
  const t1 = area.t1 + (direction * (view.t1 - view.t0)) / 50;
  if (t1 > area.t0) markArea(view, { ...area, t1 });
}

/** @param {View} view */
function drawArea(view) {
  const { ctx, theme, area, gutterWidth, height, width } = view;
  if (!area) return;
  const left = Math.max(xOf(view, area.t0), gutterWidth);
  const right = Math.min(xOf(view, area.t1), width);
  if (right < left) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(gutterWidth, RULER, plotWidth(view), height);
  ctx.clip();
  ctx.fillStyle = theme.accent;
  ctx.globalAlpha = 0.16;
  for (const { track, top, height: high } of view.places.bands) {
    if (!area.tracks.includes(track)) continue;
    const y = Math.max(yOfTop(view, top) - 1, upperEdge(view, top));
    ctx.fillRect(left, y, right - left, Math.max(yOfTop(view, top) + high + 1 - y, 0));
  }
  ctx.globalAlpha = 1;
  for (const x of [left, right]) ctx.fillRect(Math.round(x) - 0.5, RULER, 1, height);
  ctx.restore();
}

/** Place of the bracket's text on the ruler, which no tick's label may touch. @param {View} view */
function placeBracket(view) {
  const { ctx, theme, area, gutterWidth, width } = view;
  if (!area) return null;
  const [left, right] = [xOf(view, area.t0), xOf(view, area.t1)];
  if (right < gutterWidth || left > width) return null;
  ctx.font = `11px ${theme.font}`;
  const text = shownTime(area.t1 - area.t0);
  const wide = ctx.measureText(text).width;
  const middle = (Math.max(left, gutterWidth) + Math.min(right, width)) / 2;
  const x = Math.min(Math.max(middle - wide / 2, gutterWidth + 6), width - wide - 6);
  return { text, x, wide, left, right };
}

/** @param {View} view @param {NonNullable<ReturnType<typeof placeBracket>>} bracket */
function drawBracket(view, { text, x, wide, left, right }) {
  const { ctx, theme, gutterWidth, width } = view;
  const y = RULER - 4;
  const [from, to] = [Math.max(left, gutterWidth), Math.min(right, width)];
  ctx.fillStyle = theme.accent;
  ctx.fillRect(from, y, Math.max(to - from, 1), 1.5);
  for (const end of [left, right]) if (end >= gutterWidth && end <= width) ctx.fillRect(end - 0.75, y - 5, 1.5, 9);
  ctx.fillStyle = theme.background;
  ctx.fillRect(x - 4, 1, wide + 8, RULER - 6);
  ctx.fillStyle = theme.accent;
  ctx.fillText(text, x, RULER / 2 - 2);
}

/** @param {View} view @param {HTMLElement} box */
function fillArea(view, box) {
  const { area, areaSums } = view;
  if (!area) return;
  const head = element("div", "ss-trace-head");
  box.classList.add("ss-trace-area");
  head.append(
    element("b", "", `Area of ${shownTime(area.t1 - area.t0)} on ${counted(area.tracks.length, "track")}`),
    element("div", "", `from ${shownPoint(Math.round(area.t0))} to ${shownPoint(Math.round(area.t1))} · Escape removes it`),
  );
  box.replaceChildren(head);
  say(view, [...head.children].map((line) => line.textContent).join(", "));
  if (!areaSums) return void head.append(element("div", "ss-trace-same", area.tracks.length ? "Adding up…" : "No track in it."));
  const byName = element("table", "");
  fillTotals(byName, areaSums.names, AREA_TOTALS, "Name");
  const byCategory = element("table", "");
  fillTotals(byCategory, areaSums.categories, "", "Category");
  const sections = [byName, byCategory].map((table) => {
    const section = element("section", "");
    section.append(table);
    return section;
  });
  box.append(...sections);
}
