// Where the keyboard goes when what had it is gone: a pressed button that is then hidden, disabled or written anew. Browsers
// give it to the page's body: Tab may go on outside of the view, and a screen reader starts over at the top of the page.

const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex]";

/** Return what a reader knows an element by. @param {Element} one */
function nameOf(one) {
  return one.getAttribute("aria-label") || one.textContent.trim() || one.title;
}

/** Return whether `other` is `one` written anew. Buttons of several rows may be called "Apply": then it is the one that does the
 * same. A name of its own also counts where the act is only a number, which changes with the order of the rows.
 * @param {HTMLElement} other @param {HTMLElement} one @param {string} name the name that `one` had */
function isSame(other, one, name) {
  if (other.localName !== one.localName || nameOf(other) !== name) return false;
  const { act } = one.dataset;
  return other.dataset.act === act || (one.hasAttribute("aria-label") && /^(\w+:)?\d+$/.test(act));
}

/** @param {HTMLElement} one */
function canHaveFocus(one) {
  return one.isConnected && !one.disabled && one.checkVisibility();
}

/** Keep the keyboard in `root`: at the element of the same name if there is one, such as "Next" of the next page, or else in
 * the nearest box that still has something to press, where Tab goes on. Not at the next button: Enter, still held down,
 * would press it.
 * @param {Element} root @param {AbortSignal} signal */
function keepFocus(root, signal) {
  /** @type {{one: HTMLElement, name: string, boxes: HTMLElement[]} | null} */
  let last = null;
  let frame = 0;
  const check = () => {
    frame = 0;
    const { activeElement } = document;
    if (!last) return;
    const { one, name, boxes } = last;
    if (canHaveFocus(one)) {
      // The user has left it, by a click beside all controls for one.
      if (!root.contains(activeElement)) last = null;
      return;
    }
    last = null;
    // Whoever took the keyboard since keeps it.
    if (activeElement !== document.body && activeElement !== one) return;
    const stopsIn = (box) => [...box.querySelectorAll(FOCUSABLE)].filter(canHaveFocus);
    const box = boxes.find((each) => canHaveFocus(each) && stopsIn(each).length);
    if (!box) return;
    const same = stopsIn(box).find((other) => isSame(other, one, name));
    if (!same && !box.hasAttribute("tabindex")) {
      box.tabIndex = -1;
      box.addEventListener("blur", () => box.removeAttribute("tabindex"), { once: true });
    }
    (same ?? box).focus({ preventScroll: true });
  };
  const ask = () => {
    if (last) frame ||= requestAnimationFrame(check);
  };
  root.addEventListener("focusin", ({ target }) => {
    const boxes = [];
    for (let box = target.parentElement; box && root.contains(box); box = box.parentElement) boxes.push(box);
    last = { one: target, name: nameOf(target), boxes };
  }, { signal });
  root.addEventListener("focusout", ask, { signal });
  const observer = new MutationObserver(ask);
  const attributeFilter = ["class", "style", "disabled", "hidden"];
  observer.observe(root, { childList: true, subtree: true, attributes: true, attributeFilter });
  signal.addEventListener("abort", () => {
    observer.disconnect();
    cancelAnimationFrame(frame);
  });
}
