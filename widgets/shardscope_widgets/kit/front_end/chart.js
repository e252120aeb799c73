// A chart draws the model's whole state, in every view, whenever that changes or the view comes to have a size. Nothing
// is sent as a change of what was there before: a view that was made late, moved, hidden or shown twice has missed
// nothing. (plotly's own FigureWidget sends changes; a view that misses one shows another plan from then on.)
//
// All charts of a kernel share one copy of plotly: a page that is loaded anew must get every model within two seconds,
// or JupyterLab says "model not found".

/** plotly.js, loaded once. @param {{get: Function, widget_manager: any}} model */
function plotly(model) {
  const id = String(model.get("_source")).replace("IPY_MODEL_", "");
  const key = Symbol.for(`shardscope.plotly.${id}`);
  globalThis[key] ??= load(model.widget_manager, id).catch((error) => {
    delete globalThis[key];
    throw error;
  });
  return globalThis[key];
}

async function load(manager, id) {
  const source = await manager.get_model(id);
  const unpacked = new Blob([source.get("packed")]).stream().pipeThrough(new DecompressionStream("gzip"));
  const text = await new Response(unpacked).arrayBuffer();
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  try {
    return (await import(/* webpackIgnore: true */ url)).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}

const FRAME_MS = 1000 / 60;
const ARRAYS = {
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  float32: Float32Array, float64: Float64Array,
};

/** A copy of `value` that a view may change, with the kernel's arrays as typed arrays. @param {any} value */
function unpack(value) {
  if (Array.isArray(value)) return value.map(unpack);
  if (value === null || typeof value !== "object") return value;
  if (value.buffer instanceof DataView) {
    const { buffer, byteOffset, byteLength } = value.buffer;
    return new ARRAYS[value.dtype](buffer.slice(byteOffset, byteOffset + byteLength));
  }
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, unpack(each)]));
}

/** Call `listener` when the page's theme changes: JupyterLab's, VS Code's, or the system's.
 * @param {() => void} listener @param {AbortSignal} signal */
function onTheme(listener, signal) {
  const attributes = ["data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-id"];
  const observer = new MutationObserver(listener);
  observer.observe(document.body, { attributes: true, attributeFilter: attributes });
  signal.addEventListener("abort", () => observer.disconnect());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener, { signal });
}

/** Send clicks on marks to the kernel, and show by the pointer what can be clicked. */
function reportClicks(place, el, model) {
  place.on("plotly_click", ({ points: [mark] }) => {
    if (!mark || !model.get("clickable")) return;
    model.send({ click: { trace: mark.curveNumber, point: mark.pointIndex, customdata: mark.customdata ?? null } });
  });
  const point = (is) => () => el.classList.toggle("ss-at-mark", is && model.get("clickable"));
  place.on("plotly_hover", point(true));
  place.on("plotly_unhover", point(false));
}

/** Hide text that plotly made smaller than is readable to fit it into a bar. @param {Element} place */
function hideSmallText(place) {
  for (const text of place.querySelectorAll(".bartext")) {
    const scale = /scale\(([\d.]+)\)/.exec(text.getAttribute("transform") ?? "");
    text.style.display = scale && Number(scale[1]) < 0.75 ? "none" : "";
  }
}

const MIN_PLOT_PIXELS = 120;
const MIN_TOTAL_PIXELS = 72; // "54.0 GiB" in bold

/** Take room from the margin of totals, the texts at its right edge, where the bars would have no width. */
function narrowMargin(layout, width) {
  const { l = 0, r = 0 } = layout.margin ?? {};
  const isTotal = ({ xref, x, xanchor, xshift }) => xref === "paper" && x === 1 && xanchor === "right" && xshift > 0;
  const taken = Math.min(MIN_PLOT_PIXELS - (width - l - r), r - MIN_TOTAL_PIXELS);
  if (taken <= 0 || !layout.annotations?.some(isTotal)) return layout;
  const annotations = layout.annotations.map((one) => (isTotal(one) ? { ...one, xshift: one.xshift - taken } : one));
  return { ...layout, margin: { ...layout.margin, r: r - taken }, annotations };
}

function render({ model, el }) {
  const ended = new AbortController();
  const { signal } = ended;
  const place = document.createElement("div");
  el.classList.add("ss-chart");
  el.append(place);
  let Plotly = null;
  let frame = 0;
  let drawnAt = 0;
  let drawn = { figure: null, width: 0 };

  // The model's state replaces itself as a whole: the same object is the same picture.
  const isDrawn = () => drawn.figure === model.get("_figure") && drawn.width === el.clientWidth;
  function draw() {
    cancelAnimationFrame(frame);
    frame = 0;
    const width = el.clientWidth;
    // Without a place there is nothing to draw into: the observer of sizes comes back.
    if (signal.aborted || !Plotly || !width || !el.isConnected || isDrawn()) return;
    const isFirst = drawn.figure === null;
    drawnAt = performance.now();
    drawn = { figure: model.get("_figure"), width };
    const { data = [], layout = {} } = unpack(drawn.figure);
    // What a reader zoomed into stays while lines grow; a range that the kernel changes wins.
    const shown = { uirevision: "kept", ...narrowMargin(layout, width), width, autosize: false };
    const config = { ...model.get("_config"), responsive: false };
    Plotly.react(place, data, shown, config).then(() => hideSmallText(place));
    if (isFirst) reportClicks(place, el, model);
  }
  // One drawing a frame: the first at once, the last of many in the next frame.
  const ask = () => {
    if (performance.now() - drawnAt > FRAME_MS) draw();
    else frame ||= requestAnimationFrame(draw);
  };
  const askAnew = () => {
    drawn.width = 0;
    ask();
  };

  // One image: read one by one, the axes' numbers and plotly's marks mean nothing.
  const name = () => {
    const label = model.get("label");
    place.setAttribute("role", label ? "img" : "none");
    place.setAttribute("aria-label", label);
  };
  name();

  // Before the first picture, so that what is below does not move when it comes.
  const { height } = model.get("_figure")?.layout ?? {};
  if (height) place.style.minHeight = `${height}px`;
  // At once: in a later frame the picture of before would be seen first.
  const observer = new ResizeObserver(() => isDrawn() || draw());
  observer.observe(el);
  guardKeysAlone(el, signal);
  onTheme(askAnew, signal);
  model.on("change:_figure change:_config", ask);
  model.on("change:label", name);
  plotly(model).then(
    (loaded) => {
      Plotly = loaded;
      place.style.minHeight = "";
      draw();
    },
    (error) => {
      place.textContent = `The chart cannot be drawn: ${error.message ?? error}`;
    },
  );
  return () => {
    ended.abort();
    cancelAnimationFrame(frame);
    observer.disconnect();
    model.off("change:_figure change:_config", ask);
    model.off("change:label", name);
    Plotly?.purge(place);
  };
}

const chartWidget = {
  // Not awaited: anywidget gives up a model that takes two seconds, and JupyterLab then shows the one that was saved
  // with the notebook, which no kernel tells anything. Whoever renders says what went wrong.
  initialize: ({ model }) => void plotly(model).catch(() => {}),
  render,
};
