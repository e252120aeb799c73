// The search box: its requests, and the count of matches beside it.

/** @param {View} view */
function showMatchCount({ model, scene, page, matchNumber }) {
  const matches = model.get("num_matches");
  for (const button of [page.previous, page.next]) /** @type {HTMLButtonElement} */ (button).disabled = !matches;
  let text = counted(scene.num_slices, "slice");
  if (matchNumber) text = `match ${matchNumber.toLocaleString("en")} of ${matches.toLocaleString("en")}`;
  else if (model.get("search").trim()) text = `${matches.toLocaleString("en")} of ${text}`;
  page.count.textContent = page.count.title = text; // the title, where a narrow page has no room for all of it
}

/** @param {View} view */
function sendSearch(view) {
  const { model, page } = view;
  clearTimeout(view.searchTimer);
  if (page.search.value === model.get("search")) return;
  model.set("search", page.search.value);
  model.save_changes();
}

/** @param {View} view */
function followSearchBox(view) {
  const { search, canvas } = view.page;
  search.value = view.model.get("search");
  listen(view, search, "input", () => {
    clearTimeout(view.searchTimer);
    view.searchTimer = setTimeout(() => sendSearch(view), SETTLE_MS);
  });
  listen(view, view.page.next, "click", () => askForMatch(view, 1));
  listen(view, view.page.previous, "click", () => askForMatch(view, -1));
  listen(view, search, "keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter") {
      sendSearch(view);
      askForMatch(view, event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      search.value = "";
      sendSearch(view);
      canvas.focus();
    }
  });
}
