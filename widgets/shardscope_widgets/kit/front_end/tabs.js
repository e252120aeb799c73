// The row of tabs: arrow keys move between them, and a number can stand beside a name.

function render({ model, el }) {
  const ended = new AbortController();
  el.setAttribute("role", "tablist");
  const draw = () => {
    const chosen = model.get("value");
    const badges = model.get("badges");
    // Drawing anew removes the focused tab: the keyboard goes on from the chosen one.
    const had = el.contains(document.activeElement);
    el.replaceChildren(
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
    );
    // The kernel refused the last request, such as a tab that does not exist.
    const error = model.get("error");
    if (error) {
      const said = document.createElement("span");
      said.className = "ss-error";
      said.setAttribute("role", "alert");
      said.textContent = error;
      el.append(said);
    }
    if (had) el.querySelector("[aria-selected=true]")?.focus();
  };
  const choose = (name) => {
    model.set("value", name);
    model.save_changes();
  };
  const listen = (event, listener) => el.addEventListener(event, listener, { signal: ended.signal });
  listen("click", ({ target }) => {
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
    model.off("change:value change:names change:badges change:error", draw);
  };
}
export default { render };
