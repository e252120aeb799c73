// Arrows between the selected slice and others: launch to kernel, ends of flows, one collective on several ranks.

/**
 * @typedef {{index: number, name: string, rank: number, track: string, row: number, start_ns: number, end_ns: number}} End
 * @typedef {{kind: string, source: End, target: End}} Connection
 */

/** @param {View} view */
function drawArrows(view) {
  const { ctx, theme, gutterWidth, height } = view;
  const connections = /** @type {Connection[]} */ (view.model.get("selected")?.connections ?? []);
  if (!connections.length) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(gutterWidth, RULER, plotWidth(view), height);
  ctx.clip();
  for (const { kind, source, target } of chainCollectives(connections)) {
    const isCollective = kind === "collective";
    // Ranks of a collective are compared where each of them arrives.
    const leaves = isCollective ? source.start_ns : Math.min(source.end_ns, Math.max(target.start_ns, source.start_ns));
    const from = [xOf(view, leaves), middleOfRow(view, source.row)];
    const to = [xOf(view, target.start_ns), middleOfRow(view, target.row)];
    // Behind the line one of the background's colour, so that it reads on slices of any colour.
    for (const [colour, line] of /** @type {[string, number][]} */ ([[theme.background, 4], [theme.arrow, 1.5]])) {
      ctx.strokeStyle = ctx.fillStyle = colour;
      ctx.lineWidth = line;
      ctx.setLineDash(isCollective && line < 2 ? [5, 3] : []);
      strokeCurve(ctx, from, to, isCollective);
      ctx.setLineDash([]);
      if (!isCollective) drawHead(ctx, to, line > 2 ? 2 : 0);
    }
  }
  ctx.restore();
}

/** One collective leads from each rank to the one below it: lines from the selected rank to all others would cross.
 * @param {Connection[]} connections @returns {Connection[]} */
function chainCollectives(connections) {
  const isCollective = (/** @type {Connection} */ { kind }) => kind === "collective";
  const together = connections.filter(isCollective);
  if (!together.length) return connections;
  const ends = [together[0].source, ...together.map(({ target }) => target)].sort((a, b) => a.row - b.row);
  const chain = ends.slice(1).map((target, i) => ({ kind: "collective", source: ends[i], target }));
  return [...connections.filter((one) => !isCollective(one)), ...chain];
}

/** @param {View} view @param {number} row */
function middleOfRow(view, row) {
  const { places } = view;
  return yOfTop(view, places.rowTop[row]) + Math.max(places.rowTall[row], 2) / 2;
}

/** @param {CanvasRenderingContext2D} ctx @param {number[]} from @param {number[]} to @param {boolean} isLevel both
 * ends lead to the left, as a bracket does; otherwise the curve leaves to the right and arrives from the left */
function strokeCurve(ctx, [x0, y0], [x1, y1], isLevel) {
  const bend = Math.min(Math.max(Math.abs(x1 - x0) / 2, 24), 120);
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.bezierCurveTo(isLevel ? x0 - bend : x0 + bend, y0, x1 - bend, y1, x1, y1);
  ctx.stroke();
}

/** @param {CanvasRenderingContext2D} ctx @param {number[]} tip @param {number} grow */
function drawHead(ctx, [x, y], grow) {
  ctx.beginPath();
  ctx.moveTo(x + grow, y);
  ctx.lineTo(x - 7 - grow, y - 4 - grow);
  ctx.lineTo(x - 7 - grow, y + 4 + grow);
  ctx.fill();
}
