// A view's charts in a page from disk: the same front ends as in a notebook, on models that no kernel follows.

/** A model with what the front ends use of anywidget's. @param {object} state @param {Uint8Array} packed */
function pageModel(state, packed) {
  const listeners = new Map();
  return {
    widget_manager: { get_model: async () => ({ get: () => packed }) },
    get: (name) => state[name],
    set(name, value) {
      if (state[name] === value) return;
      state[name] = value;
      listeners.get(`change:${name}`)?.forEach((listener) => listener());
    },
    save_changes() {},
    send() {},
    on: (names, listener) =>
      names.split(" ").forEach((name) => listeners.set(name, (listeners.get(name) ?? new Set()).add(listener))),
    off: (names, listener) => names.split(" ").forEach((name) => listeners.get(name)?.delete(listener)),
  };
}

// On paper it is always light.
const dark = matchMedia("screen and (prefers-color-scheme: dark)");
const followTheme = () => (document.body.dataset.jpThemeLight = String(!dark.matches));
dark.addEventListener("change", followTheme);
followTheme();

const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (each) => each.charCodeAt(0));
for (const place of document.querySelectorAll("[data-chart]")) {
  const state = JSON.parse(place.querySelector("script").textContent);
  place.replaceChildren();
  (state._frames ? steppedWidget : chartWidget).render({ model: pageModel(state, packed), el: place });
}
