// The view itself: puts the parts together, follows the model, and takes everything down again.

/** @param {View} view @returns {() => void} stops following */
function followModel(view) {
  const { model, page } = view;
  const handlers = /** @type {Record<string, any>} */ ({
    "msg:custom": (/** @type {any} */ message, /** @type {DataView[]} */ buffers) =>
      REPLIES[message?.type]?.(view, message, buffers),
    "change:selected": () => {
      view.isAreaShown = view.isAreaShown && !model.get("selected");
      showDetails(view);
      if (view.isToBeRevealed && model.get("selected")) revealSlice(view, model.get("selected"));
      view.isToBeRevealed = false;
      if (!view.pending.find) view.matchNumber = 0; // another slice than the match
      showMatchCount(view);
      scheduleDraw(view);
    },
    "change:search": () => {
      if (document.activeElement !== page.search) page.search.value = model.get("search");
      view.matchNumber = 0;
      view.pending.find = 0; // a reply to it would be about the search before
      showMatchCount(view);
      scheduleDraw(view);
    },
    "change:num_matches": () => {
      showMatchCount(view);
      scheduleDraw(view);
    },
    "change:viewport_seconds": () => followStretch(view),
    "change:_revealed": () => revealTrack(view, model.get("_revealed")),
    "change:_path_number": () => scheduleDraw(view),
    "change:error": () => {
      page.error.textContent = model.get("error");
      setDownloading(view, false);
      stopPerfetto(view);
    },
    "change:height": () => fitStage(view),
  });
  for (const [event, handler] of Object.entries(handlers)) model.on(event, handler);
  return () => {
    for (const [event, handler] of Object.entries(handlers)) model.off(event, handler);
  };
}

/** @param {{model: any, el: HTMLElement}} context */
function render({ model, el }) {
  const scene = /** @type {Scene} */ (model.get("_scene"));
  const root = element("div", "ss-trace");
  const page = buildPage(root, scene);
  page.gutter.style.top = `${RULER}px`;
  el.append(root);

  const view = openView(model, root, scene, page);
  guardKeys(root, view.closing.signal);
  addFoldButtons(view);
  addHelp(view);
  followPointer(view);
  followKeys(view);
  followSearchBox(view);
  listen(view, page.fit, "click", () => showAll(view));
  listen(view, page.download, "click", () => askForDownload(view));
  listen(view, page.perfetto, "click", () => openInPerfetto(view));
  listen(view, page.totals, "toggle", () => askForTotals(view));
  const unfollow = [followModel(view), followSize(view), followTheme(view)];

  rearrange(view);
  revealTrack(view, model.get("_revealed") ?? {});
  showMatchCount(view);
  showDetails(view);
  page.error.textContent = model.get("error");

  return () => {
    view.closing.abort();
    cancelAnimationFrame(view.frame);
    clearTimeout(view.settleTimer);
    clearTimeout(view.searchTimer);
    clearTimeout(view.areaTimer);
    clearTimeout(view.waitTimer);
    stopPerfetto(view);
    for (const stop of unfollow) stop();
  };
}

export default { render };
