// State of one view: the record that the functions of all other parts take.

/** @param {any} model @param {HTMLElement} root
 * @param {Scene} scene @param {ReturnType<typeof buildPage>} page */
function openView(model, root, scene, page) {
  const ctx = /** @type {CanvasRenderingContext2D} */ (page.canvas.getContext("2d"));
  const [t0, t1] = model.get("viewport_seconds").map((/** @type {number} */ seconds) => seconds * 1e9);
  const folded = /** @type {Set<number>} */ (new Set());
  const shownStacks = /** @type {Set<number>} */ (new Set());
  const order = new Map(scene.ranks.map((rank) => [rank, scene.tracks.filter((track) => track.rank === rank)]));
  let places = arrange(scene, folded, shownStacks, false, order, []);
  // Ranks are there to be compared: where they do not fit on two screens, all are shown small first.
  if (scene.ranks.length > 1 && places.height > 2 * model.get("height")) {
    for (const rank of scene.ranks) folded.add(rank);
    places = arrange(scene, folded, shownStacks, false, order, []);
  }
  return {
    model,
    root,
    scene,
    page,
    ctx,
    closing: new AbortController(),
    theme: readTheme(root, ctx),
    t0,
    t1,
    sentViewport: [t0 / 1e9, t1 / 1e9],
    scroll: 0,
    width: 0,
    height: 0,
    dpr: 1,
    gutterWidth: GUTTER,
    isNarrow: false,
    folded, // ranks
    shownStacks, // first rows of the Python stacks that are unfolded
    order, // tracks of each rank
    counterTracks: scene.counters.map(({ rank, name }, number) => ({
      ...{ rank, name, number, kind: "counter", thread: "", first_row: -1, num_rows: 0, num_slices: 0 },
    })),
    pinned: /** @type {Track[]} */ ([]),
    sticky: 0, // height of the pinned tracks, which do not scroll
    currentTrack: /** @type {Track | null} */ (null), // that P and J act on
    hoverTrack: /** @type {Track | null} */ (null),
    places,
    rankButtons: /** @type {HTMLElement[]} */ ([]),
    stackButtons: /** @type {Map<number, HTMLElement>} */ (new Map()),
    rows: /** @type {Map<number, RowMarks>} */ (new Map()),
    counters: /** @type {Map<number, Samples>} */ (new Map()),
    path: /** @type {Path | null} */ (null),
    lines: /** @type {{canvas: HTMLCanvasElement, ctx: CanvasRenderingContext2D, image: ImageData, words: Uint32Array} | null} */ (null),
    hover: /** @type {Hit | null} */ (null),
    exact: /** @type {{slice: number, start: number, duration: number} | null} */ (null), // times of the mark under the pointer
    pointer: [0, 0],
    names: /** @type {Map<number, string>} */ (new Map()),
    unnamed: /** @type {Set<number>} */ (new Set()), // names to request
    textWidths: /** @type {Map<string, number>} */ (new Map()),
    matchNumber: 0,
    area: /** @type {Area | null} */ (null),
    areaSums: /** @type {{names: any[], categories: any[]} | null} */ (null),
    isAreaShown: false, // in the details, and not the selected slice
    isToBeRevealed: false, // the slice that is selected next
    // Ids start at random, since every view of this model hears every reply.
    lastId: Math.floor(Math.random() * 2 ** 40),
    pending: { tile: 0, since: 0, names: 0, totals: 0, find: 0, area: 0, mark: 0, markSince: 0 },
    perfetto: /** @type {Perfetto | null} */ (null), // while a trace is handed over
    frame: 0,
    settleTimer: 0,
    searchTimer: 0,
    areaTimer: 0,
    waitTimer: 0, // until the view says that it waits for a tile
  };
}

/** @typedef {ReturnType<typeof openView>} View */

/** Listens until the view closes. @param {View} view @param {EventTarget} target @param {string} type
 * @param {any} action @param {AddEventListenerOptions} [options] */
function listen(view, target, type, action, options = {}) {
  target.addEventListener(type, action, { signal: view.closing.signal, ...options });
}

/** @param {View} view */
const plotWidth = (view) => Math.max(view.width - view.gutterWidth, 1);

/** Height on the canvas of a height of the content. @param {View} view @param {number} top */
const yOfTop = (view, top) => RULER + top - (top < view.sticky ? 0 : view.scroll);

/** Height of the content at a height of the canvas. @param {View} view @param {number} y */
const contentAt = (view, y) => y - RULER + (y - RULER < view.sticky ? 0 : view.scroll);

/** Where something at this height of the content becomes visible on the canvas.
 * @param {View} view @param {number} top */
const upperEdge = (view, top) => RULER + (top < view.sticky ? 0 : view.sticky);

/** @param {View} view @param {number} time */
const xOf = (view, time) => view.gutterWidth + ((time - view.t0) / (view.t1 - view.t0)) * plotWidth(view);

/** @param {View} view @param {number} x */
const timeAt = (view, x) => view.t0 + ((x - view.gutterWidth) / plotWidth(view)) * (view.t1 - view.t0);
