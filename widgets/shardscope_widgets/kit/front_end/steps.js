// A chart that is walked through step by step. Each step's frame is merged into the figure here, so that stepping needs
// no kernel: in a notebook, in a page from disk, and while the kernel is busy. `render` of chart.js draws the result.

const PLAY_MS = 700;

/** The figure of one step: whole properties of traces and of the layout are replaced. */
function mergeFrame(figure, frame) {
  if (!frame) return figure;
  const data = figure.data.map((trace, index) => ({ ...trace, ...frame.traces[index] }));
  return { data, layout: { ...figure.layout, ...frame.layout } };
}

/** The chart's model with the figure of the current step; `draw` makes the chart look at it again. */
function atStep(model) {
  const listeners = new Set();
  let known = {};
  const current = () => {
    const figure = model.get("_figure");
    const frame = model.get("_frames")[model.get("step")];
    // The chart draws when the figure is another object.
    if (known.figure !== figure || known.frame !== frame) known = { figure, frame, merged: mergeFrame(figure, frame) };
    return known.merged;
  };
  return {
    widget_manager: model.widget_manager,
    get: (name) => (name === "_figure" ? current() : model.get(name)),
    send: (message) => model.send(message),
    on: (names, listener) => (listeners.add(listener), model.on(names, listener)),
    off: (names, listener) => (listeners.delete(listener), model.off(names, listener)),
    draw: () => listeners.forEach((listener) => listener()),
  };
}

function makeButton(text, name, onClick) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "ss-act";
  button.textContent = text;
  button.setAttribute("aria-label", name);
  button.title = name;
  button.addEventListener("click", onClick);
  return button;
}

function renderSteps({ model, el }) {
  const stepped = atStep(model);
  const ended = new AbortController();
  const count = () => model.get("_frames").length;
  let timer = 0;

  const go = (step) => {
    model.set("step", Math.max(0, Math.min(step, count() - 1)));
    model.save_changes();
  };
  const pause = () => {
    clearInterval(timer);
    timer = 0;
    update();
  };
  const toggle = () => {
    if (timer) return pause();
    if (model.get("step") >= count() - 1) go(0);
    timer = setInterval(() => (model.get("step") >= count() - 1 ? pause() : go(model.get("step") + 1)), PLAY_MS);
    update();
  };
  // What the user does ends the playback.
  const move = (step) => {
    if (timer) pause();
    go(step);
  };

  const back = makeButton("‹", "Previous step", () => move(model.get("step") - 1));
  const play = makeButton("Play", "Play", toggle);
  const next = makeButton("›", "Next step", () => move(model.get("step") + 1));
  const slider = document.createElement("input");
  slider.type = "range";
  slider.min = "0";
  slider.setAttribute("aria-label", "Step");
  slider.addEventListener("input", () => move(Number(slider.value)));
  const place = document.createElement("span");
  place.className = "ss-hint";
  const words = document.createElement("p");
  words.className = "ss-step-words";
  words.setAttribute("aria-live", "polite");
  const caption = document.createElement("span");
  const bar = document.createElement("div");
  bar.className = "ss-steps";
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "Steps");
  bar.append(back, play, next, slider, place);
  const chart = document.createElement("div");
  el.classList.add("ss-stepped");
  el.append(bar, words, chart);

  /** Keep the room of the tallest caption, so that the chart stands still at every width. */
  function keepRoom() {
    // Which of the longest is the tallest depends on where the lines break. The style sheet shows none of them.
    const longest = model.get("_frames").map((frame) => frame.words).sort((a, b) => b.length - a.length).slice(0, 8);
    words.replaceChildren(caption, ...longest.map((text) => {
      const room = document.createElement("i");
      room.dataset.text = text;
      return room;
    }));
  }

  function update() {
    const step = model.get("step");
    const number = count();
    const said = model.get("_frames")[step]?.words ?? "";
    bar.style.display = words.style.display = number > 1 ? "" : "none";
    slider.max = String(Math.max(0, number - 1));
    slider.value = String(step);
    slider.setAttribute("aria-valuetext", `${step + 1} of ${number}: ${said}`);
    place.textContent = `${step + 1} of ${number}`;
    // The slider says its step itself, and nobody can listen as fast as they are played.
    words.setAttribute("aria-live", timer || document.activeElement === slider ? "off" : "polite");
    caption.textContent = said;
    const action = timer ? "Pause" : "Play";
    play.textContent = action;
    play.setAttribute("aria-label", action);
    play.title = `${action} (space)`;
    stepped.draw();
  }

  const keys = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  el.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    // A focused button is pressed by the space bar.
    if (event.key === " " && !(event.target instanceof HTMLButtonElement)) toggle();
    else if (event.key in keys) move(model.get("step") + keys[event.key]);
    else return;
    event.preventDefault();
  }, { signal: ended.signal });

  const close = chartWidget.render({ model: stepped, el: chart });
  model.on("change:_frames", keepRoom);
  model.on("change:step change:_frames", update);
  keepRoom();
  update();
  return () => {
    clearInterval(timer);
    ended.abort();
    model.off("change:_frames", keepRoom);
    model.off("change:step change:_frames", update);
    close();
  };
}

const steppedWidget = { initialize: chartWidget.initialize, render: renderSteps };
