// The input of a chat. Enter sends, Shift+Enter begins a new line; what is typed while an answer comes is kept.

const MAX_CHARACTERS = 100_000;

function render({ model, el }) {
  const box = document.createElement("textarea");
  const send = document.createElement("button");
  el.classList.add("ss-prompt-box");
  box.rows = 2;
  box.maxLength = MAX_CHARACTERS;
  box.placeholder = "Ask both models";
  box.setAttribute("aria-label", "Message to both models; Enter sends, Shift+Enter begins a new line");
  send.type = "button";
  send.className = "jupyter-button ss-button";
  send.textContent = "Send";
  el.append(box, send);

  const ended = new AbortController();
  const { signal } = ended;
  // Typing must not reach JupyterLab, whose command mode deletes or runs the cell; Shift+Enter would run it.
  guardKeysAlone(el, signal);
  const isReady = () => !model.get("busy") && !model.get("disabled") && box.value.trim() !== "";
  const draw = () => {
    box.disabled = model.get("disabled");
    send.disabled = !isReady();
  };
  const submit = () => {
    if (!isReady()) return;
    model.send({ send: box.value });
    box.value = "";
    draw();
  };
  box.addEventListener("input", draw, { signal });
  box.addEventListener("keydown", (event) => {
    // isComposing: Enter ends the composition of a Japanese or Chinese word.
    const isPlain = !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (event.key !== "Enter" || !isPlain || event.isComposing) return;
    event.preventDefault();
    submit();
  }, { signal });
  send.addEventListener("click", () => {
    submit();
    box.focus();
  }, { signal });
  model.on("change:busy", draw);
  model.on("change:disabled", draw);
  draw();
  return () => {
    ended.abort();
    model.off("change:busy", draw);
    model.off("change:disabled", draw);
  };
}
export default { render };
