// The lines of a log that grows. The pane follows the end while the reader is there. A reader who has scrolled up or
// selects text keeps the lines in sight, and a button offers the new ones.

/** Distance that still counts as the end. */
const SLACK_PIXELS = 24;

function render({ model, el }) {
  const pane = document.createElement("div");
  const follow = document.createElement("button");
  el.classList.add("ss-log-pane");
  pane.className = "ss-log";
  pane.tabIndex = 0;
  pane.setAttribute("role", "region");
  follow.type = "button";
  follow.className = "ss-act ss-follow";
  follow.textContent = model.get("follow_label");
  follow.hidden = true;
  el.append(pane, follow);

  let following = true;
  let key = null;
  let shown = null;
  const toEnd = () => { pane.scrollTop = pane.scrollHeight; };
  const isAtEnd = () => pane.scrollHeight - pane.scrollTop - pane.clientHeight < SLACK_PIXELS;
  const isMarking = () => {
    const selection = getSelection();
    return selection && !selection.isCollapsed && pane.contains(selection.anchorNode);
  };

  function draw(asked) {
    pane.setAttribute("aria-label", model.get("name"));
    const isOther = model.get("key") !== key;
    if (model.get("value") === shown && !isOther) return;
    if (!asked && !isOther && (!following || isMarking())) {
      follow.hidden = false;
      return;
    }
    key = model.get("key");
    shown = model.get("value");
    pane.innerHTML = shown;
    follow.hidden = true;
    following = true;
    toEnd();
  }

  const ended = new AbortController();
  const { signal } = ended;
  // The keys scroll here; JupyterLab would move through the notebook's cells, or delete one.
  guardKeysAlone(el, signal);
  pane.addEventListener("scroll", () => {
    following = isAtEnd();
    if (following && !isMarking()) draw(false);
  }, { signal });
  follow.addEventListener("click", () => {
    getSelection()?.removeAllRanges();
    draw(true);
    following = true;
    toEnd();
    pane.focus();
  }, { signal });
  // Behind a tab the pane has no height and loses its scroll position.
  const observer = new ResizeObserver(() => following && toEnd());
  observer.observe(pane);
  const onChange = () => draw(false);
  // Chromium restores the scroll position of a box that was hidden: another run begins at its top.
  const onRun = () => el.closest(".ss-run-body")?.scrollTo(0, 0);
  model.on("change:num_runs", onRun);
  model.on("change:value", onChange);
  model.on("change:key", onChange);
  draw(true);
  return () => {
    ended.abort();
    observer.disconnect();
    model.off("change:value", onChange);
    model.off("change:key", onChange);
    model.off("change:num_runs", onRun);
  };
}
export default { render };
