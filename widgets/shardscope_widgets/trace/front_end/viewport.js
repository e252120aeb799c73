// The times and rows in view: zooming, panning, scrolling.

/** @param {View} view @param {number} from @param {number} to */
function showStretch(view, from, to) {
  const { scene } = view;
  const most = scene.span_ns * 1.2;
  const span = Math.min(Math.max(to - from, MIN_SPAN_NS), most);
  const middle = (from + to) / 2;
  // At least a tenth of the view keeps showing the trace, so nobody gets lost in empty time.
  const start = Math.min(Math.max(middle - span / 2, -0.9 * span), scene.span_ns - 0.1 * span);
  [view.t0, view.t1] = [start, start + span];
  scheduleDraw(view);
  clearTimeout(view.settleTimer);
  view.settleTimer = setTimeout(() => sendStretch(view), SETTLE_MS);
}

/** @param {View} view */
const showAll = (view) => showStretch(view, 0, view.scene.span_ns);

/** @param {View} view */
function sendStretch(view) {
  view.sentViewport = [view.t0 / 1e9, view.t1 / 1e9];
  view.model.set("viewport_seconds", view.sentViewport);
  view.model.save_changes();
  askForTotals(view);
}

/** @param {View} view */
function followStretch(view) {
  const [from, to] = view.model.get("viewport_seconds");
  if (from !== view.sentViewport[0] || to !== view.sentViewport[1]) showStretch(view, from * 1e9, to * 1e9);
}

/** @param {View} view @param {number} factor below 1 zooms in @param {number} [x] what stays in place */
function zoom(view, factor, x = view.gutterWidth + plotWidth(view) / 2) {
  const { t0, t1, scene } = view;
  const fixed = timeAt(view, Math.max(x, view.gutterWidth));
  const least = Math.max(factor, MIN_SPAN_NS / (t1 - t0));
  const most = Math.min(least, (scene.span_ns * 1.2) / (t1 - t0));
  showStretch(view, fixed - (fixed - t0) * most, fixed + (t1 - fixed) * most);
}

/** @param {View} view @param {number} pixels */
function pan(view, pixels) {
  const shift = (pixels / plotWidth(view)) * (view.t1 - view.t0);
  showStretch(view, view.t0 + shift, view.t1 + shift);
}

/** @param {View} view @param {number} top */
function scrollRowsTo(view, top) {
  view.scroll = Math.min(Math.max(top, 0), Math.max(view.places.height - (view.height - RULER), 0));
  scheduleDraw(view);
}

/** Bring a slice into view, wide enough to read. @param {View} view @param {any} slice @param {boolean} [zoomTo] */
function revealSlice(view, slice, zoomTo = false) {
  unfoldRow(view, slice.row);
  const { t0, t1, scene, places, scroll, height } = view;
  const start = slice.start_seconds * 1e9;
  const duration = slice.duration_seconds * 1e9;
  let span = t1 - t0;
  if (zoomTo) span = Math.max(duration * 1.25, MIN_SPAN_NS);
  else span = Math.min(Math.max(span, duration * 1.1), Math.max(duration, MIN_SPAN_NS / 10) * (plotWidth(view) / 40));
  if (zoomTo || start < t0 || start + duration > t1 || span < t1 - t0) {
    const centred = start + duration / 2 - span / 2;
    const from = Math.max(Math.min(centred, scene.span_ns - span), 0); // no empty time beside the trace
    showStretch(view, from, from + span);
  }
  const top = places.rowTop[slice.row];
  if (top < view.sticky) return;
  if (top < scroll + view.sticky || top + ROW > scroll + height - RULER) scrollRowsTo(view, top - (height - RULER) / 2);
}

/** Unfold a rank, or one of its tracks, and scroll to it. @param {View} view
 * @param {{rank?: number, first_row?: number}} target nothing: the rows stay as they are */
function revealTrack(view, { rank, first_row: firstRow }) {
  if (rank === undefined) return;
  view.folded.delete(rank);
  const track = view.scene.tracks.find((one) => one.first_row === firstRow);
  if (track?.kind === "python") view.shownStacks.add(track.first_row);
  rearrange(view);
  const { headers, bands } = view.places;
  view.currentTrack = track && track.kind !== "python" ? track : view.currentTrack;
  const header = headers.find((one) => one.rank === rank)?.top ?? 0;
  const band = bands.find((one) => one.track === track);
  // The rank's header stays in sight where it can.
  if (band && band.top < view.sticky) return scheduleDraw(view);
  const room = view.height - RULER - view.sticky;
  const isNear = !band || band.top + Math.min(band.height, room / 2) - header < room;
  scrollRowsTo(view, (isNear ? header : band.top - NAME_LINE) - view.sticky);
}

/** @param {View} view */
function zoomToSelected(view) {
  const selected = view.model.get("selected");
  if (selected) revealSlice(view, selected, true);
}
