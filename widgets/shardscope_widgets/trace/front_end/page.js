// The static parts of the view. Text from a trace only ever enters as textContent.

/** @param {string} tag @param {string} className @param {string} [text] */
function element(tag, className, text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

const TOTALS =
  "Self time excludes nested calls, total time includes them; only self times add up. All ranks, threads and streams, without Python stacks.";

/** The static parts, in reading order. @param {HTMLElement} root @param {Scene} scene */
function buildPage(root, scene) {
  const bar = element("div", "ss-trace-bar");
  const search = /** @type {HTMLInputElement} */ (element("input", "ss-trace-search"));
  Object.assign(search, { type: "search", placeholder: "Search names", maxLength: 500 });
  search.setAttribute("aria-label", "Search slices by name; Enter goes to the next match, Shift+Enter back");
  const count = element("span", "ss-trace-count");
  count.setAttribute("role", "status");
  const find = element("div", "ss-trace-find");
  const [previous, next] = [element("button", "ss-trace-previous", "‹"), element("button", "ss-trace-next", "›")];
  previous.setAttribute("aria-label", "Previous match");
  next.setAttribute("aria-label", "Next match");
  find.append(search, previous, next);
  const span = element("span", "ss-trace-span");
  const fit = element("button", "ss-trace-fit", "Show all");
  const helpButton = element("button", "ss-trace-help-button", "?");
  helpButton.setAttribute("aria-label", "Keys and gestures");
  const download = element("button", "ss-trace-download", "Download");
  download.title = "One Chrome trace of all ranks, for Perfetto";
  download.hidden = !scene.can_download;
  const perfetto = element("button", "ss-trace-perfetto", "Open in Perfetto");
  perfetto.title = "Opens ui.perfetto.dev and gives it this trace, which stays in the browser";
  perfetto.hidden = !scene.can_download || !scene.perfetto;
  bar.append(find, count, span, fit, download, perfetto, helpButton);

  const stage = element("div", "ss-trace-stage");
  const canvas = /** @type {HTMLCanvasElement} */ (element("canvas", ""));
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute(
    "aria-label",
    `Trace of ${counted(scene.ranks.length, "rank")}, ${counted(scene.num_slices, "slice")}. ` +
      "W and S zoom, A and D pan, arrow up and down scroll, 0 shows all, slash searches, question mark lists all keys. " +
      "The table below lists where the time went.",
  );
  const gutter = element("div", "ss-trace-gutter");
  const tip = element("div", "ss-trace-tip");
  tip.hidden = true;
  const pin = element("button", "ss-trace-pin", "↑");
  pin.hidden = true;
  const help = element("div", "ss-trace-help");
  help.hidden = true;
  help.setAttribute("role", "dialog");
  help.setAttribute("aria-label", "Keys and gestures");
  const status = element("div", "ss-trace-status");
  status.setAttribute("role", "status");
  // Without it, a view whose kernel runs another cell would be empty without a reason.
  const waiting = element("div", "ss-trace-waiting", "Waiting for the kernel, which is busy or has stopped.");
  waiting.hidden = true;
  stage.append(canvas, gutter, pin, tip, waiting, help, status);
  if (!scene.num_slices) stage.append(element("div", "ss-trace-empty", "Empty trace: the profiler recorded no slices."));

  const details = element("div", "ss-trace-details");
  // The first line of the details: whole tables would be read at each key that moves an end of an area.
  const spoken = element("div", "ss-trace-spoken");
  spoken.setAttribute("role", "status");
  const error = element("div", "ss-trace-error");
  error.setAttribute("role", "alert");
  const totals = /** @type {HTMLDetailsElement} */ (element("details", "ss-trace-totals"));
  totals.append(element("summary", "", "Where the time went in this view"), element("table", ""));
  root.append(bar, stage, details, spoken, totals);
  if (scene.notes.length) {
    const notes = element("details", "ss-trace-notes");
    const list = element("ul", "");
    list.append(...scene.notes.map((note) => element("li", "", note)));
    notes.append(element("summary", "", counted(scene.notes.length, "note") + " from loading"), list);
    root.append(notes);
  }
  root.append(error);
  const inStage = { stage, canvas, gutter, pin, tip, waiting, help, status };
  return { search, previous, next, count, span, fit, download, perfetto, helpButton, ...inStage, details, spoken, error, totals };
}

/** @param {HTMLElement} table @param {any[]} rows of name, slices, self_seconds, total_seconds @param {string} caption
 * @param {string} what the names are of */
function fillTotals(table, rows, caption = TOTALS, what = "Name") {
  const line = (/** @type {string} */ tag, /** @type {string[]} */ cells) => {
    const row = element("tr", "");
    row.append(...cells.map((cell) => element(tag, "", cell)));
    row.title = cells[0];
    return row;
  };
  const time = (/** @type {number} */ seconds) => shownTime(Math.round(seconds * 1e9));
  const body = rows.map((row) => [
    row.name,
    row.slices.toLocaleString("en"),
    time(row.self_seconds),
    time(row.total_seconds),
  ]);
  const head = line("th", [what, "Slices", "Self", "Total"]);
  table.replaceChildren(...(caption ? [element("caption", "", caption)] : []), head, ...body.map((cells) => line("td", cells)));
}
