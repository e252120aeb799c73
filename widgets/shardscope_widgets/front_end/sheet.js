// plotly measures its place once, and afterwards only when the window changes: not when JupyterLab's side bar
// opens, a tab is shown, or the stylesheet arrives. So a change of the view's own width tells it to look again.
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
