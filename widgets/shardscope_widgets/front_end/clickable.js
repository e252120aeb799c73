// HTML that Python writes and a person presses: tables whose rows, headings and buttons do something.

/** Write the HTML anew; what had the keyboard keeps it, and what was opened stays open.
 * @param {HTMLElement} el @param {string} html @param {string} error what is said below it, if anything
 * @param {boolean} frozen whether nothing of it can be pressed */
function write(el, html, error, frozen) {
  const focused = el.contains(document.activeElement) ? document.activeElement.dataset.act : undefined;
  const open = new Set([...el.querySelectorAll("details[open][data-key]")].map((row) => row.dataset.key));
  el.innerHTML = html;
  el.classList.toggle("ss-frozen", frozen);
  if (frozen) for (const button of el.querySelectorAll("button[data-act]")) button.disabled = true;
  if (error) {
    const said = document.createElement("p");
    said.className = "ss-error";
    said.setAttribute("role", "alert");
    said.textContent = error;
    el.append(said);
  }
  for (const row of el.querySelectorAll("details[data-key]")) row.open = open.has(row.dataset.key);
  if (focused === undefined) return;
  [...el.querySelectorAll("[data-act]")].find((other) => other.dataset.act === focused)?.focus();
}

/** Copy what a button carries, and say on it that this was done.
 * @param {HTMLElement} button */
async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page that came over http from another machine has no clipboard of its own.
    const field = document.createElement("textarea");
    field.value = text;
    button.after(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  const before = button.textContent;
  if (button.dataset.copied) return;
  button.dataset.copied = "yes";
  button.textContent = "Copied";
  setTimeout(() => {
    button.textContent = before;
    delete button.dataset.copied;
  }, 2000);
}

function render({ model, el }) {
  const ended = new AbortController();
  const draw = () => write(el, model.get("value"), model.get("error"), model.get("frozen"));
  const press = ({ target }) => {
    const copied = target.closest("[data-copy]");
    if (copied) return void copy(copied);
    if (model.get("frozen")) return;
    // A selection that ends on a row is no press.
    if (String(getSelection()) !== "" && !target.closest("button")) return;
    const pressed = target.closest("[data-act]");
    if (pressed && el.contains(pressed)) model.send({ act: pressed.dataset.act });
  };
  el.addEventListener("click", press, { signal: ended.signal });
  model.on("change:value change:error change:frozen", draw);
  draw();
  return () => {
    ended.abort();
    model.off("change:value change:error change:frozen", draw);
  };
}
export default { render };
