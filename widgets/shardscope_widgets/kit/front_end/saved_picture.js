// The picture of a view in a saved notebook, for readers without a kernel.

/** Put the picture of the view's last state into the saved output that holds the one before. JupyterLab does so by
 * itself until the page is loaded anew or the cell is moved; elsewhere there is no such model, and nothing to do.
 * @param {any} manager @param {string} name class of the picture @param {string} html */
function savePicture(manager, name, html) {
  for (const cell of manager?.context?.model?.cells ?? []) {
    for (let at = 0; at < (cell.outputs?.length ?? 0); at++) {
      const output = cell.outputs.get(at).toJSON();
      const saved = [output.data?.["text/html"] ?? ""].flat().join("");
      if (!saved.includes(name) || saved === html) continue;
      cell.outputs.set(at, { ...output, data: { ...output.data, "text/html": html } });
    }
  }
}
