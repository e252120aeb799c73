// The slices of the rows in view, their names and frames. A screen may have a hundred thousand marks, for which a call
// of the canvas each takes too long: they are painted into one line of pixels for each row, which the canvas stretches.

/** @typedef {{marks: RowMarks, row: number, y: number, tall: number}} ShownRow */

/** @param {View} view @param {boolean} isPinned of the pinned tracks, or of all others
 * @returns {number} how many slices the drawn marks stand for */
function drawSlices(view, isPinned) {
  const { ctx, theme, places, height, gutterWidth, dpr } = view;
  const shown = /** @type {ShownRow[]} */ ([]);
  for (let row = 0; row < places.rowTop.length; row++) {
    const tall = places.rowTall[row];
    const marks = tall ? view.rows.get(row) : undefined;
    if (!marks || places.rowTop[row] < view.sticky !== isPinned) continue;
    const y = yOfTop(view, places.rowTop[row]);
    if (y <= height && y + tall >= RULER) shown.push({ marks, row, y, tall });
  }
  if (!shown.length) return 0;
  const lines = openLines(view, shown.length);
  const overlays = shown.map((one, line) => paintRow(view, lines, line, one));
  lines.ctx.putImageData(lines.image, 0, 0);
  ctx.save();
  ctx.beginPath();
  ctx.rect(gutterWidth, RULER, plotWidth(view), height);
  ctx.clip();
  ctx.font = `11px ${theme.font}`;
  ctx.imageSmoothingEnabled = false;
  shown.forEach(({ marks, y, tall }, line) => {
    const { width } = lines.image;
    ctx.drawImage(lines.canvas, 0, line, width, 1, gutterWidth, y, width / dpr, tall >= READABLE_ROW ? tall - 1 : tall);
    for (const { mark, x, w, dimmed } of overlays[line].named)
      drawName(view, marks, mark, Math.max(x, gutterWidth), y, x + w, dimmed);
    for (const { x, w, thick } of overlays[line].outlined) outline(view, x, y, w, tall, thick);
  });
  ctx.restore();
  return overlays.reduce((sum, { drawn }) => sum + drawn, 0);
}

/** Empty lines of pixels, as wide as the plot on this screen. @param {View} view @param {number} number */
function openLines(view, number) {
  const width = Math.ceil(plotWidth(view) * view.dpr);
  const before = view.lines;
  if (before && before.image.width === width && before.image.height >= number) {
    before.words.fill(0);
    return before;
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, number];
  const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = ctx.createImageData(width, number);
  return (view.lines = { canvas, ctx, image, words: new Uint32Array(image.data.buffer) });
}

/** Paint the marks of a row; their names and frames come over them. @param {View} view
 * @param {NonNullable<View["lines"]>} lines @param {number} line @param {ShownRow} shown */
function paintRow(view, { image }, line, { marks, row, tall }) {
  const { theme, hover, t0, t1, width, gutterWidth, dpr } = view;
  const { start, duration, colour, density, match, count, slice } = marks;
  const selected = view.model.get("selected")?.index ?? -1;
  const searching = Boolean(marks.search.trim());
  const scale = plotWidth(view) / (t1 - t0);
  const readable = tall >= READABLE_ROW;
  const overlay = { drawn: 0, named: /** @type {any[]} */ ([]), outlined: /** @type {any[]} */ ([]) };
  const offset = line * image.width;
  for (let mark = firstMarkAfter(marks, t0); mark < start.length && start[mark] <= t1; mark++) {
    const left = gutterWidth + (start[mark] - t0) * scale;
    const wide = Math.max(duration[mark] * scale, 1);
    const x = Math.max(left, gutterWidth - 2);
    const w = Math.min(left + wide, width + 2) - x;
    const dimmed = searching && !match[mark];
    const alpha = (dimmed ? 0.22 : 1) * (count[mark] > 1 ? 0.45 + (0.55 * density[mark]) / 255 : 1);
    // A pixel apart, so that neighbours stay two.
    const from = Math.max((x - gutterWidth) * dpr, 0);
    const to = Math.min((x + (w > 3 ? w - 1 : w) - gutterWidth) * dpr, image.width);
    paintSpan(image.data, offset, from, to, theme.fillParts[colour[mark]], alpha);
    if (readable && w > MIN_TEXT_PX && count[mark] === 1) overlay.named.push({ mark, x, w, dimmed });
    overlay.drawn += count[mark];
    if (selected >= slice[mark] && selected < slice[mark] + count[mark]) overlay.outlined.push({ x, w, thick: 2 });
    else if (hover && hover.row === row && hover.mark === mark) overlay.outlined.push({ x, w, thick: 1 });
  }
  return overlay;
}

/** Paint over a part of a line, whose ends may be inside pixels. @param {Uint8ClampedArray} data @param {number} offset
 * of the line, in pixels @param {number} from @param {number} to @param {number[]} colour @param {number} alpha */
function paintSpan(data, offset, from, to, [red, green, blue], alpha) {
  for (let pixel = Math.floor(from); pixel < to; pixel++) {
    const share = alpha * (Math.min(to, pixel + 1) - Math.max(from, pixel));
    const at = 4 * (offset + pixel);
    const below = (data[at + 3] / 255) * (1 - share);
    const all = share + below;
    if (all <= 0) continue;
    data[at] = (red * share + data[at] * below) / all;
    data[at + 1] = (green * share + data[at + 1] * below) / all;
    data[at + 2] = (blue * share + data[at + 2] * below) / all;
    data[at + 3] = all * 255;
  }
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
 * @param {number} right @param {boolean} dimmed whether the search leaves it out, which takes away its colour */
function drawName({ ctx, theme, names, textWidths }, marks, mark, x, y, right, dimmed) {
  const name = names.get(marks.name[mark]);
  const room = right - x - 9;
  if (!name || room < 14) return;
  ctx.fillStyle = dimmed ? theme.soft : theme.texts[marks.colour[mark]];
  let needed = textWidths.get(name);
  if (needed === undefined) textWidths.set(name, (needed = ctx.measureText(name).width));
  const text = needed <= room ? name : shortenName(ctx, name, Math.floor((room / needed) * name.length), room);
  if (!text) return;
  ctx.fillText(text, x + 4, y + ROW / 2);
}

/** The beginning of a name that has room; empty if that is a letter or none. @param {CanvasRenderingContext2D} ctx
 * @param {string} name @param {number} most letters @param {number} room */
function shortenName(ctx, name, most, room) {
  for (let kept = most; kept > 1; kept--) {
    const text = name.slice(0, kept) + "…";
    if (ctx.measureText(text).width <= room) return text;
  }
  return "";
}
