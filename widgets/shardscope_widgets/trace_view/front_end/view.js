// The view itself: asks Python for tiles, draws them, and follows pointer, keys, theme and model.

/** @param {{model: any, el: HTMLElement}} context */
function render({ model, el }) {
  const scene = /** @type {Scene} */ (model.get("_scene"));
  const root = element("div", "ss-trace");
  // JupyterLab takes A, B, D and others as commands from anything focused inside a notebook.
  root.dataset.lmSuppressShortcuts = "true";
  const page = buildPage(root, scene);
  const { canvas, stage, gutter, tip } = page;
  page.stage.style.height = `${model.get("height")}px`;
  gutter.style.top = `${RULER}px`;
  el.append(root);

  const ctx = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const stop = new AbortController();
  const listen = (/** @type {EventTarget} */ target, /** @type {string} */ type, /** @type {any} */ action, options = {}) =>
    target.addEventListener(type, action, { signal: stop.signal, ...options });

  let theme = readTheme(root, ctx);
  let [t0, t1] = model.get("viewport_seconds").map((/** @type {number} */ seconds) => seconds * 1e9);
  let scroll = 0;
  let width = 0;
  let height = 0;
  let gutterWidth = GUTTER;
  /** @type {Tile | null} */
  let tile = null;
  /** @type {Hit | null} */
  let hover = null;
  const folded = /** @type {Set<number>} */ (new Set());
  let places = arrange(scene, folded);
  // Ranks are there to be compared: where they do not fit on two screens, all are shown small first.
  if (scene.ranks.length > 1 && places.height > 2 * model.get("height")) {
    for (const rank of scene.ranks) folded.add(rank);
    places = arrange(scene, folded);
  }
  const names = /** @type {Map<number, string>} */ (new Map());
  const textWidths = /** @type {Map<string, number>} */ (new Map());

  // -- asking Python. Ids start at random, since every view of this model hears every reply.
  let nextId = Math.floor(Math.random() * 2 ** 40);
  const ask = (/** @type {object} */ request) => {
    nextId += 1;
    model.send({ ...request, id: nextId });
    return nextId;
  };
  const pending = { tile: 0, since: 0, names: 0, totals: 0, find: 0 };

  const plot = () => Math.max(width - gutterWidth, 1);
  const xOf = (/** @type {number} */ time) => gutterWidth + ((time - t0) / (t1 - t0)) * plot();
  const timeAt = (/** @type {number} */ x) => t0 + ((x - gutterWidth) / plot()) * (t1 - t0);

  /** Ask for a tile when the one at hand ends inside the view, is too coarse or too fine, or shows another search. */
  function askForTile() {
    const waiting = pending.tile && performance.now() - pending.since < REPLY_MS;
    if (waiting || width === 0 || !scene.num_slices) return;
    const span = t1 - t0;
    const resolution = tile ? (tile.t1 - tile.t0) / tile.width / (span / plot()) : Infinity;
    const edge = (/** @type {number} */ time) => Math.min(Math.max(time, 0), scene.span_ns);
    const covered = tile && edge(t0) >= tile.t0 && edge(t1) <= tile.t1;
    if (tile && covered && resolution < 1.3 && resolution > 0.3 && tile.search === model.get("search")) return;
    // One view more on each side, so that panning has something to draw while the next tile is cut.
    const request = { type: "tile", t0_ns: t0 - span, t1_ns: t1 + span, width: Math.min(3 * Math.round(plot()), 16384) };
    pending.tile = ask(request);
    pending.since = performance.now();
  }

  function askForNames() {
    if (pending.names || !tile) return;
    const missing = [...new Set(tile.columns.name)].filter((name) => !names.has(name)).slice(0, 5000);
    if (missing.length) pending.names = ask({ type: "names", indices: missing });
  }

  function askForTotals() {
    if (!page.totals.open || !scene.num_slices) return;
    const limit = 9 * scene.span_ns;
    pending.totals = ask({ type: "totals", t0_ns: Math.max(t0, -limit), t1_ns: Math.min(t1, limit) });
  }

  // -- the viewport
  let settleTimer = 0;
  let sentViewport = [t0 / 1e9, t1 / 1e9];

  /** @param {number} from @param {number} to */
  function show(from, to) {
    const most = scene.span_ns * 1.2;
    const span = Math.min(Math.max(to - from, MIN_SPAN_NS), most);
    const middle = (from + to) / 2;
    // At least a tenth of the view keeps showing the trace, so nobody gets lost in empty time.
    const start = Math.min(Math.max(middle - span / 2, -0.9 * span), scene.span_ns - 0.1 * span);
    [t0, t1] = [start, start + span];
    schedule();
    clearTimeout(settleTimer);
    settleTimer = setTimeout(settled, SETTLE_MS);
  }

  function settled() {
    sentViewport = [t0 / 1e9, t1 / 1e9];
    model.set("viewport_seconds", sentViewport);
    model.save_changes();
    askForTotals();
  }

  /** @param {number} factor below 1 zooms in @param {number} [x] what stays in place */
  function zoom(factor, x = gutterWidth + plot() / 2) {
    const fixed = timeAt(Math.max(x, gutterWidth));
    const least = Math.max(factor, MIN_SPAN_NS / (t1 - t0));
    const most = Math.min(least, (scene.span_ns * 1.2) / (t1 - t0));
    show(fixed - (fixed - t0) * most, fixed + (t1 - fixed) * most);
  }

  const pan = (/** @type {number} */ pixels) => {
    const shift = (pixels / plot()) * (t1 - t0);
    show(t0 + shift, t1 + shift);
  };

  const scrollTo = (/** @type {number} */ top) => {
    scroll = Math.min(Math.max(top, 0), Math.max(places.height - (height - RULER), 0));
    schedule();
  };

  /** Bring a slice into view, wide enough to read. @param {any} slice @param {boolean} [zoomTo] */
  function reveal(slice, zoomTo = false) {
    const start = slice.start_seconds * 1e9;
    const duration = slice.duration_seconds * 1e9;
    let span = t1 - t0;
    if (zoomTo) span = Math.max(duration * 1.25, MIN_SPAN_NS);
    else span = Math.min(Math.max(span, duration * 1.1), Math.max(duration, MIN_SPAN_NS / 10) * (plot() / 40));
    if (zoomTo || start < t0 || start + duration > t1 || span < t1 - t0) {
      const centred = start + duration / 2 - span / 2;
      const from = Math.max(Math.min(centred, scene.span_ns - span), 0); // no empty time beside the trace
      show(from, from + span);
    }
    const top = places.rowTop[slice.row];
    if (top < scroll || top + ROW > scroll + height - RULER) scrollTo(top - (height - RULER) / 2);
  }

  // -- rank headers are buttons, so that folding works from the keyboard
  const buttons = scene.ranks.map((rank) => {
    const button = element("button", "ss-trace-rank", `rank ${rank}`);
    listen(button, "click", () => fold(rank));
    listen(button, "focus", () => {
      stage.scrollTop = gutter.scrollTop = 0; // the browser scrolls to what it focuses; the canvas would not follow
      const top = places.headers.find((header) => header.rank === rank)?.top ?? 0;
      if (top < scroll || top + HEADER > scroll + height - RULER) scrollTo(top);
    });
    gutter.append(button);
    return button;
  });

  /** @param {number} rank */
  function fold(rank) {
    if (!folded.delete(rank)) folded.add(rank);
    rearrange();
  }

  function rearrange() {
    places = arrange(scene, folded);
    places.headers.forEach(({ rank }, i) => buttons[i].setAttribute("aria-expanded", String(!folded.has(rank))));
    hover = null;
    scrollTo(scroll);
  }

  // -- drawing
  let frame = 0;
  const schedule = () => {
    frame ||= requestAnimationFrame(draw);
  };

  function draw() {
    frame = 0;
    if (width === 0) return;
    askForTile();
    const began = performance.now();
    const dpr = window.devicePixelRatio || 1;
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.fillStyle = theme.background;
    ctx.fillRect(0, 0, width, height);
    ctx.textBaseline = "middle";
    const ticks = drawGrid();
    drawHeaders();
    const drawn = drawSlices();
    drawLabels();
    drawRuler(ticks);
    drawScrollbar();
    page.span.textContent = `${shownTime(t1 - t0)} of ${shownTime(scene.span_ns)}`;
    Object.assign(canvas.dataset, {
      slices: drawn,
      t0: t0 / 1e9,
      t1: t1 / 1e9,
      matches: model.get("num_matches"),
      frameMs: (performance.now() - began).toFixed(2),
    });
  }

  /** Times of the ruler's ticks; their lines stand behind the slices. */
  function drawGrid() {
    const step = roundStep(((t1 - t0) / plot()) * 110);
    const ticks = { step, times: /** @type {number[]} */ ([]) };
    ctx.fillStyle = theme.line;
    for (let time = Math.ceil(t0 / step) * step; time <= t1; time += step) {
      ticks.times.push(time);
      ctx.fillRect(Math.round(xOf(time)), RULER, 1, height);
    }
    return ticks;
  }

  /** @param {{step: number, times: number[]}} ticks */
  function drawRuler(ticks) {
    ctx.fillStyle = theme.background;
    ctx.fillRect(0, 0, width, RULER);
    ctx.fillStyle = theme.line;
    ctx.fillRect(0, RULER - 1, width, 1);
    ctx.font = `11px ${theme.font}`;
    const [size, unit] = unitOf(Math.max(ticks.step, 1));
    for (const time of ticks.times) {
      const x = Math.round(xOf(time));
      ctx.fillStyle = theme.line;
      ctx.fillRect(x, RULER - 6, 1, 6);
      ctx.fillStyle = theme.soft;
      const label = `${Math.round(time / size).toLocaleString("en")} ${unit}`;
      if (x + 4 < width - 24) ctx.fillText(label, x + 4, RULER / 2);
    }
    ctx.fillStyle = theme.background;
    ctx.fillRect(0, 0, gutterWidth, RULER - 1);
  }

  function drawHeaders() {
    ctx.font = `12px ${theme.font}`;
    ctx.textAlign = "right";
    places.headers.forEach(({ rank, top, height: tall, tracks }, i) => {
      const y = RULER + top - scroll;
      buttons[i].style.transform = `translateY(${top - scroll}px)`;
      buttons[i].style.height = `${tall}px`;
      if (y > height || y + tall < RULER) return;
      ctx.fillStyle = theme.line;
      if (folded.has(rank)) return ctx.fillRect(0, y + tall - 1, width, 1);
      ctx.fillStyle = theme.panel;
      ctx.fillRect(0, y, width, HEADER);
      ctx.fillStyle = theme.line;
      ctx.fillRect(0, y, width, 1);
      ctx.fillRect(0, y + HEADER - 1, width, 1);
      const slices = tracks.reduce((sum, track) => sum + track.num_slices, 0);
      ctx.fillStyle = theme.soft;
      ctx.fillText(`${counted(tracks.length, "track")} · ${counted(slices, "slice")}`, width - 16, y + HEADER / 2);
    });
    ctx.textAlign = "left";
  }

  function drawLabels() {
    ctx.fillStyle = theme.line;
    ctx.fillRect(gutterWidth - 1, RULER, 1, height);
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, RULER, gutterWidth - 8, height);
    ctx.clip();
    ctx.font = `12px ${theme.font}`;
    ctx.fillStyle = theme.soft;
    for (const { track, top, height: high, tall } of places.bands) {
      const y = RULER + top - scroll;
      if (tall < READABLE_ROW || y > height || y + high < RULER) continue;
      const isNarrow = gutterWidth === NARROW_GUTTER;
      ctx.fillText(isNarrow ? track.name.replace("CPU ", "") : track.name, isNarrow ? 8 : 24, y + ROW / 2);
    }
    ctx.restore();
  }

  /** @returns {number} how many slices the drawn marks stand for */
  function drawSlices() {
    if (!tile) return 0;
    ctx.save();
    ctx.beginPath();
    ctx.rect(gutterWidth, RULER, plot(), height);
    ctx.clip();
    ctx.font = `11px ${theme.font}`;
    const selected = model.get("selected");
    const searching = Boolean(tile.search.trim());
    const { row_first: bounds, start, duration, colour, density, match, count, index } = tile.columns;
    const scale = plot() / (t1 - t0);
    let drawn = 0;
    for (let row = 0; row < places.rowTop.length; row++) {
      const y = RULER + places.rowTop[row] - scroll;
      const tall = places.rowTall[row];
      if (y > height || y + tall < RULER) continue;
      const readable = tall >= READABLE_ROW;
      const last = bounds[row + 1];
      for (let mark = firstMarkAfter(tile, row, t0); mark < last && start[mark] <= t1; mark++) {
        const left = gutterWidth + (start[mark] - t0) * scale;
        const wide = Math.max(duration[mark] * scale, 1);
        const x = Math.max(left, gutterWidth - 2);
        const w = Math.min(left + wide, width + 2) - x;
        const dimmed = searching && !match[mark];
        ctx.globalAlpha = (dimmed ? 0.22 : 1) * (count[mark] > 1 ? 0.45 + (0.55 * density[mark]) / 255 : 1);
        ctx.fillStyle = theme.fills[colour[mark]];
        // A pixel apart, so that neighbours stay two.
        ctx.fillRect(x, y, w > 3 ? w - 1 : w, readable ? tall - 1 : tall);
        if (readable && w > MIN_TEXT_PX && count[mark] === 1) drawName(mark, Math.max(x, gutterWidth), y, x + w);
        drawn += count[mark];
        if (selected && index[mark] === selected.index) outline(x, y, w, tall, 2);
        else if (hover && hover.mark === mark) outline(x, y, w, tall, 1);
      }
    }
    ctx.restore();
    return drawn;
  }

  /** @param {number} x @param {number} y @param {number} w @param {number} tall @param {number} line */
  function outline(x, y, w, tall, line) {
    ctx.globalAlpha = 1;
    ctx.strokeStyle = line > 1 ? theme.accent : theme.ink;
    ctx.lineWidth = line;
    // Thin rows are framed from outside, where there would be nothing left inside.
    const inset = tall >= READABLE_ROW ? line / 2 : -line / 2;
    ctx.strokeRect(x + inset, y + inset, Math.max(w - 1 - 2 * inset, 1), Math.max(tall - 1 - 2 * inset, 1));
  }

  /** @param {number} mark @param {number} x @param {number} y @param {number} right */
  function drawName(mark, x, y, right) {
    const columns = /** @type {Tile} */ (tile).columns;
    const name = names.get(columns.name[mark]);
    const room = right - x - 9;
    if (!name || room < 14) return;
    ctx.fillStyle = theme.texts[columns.colour[mark]];
    let text = name;
    let needed = textWidths.get(name);
    if (needed === undefined) textWidths.set(name, (needed = ctx.measureText(name).width));
    if (needed > room) {
      let kept = Math.floor((room / needed) * name.length);
      while (kept > 1 && ctx.measureText((text = name.slice(0, kept) + "…")).width > room) kept -= 1;
      if (kept < 2) return;
    }
    ctx.fillText(text, x + 4, y + ROW / 2);
  }

  function drawScrollbar() {
    const room = height - RULER;
    if (places.height <= room) return;
    ctx.fillStyle = theme.soft;
    ctx.globalAlpha = 0.5;
    const tall = Math.max((room / places.height) * room, 24);
    ctx.fillRect(width - 5, RULER + (scroll / (places.height - room)) * (room - tall), 4, tall);
    ctx.globalAlpha = 1;
  }

  // -- what the pointer is on
  /** @param {number} x @param {number} y @returns {Hit | null} */
  function hitAt(x, y) {
    if (!tile || x < gutterWidth || y < RULER) return null;
    const top = y - RULER + scroll;
    const band = places.bands.find((place) => top >= place.top && top < place.top + place.height);
    if (!band) return null;
    const row = band.track.first_row + Math.floor((top - band.top) / band.tall);
    const slack = (t1 - t0) / plot(); // a mark is drawn at least one pixel wide
    const mark = firstMarkAfter(tile, row, timeAt(x) - slack);
    const found = mark < tile.columns.row_first[row + 1] && tile.columns.start[mark] <= timeAt(x) + slack / 2;
    return found ? { mark, row } : null;
  }

  /** @param {number} x @param {number} y */
  function showTip(x, y) {
    hover = hitAt(x, y);
    tip.hidden = !hover;
    if (!hover || !tile) return;
    const { name, count, start, duration } = tile.columns;
    const { mark } = hover;
    const run = count[mark] > 1;
    const title = names.get(name[mark]) ?? "…";
    const facts = `start ${shownPoint(Math.round(start[mark]))} · ${shownTime(duration[mark])}`;
    tip.replaceChildren(
      element("div", "", run ? `${counted(count[mark], "slice")}, the longest ${title}` : title),
      element("small", "", run ? `${facts} in all · zoom in to tell them apart` : facts),
    );
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(Math.min(x + 12, width - box.width - 8), 4)}px`;
    tip.style.top = `${y + 18 + box.height > height ? Math.max(y - box.height - 10, 0) : y + 18}px`;
  }

  const at = (/** @type {MouseEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  /** @type {{x: number, y: number, moved: boolean} | null} */
  let grip = null;
  listen(canvas, "pointerdown", (/** @type {PointerEvent} */ event) => {
    if (event.button !== 0) return;
    const [x, y] = at(event);
    grip = { x, y, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  listen(canvas, "pointermove", (/** @type {PointerEvent} */ event) => {
    const [x, y] = at(event);
    if (grip && (grip.moved || Math.hypot(x - grip.x, y - grip.y) > 3)) {
      pan(grip.x - x);
      scrollTo(scroll + grip.y - y);
      grip = { x, y, moved: true };
      tip.hidden = true;
      canvas.classList.add("ss-panning");
      return;
    }
    showTip(x, y);
    schedule();
  });
  listen(canvas, "pointerup", (/** @type {PointerEvent} */ event) => {
    const clicked = grip && !grip.moved;
    letGo();
    if (!clicked) return;
    const [x, y] = at(event);
    const top = y - RULER + scroll;
    const isHeader = (/** @type {any} */ place) => !folded.has(place.rank) && top >= place.top && top < place.top + HEADER;
    const header = y > RULER && places.headers.find(isHeader);
    if (header) return fold(header.rank);
    const hit = hitAt(x, y);
    ask({ type: "select", index: hit && tile ? tile.columns.index[hit.mark] : null });
  });
  const letGo = () => {
    grip = null;
    canvas.classList.remove("ss-panning");
  };
  listen(canvas, "pointercancel", letGo);
  listen(canvas, "pointerleave", () => {
    hover = null;
    tip.hidden = true;
    schedule();
  });
  listen(canvas, "dblclick", () => model.get("selected") && reveal(model.get("selected"), true));
  listen(
    canvas,
    "wheel",
    (/** @type {WheelEvent} */ event) => {
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
      const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
      const [x, y] = at(event);
      if (x < gutterWidth) scrollTo(scroll + dy);
      else if (event.shiftKey) pan(dx || dy);
      else if (Math.abs(dx) > Math.abs(dy)) pan(dx);
      else zoom(Math.exp(Math.min(Math.max(dy, -240), 240) * (event.ctrlKey ? 0.01 : 0.002)), x);
      showTip(x, y);
    },
    { passive: false },
  );

  // -- the keyboard
  const keys = /** @type {Record<string, () => void>} */ ({
    w: () => zoom(0.8),
    s: () => zoom(1.25),
    a: () => pan(-plot() * 0.1),
    d: () => pan(plot() * 0.1),
    "+": () => zoom(0.8),
    "=": () => zoom(0.8),
    "-": () => zoom(1.25),
    0: () => show(0, scene.span_ns),
    home: () => show(0, scene.span_ns),
    arrowleft: () => pan(-plot() * 0.1),
    arrowright: () => pan(plot() * 0.1),
    arrowup: () => scrollTo(scroll - 2 * ROW),
    arrowdown: () => scrollTo(scroll + 2 * ROW),
    pageup: () => scrollTo(scroll - height / 2),
    pagedown: () => scrollTo(scroll + height / 2),
    f: () => model.get("selected") && reveal(model.get("selected"), true),
    escape: () => ask({ type: "select", index: null }),
    "/": () => page.search.focus(),
  });
  listen(canvas, "keydown", (/** @type {KeyboardEvent} */ event) => {
    const action = keys[event.key.toLowerCase()];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    tip.hidden = true;
    action();
  });

  // -- search
  let searchTimer = 0;
  let matchNumber = 0;
  const showCount = () => {
    const matches = model.get("num_matches");
    const which = matchNumber ? `match ${matchNumber.toLocaleString("en")} · ` : "";
    page.count.textContent = model.get("search").trim()
      ? `${which}${matches.toLocaleString("en")} of ${counted(scene.num_slices, "slice")}`
      : counted(scene.num_slices, "slice");
  };
  const sendSearch = () => {
    clearTimeout(searchTimer);
    if (page.search.value === model.get("search")) return;
    matchNumber = 0;
    model.set("search", page.search.value);
    model.save_changes();
    showCount();
    schedule();
  };
  page.search.value = model.get("search");
  listen(page.search, "input", () => {
    clearTimeout(searchTimer);
    searchTimer = setTimeout(sendSearch, SETTLE_MS);
  });
  listen(page.search, "keydown", (/** @type {KeyboardEvent} */ event) => {
    event.stopPropagation();
    if (event.key === "Enter") {
      sendSearch();
      pending.find = ask({ type: "find", direction: event.shiftKey ? -1 : 1 });
    } else if (event.key === "Escape") {
      page.search.value = "";
      sendSearch();
      canvas.focus();
    }
  });
  listen(page.fit, "click", () => show(0, scene.span_ns));
  listen(page.totals, "toggle", askForTotals);

  // -- what Python says
  /** @type {Record<string, (message: any, buffers: DataView[]) => void>} */
  const replies = {
    tile: (message, buffers) => {
      if (message.id !== pending.tile) return;
      pending.tile = 0;
      tile = readTile(scene, message, buffers);
      hover = null;
      askForNames();
      schedule();
    },
    names: (message) => {
      message.indices.forEach((/** @type {number} */ index, /** @type {number} */ i) => names.set(index, message.names[i]));
      if (message.id === pending.names) pending.names = 0;
      askForNames();
      schedule();
    },
    totals: (message) => {
      if (message.id !== pending.totals) return;
      fillTotals(/** @type {HTMLElement} */ (page.totals.querySelector("table")), message.rows);
    },
    found: (message) => {
      if (message.id !== pending.find) return;
      matchNumber = message.position;
      showCount();
      if (model.get("selected")) reveal(model.get("selected"));
    },
  };
  const handlers = /** @type {Record<string, any>} */ ({
    "msg:custom": (/** @type {any} */ message, /** @type {DataView[]} */ buffers) =>
      replies[message?.type]?.(message, buffers),
    "change:selected": () => {
      fillDetails(page.details, model.get("selected"));
      schedule();
    },
    "change:search": () => {
      if (document.activeElement !== page.search) page.search.value = model.get("search");
      schedule();
    },
    "change:num_matches": () => {
      showCount();
      schedule();
    },
    "change:viewport_seconds": () => {
      const [from, to] = model.get("viewport_seconds");
      if (from !== sentViewport[0] || to !== sentViewport[1]) show(from * 1e9, to * 1e9);
    },
    "change:error": () => (page.error.textContent = model.get("error")),
    "change:height": () => (stage.style.height = `${model.get("height")}px`),
  });
  for (const [event, handler] of Object.entries(handlers)) model.on(event, handler);

  // -- what the page does
  const resize = new ResizeObserver(() => {
    [width, height] = [stage.clientWidth, stage.clientHeight];
    gutterWidth = width < 560 ? NARROW_GUTTER : GUTTER;
    for (const button of buttons) button.style.width = `${gutterWidth}px`;
    const dpr = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.round(width * dpr), Math.round(height * dpr)];
    scrollTo(scroll);
  });
  resize.observe(stage);
  const retheme = () => {
    theme = readTheme(root, ctx);
    schedule();
  };
  // JupyterLab sets the attribute before the theme's style sheet has loaded, hence the second look.
  const themeChanged = () => {
    retheme();
    setTimeout(retheme, 300);
  };
  const observer = new MutationObserver(themeChanged);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  listen(matchMedia("(prefers-color-scheme: dark)"), "change", themeChanged);

  rearrange();
  showCount();
  fillDetails(page.details, model.get("selected"));
  page.error.textContent = model.get("error");

  return () => {
    stop.abort();
    resize.disconnect();
    observer.disconnect();
    cancelAnimationFrame(frame);
    clearTimeout(settleTimer);
    clearTimeout(searchTimer);
    for (const [event, handler] of Object.entries(handlers)) model.off(event, handler);
  };
}

export default { render };
