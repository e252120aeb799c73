// Requests to Python, and the handling of its replies.

/** @param {View} view @param {object} request @returns {number} the id that the reply will carry */
function askPython(view, request) {
  view.lastId += 1;
  view.model.send({ ...request, id: view.lastId });
  return view.lastId;
}

/** Request what is missing in the rows in view, then in those around them. A reply may have only the first of them.
 * @param {View} view */
function askForTile(view) {
  const { scene, pending, t0, t1 } = view;
  const waiting = pending.tile && performance.now() - pending.since < REPLY_MS;
  if (waiting || view.width === 0 || !scene.num_slices) return;
  const missing = [0, view.height / 2]
    .map((margin) => listMissing(view, margin))
    .find(({ rows, counters, wants_path: wantsPath }) => rows.length || counters.length || wantsPath);
  if (!missing) return;
  // One view more on each side, so that panning has something to draw while the next tile is cut.
  const span = t1 - t0;
  const [from, to] = [Math.max(t0 - span, 0), Math.min(t1 + span, scene.span_ns)];
  if (to <= from) return;
  const width = Math.min(Math.max(Math.round((plotWidth(view) * (to - from)) / span), 1), 16384);
  pending.tile = askPython(view, { type: "tile", t0_ns: from, t1_ns: to, width, ...missing });
  pending.since = performance.now();
  view.waitTimer ||= setTimeout(() => (view.page.waiting.hidden = false), WAITING_MS);
}

/** The kernel has replied. @param {View} view */
function endWaiting(view) {
  clearTimeout(view.waitTimer);
  view.waitTimer = 0;
  view.page.waiting.hidden = true;
}

/** @param {View} view */
function askForNames(view) {
  if (view.pending.names || !view.unnamed.size) return;
  view.pending.names = askPython(view, { type: "names", indices: [...view.unnamed].slice(0, 5000) });
}

/** Request the exact times of a mark whose tile has rounded ones. @param {View} view @param {RowMarks} marks
 * @param {number} mark */
function askForMark(view, { slice, count }, mark) {
  const { pending } = view;
  if (pending.mark && performance.now() - pending.markSince < REPLY_MS) return; // its reply sends the next request
  pending.mark = askPython(view, { type: "mark", index: slice[mark], count: count[mark] });
  pending.markSince = performance.now();
}

/** @param {View} view */
function askForTotals(view) {
  const { scene, t0, t1 } = view;
  if (!view.page.totals.open || !scene.num_slices) return;
  const limit = 9 * scene.span_ns;
  view.pending.totals = askPython(view, { type: "totals", t0_ns: Math.max(t0, -limit), t1_ns: Math.min(t1, limit) });
}

/** @param {View} view @param {number | null} index of the slice; null selects none */
const askToSelect = (view, index) => askPython(view, { type: "select", index });

/** Select the slice that names a mark. @param {View} view @param {RowMarks} marks @param {number} mark */
function askToPick(view, { slice, count }, mark) {
  if (count[mark] === 1) askToSelect(view, slice[mark]);
  else askPython(view, { type: "pick", index: slice[mark], count: count[mark] });
}

/** @param {View} view @param {1 | -1} direction in time */
function askForMatch(view, direction) {
  view.pending.find = askPython(view, { type: "find", direction });
}

/** @param {View} view */
function askForDownload(view) {
  setDownloading(view, true);
  askPython(view, { type: "download" });
}

/** @param {View} view @param {boolean} isRunning */
function setDownloading(view, isRunning) {
  const button = /** @type {HTMLButtonElement} */ (view.page.download);
  button.disabled = isRunning;
  button.textContent = isRunning ? "Writing…" : "Download";
}

/** @type {Record<string, (view: View, message: any, buffers: DataView[]) => void | Promise<void>>} */
const REPLIES = {
  tile: async (view, message, buffers) => {
    if (message.id !== view.pending.tile) return;
    const tile = message.tile ?? (await readTile(message, buffers[0]));
    if (view.closing.signal.aborted || message.id !== view.pending.tile) return;
    view.pending.tile = 0;
    endWaiting(view);
    keepTile(view, tile);
    for (const name of tile.names) if (!view.names.has(name)) view.unnamed.add(name);
    view.hover = null;
    askForNames(view);
    scheduleDraw(view);
  },
  names: (view, message) => {
    message.indices.forEach((/** @type {number} */ index, /** @type {number} */ i) => {
      view.names.set(index, message.names[i]);
      view.unnamed.delete(index);
    });
    if (message.id === view.pending.names) view.pending.names = 0;
    askForNames(view);
    scheduleDraw(view);
  },
  mark: (view, message) => {
    if (message.id !== view.pending.mark) return;
    view.pending.mark = 0;
    view.exact = { slice: message.index, start: message.start_ns, duration: message.duration_ns };
    if (view.hover && !view.page.tip.hidden) showTip(view, view.pointer[0], view.pointer[1]);
  },
  totals: (view, message) => {
    if (message.id !== view.pending.totals) return;
    fillTotals(/** @type {HTMLElement} */ (view.page.totals.querySelector("table")), message.rows);
  },
  area: (view, message) => {
    if (message.id !== view.pending.area) return;
    view.areaSums = message;
    showDetails(view);
  },
  download: (view, message, buffers) => {
    if (message.id === view.perfetto?.id) return handToPerfetto(view, buffers);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(/** @type {BlobPart[]} */ (buffers), { type: "application/gzip" }));
    link.download = message.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), REPLY_MS);
    setDownloading(view, false);
  },
  picture: (view, message) => savePicture(view.model.widget_manager, message.of, message.picture),
  found: (view, message) => {
    if (message.id !== view.pending.find) return;
    view.pending.find = 0;
    view.matchNumber = message.position;
    showMatchCount(view);
    if (view.model.get("selected")) revealSlice(view, view.model.get("selected"));
  },
};
