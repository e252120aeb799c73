// Asking Python, and what its replies change.

/** @param {View} view @param {object} request @returns {number} the id that the reply will carry */
function askPython(view, request) {
  view.lastId += 1;
  view.model.send({ ...request, id: view.lastId });
  return view.lastId;
}

/** Ask for a tile when the one at hand ends inside the view, is too coarse or too fine, or shows another search
 * or path.
 * @param {View} view */
function askForTile(view) {
  const { scene, pending, tile, t0, t1 } = view;
  const waiting = pending.tile && performance.now() - pending.since < REPLY_MS;
  if (waiting || view.width === 0 || !scene.num_slices) return;
  const plot = plotWidth(view);
  const span = t1 - t0;
  const resolution = tile ? (tile.t1 - tile.t0) / tile.width / (span / plot) : Infinity;
  const edge = (/** @type {number} */ time) => Math.min(Math.max(time, 0), scene.span_ns);
  const covered = tile && edge(t0) >= tile.t0 && edge(t1) <= tile.t1;
  const isCurrent =
    tile && tile.search === view.model.get("search") && tile.pathNumber === view.model.get("_path_number");
  if (isCurrent && covered && resolution < 1.3 && resolution > 0.3) return;
  // One view more on each side, so that panning has something to draw while the next tile is cut.
  const request = { type: "tile", t0_ns: t0 - span, t1_ns: t1 + span, width: Math.min(3 * Math.round(plot), 16384) };
  pending.tile = askPython(view, request);
  pending.since = performance.now();
}

/** @param {View} view */
function askForNames(view) {
  if (view.pending.names || !view.tile) return;
  const missing = [...new Set([...view.tile.columns.name, ...view.tile.instants.name])].filter((name) => !view.names.has(name)).slice(0, 5000);
  if (missing.length) view.pending.names = askPython(view, { type: "names", indices: missing });
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

/** @type {Record<string, (view: View, message: any, buffers: DataView[]) => void>} */
const REPLIES = {
  tile: (view, message, buffers) => {
    if (message.id !== view.pending.tile) return;
    view.pending.tile = 0;
    view.tile = readTile(view.scene, message, buffers);
    view.hover = null;
    askForNames(view);
    scheduleDraw(view);
  },
  names: (view, message) => {
    message.indices.forEach((/** @type {number} */ index, /** @type {number} */ i) =>
      view.names.set(index, message.names[i]),
    );
    if (message.id === view.pending.names) view.pending.names = 0;
    askForNames(view);
    scheduleDraw(view);
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
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(/** @type {BlobPart[]} */ (buffers), { type: "application/gzip" }));
    link.download = message.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), REPLY_MS);
    setDownloading(view, false);
  },
  found: (view, message) => {
    if (message.id !== view.pending.find) return;
    view.matchNumber = message.position;
    showMatchCount(view);
    if (view.model.get("selected")) revealSlice(view, view.model.get("selected"));
  },
};
