// HTML that Python writes and a person presses: tables whose rows, headings and buttons do something.

/** Write the HTML anew; what had the keyboard keeps it, what was opened stays open, what was typed stays typed.
 * @param {HTMLElement} el @param {string} html @param {string} error what is said below it, if anything
 * @param {boolean} frozen whether nothing of it can be pressed */
function write(el, html, error, frozen) {
  const focused = el.contains(document.activeElement) ? place(document.activeElement) : undefined;
  const typed = new Map([...el.querySelectorAll("input[data-answer]")].map((box) => [box.dataset.answer, box.value]));
  const open = new Set([...el.querySelectorAll("details[open][data-key]")].map((row) => row.dataset.key));
  const opened = new Set([...el.querySelectorAll("[data-why]:not([hidden])")].map((row) => row.dataset.why));
  el.innerHTML = html;
  for (const key of opened) openRow(el, key, true);
  el.classList.toggle("ss-frozen", frozen);
  for (const box of el.querySelectorAll("input[data-answer]")) box.value = typed.get(box.dataset.answer) ?? "";
  if (frozen) for (const each of el.querySelectorAll("button[data-act], input[data-answer]")) each.disabled = true;
  for (const row of el.querySelectorAll("details[data-key]")) row.open = open.has(row.dataset.key);
  const pressed = [...el.querySelectorAll("[data-act], [data-answer], [aria-expanded]")].find((other) => place(other) === focused);
  pressed?.focus();
  if (error) say(error, pressed?.closest(".ss-fix") ?? el);
}

/** Open or close the row below the one that `key` names: its formula and its source.
 * @param {HTMLElement} el @param {string} key @param {boolean} open */
function openRow(el, key, open) {
  const row = [...el.querySelectorAll("[data-opens]")].find((one) => one.dataset.opens === key);
  if (!row) return;
  const why = row.nextElementSibling;
  why.hidden = !open;
  row.querySelector("[aria-expanded]").setAttribute("aria-expanded", String(open));
  return row;
}

/** Say below what was pressed, or else below all, what is wrong with it.
 * @param {string} error @param {HTMLElement} where */
function say(error, where) {
  const said = document.createElement("p");
  said.className = "ss-error";
  said.setAttribute("role", "alert");
  said.textContent = error;
  where.append(said);
}

/** Return what tells an element that takes the keyboard from the others. An act with a number is a place in a list, where
 * another row may be next time: then the name counts as well, or a second Enter would press what nobody chose.
 * @param {HTMLElement} one */
function place(one) {
  if (one.hasAttribute("aria-expanded")) return `row ${one.closest("[data-opens]")?.dataset.opens}`;
  const { act, answer } = one.dataset;
  if (answer !== undefined) return `answer ${answer}`;
  return /^(\w+:)?\d+$/.test(act) ? `${act} ${one.getAttribute("aria-label") ?? one.textContent}` : act;
}

/** Return what is sent of a press: a button beside a box of its own name sends what was typed there.
 * @param {HTMLElement} el @param {string} act */
function message(el, act) {
  const box = [...el.querySelectorAll("input[data-answer]")].find((one) => one.dataset.answer === act);
  return box === undefined ? { act } : { act, answer: box.value };
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
    const row = target.closest("[data-opens]");
    if (row && !target.closest("[data-act]") && String(getSelection()) === "") {
      return void openRow(el, row.dataset.opens, row.nextElementSibling.hidden);
    }
    if (model.get("frozen")) return;
    // A selection that ends on a row is no press.
    if (String(getSelection()) !== "" && !target.closest("button")) return;
    const pressed = target.closest("[data-act]");
    if (pressed && el.contains(pressed)) model.send(message(el, pressed.dataset.act));
  };
  const enter = ({ key, target }) => {
    if (key === "Enter" && target.dataset.answer && !model.get("frozen")) model.send(message(el, target.dataset.answer));
  };
  el.addEventListener("click", press, { signal: ended.signal });
  el.addEventListener("keydown", enter, { signal: ended.signal });
  const hear = ({ open }) => {
    const row = open && openRow(el, open, true);
    if (!row) return;
    row.nextElementSibling.scrollIntoView({ block: "nearest" });
    row.scrollIntoView({ block: "nearest" });
    row.querySelector("[aria-expanded]").focus({ preventScroll: true });
  };
  guardKeysAlone(el, ended.signal);
  model.on("change:value change:error change:frozen", draw);
  model.on("msg:custom", hear);
  draw();
  return () => {
    ended.abort();
    model.off("change:value change:error change:frozen", draw);
    model.off("msg:custom", hear);
  };
}
export default { render };
