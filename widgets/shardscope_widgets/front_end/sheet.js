// plotly measures its place once, and afterwards only when the window changes: not when JupyterLab's side bar
// opens, a tab is shown, or the stylesheet arrives. So a change of the view's own width tells it to look again.
/** Let every chart in `root` take the width of its place. @param {Element} root */
function refit(root) {
  for (const chart of root.querySelectorAll(".js-plotly-plot")) {
    // A width that an earlier fit left behind counts as chosen, and a chosen one is never changed (Plots.resize).
    if (chart.layout) delete chart.layout.width;
  }
  window.dispatchEvent(new Event("resize"));
}

function render({ el }) {
  el.style.display = "none";
  let root = null;
  let width = 0;
  const observer = new ResizeObserver(() => {
    const now = root.clientWidth;
    if (now !== width) {
      width = now;
      refit(root);
    }
  });
  const frame = requestAnimationFrame(() => {
    root = el.closest(".ss-root");
    if (root) observer.observe(root);
    setTimeout(() => root && refit(root), 300);
  });
  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
  };
}
export default { render };
