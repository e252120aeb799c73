// What the views need of the page itself; each function says why.

/** A click into the box of models shows them all: browsers offer only what contains the words in the box, which
 * is the model that is already there. Leaving the box without a word brings that back.
 * @param {Element} root @param {AbortSignal} signal */
function offerAll(root, signal) {
  let before = "";
  const isList = (target) => target instanceof HTMLInputElement && target.hasAttribute("list");
  const listen = (name, listener) =>
    root.addEventListener(name, (event) => isList(event.target) && listener(event), { capture: true, signal });
  listen("pointerdown", ({ target }) => {
    if (target.value === "" || target === document.activeElement) return;
    before = target.placeholder = target.value;
    target.value = "";
  });
  const restore = (event) => {
    if (before === "" || event.target.value !== "") return;
    event.target.value = before;
    before = "";
    // Nothing was chosen: the kernel need not hear of an empty box.
    if (event.type === "change") event.stopPropagation();
  };
  listen("change", restore);
  listen("blur", restore);
}

/** Let Enter report a change once. ipywidgets tells the kernel "submit" first, for which only a path waits whose file
 * is read again (controls.read_again), and the kernel answers messages one by one: the change itself would come a fifth
 * of the whole wait later.
 * @param {Element} root @param {AbortSignal} signal */
function reportOnce(root, signal) {
  const keepFromIpywidgets = (event) => {
    if (event.key !== "Enter" || !(event.target instanceof HTMLInputElement)) return;
    if (!event.target.closest(".ss-reads-again")) event.stopPropagation();
  };
  root.addEventListener("keypress", keepFromIpywidgets, { capture: true, signal });
}

/** Bring the top of the view into sight if it is above: what a button further down started is seen there.
 * @param {Element} root */
function show(root) {
  const scroller = root.closest(".jp-WindowedPanel-outer");
  const edge = scroller ? scroller.getBoundingClientRect().top : 0;
  if (root.getBoundingClientRect().top < edge) root.scrollIntoView({ block: "start" });
}

function render({ model, el }) {
  // It has nothing to see, but what is hidden is not said.
  el.classList.add("ss-off-screen");
  const ended = new AbortController();
  let root = null;
  let width = 0;
  let telling;
  const observer = new ResizeObserver(() => {
    const now = root.clientWidth;
    if (now !== width) {
      width = now;
      clearTimeout(telling);
      if (model.get("measures") && now > 0) telling = setTimeout(tell, 150);
    }
  });
  // Once the dragging of an edge has ended; behind a tab there is no width.
  const tell = () => {
    model.set("width", width);
    model.save_changes();
  };
  // A view may be rendered long before it is attached: under a tab, in a cell that is scrolled to later.
  let frame = requestAnimationFrame(function find() {
    root = el.closest(".ss-root");
    if (!root || !el.isConnected) {
      frame = requestAnimationFrame(find);
      return;
    }
    observer.observe(root);
    offerAll(root, ended.signal);
    reportOnce(root, ended.signal);
    guardKeys(root, ended.signal);
    rove(root, ended.signal);
    // Once for a view and the views in it: a result would be said twice.
    if (root.parentElement?.closest(".ss-root")) return;
    describeControls(root, ended.signal);
    keepFocus(root, ended.signal);
    sayChanges(root, el, ended.signal);
  });
  const onMessage = (message) => {
    if (message === "show") root && show(root);
    else if (message.picture) savePicture(model.widget_manager, message.of, message.picture);
  };
  model.on("msg:custom", onMessage);
  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
    clearTimeout(telling);
    ended.abort();
    model.off("msg:custom", onMessage);
  };
}
export default { render };
