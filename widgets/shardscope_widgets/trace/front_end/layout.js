// Layout: heights of ranks, tracks and rows, and the marks of a row at a time.

/** Heights from the top of the scrolled content. A folded rank is one band with all its rows, too thin for names;
 * it leaves Python stacks out. Python stacks are one line, and below it their rows if they are shown.
 * @param {Scene} scene @param {Set<number>} folded ranks @param {Set<number>} shownStacks first rows of tracks
 * @param {boolean} isNarrow track names stand above their rows, not beside them
 * @param {Map<number, Track[]>} order of each rank's tracks @param {Track[]} pinned above all ranks */
function arrange(scene, folded, shownStacks, isNarrow, order, pinned) {
  const numRows = scene.tracks.reduce((sum, track) => sum + track.num_rows, 0);
  const rowTop = new Float64Array(numRows);
  const rowTall = new Float64Array(numRows); // 0 where a row is not shown
  const headers = /** @type {{rank: number, top: number, height: number, tracks: Track[]}[]} */ ([]);
  const bands = /** @type {{track: Track, top: number, height: number, tall: number}[]} */ ([]);
  const stacks = /** @type {{track: Track, top: number, isShown: boolean, hasOperators: boolean}[]} */ ([]);
  const counters = /** @type {{number: number, top: number}[]} */ ([]);
  const addCounter = (/** @type {number} */ number) => {
    y += COUNTER_GAP + (isNarrow ? NAME_LINE : 0);
    counters.push({ number, top: y });
    y += COUNTER_HEIGHT;
  };
  let y = 0;
  const addBand = (/** @type {Track} */ track, /** @type {number} */ tall) => {
    bands.push({ track, top: y, height: track.num_rows * tall, tall });
    for (let row = 0; row < track.num_rows; row++) rowTop[track.first_row + row] = y + row * tall;
    rowTall.fill(tall, track.first_row, track.first_row + track.num_rows);
    y += track.num_rows * tall;
  };
  for (const track of pinned) {
    if (track.number !== undefined) addCounter(track.number);
    if (track.number !== undefined) continue;
    y += TRACK_GAP / 2 + (isNarrow ? NAME_LINE : 0);
    addBand(track, ROW);
    y += TRACK_GAP / 2;
  }
  const pinnedHeight = pinned.length ? (y += 1) : 0; // and a line
  for (const rank of scene.ranks) {
    const all = order.get(rank) ?? [];
    const tracks = all.filter((track) => !pinned.includes(track));
    const isFolded = folded.has(rank);
    const rows = tracks.reduce((sum, track) => sum + (track.kind === "python" ? 0 : track.num_rows), 0);
    const thin = Math.min(Math.max(Math.floor(48 / Math.max(rows, 1)), 1), 4);
    const gap = isFolded ? 1 : TRACK_GAP / 2;
    const header = { rank, top: y, height: HEADER, tracks: all };
    headers.push(header);
    y += isFolded ? FOLD_MARGIN : HEADER;
    for (const [i, track] of tracks.entries()) {
      if (track.kind === "python") {
        rowTop.fill(y, track.first_row, track.first_row + track.num_rows);
        const isShown = shownStacks.has(track.first_row);
        const before = tracks[i - 1];
        const hasOperators = before?.kind === "cpu" && before.thread === track.thread;
        stacks.push({ track, top: y, isShown, hasOperators });
        if (isFolded) continue;
        y += STACK_LINE;
        if (isShown) addBand(track, ROW);
        y += isShown ? 2 * gap : 0;
        continue;
      }
      y += gap + (isNarrow && !isFolded ? NAME_LINE : 0);
      addBand(track, !isFolded ? ROW : track.kind === "gpu" ? thin + 2 : thin); // streams are few and matter most
      y += gap;
    }
    for (const [number, counter] of scene.counters.entries()) {
      const isPinned = pinned.some((track) => track.number === number);
      if (counter.rank === rank && !isFolded && !isPinned) addCounter(number);
    }
    if (!isFolded && counters.length) y += COUNTER_GAP;
    if (!isFolded) continue;
    y = Math.max(y + FOLD_MARGIN, header.top + HEADER);
    header.height = y - header.top;
  }
  return { rowTop, rowTall, headers, bands, stacks, counters, pinnedHeight, height: y };
}
