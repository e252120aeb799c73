// The slices of the rows in view, their names and frames.

/** @param {View} view @param {boolean} isPinned of the pinned tracks, or of all others
 * @returns {number} how many slices the drawn marks stand for */
function drawSlices(view, isPinned) {
  const { ctx, theme, places, height, gutterWidth } = view;
  ctx.save();
  ctx.beginPath();
  ctx.rect(gutterWidth, RULER, plotWidth(view), height);
  ctx.clip();
  ctx.font = `11px ${theme.font}`;
  let drawn = 0;
  for (let row = 0; row < places.rowTop.length; row++) {
    if (places.rowTop[row] < view.sticky !== isPinned) continue;
    const y = yOfTop(view, places.rowTop[row]);
    const tall = places.rowTall[row];
    if (tall === 0 || y > height || y + tall < RULER) continue;
    const marks = view.rows.get(row);
    if (marks) drawn += drawRow(view, marks, row, y, tall);
  }
  ctx.restore();
  return drawn;
}

/** @param {View} view @param {RowMarks} marks @param {number} row @param {number} y @param {number} tall
 * @returns {number} how many slices the drawn marks stand for */
function drawRow(view, marks, row, y, tall) {
  const { ctx, theme, hover, t0, t1, width, gutterWidth } = view;
  const { start, duration, colour, density, match, count, slice } = marks;
  const selected = view.model.get("selected")?.index ?? -1;
  const searching = Boolean(marks.search.trim());
  const scale = plotWidth(view) / (t1 - t0);
  const readable = tall >= READABLE_ROW;
  let drawn = 0;
  for (let mark = firstMarkAfter(marks, t0); mark < start.length && start[mark] <= t1; mark++) {
    const left = gutterWidth + (start[mark] - t0) * scale;
    const wide = Math.max(duration[mark] * scale, 1);
    const x = Math.max(left, gutterWidth - 2);
    const w = Math.min(left + wide, width + 2) - x;
    const dimmed = searching && !match[mark];
    ctx.globalAlpha = (dimmed ? 0.22 : 1) * (count[mark] > 1 ? 0.45 + (0.55 * density[mark]) / 255 : 1);
    ctx.fillStyle = theme.fills[colour[mark]];
    // A pixel apart, so that neighbours stay two.
    ctx.fillRect(x, y, w > 3 ? w - 1 : w, readable ? tall - 1 : tall);
    const isNamed = readable && w > MIN_TEXT_PX && count[mark] === 1;
    if (isNamed) drawName(view, marks, mark, Math.max(x, gutterWidth), y, x + w);
    drawn += count[mark];
    if (selected >= slice[mark] && selected < slice[mark] + count[mark]) outline(view, x, y, w, tall, 2);
    else if (hover && hover.row === row && hover.mark === mark) outline(view, x, y, w, tall, 1);
  }
  return drawn;
}

/** @param {View} view @param {number} x @param {number} y @param {number} w @param {number} tall
 * @param {number} line */
function outline({ ctx, theme }, x, y, w, tall, line) {
  ctx.globalAlpha = 1;
  ctx.strokeStyle = line > 1 ? theme.accent : theme.ink;
  ctx.lineWidth = line;
  // Thin rows are framed from outside, where there would be nothing left inside.
  const inset = tall >= READABLE_ROW ? line / 2 : -line / 2;
  ctx.strokeRect(x + inset, y + inset, Math.max(w - 1 - 2 * inset, 1), Math.max(tall - 1 - 2 * inset, 1));
}

/** @param {View} view @param {RowMarks} marks @param {number} mark @param {number} x @param {number} y
 * @param {number} right */
function drawName({ ctx, theme, names, textWidths }, marks, mark, x, y, right) {
  const name = names.get(marks.name[mark]);
  const room = right - x - 9;
  if (!name || room < 14) return;
  ctx.fillStyle = theme.texts[marks.colour[mark]];
  let text = name;
  let needed = textWidths.get(name);
  if (needed === undefined) textWidths.set(name, (needed = ctx.measureText(name).width));
  if (needed > room) {
    let kept = Math.floor((room / needed) * name.length);
    while (kept > 1 && ctx.measureText((text = name.slice(0, kept) + "…")).width > room) kept -= 1;
    if (kept < 2) return;
  }
  ctx.fillText(text, x + 4, y + ROW / 2);
}
