// Ranks and Python stacks fold. Their headers are buttons, so that folding works from the keyboard.

/** @param {View} view */
function addFoldButtons(view) {
  const { gutter } = view.page;
  view.rankButtons = view.scene.ranks.map((rank) => {
    const button = element("button", "ss-trace-rank", `rank ${rank}`);
    listen(view, button, "click", () => foldOrUnfold(view, view.folded, rank));
    revealOnFocus(view, button, () => view.places.headers.find((header) => header.rank === rank)?.top ?? 0);
    return button;
  });
  view.stackButtons = new Map(
    view.scene.tracks
      .filter((track) => track.kind === "python")
      .map((track) => {
        const button = element("button", "ss-trace-stack");
        listen(view, button, "click", () => foldOrUnfold(view, view.shownStacks, track.first_row));
        revealOnFocus(view, button, () => view.places.stacks.find((stack) => stack.track === track)?.top ?? 0);
        return [track.first_row, button];
      }),
  );
  // In the order in which they stand, which is that of the Tab key.
  view.scene.ranks.forEach((rank, i) => {
    const stacks = view.scene.tracks.filter((track) => track.rank === rank && track.kind === "python");
    gutter.append(view.rankButtons[i], ...stacks.map((track) => view.stackButtons.get(track.first_row) ?? ""));
  });
}

/** Scroll a button into view when the Tab key reaches it.
 * @param {View} view @param {HTMLElement} button @param {() => number} findTop */
function revealOnFocus(view, button, findTop) {
  const { stage, gutter } = view.page;
  listen(view, button, "focus", () => {
    stage.scrollTop = gutter.scrollTop = 0; // the browser scrolls to what it focuses; the canvas would not follow
    const top = findTop();
    const isHidden = top < view.scroll + view.sticky || top + HEADER > view.scroll + view.height - RULER;
    if (isHidden) scrollRowsTo(view, top - view.sticky);
  });
}

/** @param {View} view @param {Set<number>} set @param {number} key */
function foldOrUnfold(view, set, key) {
  if (!set.delete(key)) set.add(key);
  rearrange(view);
}

/** Unfold the rank and the Python stacks that have `row`, for a slice that is to be shown.
 * @param {View} view @param {number} row */
function unfoldRow(view, row) {
  const track = view.scene.tracks.find((one) => row >= one.first_row && row < one.first_row + one.num_rows);
  if (!track) return;
  const isHidden = track.kind === "python" && !view.shownStacks.has(track.first_row);
  if (!isHidden && !view.folded.has(track.rank)) return;
  if (isHidden) view.shownStacks.add(track.first_row);
  view.folded.delete(track.rank);
  rearrange(view);
}

/** @param {View} view */
function rearrange(view) {
  view.places = arrange(view.scene, view.folded, view.shownStacks, view.isNarrow, view.order, view.pinned);
  // Pinned tracks that would leave too little for others scroll as well.
  const { pinnedHeight } = view.places;
  view.sticky = pinnedHeight <= 0.6 * (view.height - RULER) ? pinnedHeight : 0;
  view.page.gutter.style.top = `${RULER + view.sticky}px`;
  view.places.headers.forEach(({ rank }, i) =>
    view.rankButtons[i].setAttribute("aria-expanded", String(!view.folded.has(rank))),
  );
  for (const { track, isShown, hasOperators } of view.places.stacks) {
    const button = view.stackButtons.get(track.first_row);
    if (!button) continue;
    const whose = hasOperators ? "Python stacks" : track.name; // under the thread's own name there is no need for it
    const rest = `, ${counted(track.num_rows, "row")}: ${isShown ? "hide" : "show"}`;
    button.textContent = whose + rest;
    button.setAttribute("aria-label", `${track.name} of rank ${track.rank}${rest}`);
    button.setAttribute("aria-expanded", String(isShown));
    button.hidden = view.folded.has(track.rank);
  }
  view.hover = null;
  fitStage(view);
  scrollRowsTo(view, view.scroll);
}

/** The unfolded rank whose header is at `y` of the canvas. @param {View} view @param {number} y */
function headerAt(view, y) {
  if (y <= RULER) return undefined;
  const top = contentAt(view, y);
  return view.places.headers.find(
    (header) => top >= view.sticky && !view.folded.has(header.rank) && top >= header.top && top < header.top + HEADER,
  );
}
