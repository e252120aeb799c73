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

/** Let Enter report a change once. ipywidgets tells the kernel "submit" first, which nobody here waits for, and the
 * kernel answers messages one by one: the change itself would come a fifth of the whole wait later.
 * @param {Element} root @param {AbortSignal} signal */
function reportOnce(root, signal) {
  const keepFromIpywidgets = (event) => {
    if (event.key === "Enter" && event.target instanceof HTMLInputElement) event.stopPropagation();
  };
  root.addEventListener("keypress", keepFromIpywidgets, { capture: true, signal });
}

/** Name inputs for screen readers. ipywidgets gives them a title only, which is no label: not all screen readers say it, and
 * voice control finds an input by the words that are seen beside it.
 * @param {Element} root @param {AbortSignal} signal */
function nameInputs(root, signal) {
  const name = (input) => {
    // ipywidgets' own label is empty unless there is a description.
    const isLabelled = [...(input.labels ?? [])].some((label) => label.textContent.trim());
    if (!input.title || isLabelled) return;
    const seen = input.closest(".ss-row")?.querySelector(".widget-label")?.textContent.trim() ?? "";
    const isSaid = input.title.toLowerCase().includes(seen.toLowerCase());
    const label = isSaid ? input.title : `${seen}: ${input.title}`;
    if (input.getAttribute("aria-label") !== label) input.setAttribute("aria-label", label);
  };
  const nameAll = (element) => element.querySelectorAll("input, select, textarea").forEach(name);
  const isInput = (element) => element.matches("input, select, textarea");
  const observer = new MutationObserver((records) => {
    for (const { type, target, addedNodes } of records) {
      if (type === "attributes") isInput(target) && name(target);
      else for (const node of addedNodes) node instanceof Element && (isInput(node) ? name(node) : nameAll(node));
    }
  });
  nameAll(root);
  observer.observe(root, { subtree: true, childList: true, attributes: true, attributeFilter: ["title"] });
  signal.addEventListener("abort", () => observer.disconnect());
}

/** Bring the top of the view into sight if it is above: what a button further down started is seen there.
 * @param {Element} root */
function show(root) {
  const scroller = root.closest(".jp-WindowedPanel-outer");
  const edge = scroller ? scroller.getBoundingClientRect().top : 0;
  if (root.getBoundingClientRect().top < edge) root.scrollIntoView({ block: "start" });
}

function render({ model, el }) {
  el.style.display = "none";
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
    if (!root) {
      frame = requestAnimationFrame(find);
      return;
    }
    observer.observe(root);
    offerAll(root, ended.signal);
    reportOnce(root, ended.signal);
    nameInputs(root, ended.signal);
    guardKeys(root, ended.signal);
    rove(root, ended.signal);
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
