// Brings the view below this element into sight: what a button further down shows is seen there.

function render({ model, el }) {
  el.style.display = "none";
  const show = () => el.nextElementSibling?.scrollIntoView({ block: "nearest" });
  model.on("msg:custom", show);
  return () => model.off("msg:custom", show);
}

export default { render };
