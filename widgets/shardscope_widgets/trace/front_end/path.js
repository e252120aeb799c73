// The critical path over the slices: its parts are outlined, and lines lead from one track to the next.

const LEAST_STEP_PX = 3; // lines closer than this would be a band

/** @param {View} view */
function drawPath(view) {
  const { ctx, theme, path, places, t0, t1, width, height, gutterWidth } = view;
  if (!path || !path.start.length) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(gutterWidth, RULER, plotWidth(view), height);
  ctx.clip();
  ctx.strokeStyle = ctx.fillStyle = theme.path;
  ctx.lineWidth = 2;
  let before = NaN; // height of the part before
  let lastStep = -Infinity;
  for (let part = 0; part < path.start.length; part++) {
    const row = path.row[part];
    const tall = places.rowTall[row];
    const top = yOfTop(view, places.rowTop[row]);
    const middle = path.is_slice[part] ? top + Math.max(tall, 1) / 2 : top - 1;
    const left = Math.max(xOf(view, path.start[part]), gutterWidth - 4);
    const right = Math.min(xOf(view, path.end[part]), width + 4);
    const isInView = path.end[part] >= t0 && path.start[part] <= t1;
    if (isInView && Math.abs(before - middle) > 1 && left - lastStep >= LEAST_STEP_PX) {
      ctx.fillRect(left - 0.5, Math.min(before, middle), 1, Math.abs(before - middle));
      lastStep = left;
    }
    before = middle;
    if (!isInView || tall === 0 || top > height || top + tall < upperEdge(view, places.rowTop[row])) continue;
    const wide = Math.max(right - left, 2);
    if (!path.is_slice[part]) ctx.fillRect(left, top - 2, wide, 2); // above, where it hides no name
    else if (tall < READABLE_ROW || wide < 6) ctx.fillRect(left, top, wide, Math.max(tall - 1, 2));
    else ctx.strokeRect(left + 1, top + 1, wide - 3, tall - 3);
  }
  ctx.restore();
}
