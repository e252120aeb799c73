// Tiles: the marks of a stretch of time, row by row, and which rows and counters still need theirs.

/** @param {DataView} packed @returns {Promise<Uint8Array>} */
async function inflate(packed) {
  const stream = new Blob([/** @type {BlobPart} */ (packed)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** @param {[string, number | string, number][]} kinds name, kind and number of values of each column, as
 * tile_encoding.py writes them @param {Uint8Array} bytes */
function readColumns(kinds, bytes) {
  const columns = /** @type {Record<string, Float64Array>} */ ({});
  let at = 0;
  for (const [name, kind, count] of kinds) {
    if (typeof kind === "string") {
      const [Floats, size] = /** @type {const} */ (kind === "f8" ? [Float64Array, 8] : [Float32Array, 4]);
      columns[name] = Float64Array.from(new Floats(/** @type {ArrayBuffer} */ (bytes.buffer).slice(at, at + count * size)));
      at += count * size;
      continue;
    }
    const values = (columns[name] = new Float64Array(count));
    for (let plane = 0, factor = 1; plane < kind; plane++, factor *= 256) {
      for (let i = 0; i < count; i++) values[i] += bytes[at + i] * factor;
      at += count;
    }
  }
  return columns;
}

/** @param {any} message @param {DataView} packed @returns {Promise<Tile>} */
async function readTile(message, packed) {
  const columns = readColumns(message.columns, await inflate(packed));
  const { t0_ns: t0, t1_ns: t1, width, search, tick_ns: tick } = message;
  const stretch = { t0, t1, width };
  const rows = readRows(message, columns);
  const counters = new Map();
  const { counter_number: numbers, counter_begin: begin, counter_time: time, counter_value: value } = columns;
  let first = 0;
  message.counters.forEach((/** @type {number} */ counter, /** @type {number} */ i) => {
    const last = first + numbers[i];
    counters.set(counter, { ...stretch, time: time.subarray(first, last).map((one) => one + begin[0]), value: value.subarray(first, last) });
    first = last;
  });
  const names = [...columns.names, ...columns.instant_name];
  return { rows, counters, path: readPath(message, columns), names, search, tick };
}

/** @param {any} message @param {Record<string, Float64Array>} columns */
function readRows(message, columns) {
  const { t0_ns: t0, t1_ns: t1, width, search, tick_ns: tick } = message;
  const { gap, extent, name: local, count, density, names, colours, matches } = columns;
  const size = gap.length;
  const [start, duration, slice, name] = [0, 0, 0, 0].map(() => new Float64Array(size));
  const [colour, match] = [new Uint8Array(size), new Uint8Array(size)];
  const rows = /** @type {Map<number, RowMarks>} */ (new Map());
  let mark = 0;
  let filled = 0; // rows with marks so far
  message.rows.forEach((/** @type {number} */ row, /** @type {number} */ i) => {
    const first = mark;
    const last = first + columns.row_number[i];
    let at = last > first ? columns.row_start[filled] : 0;
    let index = last > first ? columns.row_slice[filled++] : 0;
    for (; mark < last; mark++) {
      at += gap[mark];
      [start[mark], duration[mark], slice[mark]] = [t0 + at * tick, extent[mark] * tick, index];
      at += extent[mark];
      index += count[mark];
      const which = local[mark];
      [name[mark], colour[mark], match[mark]] = [names[which], colours[which], matches[which]];
    }
    const part = (/** @type {any} */ values) => values.subarray(first, last);
    const marks = { start: part(start), duration: part(duration), slice: part(slice), name: part(name), count: part(count) };
    const looks = { colour: part(colour), density: part(density), match: part(match) };
    rows.set(row, { t0, t1, width, search, isExact: tick === 1, ...marks, ...looks, instants: { time: [], name: [], count: [] } });
  });
  let first = 0;
  columns.instant_row.forEach((row, i) => {
    const last = first + columns.instant_number[i];
    const time = columns.instant_time.subarray(first, last).map((one) => one + t0);
    const [name, number] = [columns.instant_name.subarray(first, last), columns.instant_count.subarray(first, last)];
    Object.assign(/** @type {RowMarks} */ (rows.get(row)), { instants: { time, name, count: number } });
    first = last;
  });
  return rows;
}

/** @param {any} message @param {Record<string, Float64Array>} columns @returns {Path | null} null: not in this tile */
function readPath(message, columns) {
  if (!message.has_path) return null;
  const { t0_ns: t0, t1_ns: t1, width, path: number } = message;
  const tick = Math.max(Math.floor((t1 - t0) / width / 8), 1);
  const { path_gap: gap = [], path_extent: extent = [], path_row: row = [], path_is_slice: isSlice = [] } = columns;
  const start = new Float64Array(gap.length);
  let at = t0 - (t1 - t0);
  for (let i = 0; i < gap.length; i++) start[i] = at += gap[i] * tick;
  const end = start.map((one, i) => one + extent[i] * tick);
  return { t0, t1, width, number, start, end, row, is_slice: isSlice };
}

/** Store a tile, and drop rows that are far from the view. @param {View} view @param {Tile} tile */
function keepTile(view, tile) {
  for (const [row, marks] of tile.rows) view.rows.set(row, marks);
  for (const [number, samples] of tile.counters) view.counters.set(number, samples);
  if (tile.path) view.path = tile.path;
  if (view.rows.size <= MAX_KEPT_ROWS) return;
  const near = new Set(listRows(view, view.height));
  for (const row of view.rows.keys()) if (!near.has(row)) view.rows.delete(row);
}

/** Rows that are in view or up to `margin` pixels above and below. @param {View} view @param {number} margin */
function listRows(view, margin) {
  const rows = /** @type {number[]} */ ([]);
  for (const { track, top, height, tall } of view.places.bands) {
    const y = yOfTop(view, top);
    if (y > view.height + margin || y + height < upperEdge(view, top) - margin) continue;
    for (let i = 0; i < track.num_rows; i++) {
      const at = y + i * tall;
      if (at <= view.height + margin && at + tall >= upperEdge(view, top) - margin) rows.push(track.first_row + i);
    }
  }
  return rows;
}

/** Whether a part of a tile covers the time in view at the resolution that is drawn. @param {View} view
 * @param {{t0: number, t1: number, width: number} | null | undefined} part */
function isCurrent({ scene, t0, t1, width, gutterWidth }, part) {
  if (!part) return false;
  const edge = (/** @type {number} */ time) => Math.min(Math.max(time, 0), scene.span_ns);
  const resolution = (part.t1 - part.t0) / part.width / ((t1 - t0) / Math.max(width - gutterWidth, 1));
  return edge(t0) >= part.t0 && edge(t1) <= part.t1 && resolution < 1.3 && resolution > 0.3;
}

/** Rows and counters that are missing in view or, if none are, within `margin` pixels of it. @param {View} view @param {number} margin */
function listMissing(view, margin) {
  const search = view.model.get("search");
  const isMissing = (/** @type {number} */ row) => view.rows.get(row)?.search !== search || !isCurrent(view, view.rows.get(row));
  const counters = view.places.counters.filter(({ top }) => {
    const y = yOfTop(view, top);
    return y <= view.height + margin && y + COUNTER_HEIGHT >= RULER - margin;
  });
  const number = view.model.get("_path_number");
  return {
    rows: listRows(view, margin).filter(isMissing),
    counters: counters.map((one) => one.number).filter((one) => !isCurrent(view, view.counters.get(one))),
    wants_path: number > 0 && (view.path?.number !== number || !isCurrent(view, view.path)),
  };
}

/** First mark that ends after `time`. @param {RowMarks} marks @param {number} time */
function firstMarkAfter({ start, duration }, time) {
  let low = 0;
  let high = start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[middle] + duration[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}
