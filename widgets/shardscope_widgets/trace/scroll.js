// Scrolls the view below this element into sight, where a button further down has shown something.

function render({ model, el }) {
  el.style.display = "none";
  const show = () => el.nextElementSibling?.scrollIntoView({ block: "nearest" });
  model.on("msg:custom", show);
  return () => model.off("msg:custom", show);
}

export default { render };
