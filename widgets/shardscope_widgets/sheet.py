"""The stylesheet as a widget of its own, which also keeps charts as wide as their place."""

from __future__ import annotations

import anywidget

from shardscope_widgets.theme import STYLE

# plotly measures its place once, and afterwards only when the window changes: not when JupyterLab's side bar
# opens, a tab is shown, or this stylesheet arrives. So a change of the view's own width tells it to look again.
_FOLLOW_WIDTH = """
function render({ el }) {
  el.style.display = "none";
  let root = null;
  let width = 0;
  const observer = new ResizeObserver(() => {
    const now = root.clientWidth;
    if (now !== width) {
      width = now;
      window.dispatchEvent(new Event("resize"));
    }
  });
  const frame = requestAnimationFrame(() => {
    root = el.closest(".ss-root");
    if (root) observer.observe(root);
    setTimeout(() => window.dispatchEvent(new Event("resize")), 300);
  });
  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
  };
}
export default { render };
"""


class Sheet(anywidget.AnyWidget):
    """Put one inside each view that carries the class ``ss-root``."""

    _esm = _FOLLOW_WIDTH
    _css = STYLE
