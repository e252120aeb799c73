// The page around the view: its size and its theme.

/** @param {View} view @returns {() => void} stops following */
function followSize(view) {
  const { stage, canvas } = view.page;
  const observer = new ResizeObserver(() => {
    [view.width, view.height] = [stage.clientWidth, stage.clientHeight];
    view.gutterWidth = view.width < 560 ? NARROW_GUTTER : GUTTER;
    for (const button of view.rankButtons) button.style.width = `${view.gutterWidth}px`;
    const dpr = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.round(view.width * dpr), Math.round(view.height * dpr)];
    scrollRowsTo(view, view.scroll);
  });
  observer.observe(stage);
  return () => observer.disconnect();
}

/** @param {View} view @returns {() => void} stops following */
function followTheme(view) {
  const retheme = () => {
    view.theme = readTheme(view.root, view.ctx);
    scheduleDraw(view);
  };
  // JupyterLab sets the attribute before the theme's style sheet has loaded, hence the second look.
  const themeChanged = () => {
    retheme();
    setTimeout(retheme, 300);
  };
  const observer = new MutationObserver(themeChanged);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  listen(view, matchMedia("(prefers-color-scheme: dark)"), "change", themeChanged);
  return () => observer.disconnect();
}
