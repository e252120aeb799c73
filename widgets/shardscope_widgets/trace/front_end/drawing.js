// One frame: grid, rank headers, slices, track names, ruler and scroll bar, from back to front.

/** @param {View} view */
function scheduleDraw(view) {
  view.frame ||= requestAnimationFrame(() => draw(view));
}

/** @param {View} view */
function draw(view) {
  view.frame = 0;
  if (view.width === 0) return;
  const began = performance.now();
  if (view.dpr !== (window.devicePixelRatio || 1)) measure(view); // the page was zoomed, or moved to another screen
  if (!view.theme.isOfPage) view.theme = readTheme(view.root, view.ctx); // it was read before the view was attached
  const { ctx, theme, model, scene, page, width, height, dpr, t0, t1 } = view;
  askForTile(view);
  ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
  ctx.fillStyle = theme.background;
  ctx.fillRect(0, 0, width, height);
  ctx.textBaseline = "middle";
  const ticks = drawGrid(view);
  clipRows(view, false);
  drawHeaders(view);
  let drawn = drawSlices(view, false);
  drawCounters(view, false);
  drawTrackNames(view, false);
  ctx.restore();
  if (view.sticky) {
    clipRows(view, true);
    drawn += drawSlices(view, true);
    drawCounters(view, true);
    drawTrackNames(view, true);
    ctx.fillStyle = theme.soft;
    ctx.fillRect(0, RULER + view.sticky - 1, width, 1);
    ctx.restore();
  }
  drawInstants(view);
  drawPath(view);
  drawArea(view);
  drawArrows(view);
  placePinButton(view);
  drawRuler(view, ticks);
  drawScrollbar(view);
  // Zoomed out or panned beyond an end, the view is longer than the trace in it.
  const visible = Math.max(Math.min(t1, scene.span_ns) - Math.max(t0, 0), 0);
  page.span.textContent = `${shownTime(visible)} of ${shownTime(scene.span_ns)}`;
  Object.assign(page.canvas.dataset, {
    slices: drawn,
    t0: t0 / 1e9,
    t1: t1 / 1e9,
    matches: model.get("num_matches"),
    frameMs: (performance.now() - began).toFixed(2),
  });
}

/** Draw only where the pinned tracks are, or only where the others are. @param {View} view @param {boolean} isPinned */
function clipRows({ ctx, width, height, sticky }, isPinned) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, RULER + (isPinned ? 0 : sticky), width, isPinned ? sticky : height);
  ctx.clip();
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
  const bracket = placeBracket(view);
  for (const time of ticks.times) {
    const x = Math.round(xOf(view, time));
    ctx.fillStyle = theme.line;
    ctx.fillRect(x, RULER - 6, 1, 6);
    ctx.fillStyle = theme.soft;
    const label = `${NUMBERS.format(Math.round(time / size))} ${unit}`;
    const right = x + 4 + ctx.measureText(label).width;
    const isFree = !bracket || right < bracket.x - 6 || x + 4 > bracket.x + bracket.wide + 6;
    if (right < width && isFree) ctx.fillText(label, x + 4, RULER / 2);
  }
  if (bracket) drawBracket(view, bracket);
  ctx.fillStyle = theme.background;
  ctx.fillRect(0, 0, view.gutterWidth, RULER - 1);
}

/** @param {View} view */
function drawHeaders(view) {
  const { ctx, theme, width, height, scroll, rankButtons, stackButtons } = view;
  for (const { track, top } of view.places.stacks) {
    const button = stackButtons.get(track.first_row);
    if (button) button.style.transform = `translateY(${top - scroll - view.sticky}px)`;
  }
  ctx.font = `12px ${theme.font}`;
  ctx.textAlign = "right";
  view.places.headers.forEach(({ rank, top, height: tall, tracks }, i) => {
    const y = RULER + top - scroll;
    rankButtons[i].style.transform = `translateY(${top - scroll - view.sticky}px)`;
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

/** `text`, or as much of its beginning as `room` pixels hold.
 * @param {CanvasRenderingContext2D} ctx @param {string} text @param {number} room */
function fitText(ctx, text, room) {
  if (ctx.measureText(text).width <= room) return text;
  let kept = text.length - 1;
  while (kept > 1 && ctx.measureText(text.slice(0, kept) + "…").width > room) kept -= 1;
  return text.slice(0, kept) + "…";
}

/** @param {View} view @param {boolean} isPinned of the pinned tracks, or of all others */
function drawTrackNames(view, isPinned) {
  const { ctx, theme, width, height, gutterWidth, isNarrow } = view;
  if (!isNarrow) {
    ctx.fillStyle = theme.line;
    ctx.fillRect(gutterWidth - 1, RULER, 1, height);
  }
  ctx.font = `12px ${theme.font}`;
  for (const { track, top, height: high, tall } of view.places.bands) {
    if (top < view.sticky !== isPinned) continue;
    const y = yOfTop(view, top);
    // The line of Python stacks is a button, and has their name.
    if (track.kind === "python" || tall < READABLE_ROW || y - NAME_LINE > height || y + high < RULER) continue;
    // If its first row is above the edge, so is the header of its rank: the name stays in sight, with the rank.
    const edge = upperEdge(view, top);
    const isCut = !isNarrow && y < edge;
    const ofRank = isCut || view.pinned.includes(track);
    const nameY = isNarrow ? y - NAME_LINE / 2 : Math.min(Math.max(y, edge), y + high - ROW) + ROW / 2;
    const left = isNarrow || ofRank ? 8 : 24;
    const isCurrent = track === view.currentTrack;
    const label = ofRank ? `rank ${track.rank} · ${track.name}` : track.name;
    const buttonRoom = isCurrent || track === view.hoverTrack ? 20 : 0;
    const name = fitText(ctx, label, -buttonRoom + (isNarrow ? width : gutterWidth) - left - 8);
    if (isNarrow) {
      ctx.fillStyle = theme.background;
      ctx.fillRect(left - 2, y - NAME_LINE, ctx.measureText(name).width + 4, NAME_LINE);
    }
    if (isCurrent) {
      ctx.fillStyle = theme.accent;
      ctx.fillRect(0, y - (isNarrow ? NAME_LINE : 0), 3, high + (isNarrow ? NAME_LINE : 0));
    }
    ctx.fillStyle = isCurrent ? theme.ink : theme.soft;
    ctx.fillText(name, left, nameY);
  }
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
