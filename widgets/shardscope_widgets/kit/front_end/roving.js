// One Tab stop for a group of buttons; arrow keys, Home and End move inside. A group is an `.ss-seg` (the segments of
// controls.py) or any element with `data-roving` in the HTML of a Clickable: `<div data-roving role='group'>`.

const GROUPS = ".ss-seg, [data-roving]";
// Not rows: each that can be pressed has a button in it, and the keyboard would stop twice.
const STOPS = "button:not(:disabled), summary, a[href], [role=button]";
const CHOSEN = ".mod-active, [aria-pressed=true], [aria-current=true], [aria-selected=true]";

/** Return what can be focused in `group`, but not in a group inside of it. @param {Element} group */
function stopsOf(group) {
  return [...group.querySelectorAll(STOPS)].filter((one) => one.closest(GROUPS) === group && one.checkVisibility());
}

/** Let Tab stop once in `group`: where the keyboard is, else at what is chosen, else at the first.
 * @param {Element} group */
function settle(group) {
  const stops = stopsOf(group);
  const focused = stops.find((one) => one === document.activeElement);
  const stop = focused ?? stops.find((one) => one.matches(CHOSEN)) ?? stops[0];
  for (const one of stops) {
    const index = one === stop ? 0 : -1;
    if (one.tabIndex !== index || !one.hasAttribute("tabindex")) one.tabIndex = index;
  }
}

/** Keep every group in `root` at one Tab stop while its content comes and goes.
 * @param {Element} root @param {AbortSignal} signal */
function rove(root, signal) {
  let frame = 0;
  const settleAll = () => {
    frame = 0;
    for (const group of root.querySelectorAll(GROUPS)) settle(group);
  };
  const ask = () => {
    frame ||= requestAnimationFrame(settleAll);
  };
  const observer = new MutationObserver(ask);
  observer.observe(root, { childList: true, subtree: true, attributes: true, attributeFilter: ["class", "disabled"] });
  root.addEventListener("focusin", ({ target }) => {
    const group = target.closest(GROUPS);
    if (group && root.contains(group)) settle(group);
  }, { signal });
  root.addEventListener("keydown", (event) => {
    const group = event.target.closest(GROUPS);
    if (!group || event.target.matches("input, select, textarea")) return;
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const stops = stopsOf(group);
    const here = stops.indexOf(event.target);
    const there = {
      ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: stops.length - 1,
    }[event.key];
    if (here < 0 || there === undefined) return;
    event.preventDefault();
    stops[(there + stops.length) % stops.length].focus();
  }, { signal });
  signal.addEventListener("abort", () => {
    observer.disconnect();
    cancelAnimationFrame(frame);
  });
  ask();
}
