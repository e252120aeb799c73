// What the keys do while the drawing has the focus.

/** @type {Record<string, (view: View) => void>} */
const KEYS = {
  w: (view) => zoom(view, 0.8),
  s: (view) => zoom(view, 1.25),
  a: (view) => pan(view, -plotWidth(view) * 0.1),
  d: (view) => pan(view, plotWidth(view) * 0.1),
  "+": (view) => zoom(view, 0.8),
  "=": (view) => zoom(view, 0.8),
  "-": (view) => zoom(view, 1.25),
  0: (view) => showAll(view),
  home: (view) => showAll(view),
  arrowleft: (view) => pan(view, -plotWidth(view) * 0.1),
  arrowright: (view) => pan(view, plotWidth(view) * 0.1),
  arrowup: (view) => scrollRowsTo(view, view.scroll - 2 * ROW),
  arrowdown: (view) => scrollRowsTo(view, view.scroll + 2 * ROW),
  pageup: (view) => scrollRowsTo(view, view.scroll - view.height / 2),
  pagedown: (view) => scrollRowsTo(view, view.scroll + view.height / 2),
  f: (view) => zoomToSelected(view),
  escape: (view) => askToSelect(view, null),
  "/": (view) => view.page.search.focus(),
};

/** @param {View} view */
function followKeys(view) {
  listen(view, view.page.canvas, "keydown", (/** @type {KeyboardEvent} */ event) => {
    const action = KEYS[event.key.toLowerCase()];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    view.page.tip.hidden = true;
    action(view);
  });
  const { canvas, details } = view.page;
  // Without the focus the same keys are JupyterLab's: they are named only while they work.
  for (const type of ["focus", "blur"]) {
    listen(view, canvas, type, () => fillDetails(details, view.model.get("selected"), type === "focus"));
  }
}
