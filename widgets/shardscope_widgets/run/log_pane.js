// The lines of a log that keeps growing. It follows the end as long as the reader is there; who has scrolled up, or
// marks words, keeps what is in sight, and a button says that there is more.

/** Near enough to the end to be there. */
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
  follow.textContent = "New lines: follow the log";
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
  // Behind a tab it has no height, and forgets where it was.
  const observer = new ResizeObserver(() => following && toEnd());
  observer.observe(pane);
  const onChange = () => draw(false);
  model.on("change:value", onChange);
  model.on("change:key", onChange);
  draw(true);
  return () => {
    ended.abort();
    observer.disconnect();
    model.off("change:value", onChange);
    model.off("change:key", onChange);
  };
}
export default { render };
