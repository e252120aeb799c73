// Actions of the keys while the drawing has the focus.

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
  n: (view) => askForMatch(view, 1),
  "shift+n": (view) => askForMatch(view, -1),
  j: (view) => stepTrack(view, 1),
  k: (view) => stepTrack(view, -1),
  "shift+j": (view) => withCurrentTrack(view, (track) => moveTrack(view, track, 1)),
  "shift+k": (view) => withCurrentTrack(view, (track) => moveTrack(view, track, -1)),
  p: (view) => withCurrentTrack(view, (track) => pinOrUnpin(view, track)),
  "?": (view) => openHelp(view),
  m: (view) => markSelected(view),
  "shift+arrowleft": (view) => moveAreaEnd(view, -1),
  "shift+arrowright": (view) => moveAreaEnd(view, 1),
  escape: (view) => (view.area ? markArea(view, null) : askToSelect(view, null)),
  "/": (view) => view.page.search.focus(),
};

/** @param {View} view */
function followKeys(view) {
  listen(view, view.page.canvas, "keydown", (/** @type {KeyboardEvent} */ event) => {
    const key = event.key.toLowerCase();
    const action = (event.shiftKey && KEYS[`shift+${key}`]) || KEYS[key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    view.page.tip.hidden = true;
    action(view);
  });
  const showHint = () => view.model.get("selected") || showDetails(view);
  for (const type of ["focus", "blur"]) listen(view, view.page.canvas, type, showHint);
}
