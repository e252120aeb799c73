// Counters as step lines below a rank's tracks, and instants as ticks on the tracks.

/** @typedef {{rank: number, name: string, is_bytes: boolean, low: number, high: number}} Counter */

const COUNTER_HEIGHT = 40;
const COUNTER_GAP = 8;
const FOUR_DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const BYTE_UNITS = /** @type {[number, string][]} */ ([[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]);

/** @param {Counter} counter @param {number} value */
function shownValue(counter, value) {
  const [size, unit] = BYTE_UNITS.find(([one]) => Math.abs(value) >= one) ?? [1, "B"];
  if (!counter.is_bytes) return FOUR_DIGITS.format(value);
  return `${FOUR_DIGITS.format(value / size)} ${unit}`;
}

/** @param {View} view @param {boolean} isPinned of the pinned counters, or of all others */
function drawCounters(view, isPinned) {
  const { ctx, theme, scene, places, gutterWidth, width, height, isNarrow } = view;
  for (const { number, top } of places.counters) {
    const counter = scene.counters[number];
    if (top < view.sticky !== isPinned) continue;
    const y = yOfTop(view, top);
    if (y > height || y + COUNTER_HEIGHT < RULER) continue;
    const scale = (COUNTER_HEIGHT - 4) / (counter.high - counter.low || 1);
    const heightOf = (/** @type {number} */ value) => y + COUNTER_HEIGHT - (value - counter.low) * scale;
    ctx.save();
    ctx.beginPath();
    ctx.rect(gutterWidth, RULER, plotWidth(view), height);
    ctx.clip();
    const samples = view.counters.get(number);
    if (samples) {
      const { time, value } = samples;
      ctx.beginPath();
      let last = NaN;
      for (let i = 0; i < time.length; i++) {
        const x = Math.min(Math.max(xOf(view, time[i]), gutterWidth - 2), width + 2);
        if (i > 0) ctx.lineTo(x, heightOf(last));
        ctx.lineTo(x, heightOf(value[i]));
        last = value[i];
      }
      if (!Number.isNaN(last)) ctx.lineTo(width + 2, heightOf(last));
      ctx.strokeStyle = theme.counter;
      ctx.lineWidth = 1.5;
      ctx.stroke();
      if (!Number.isNaN(last)) {
        ctx.lineTo(width + 2, heightOf(counter.low));
        ctx.lineTo(Math.max(xOf(view, time[0]), gutterWidth - 2), heightOf(counter.low));
        ctx.globalAlpha = 0.2;
        ctx.fillStyle = theme.counter;
        ctx.fill();
        ctx.globalAlpha = 1;
      }
    }
    ctx.restore();
    ctx.fillStyle = theme.line;
    ctx.fillRect(gutterWidth, y + COUNTER_HEIGHT, width - gutterWidth, 1);
    const track = view.counterTracks[number];
    const isOfRank = view.pinned.includes(track);
    const isCurrent = track === view.currentTrack;
    if (isCurrent) {
      ctx.fillStyle = theme.accent;
      ctx.fillRect(0, y - (isNarrow ? NAME_LINE : 0), 3, COUNTER_HEIGHT + (isNarrow ? NAME_LINE : 0));
    }
    const left = isNarrow || isOfRank ? 8 : 24;
    const buttonRoom = isCurrent || track === view.hoverTrack ? 20 : 0;
    const room = (isNarrow ? width : gutterWidth) - left - 8 - buttonRoom;
    const label = isOfRank ? `rank ${counter.rank} · ${counter.name}` : counter.name;
    ctx.font = `12px ${theme.font}`;
    ctx.fillStyle = theme.soft;
    const nameY = isNarrow ? y - NAME_LINE / 2 : y + 12;
    const name = fitText(ctx, isNarrow ? `${label} · up to ${shownValue(counter, counter.high)}` : label, room);
    ctx.fillText(name, left, nameY);
    if (isNarrow) continue;
    ctx.font = `11px ${theme.font}`;
    ctx.fillText(fitText(ctx, `up to ${shownValue(counter, counter.high)}`, room), left, y + 28);
  }
}

/** @param {View} view */
function drawInstants(view) {
  const { ctx, theme, places, gutterWidth, height } = view;
  ctx.save();
  ctx.beginPath();
  ctx.rect(gutterWidth, RULER, plotWidth(view), height);
  ctx.clip();
  ctx.fillStyle = theme.ink;
  for (const [row, { instants }] of view.rows) {
    const tall = places.rowTall[row];
    const y = yOfTop(view, places.rowTop[row]);
    if (!tall || y > height || y < upperEdge(view, places.rowTop[row])) continue;
    const size = tall >= READABLE_ROW ? 4 : 2;
    for (const time of instants.time) {
      const x = xOf(view, time);
      if (x < gutterWidth - 4 || x > view.width + 4) continue;
      ctx.beginPath();
      ctx.moveTo(x - size, y - 3);
      ctx.lineTo(x + size, y - 3);
      ctx.lineTo(x, y - 3 + 1.5 * size);
      ctx.fill();
      ctx.fillRect(x - 0.5, y - 3, 1, tall + 2);
    }
  }
  ctx.restore();
}

/** Title and facts of the counter or instant under the pointer, or null. @param {View} view @param {number} x
 * @param {number} y @returns {[string, string] | null} */
function describeMarkAt(view, x, y) {
  const { scene, places, names } = view;
  if (x < view.gutterWidth || y < RULER) return null;
  const top = contentAt(view, y);
  const at = timeAt(view, x);
  const place = places.counters.find((one) => top >= one.top && top <= one.top + COUNTER_HEIGHT);
  if (place) {
    const samples = view.counters.get(place.number);
    const found = samples ? samples.time.findLastIndex((/** @type {number} */ time) => time <= at) : -1;
    const counter = scene.counters[place.number];
    if (!samples || found < 0) return null;
    return [`${counter.name}: ${shownValue(counter, samples.value[found])}`, `since ${shownPoint(Math.round(samples.time[found]))}`];
  }
  for (const [row, { instants }] of view.rows) {
    const distance = top - places.rowTop[row];
    if (!places.rowTall[row] || distance < -4 || distance > 5) continue;
    const { time, name, count } = instants;
    const i = time.findIndex((/** @type {number} */ one) => Math.abs(xOf(view, one) - x) <= 4);
    if (i < 0) continue;
    const title = names.get(name[i]) ?? "…";
    const others = count[i] > 1 ? ` and ${counted(count[i] - 1, "more instant")}` : "";
    return [`${title}${others}`, `instant at ${shownPoint(Math.round(time[i]))}`];
  }
  return null;
}
