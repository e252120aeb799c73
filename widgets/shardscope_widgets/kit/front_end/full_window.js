// A view over the whole window. JupyterLab's cells are inside of elements with `contain` and transforms, in which
// `position: fixed` is no longer about the window; what is in the browser's top layer (a popover) still is, and it
// stays where it is in the document, so that its widgets are not attached anew.

const ICON = {
  false: "M2 6V2h4 M10 2h4v4 M14 10v4h-4 M6 14H2v-4",
  true: "M6 2v4H2 M14 6h-4V2 M10 14v-4h4 M2 10h4v4",
};

function render({ el }) {
  const ended = new AbortController();
  const { signal } = ended;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "ss-icon-button";
  el.append(button);
  const root = () => el.closest(".ss-root");
  const isFull = () => root()?.matches(":popover-open") ?? false;
  const draw = () => {
    const full = isFull();
    const words = full ? "Back to the notebook" : "Full window";
    button.title = words;
    button.setAttribute("aria-label", words);
    button.setAttribute("aria-pressed", String(full));
    button.innerHTML = `<svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true"><path d="${ICON[full]}"
      fill="none" stroke="currentColor" stroke-width="1.5"/></svg>`;
  };
  const toggle = () => {
    const view = root();
    if (!view) return;
    if (isFull()) {
      view.hidePopover();
      view.removeAttribute("popover");
      view.scrollIntoView({ block: "nearest" });
    } else {
      view.setAttribute("popover", "manual");
      view.showPopover();
    }
    draw();
  };
  button.addEventListener("click", toggle, { signal });
  // Escape is JupyterLab's as well: here it only leaves the full window.
  document.addEventListener(
    "keydown",
    (event) => {
      if (event.key !== "Escape" || !isFull()) return;
      event.stopPropagation();
      toggle();
      button.focus();
    },
    { capture: true, signal },
  );
  draw();
  return () => ended.abort();
}
export default { render };
