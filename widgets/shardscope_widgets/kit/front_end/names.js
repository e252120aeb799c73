// Names and states of ipywidgets' controls for screen readers, which are only seen in what ipywidgets makes.

/** Name an input. ipywidgets gives it a title only, which is no label: not all screen readers say it, and voice control finds
 * an input by the words that are seen beside it. Say as well whether it is wrong, and why.
 * @param {HTMLInputElement | HTMLSelectElement | HTMLTextAreaElement} input */
function describeInput(input) {
  const row = input.closest(".ss-row");
  // ipywidgets' own label is empty unless there is a description.
  const isLabelled = [...(input.labels ?? [])].some((label) => label.textContent.trim());
  if (input.title && !isLabelled) {
    const seen = row?.querySelector(".widget-label")?.textContent.trim() ?? "";
    const isSaid = input.title.toLowerCase().includes(seen.toLowerCase());
    setAttribute(input, "aria-label", isSaid ? input.title : `${seen}: ${input.title}`);
  }
  // Where a row has several inputs, the wrong one is marked.
  const ownsRowError = !row?.querySelector(".ss-wrong") || Boolean(input.closest(".ss-wrong"));
  const error = ownsRowError ? row?.querySelector(":scope > .ss-error [role=alert]") : null;
  setAttribute(input, "aria-invalid", error ? "true" : null);
  // Beside its name: what is wrong is also said to whoever comes back to the input.
  setAttribute(input, "aria-description", error ? error.textContent : null);
}

/** Say which of the segments is chosen, and of what they are a choice. @param {Element} group */
function describeSegments(group) {
  const label = group.querySelector(":scope > .widget-label")?.title || group.closest(".ss-row")?.querySelector(".widget-label")?.textContent;
  setAttribute(group, "role", "group");
  setAttribute(group, "aria-label", label?.trim() || null);
  for (const button of group.querySelectorAll("button")) {
    setAttribute(button, "aria-pressed", String(button.classList.contains("mod-active")));
  }
}

/** Leave out the sign of a button, a character that no voice knows; an arrow says whether what is below is open.
 * @param {Element} sign */
function describeSign(sign) {
  const { classList } = sign;
  setAttribute(sign, "aria-hidden", "true");
  const isArrow = classList.contains("fa-chevron-down") || classList.contains("fa-chevron-right");
  setAttribute(sign.parentElement, "aria-expanded", isArrow ? String(classList.contains("fa-chevron-down")) : null);
}

/** Say whether what a button opens is open, where it has no arrow. @param {Element} button */
function describeExpanding(button) {
  setAttribute(button, "aria-expanded", String(button.classList.contains("ss-expanded")));
}

/** @param {Element} element @param {string} name @param {string | null} value null: none */
function setAttribute(element, name, value) {
  if (element.getAttribute(name) === value) return;
  if (value === null) element.removeAttribute(name);
  else element.setAttribute(name, value);
}

/** Describe all controls in `root`, while they come and go. @param {Element} root @param {AbortSignal} signal */
function describeControls(root, signal) {
  let frame = 0;
  const describeAll = () => {
    frame = 0;
    root.querySelectorAll(".jupyter-widgets :is(input, select, textarea)").forEach(describeInput);
    root.querySelectorAll(".ss-seg").forEach(describeSegments);
    root.querySelectorAll(".jupyter-button > i").forEach(describeSign);
    root.querySelectorAll(".jupyter-button.ss-expands").forEach(describeExpanding);
  };
  const observer = new MutationObserver(() => {
    frame ||= requestAnimationFrame(describeAll);
  });
  describeAll();
  observer.observe(root, { subtree: true, childList: true, attributes: true, attributeFilter: ["title", "class"] });
  signal.addEventListener("abort", () => {
    observer.disconnect();
    cancelAnimationFrame(frame);
  });
}
