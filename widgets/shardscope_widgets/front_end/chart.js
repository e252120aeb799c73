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

export default () => {
  let ready = null;
  return {
    async initialize(context) {
      ready = plotly(context.model).then((module) => module.default());
      return (await ready).initialize(context);
    },
    async render(context) {
      return (await ready).render(context);
    },
  };
};
