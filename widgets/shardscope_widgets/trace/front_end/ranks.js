// Rank headers are buttons, so that folding works from the keyboard.

/** @param {View} view */
function addRankButtons(view) {
  const { stage, gutter } = view.page;
  view.rankButtons = view.scene.ranks.map((rank) => {
    const button = element("button", "ss-trace-rank", `rank ${rank}`);
    listen(view, button, "click", () => foldOrUnfold(view, rank));
    listen(view, button, "focus", () => {
      stage.scrollTop = gutter.scrollTop = 0; // the browser scrolls to what it focuses; the canvas would not follow
      const top = view.places.headers.find((header) => header.rank === rank)?.top ?? 0;
      const isHidden = top < view.scroll || top + HEADER > view.scroll + view.height - RULER;
      if (isHidden) scrollRowsTo(view, top);
    });
    gutter.append(button);
    return button;
  });
}

/** @param {View} view @param {number} rank */
function foldOrUnfold(view, rank) {
  if (!view.folded.delete(rank)) view.folded.add(rank);
  rearrange(view);
}

/** @param {View} view */
function rearrange(view) {
  view.places = arrange(view.scene, view.folded);
  view.places.headers.forEach(({ rank }, i) =>
    view.rankButtons[i].setAttribute("aria-expanded", String(!view.folded.has(rank))),
  );
  view.hover = null;
  scrollRowsTo(view, view.scroll);
}

/** The unfolded rank whose header is at `y` of the canvas. @param {View} view @param {number} y */
function headerAt(view, y) {
  if (y <= RULER) return undefined;
  const top = y - RULER + view.scroll;
  return view.places.headers.find(
    (header) => !view.folded.has(header.rank) && top >= header.top && top < header.top + HEADER,
  );
}
