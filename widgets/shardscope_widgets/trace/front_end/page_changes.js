// Changes of the page around the view: size, visibility and theme.

const LEAST_STAGE = 120; // room for a tooltip
const STAGE_BORDERS = 2;

/** @param {View} view */
function measure(view) {
  const { stage, canvas } = view.page;
  [view.width, view.height] = [stage.clientWidth, stage.clientHeight];
  view.dpr = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(view.width * view.dpr), Math.round(view.height * view.dpr)];
  const isNarrow = view.width < NARROW;
  view.gutterWidth = isNarrow ? NARROW_GUTTER : GUTTER;
  for (const button of view.rankButtons) button.style.width = `${view.gutterWidth}px`;
  if ((isNarrow !== view.isNarrow || view.pinned.length) && view.width > 0) {
    view.isNarrow = isNarrow;
    rearrange(view);
  }
  scrollRowsTo(view, view.scroll);
}

/** Make the stage as high as its content, up to the view's height, which the sheet of keys may need.
 * @param {View} view */
function fitStage(view) {
  const { page, model, places } = view;
  const most = model.get("height");
  const height = page.help.hidden ? Math.max(Math.min(RULER + places.height + STAGE_BORDERS, most), LEAST_STAGE) : most;
  if (page.stage.style.height === `${height}px`) return;
  page.stage.style.height = `${height}px`;
  // At once: whoever scrolls to a row next has to know the height.
  measure(view);
}

/** Read the theme again, for the next frame. @param {View} view */
function retheme(view) {
  view.theme = readTheme(view.root, view.ctx);
  view.textWidths.clear();
  scheduleDraw(view);
}

/** Follow the view's size, which is zero until the view is attached and its tab is shown.
 * @param {View} view @returns {() => void} stops following */
function followSize(view) {
  const onChange = () => {
    measure(view);
    retheme(view);
  };
  const size = new ResizeObserver(onChange);
  // A tab hidden with `content-visibility` keeps its size.
  const sight = new IntersectionObserver(() => retheme(view));
  size.observe(view.page.stage);
  sight.observe(view.page.stage);
  return () => {
    size.disconnect();
    sight.disconnect();
  };
}

/** @param {View} view @returns {() => void} stops following */
function followTheme(view) {
  const again = () => retheme(view);
  const observer = new MutationObserver(again);
  const options = { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class", "style"] };
  observer.observe(document.body, options);
  observer.observe(document.documentElement, options);
  // JupyterLab sets the attribute before the theme's style sheet has loaded.
  const onLoad = (/** @type {Event} */ event) => event.target instanceof HTMLLinkElement && again();
  listen(view, document, "load", onLoad, { capture: true });
  listen(view, matchMedia("(prefers-color-scheme: dark)"), "change", again);
  return () => observer.disconnect();
}
