// What a screen reader says by itself: results that appear while the keyboard is elsewhere.

/** Time for which a text must stay the same: each digit of a number that is being typed makes another plan. */
const SETTLED_MS = 700;

/** Return the text of an element without its signs. @param {Element} one */
function spokenText(one) {
  const copy = one.cloneNode(true);
  for (const sign of copy.querySelectorAll("[aria-hidden=true]")) sign.remove();
  return copy.textContent.trim().replace(/\s+/g, " ");
}

/** Say the text of an element with `data-said` when it has changed, and then stayed the same for a moment.
 *
 * Python writes such elements anew, and screen readers do not say what a new live region has in it: `place` is one that
 * stays. Elements with the same `data-said` are the same one. What is there at first is not said.
 * @param {Element} root @param {HTMLElement} place @param {AbortSignal} signal */
function sayChanges(root, place, signal) {
  const said = new Map();
  let pending = new Map();
  let timer = 0;
  const read = () => new Map(
    [...root.querySelectorAll("[data-said]")]
      .filter((each) => each.checkVisibility())
      .map((each) => [each.dataset.said, spokenText(each)]),
  );
  const check = () => {
    timer = 0;
    const now = read();
    // What was removed and comes back with the same text is news: the same work has ended again.
    for (const key of said.keys()) {
      if (!root.querySelector(`[data-said="${CSS.escape(key)}"]`)) said.delete(key);
    }
    const settled = [...now].filter(([key, text]) => said.get(key) !== text && pending.get(key) === text);
    pending = new Map([...now].filter(([key, text]) => said.get(key) !== text && pending.get(key) !== text));
    for (const [key, text] of settled) said.set(key, text);
    const news = settled.map(([, text]) => text).filter(Boolean);
    if (news.length) place.textContent = news.join(". ");
    if (pending.size) ask();
  };
  const ask = () => {
    timer ||= setTimeout(check, SETTLED_MS);
  };
  place.setAttribute("role", "status");
  for (const [key, text] of read()) said.set(key, text);
  const observer = new MutationObserver(ask);
  observer.observe(root, { childList: true, subtree: true, characterData: true });
  signal.addEventListener("abort", () => {
    observer.disconnect();
    clearTimeout(timer);
  });
}
