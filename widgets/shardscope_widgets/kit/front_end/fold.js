// The line of a folding question. Closing hides its inputs at once, by the stylesheet; Python learns of it after.

function render({ model, el }) {
  const ended = new AbortController();
  const line = document.createElement("button");
  const title = document.createElement("span");
  const answer = document.createElement("span");
  line.type = "button";
  line.className = "ss-fold-line";
  title.className = "ss-fold-title";
  answer.className = "ss-fold-answer";
  line.append(title, answer);
  el.append(line);
  const draw = () => {
    const isOpen = model.get("expanded");
    title.textContent = model.get("title");
    // An open question shows its inputs: its answer there would say the same twice.
    answer.textContent = isOpen ? "" : model.get("answer");
    // A long answer is cut off with an ellipsis: the tooltip has all of it.
    line.title = isOpen ? "" : model.get("answer");
    line.setAttribute("aria-expanded", String(isOpen));
    line.classList.toggle("ss-wrong", model.get("wrong"));
  };
  line.addEventListener(
    "click",
    () => {
      model.set("expanded", !model.get("expanded"));
      model.save_changes();
    },
    { signal: ended.signal },
  );
  model.on("change:title change:answer change:expanded change:wrong", draw);
  draw();
  return () => {
    ended.abort();
    model.off("change:title change:answer change:expanded change:wrong", draw);
  };
}
export default { render };
