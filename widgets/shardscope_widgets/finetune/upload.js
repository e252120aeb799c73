// A button that uploads one small file. Its size is checked here: a larger message would end the connection.

function render({ model, el }) {
  const button = document.createElement("button");
  const input = document.createElement("input");
  button.type = "button";
  button.className = "jupyter-button ss-ghost ss-small";
  button.textContent = "Upload…";
  button.title = model.get("tooltip_text");
  input.type = "file";
  input.hidden = true;
  input.accept = model.get("suffixes").join(",");
  el.append(button, input);

  const ended = new AbortController();
  const { signal } = ended;
  guardKeysAlone(el, signal);
  button.addEventListener("click", () => input.click(), { signal });
  input.addEventListener("change", async () => {
    const file = input.files[0];
    if (!file) return;
    input.value = ""; // The same file can be chosen again.
    if (file.size > model.get("max_bytes")) {
      model.send({ name: file.name, size: file.size });
      return;
    }
    button.disabled = true;
    try {
      const content = await file.arrayBuffer();
      if (!signal.aborted) model.send({ name: file.name, size: file.size }, undefined, [content]);
    } finally {
      button.disabled = false;
    }
  }, { signal });
  return () => ended.abort();
}
export default { render };
