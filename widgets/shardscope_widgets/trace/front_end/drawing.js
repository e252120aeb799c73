// One frame: grid, rank headers, slices, track names, ruler and scroll bar, from back to front.

/** @param {View} view */
function scheduleDraw(view) {
  view.frame ||= requestAnimationFrame(() => draw(view));
}

/** @param {View} view */
function draw(view) {
  const { ctx, theme, model, scene, page, width, height, t0, t1 } = view;
  view.frame = 0;
  if (width === 0) return;
  askForTile(view);
  const began = performance.now();
  const dpr = window.devicePixelRatio || 1;
  ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
  ctx.fillStyle = theme.background;
  ctx.fillRect(0, 0, width, height);
  ctx.textBaseline = "middle";
  const ticks = drawGrid(view);
  drawHeaders(view);
  const drawn = drawSlices(view);
  drawTrackNames(view);
  drawRuler(view, ticks);
  drawScrollbar(view);
  page.span.textContent = `${shownTime(t1 - t0)} of ${shownTime(scene.span_ns)}`;
  Object.assign(page.canvas.dataset, {
    slices: drawn,
    t0: t0 / 1e9,
    t1: t1 / 1e9,
    matches: model.get("num_matches"),
    frameMs: (performance.now() - began).toFixed(2),
  });
}

/** Times of the ruler's ticks; their lines stand behind the slices. @param {View} view */
function drawGrid(view) {
  const { ctx, theme, t0, t1 } = view;
  const step = roundStep(((t1 - t0) / plotWidth(view)) * 110);
  const ticks = { step, times: /** @type {number[]} */ ([]) };
  ctx.fillStyle = theme.line;
  for (let time = Math.ceil(t0 / step) * step; time <= t1; time += step) {
    ticks.times.push(time);
    ctx.fillRect(Math.round(xOf(view, time)), RULER, 1, view.height);
  }
  return ticks;
}

/** @param {View} view @param {{step: number, times: number[]}} ticks */
function drawRuler(view, ticks) {
  const { ctx, theme, width } = view;
  ctx.fillStyle = theme.background;
  ctx.fillRect(0, 0, width, RULER);
  ctx.fillStyle = theme.line;
  ctx.fillRect(0, RULER - 1, width, 1);
  ctx.font = `11px ${theme.font}`;
  const [size, unit] = unitOf(Math.max(ticks.step, 1));
  for (const time of ticks.times) {
    const x = Math.round(xOf(view, time));
    ctx.fillStyle = theme.line;
    ctx.fillRect(x, RULER - 6, 1, 6);
    ctx.fillStyle = theme.soft;
    const label = `${Math.round(time / size).toLocaleString("en")} ${unit}`;
    if (x + 4 < width - 24) ctx.fillText(label, x + 4, RULER / 2);
  }
  ctx.fillStyle = theme.background;
  ctx.fillRect(0, 0, view.gutterWidth, RULER - 1);
}

/** @param {View} view */
function drawHeaders(view) {
  const { ctx, theme, width, height, scroll, rankButtons } = view;
  ctx.font = `12px ${theme.font}`;
  ctx.textAlign = "right";
  view.places.headers.forEach(({ rank, top, height: tall, tracks }, i) => {
    const y = RULER + top - scroll;
    rankButtons[i].style.transform = `translateY(${top - scroll}px)`;
    rankButtons[i].style.height = `${tall}px`;
    if (y > height || y + tall < RULER) return;
    ctx.fillStyle = theme.line;
    if (view.folded.has(rank)) return ctx.fillRect(0, y + tall - 1, width, 1);
    ctx.fillStyle = theme.panel;
    ctx.fillRect(0, y, width, HEADER);
    ctx.fillStyle = theme.line;
    ctx.fillRect(0, y, width, 1);
    ctx.fillRect(0, y + HEADER - 1, width, 1);
    const slices = tracks.reduce((sum, track) => sum + track.num_slices, 0);
    ctx.fillStyle = theme.soft;
    ctx.fillText(`${counted(tracks.length, "track")} · ${counted(slices, "slice")}`, width - 16, y + HEADER / 2);
  });
  ctx.textAlign = "left";
}

/** @param {View} view */
function drawTrackNames(view) {
  const { ctx, theme, height, gutterWidth } = view;
  ctx.fillStyle = theme.line;
  ctx.fillRect(gutterWidth - 1, RULER, 1, height);
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, RULER, gutterWidth - 8, height);
  ctx.clip();
  ctx.font = `12px ${theme.font}`;
  ctx.fillStyle = theme.soft;
  for (const { track, top, height: high, tall } of view.places.bands) {
    const y = RULER + top - view.scroll;
    if (tall < READABLE_ROW || y > height || y + high < RULER) continue;
    const isNarrow = gutterWidth === NARROW_GUTTER;
    ctx.fillText(isNarrow ? track.name.replace("CPU ", "") : track.name, isNarrow ? 8 : 24, y + ROW / 2);
  }
  ctx.restore();
}

/** @param {View} view */
function drawScrollbar(view) {
  const { ctx, theme, width, height, places, scroll } = view;
  const room = height - RULER;
  if (places.height <= room) return;
  ctx.fillStyle = theme.soft;
  ctx.globalAlpha = 0.5;
  const tall = Math.max((room / places.height) * room, 24);
  ctx.fillRect(width - 5, RULER + (scroll / (places.height - room)) * (room - tall), 4, tall);
  ctx.globalAlpha = 1;
}
