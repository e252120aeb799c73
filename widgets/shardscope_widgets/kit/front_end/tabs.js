// The row of tabs: arrow keys move between them, and a number can stand beside a name. Where the row is too
// narrow it scrolls, with an arrow at each end that has more tabs.

const ARROW_PIXELS = 26;

/** Return whether the user has asked the system for less motion. */
const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** The arrow at one end; the keyboard needs none, because the arrow keys reach every tab. */
function createScroller(direction) {
  const scroller = document.createElement("span");
  scroller.className = `ss-tabs-scroll ss-tabs-${direction}`;
  scroller.setAttribute("aria-hidden", "true");
  scroller.dataset.direction = direction;
  return scroller;
}

function render({ model, el }) {
  const ended = new AbortController();
  el.setAttribute("role", "tablist");
  const [before, after] = [createScroller("before"), createScroller("after")];
  const showScrollers = () => {
    const left = el.scrollWidth - el.clientWidth - el.scrollLeft;
    before.classList.toggle("ss-on", el.scrollLeft > 1);
    after.classList.toggle("ss-on", left > 1);
  };
  const showChosen = () => {
    // Not scrollIntoView(), which would scroll the notebook as well.
    const tab = el.querySelector("[aria-selected=true]");
    if (!tab) return;
    const [row, place] = [el.getBoundingClientRect(), tab.getBoundingClientRect()];
    if (place.left < row.left + ARROW_PIXELS) el.scrollLeft -= row.left + ARROW_PIXELS - place.left;
    else if (place.right > row.right - ARROW_PIXELS) el.scrollLeft += place.right - row.right + ARROW_PIXELS;
    showScrollers();
  };
  // The page below the tabs, which belongs to the chosen one; it is attached after them.
  const namePanel = () => {
    const panel = el.nextElementSibling;
    if (!panel?.matches(".widget-box")) return;
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-label", model.get("value"));
  };
  const draw = () => {
    const chosen = model.get("value");
    const badges = model.get("badges");
    // Drawing anew removes the focused tab: the keyboard goes on from the chosen one.
    const had = el.contains(document.activeElement);
    const { scrollLeft } = el;
    el.replaceChildren(
      before,
      ...model.get("names").map((name) => {
        const tab = document.createElement("button");
        tab.type = "button";
        tab.dataset.name = name;
        tab.setAttribute("role", "tab");
        tab.setAttribute("aria-selected", String(name === chosen));
        // One stop for the Tab key; the arrow keys move inside (ARIA's pattern for tabs).
        tab.tabIndex = name === chosen ? 0 : -1;
        tab.append(name);
        const [count, words, severity] = badges[name] ?? [];
        if (count) {
          const badge = document.createElement("sup");
          badge.className = `ss-is-${severity}`;
          badge.textContent = count;
          badge.setAttribute("aria-label", words);
          tab.title = words;
          tab.append(badge);
        }
        return tab;
      }),
      after,
    );
    el.scrollLeft = scrollLeft;
    // The kernel refused the last request, such as a tab that does not exist.
    const error = model.get("error");
    if (error) {
      const said = document.createElement("span");
      said.className = "ss-error";
      said.setAttribute("role", "alert");
      said.textContent = error;
      el.append(said);
    }
    if (had) el.querySelector("[aria-selected=true]")?.focus({ preventScroll: true });
    showChosen();
    namePanel();
  };
  const choose = (name) => {
    model.set("value", name);
    model.save_changes();
  };
  const listen = (event, listener) => el.addEventListener(event, listener, { signal: ended.signal });
  listen("scroll", showScrollers);
  const resizes = new ResizeObserver(() => {
    showChosen();
    namePanel();
  });
  resizes.observe(el);
  listen("click", ({ target }) => {
    const { direction } = target.dataset;
    if (direction) el.scrollBy({ left: (direction === "after" ? 0.7 : -0.7) * el.clientWidth, behavior: isCalm() ? "auto" : "smooth" });
    const tab = target.closest("button");
    if (tab) choose(tab.dataset.name);
  });
  listen("keydown", (event) => {
    const names = model.get("names");
    const here = names.indexOf(model.get("value"));
    const there = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: names.length - 1 }[event.key];
    if (there === undefined) return;
    // Home and End would scroll the page as well.
    event.preventDefault();
    choose(names[(there + names.length) % names.length]);
  });
  guardKeysAlone(el, ended.signal);
  model.on("change:value change:names change:badges change:error", draw);
  draw();
  return () => {
    ended.abort();
    resizes.disconnect();
    model.off("change:value change:names change:badges change:error", draw);
  };
}
export default { render };
