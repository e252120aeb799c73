// All charts of a kernel share one copy of plotly. Each FigureWidget would bring 5 MB of its own otherwise: a page
// that is loaded anew must get every model within two seconds, or JupyterLab says "model not found".
/** plotly's own anywidget module, loaded once. @param {{get: Function, widget_manager: any}} model */
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
    return await import(/* webpackIgnore: true */ url);
  } finally {
    URL.revokeObjectURL(url);
  }
}

// What the kernel tells a figure comes as changes of these, each of which the next one overwrites.
const TOLD = [
  "addTraces",
  "deleteTraces",
  "moveTraces",
  "restyle",
  "relayout",
  "update",
  "animate",
  "removeLayoutProps",
  "removeTraceProps",
].map((name) => `_py2js_${name}`);

/** `model` as plotly shall see it, and a way to tell plotly afterwards what it was too late for. */
function remembering(model) {
  const missed = [];
  const listeners = new Map();
  const notes = TOLD.map((name) => {
    const note = () => missed.push([name, model.get(name)]);
    model.on(`change:${name}`, note);
    return () => model.off(`change:${name}`, note);
  });
  let told = null;
  const seen = new Proxy(model, {
    get(target, key) {
      if (key === "get") return (name) => (told && told[0] === name ? told[1] : target.get(name));
      if (key === "on") {
        return (event, listener, ...rest) => {
          listeners.set(event, [...(listeners.get(event) ?? []), listener]);
          return target.on(event, listener, ...rest);
        };
      }
      const value = target[key];
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
  const catchUp = () => {
    for (const stop of notes) stop();
    for (told of missed) for (const listener of listeners.get(`change:${told[0]}`) ?? []) listener();
    told = null;
  };
  return { seen, catchUp };
}

export default () => {
  let ready = null;
  return {
    // Not awaited: anywidget gives up a model that takes two seconds, and JupyterLab then shows the one that was
    // saved with the notebook, which no kernel tells anything.
    initialize(context) {
      const { seen, catchUp } = remembering(context.model);
      ready = plotly(context.model).then(async (module) => {
        const widget = await module.default();
        // At once: what came between the two would be told twice.
        const begun = widget.initialize({ ...context, model: seen });
        catchUp();
        await begun;
        return widget;
      });
      ready.catch(() => {}); // whoever renders says it
    },
    async render(context) {
      return (await ready).render(context);
    },
  };
};
