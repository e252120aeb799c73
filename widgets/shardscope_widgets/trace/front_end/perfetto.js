// "Open in Perfetto": a window that the click opens, and the trace as a message to it, as Perfetto documents
// (docs/visualization/deep-linking-to-perfetto-ui): PING until it answers PONG, then the file.

/** @typedef {{id: number, target: Window, file: ArrayBuffer | null, isReady: boolean, timer: any, began: number,
 *   listening: AbortController}} Perfetto */

const PING_MS = 100;
const PERFETTO_MS = 12000; // its page is several MB

/** @param {View} view */
function openInPerfetto(view) {
  const { scene, page } = view;
  if (view.perfetto) return;
  page.error.textContent = "";
  // Python says why such a trace is not sent; a window would stay empty.
  if (scene.num_slices > scene.download_limit) return askForDownload(view);
  const target = window.open(scene.perfetto);
  if (!target) return sayPerfettoFailed(view, "The browser did not open a window");
  const listening = new AbortController();
  const id = askPython(view, { type: "download" });
  const state = { id, target, file: null, isReady: false, began: performance.now(), listening, timer: 0 };
  view.perfetto = state;
  const onMessage = (/** @type {MessageEvent} */ event) => {
    if (event.source !== target || event.origin !== scene.perfetto || event.data !== "PONG") return;
    clearInterval(state.timer);
    state.isReady = true;
    sendToPerfetto(view);
  };
  window.addEventListener("message", onMessage, { signal: listening.signal });
  state.timer = setInterval(() => pingPerfetto(view), PING_MS);
  const button = /** @type {HTMLButtonElement} */ (page.perfetto);
  [button.disabled, button.textContent] = [true, "Opening…"];
}

/** @param {View} view */
function pingPerfetto(view) {
  const { perfetto, scene } = view;
  if (!perfetto) return;
  if (performance.now() - perfetto.began < PERFETTO_MS && !perfetto.target.closed) {
    return perfetto.target.postMessage("PING", scene.perfetto);
  }
  const why = perfetto.target.closed ? "The window was closed" : `${new URL(scene.perfetto).host} did not answer`;
  stopPerfetto(view);
  sayPerfettoFailed(view, why);
}

/** Python's compressed trace of all ranks. @param {View} view @param {DataView[]} buffers */
async function handToPerfetto(view, buffers) {
  const { perfetto } = view;
  const file = await new Blob(/** @type {BlobPart[]} */ (buffers)).arrayBuffer();
  if (!perfetto || perfetto !== view.perfetto) return;
  perfetto.file = file;
  sendToPerfetto(view);
}

/** Send the trace once it is there and the page is ready. @param {View} view */
function sendToPerfetto(view) {
  const { perfetto, scene } = view;
  if (!perfetto?.file || !perfetto.isReady) return;
  const title = `Shardscope: ${counted(scene.ranks.length, "rank")}`;
  const message = { perfetto: { buffer: perfetto.file, title, fileName: "trace.json.gz" } };
  perfetto.target.postMessage(message, scene.perfetto, [perfetto.file]);
  stopPerfetto(view);
}

/** @param {View} view */
function stopPerfetto(view) {
  if (!view.perfetto) return;
  clearInterval(view.perfetto.timer);
  view.perfetto.listening.abort();
  view.perfetto = null;
  const button = /** @type {HTMLButtonElement} */ (view.page.perfetto);
  [button.disabled, button.textContent] = [false, "Open in Perfetto"];
}

/** @param {View} view @param {string} why */
function sayPerfettoFailed(view, why) {
  view.page.error.textContent = `${why}. Fix: press Download, and open the file in Perfetto.`;
}
