// Keys pressed inside the view stay inside it.

/** Keep keys from JupyterLab, whose command mode would take D D for "delete this cell" and M for "make it Markdown".
 * `lmSuppressShortcuts` does not do it: Lumino matches the focused element first, and would withhold Ctrl+S too.
 * @param {Element} root @param {AbortSignal} signal */
function guardKeys(root, signal) {
  const guard = (/** @type {KeyboardEvent} */ event) => {
    const isSave = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "s";
    if (event.key !== "Escape" && event.key !== "Tab" && !isSave) event.stopPropagation();
  };
  root.addEventListener("keydown", /** @type {EventListener} */ (guard), { signal });
}
