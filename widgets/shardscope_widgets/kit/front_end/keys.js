// What keys mean inside of our widgets and around them. Joined in front of every front end that takes the keyboard.

/** Keys that JupyterLab's command mode acts on even with Ctrl, Cmd or Alt: run the cell again, select, merge, move or
 * collapse cells. The clipboard's and undo's are here because users bind them to cells; browsers do their own part of
 * all of these whether or not the event goes on. */
const ACT_ON_CELLS = new Set([
  "enter", "backspace", "delete", "arrowup", "arrowdown", "arrowleft", "arrowright", "home", "end",
  "a", "c", "m", "v", "x", "y", "z",
]);

/** Return whether a key is JupyterLab's or the browser's, wherever it is pressed: Escape, Tab, F1 to F12, Ctrl+S and the like.
 * @param {KeyboardEvent} event */
function isForThePage(event) {
  if (event.key === "Escape" || event.key === "Tab" || /^F\d+$/.test(event.key)) return true;
  if (!(event.ctrlKey || event.metaKey || event.altKey)) return false;
  // Ctrl+Shift+C opens the command palette; alone it copies.
  if (event.shiftKey && !event.altKey && ["c", "x"].includes(event.key.toLowerCase())) return true;
  return !ACT_ON_CELLS.has(event.key.toLowerCase());
}

/** Give the keyboard away at a press outside of our views. JupyterLab prevents that where the cell's prompt is pressed,
 * which selects the cell: its keys, "move the cell down" for one, would go on to the view, which stops them.
 * @param {Element} root @param {AbortSignal} signal */
function leaveAtPressOutside(root, signal) {
  const leave = (event) => {
    if (root.contains(document.activeElement) && !event.target.closest?.(".ss-root")) document.activeElement.blur();
  };
  document.addEventListener("mousedown", leave, { capture: true, signal });
}

/** Keep keys that are pressed inside of `root` from JupyterLab, whose command mode deletes, cuts and converts the cell.
 *
 * Lumino matches its shortcuts on the document, the focused element first, so that `lmSuppressShortcuts` on an ancestor
 * helps only where nothing matches `:focus`. It listens while the event bubbles: stopping it here is enough.
 * @param {Element} root @param {AbortSignal} signal */
function guardKeys(root, signal) {
  // ipywidgets' text boxes stop every key, Ctrl+S as well, which would open the browser's dialog to save the page.
  const letPass = (event) => {
    if (isForThePage(event) && event.target.closest?.(".widget-text, .widget-textarea")) event.stopPropagation = () => {};
  };
  root.addEventListener("keydown", letPass, { capture: true, signal });
  root.addEventListener("keydown", (event) => isForThePage(event) || event.stopPropagation(), { signal });
  leaveAtPressOutside(root, signal);
}

/** As `guardKeys`, for a widget that usually stands in a view, which has a guard of its own and may listen for keys.
 * @param {Element} el @param {AbortSignal} signal */
function guardKeysAlone(el, signal) {
  const guard = (event) => el.closest(".ss-root") || isForThePage(event) || event.stopPropagation();
  el.addEventListener("keydown", guard, { signal });
}
