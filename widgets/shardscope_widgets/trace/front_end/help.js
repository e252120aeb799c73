// The sheet of keys and gestures that "?" opens over the drawing.

const HELP = /** @type {[string, string][]} */ ([
  ["W, S or wheel", "zoom in, out"],
  ["A, D or drag", "move in time"],
  ["↑, ↓, Page Up, Page Down", "scroll"],
  ["0", "show all"],
  ["F or double click", "zoom to the selected slice"],
  ["Click", "select a slice; fold or unfold a rank"],
  ["/", "search; Enter and Shift+Enter go on and back"],
  ["N, Shift+N", "next match, previous match"],
  ["M", "measure the selected slice; again: its rank, all ranks"],
  ["Shift and drag", "measure and add up an area"],
  ["Shift+←, Shift+→", "move the end of the area"],
  ["J, K", "next track, previous track"],
  ["P", "pin the track or counter to the top, or unpin it"],
  ["Shift+J, Shift+K or drag", "move the track down, up"],
  ["Escape", "remove the area, then the selection"],
]);

/** @param {View} view */
function addHelp(view) {
  const { page } = view;
  const { help } = page;
  const close = element("button", "ss-trace-close", "Close");
  const list = element("dl", "");
  for (const [keys, action] of HELP) {
    const line = element("div", "");
    line.append(element("dt", "", keys), element("dd", "", action));
    list.append(line);
  }
  help.append(element("h3", "", "Keys and gestures"), list, close);
  listen(view, close, "click", () => closeHelp(view));
  listen(view, page.helpButton, "click", () => openHelp(view));
  listen(view, help, "keydown", (/** @type {KeyboardEvent} */ event) => {
    // It covers the drawing: Tab would move on below it, where Escape no longer closes it.
    if (event.key === "Tab") event.preventDefault();
    if (event.key !== "Escape" && event.key !== "?") return;
    event.stopPropagation();
    closeHelp(view);
  });
}

/** @param {View} view */
function openHelp(view) {
  view.page.help.hidden = false;
  fitStage(view);
  /** @type {HTMLElement} */ (view.page.help.querySelector("button")).focus();
}

/** @param {View} view */
function closeHelp(view) {
  view.page.help.hidden = true;
  fitStage(view);
  view.page.canvas.focus();
}
