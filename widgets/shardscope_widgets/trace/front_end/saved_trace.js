// The part of Python in a saved page: it answers the view's requests from the columns in the page. Its rules repeat those
// of tiles.py (marks, sums) and selection.py (arrows, callers, statistics), where the reasons are.

const MODULE_NAME = /^nn\.Module: /;
const MAX_SAVED_CALLERS = 60;
const MAX_SAVED_CONNECTIONS = 40;
const MAX_SAVED_ARGS = 40;
const NUM_TOTALS = 12;

/** @typedef {Record<string, any>} Columns */

/** Decompress base64 text of gzip: a JSON head, and columns. @param {string} text */
async function readSavedTrace(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  // A loop: Uint8Array.from() makes a text of each of some ten million letters.
  for (let at = 0; at < letters.length; at++) packed[at] = letters.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const headBytes = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headBytes)));
  const kinds = /** @type {Record<string, any>} */ ({ "<f8": Float64Array, "<u4": Uint32Array, "<i4": Int32Array, u1: Uint8Array });
  const columns = /** @type {Columns} */ ({});
  let at = 4 + headBytes;
  for (const [name, kind, count] of head.columns) {
    const bytes = count * kinds[kind].BYTES_PER_ELEMENT;
    // The arguments, which may have a hundred megabytes, are not copied; numbers must begin at multiples of their size.
    columns[name] = kind === "u1" ? new Uint8Array(buffer, at, count) : new kinds[kind](buffer.slice(at, at + bytes));
    at += bytes;
  }
  return { ...head, columns };
}

/** First index from `low` to `high` for which `isPast` holds. @param {number} low @param {number} high
 * @param {(index: number) => boolean} isPast */
function bisect(low, high, isPast) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isPast(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

class SavedTrace {
  /** @param {any} saved */
  constructor(saved) {
    this.saved = saved;
    this.columns = saved.columns;
    this.scene = /** @type {Scene} */ (saved.state._scene);
    this.numRows = this.columns.row_first.length - 1;
    this.trackOfRow = new Int32Array(this.numRows);
    this.scene.tracks.forEach((track, number) =>
      this.trackOfRow.fill(number, track.first_row, track.first_row + track.num_rows),
    );
    this.rowOfSlice = new Int32Array(this.columns.start.length);
    for (let row = 0; row < this.numRows; row++) {
      this.rowOfSlice.fill(row, this.columns.row_first[row], this.columns.row_first[row + 1]);
    }
    this.matches = new Uint8Array(saved.names.length);
  }

  /** @param {string} text @returns {number} how many slices match */
  search(text) {
    const wanted = text.trim().toLowerCase();
    this.matches = Uint8Array.from(this.saved.names, (name) => Number(wanted !== "" && name.toLowerCase().includes(wanted)));
    return this.columns.name.reduce((/** @type {number} */ sum, /** @type {number} */ name) => sum + this.matches[name], 0);
  }

  /** First and last slice of a row between two times. @param {number} row @param {number} t0 @param {number} t1 */
  findRange(row, t0, t1) {
    const { start, duration, row_first: bounds } = this.columns;
    const low = bisect(bounds[row], bounds[row + 1], (i) => start[i] + duration[i] >= t0);
    return [low, bisect(low, bounds[row + 1], (i) => start[i] > t1)];
  }

  /** @param {any} request @param {string} search @param {number} number of the path @returns {Tile} */
  buildTile({ t0_ns: t0, t1_ns: t1, width, rows, counters, wants_path: wantsPath }, search, number) {
    const stretch = { t0, t1, width };
    const instants = this.cut("instant", ["time", "row", "name", "count"], "time", "time", t0, t1);
    const names = /** @type {Set<number>} */ (new Set());
    const tile = {
      rows: /** @type {Map<number, RowMarks>} */ (new Map()),
      counters: /** @type {Map<number, Samples>} */ (new Map()),
      path: wantsPath ? { ...stretch, number, start: [], end: [], row: [], is_slice: [] } : null,
      names: /** @type {number[]} */ ([]),
    };
    for (const row of rows) {
      const mine = instants.row.map((/** @type {number} */ one, /** @type {number} */ i) => (one === row ? i : -1)).filter((/** @type {number} */ i) => i >= 0);
      const pick = (/** @type {any[]} */ values) => mine.map((/** @type {number} */ i) => values[i]);
      const ticks = { time: pick(instants.time), name: pick(instants.name), count: pick(instants.count) };
      const marks = this.listMarks(row, t0, t1, width);
      tile.rows.set(row, { ...stretch, search, isExact: true, ...marks, instants: ticks });
      for (const name of [...marks.name, ...ticks.name]) names.add(name);
    }
    for (const counter of counters) tile.counters.set(counter, { ...stretch, ...this.cutCounter(counter, t0, t1) });
    if (tile.path && this.saved.has_path) Object.assign(tile.path, this.cut("path", ["start", "end", "row", "is_slice"], "start", "end", t0, t1));
    tile.names = [...names];
    return tile;
  }

  /** @param {number} row @param {number} t0 @param {number} t1 @param {number} width */
  listMarks(row, t0, t1, width) {
    const { start, duration, name, colour } = this.columns;
    const pixel = (t1 - t0) / width;
    const list = () => /** @type {number[]} */ ([]);
    const marks = { start: list(), duration: list(), slice: list(), name: list(), count: list(), colour: list(), density: list(), match: list() };
    const [low, high] = this.findRange(row, t0, t1);
    for (let first = low, last; first < high; first = last) {
      const at = Math.floor((start[first] - t0) / pixel);
      let [busy, isSmall] = [duration[first], duration[first] < pixel];
      for (last = first + 1; last < high && isSmall; last++) {
        isSmall = duration[last] < pixel && Math.floor((start[last] - t0) / pixel) === at;
        if (!isSmall) break;
        busy += duration[last];
      }
      const shown = this.chooseSlice(first, last - first);
      const extent = start[last - 1] + duration[last - 1] - start[first];
      marks.start.push(start[first]);
      marks.duration.push(extent);
      marks.slice.push(first);
      marks.name.push(name[shown]);
      marks.count.push(last - first);
      marks.colour.push(colour[name[shown]]);
      marks.density.push(Math.min((255 * busy) / Math.max(extent, 1), 255));
      marks.match.push(this.matches[name[shown]]);
    }
    return marks;
  }

  /** The slice that names a mark. @param {number} first @param {number} count */
  chooseSlice(first, count) {
    const { duration, name } = this.columns;
    let shown = first;
    for (let i = first + 1; i < first + count; i++) {
      const difference = this.matches[name[i]] - this.matches[name[shown]];
      if (difference > 0 || (difference === 0 && duration[i] > duration[shown])) shown = i;
    }
    return shown;
  }

  /** @param {string} prefix of the saved columns @param {string[]} names of columns @param {string} from
   * @param {string} to names of the columns of times @param {number} t0 @param {number} t1
   * @returns {Record<string, any>} */
  cut(prefix, names, from, to, t0, t1) {
    const kept = /** @type {number[]} */ ([]);
    const [starts, ends] = [this.columns[`${prefix}_${from}`], this.columns[`${prefix}_${to}`]];
    for (let i = 0; i < starts.length; i++) if (starts[i] <= t1 && ends[i] >= t0) kept.push(i);
    return Object.fromEntries(names.map((column) => [column, kept.map((i) => this.columns[`${prefix}_${column}`][i])]));
  }

  /** @param {number} number @param {number} t0 @param {number} t1 */
  cutCounter(number, t0, t1) {
    const { counter_first: first, counter_time: time, counter_value: value } = this.columns;
    const low = Math.max(bisect(first[number], first[number + 1], (i) => time[i] > t0) - 1, first[number]);
    const high = bisect(low, first[number + 1], (i) => time[i] > t1);
    return { time: time.subarray(low, high), value: value.subarray(low, high) };
  }

  /** @param {number} t0 @param {number} t1 @param {Set<number> | null} tracks null: all, without Python stacks */
  sum(t0, t1, tracks) {
    const { start, duration, name, category, parent, is_recursive: isRecursive, is_inside_category: isInside } = this.columns;
    const found = /** @type {number[]} */ ([]);
    for (let row = 0; row < this.numRows; row++) {
      if (tracks && !tracks.has(this.trackOfRow[row])) continue;
      const [low, high] = this.findRange(row, t0, t1);
      for (let i = low; i < high; i++) found.push(i);
    }
    const isFrame = (/** @type {number} */ i) => this.scene.tracks[this.trackOfRow[this.rowOfSlice[i]]].kind === "python";
    const operators = found.filter((i) => !isFrame(i));
    const counted = operators.length || !tracks ? operators : found;
    const inside = new Float64Array(start.length);
    const ofCallees = new Float64Array(start.length);
    for (const i of counted) {
      inside[i] = Math.min(start[i] + duration[i], t1) - Math.max(start[i], t0);
      if (parent[i] >= 0) ofCallees[parent[i]] += inside[i];
    }
    const sumBy = (/** @type {any} */ group, /** @type {string[]} */ texts, /** @type {any} */ isNested) => {
      const sums = /** @type {Map<number, any>} */ (new Map());
      for (const i of counted) {
        let row = sums.get(group[i]);
        if (!row) sums.set(group[i], (row = { name: texts[group[i]], slices: 0, self_seconds: 0, total_seconds: 0 }));
        row.slices += 1;
        row.self_seconds += (inside[i] - ofCallees[i]) / 1e9;
        if (!isNested[i]) row.total_seconds += inside[i] / 1e9;
      }
      const rows = [...sums.values()];
      rows.sort((a, b) => b.self_seconds - a.self_seconds || b.total_seconds - a.total_seconds);
      return rows.slice(0, NUM_TOTALS);
    };
    const categories = this.saved.categories.map((/** @type {string} */ text) => text || "no category");
    return { names: sumBy(name, this.saved.names, isRecursive), categories: sumBy(category, categories, isInside) };
  }

  /** @param {number} index */
  describeEnd(index) {
    const { start, duration, name } = this.columns;
    const row = this.rowOfSlice[index];
    const { rank, name: track } = this.scene.tracks[this.trackOfRow[row]];
    const [from, to] = [start[index], start[index] + duration[index]];
    return { index, name: this.saved.names[name[index]], rank, track, row, start_ns: from, end_ns: to };
  }

  /** @param {number} index */
  describeSlice(index) {
    const { category, duration } = this.columns;
    const { name, rank, track, row, start_ns: start } = this.describeEnd(index);
    const callers = this.findCallers(index).map((caller) => this.saved.names[this.columns.name[caller]]);
    const args = this.readArgs(index);
    const module = callers.find((caller) => MODULE_NAME.test(caller))?.replace(MODULE_NAME, "");
    return {
      index,
      name,
      rank,
      track,
      row,
      category: this.saved.categories[category[index]],
      start_seconds: start / 1e9,
      duration_seconds: duration[index] / 1e9,
      args: Object.fromEntries(Object.entries(args).slice(0, MAX_SAVED_ARGS)),
      callers,
      module: module ?? (typeof args["Module Hierarchy"] === "string" ? args["Module Hierarchy"] : ""),
      statistics: this.measureName(index),
      connections: this.findConnections(index).map(([kind, source, target]) => ({
        kind,
        source: this.describeEnd(source),
        target: this.describeEnd(target),
      })),
    };
  }

  /** @param {number} index @returns {Record<string, any>} */
  readArgs(index) {
    const { args_first: first, args } = this.columns;
    if (!first.length) return {};
    try {
      const value = JSON.parse(new TextDecoder().decode(args.subarray(first[index], first[index + 1])) || "{}");
      return value && typeof value === "object" && !Array.isArray(value) ? value : {};
    } catch {
      return {};
    }
  }

  /** @param {number} index */
  listParents(index) {
    const parents = /** @type {number[]} */ ([]);
    for (let one = this.columns.parent[index]; one >= 0; one = this.columns.parent[one]) parents.push(one);
    return parents;
  }

  /** @param {number} index */
  findCallers(index) {
    const { start, duration, launch, row_first: bounds } = this.columns;
    const { tracks } = this.scene;
    let onCpu = index;
    const callers = /** @type {number[]} */ ([]);
    if (tracks[this.trackOfRow[this.rowOfSlice[index]]].kind === "gpu") {
      onCpu = launch[index];
      if (onCpu < 0) return [];
      callers.push(onCpu);
    }
    callers.push(...this.listParents(onCpu));
    const track = tracks[this.trackOfRow[this.rowOfSlice[onCpu]]];
    const stack = tracks.find((one) => one.kind === "python" && one.rank === track.rank && one.thread === track.thread);
    if (stack && track.kind !== "python") {
      const time = start[onCpu];
      let frame = -1;
      for (let row = stack.first_row; row < stack.first_row + stack.num_rows; row++) {
        const i = bisect(bounds[row], bounds[row + 1], (one) => start[one] > time) - 1;
        if (i >= bounds[row] && start[i] + duration[i] >= time) frame = i;
      }
      if (frame >= 0) callers.push(frame, ...this.listParents(frame));
    }
    return callers.slice(0, MAX_SAVED_CALLERS);
  }

  /** @param {number} index */
  measureName(index) {
    const { start, duration, name, category, is_recursive: isRecursive } = this.columns;
    const rankOf = (/** @type {number} */ i) => this.scene.tracks[this.trackOfRow[this.rowOfSlice[i]]].rank;
    const rank = rankOf(index);
    let [count, all, sum, total, min, max, first, end] = [0, 0, 0, 0, Infinity, 0, Infinity, 0];
    for (let i = 0; i < start.length; i++) {
      const isOfRank = rankOf(i) === rank;
      if (isOfRank) [first, end] = [Math.min(first, start[i]), Math.max(end, start[i] + duration[i])];
      if (name[i] !== name[index] || category[i] !== category[index]) continue;
      all += 1;
      if (!isOfRank) continue;
      [count, sum, min, max] = [count + 1, sum + duration[i], Math.min(min, duration[i]), Math.max(max, duration[i])];
      if (!isRecursive[i]) total += duration[i];
    }
    const seconds = { total_seconds: total / 1e9, mean_seconds: sum / count / 1e9, min_seconds: min / 1e9, max_seconds: max / 1e9 };
    return { rank, count, ...seconds, share: end > first ? total / (end - first) : 0, num_on_all_ranks: all };
  }

  /** @param {number} index @returns {[string, number, number][]} kind, source and target */
  findConnections(index) {
    const { start, duration, launch, call, flow_source: sources, flow_target: targets } = this.columns;
    const found = /** @type {Map<string, [string, number, number]>} */ (new Map());
    const add = (/** @type {string} */ kind, /** @type {number} */ source, /** @type {number} */ target) => {
      if (!found.has(`${source} ${target}`)) found.set(`${source} ${target}`, [kind, source, target]);
    };
    if (launch[index] >= 0) add("launch", launch[index], index);
    else {
      const [own, nested] = [/** @type {number[]} */ ([]), /** @type {number[]} */ ([])];
      const row = this.rowOfSlice[index];
      const end = start[index] + duration[index];
      for (let i = 0; i < launch.length; i++) {
        const by = launch[i];
        if (by < 0) continue;
        if (by === index) own.push(i);
        const isInside = this.rowOfSlice[by] > row && this.trackOfRow[this.rowOfSlice[by]] === this.trackOfRow[row];
        if (isInside && start[by] >= start[index] && start[by] + duration[by] <= end) nested.push(i);
      }
      const work = own.length ? own.slice(0, MAX_SAVED_CONNECTIONS) : nested.length <= MAX_SAVED_CONNECTIONS ? nested : [];
      for (const i of work) add("launch", launch[i], i);
    }
    for (let i = 0; i < sources.length; i++) {
      if ((sources[i] === index || targets[i] === index) && sources[i] !== targets[i]) add("flow", sources[i], targets[i]);
    }
    if (call[index] >= 0) {
      for (let i = 0; i < call.length; i++) if (call[i] === call[index] && i !== index) add("collective", index, i);
    }
    return [...found.values()];
  }

  /** The next match after the selected one, or the first in view. @param {any} model @param {number} direction */
  findMatch(model, direction) {
    const { start, name } = this.columns;
    const matches = /** @type {number[]} */ ([]);
    for (let i = 0; i < name.length; i++) if (this.matches[name[i]]) matches.push(i);
    if (!matches.length) return null;
    matches.sort((a, b) => start[a] - start[b] || a - b);
    const at = matches.indexOf(model.get("selected")?.index ?? -1);
    const after = matches.findIndex((i) => start[i] >= model.get("viewport_seconds")[0] * 1e9);
    const next = at >= 0 ? at + direction : (after < 0 ? matches.length : after) - (direction > 0 ? 0 : 1);
    const position = (next + matches.length) % matches.length;
    return { index: matches[position], position: position + 1 };
  }
}

/** The methods of an anywidget model that the view uses, for a saved trace. @param {any} saved */
function openSavedModel(saved) {
  const trace = new SavedTrace(saved);
  const { state } = saved;
  const handlers = /** @type {Record<string, Function[]>} */ ({});
  const fire = (/** @type {string} */ event, /** @type {any[]} */ ...rest) =>
    [...(handlers[event] ?? [])].forEach((handler) => handler(...rest));
  const set = (/** @type {string} */ key, /** @type {any} */ value) => {
    state[key] = value;
    fire(`change:${key}`);
  };
  const answers = /** @type {Record<string, (request: any) => any>} */ ({
    tile: (request) => ({ tile: trace.buildTile(request, state.search, state._path_number) }),
    names: ({ indices }) => ({ indices, names: indices.map((/** @type {number} */ i) => saved.names[i]) }),
    totals: ({ t0_ns: t0, t1_ns: t1 }) => ({ rows: trace.sum(t0, t1, null).names }),
    area: ({ t0_ns: t0, t1_ns: t1, tracks }) => trace.sum(t0, t1, new Set(tracks)),
    pick: ({ index, count }) => answers.select({ index: trace.chooseSlice(index, count) }),
    select: ({ index }) => {
      set("selected", index === null ? null : trace.describeSlice(index));
      return null;
    },
    find: ({ direction }) => {
      const match = trace.findMatch(model, direction);
      if (!match) return null;
      set("selected", trace.describeSlice(match.index));
      return { position: match.position };
    },
  });
  const model = {
    get: (/** @type {string} */ key) => state[key],
    set: (/** @type {string} */ key, /** @type {any} */ value) => {
      set(key, value);
      if (key === "search") set("num_matches", trace.search(value));
    },
    save_changes: () => {},
    send: (/** @type {any} */ request) =>
      setTimeout(() => {
        const reply = answers[request.type](request);
        const type = request.type === "find" ? "found" : request.type;
        if (reply) fire("msg:custom", { ...reply, type, id: request.id }, []);
      }),
    on: (/** @type {string} */ event, /** @type {Function} */ handler) => (handlers[event] ??= []).push(handler),
    off: (/** @type {string} */ event, /** @type {Function} */ handler) => {
      handlers[event] = (handlers[event] ?? []).filter((one) => one !== handler);
    },
  };
  if (state.search) trace.search(state.search);
  return model;
}

/** Show the trace that is saved in this page. */
async function showSavedTrace() {
  const place = /** @type {HTMLElement} */ (document.getElementById("trace"));
  try {
    const text = document.getElementById("trace-data")?.textContent ?? "";
    const model = openSavedModel(await readSavedTrace(text.trim()));
    place.replaceChildren();
    render({ model, el: place });
  } catch (error) {
    place.textContent = `This page could not be opened: ${error}. A browser from 2023 or later is needed.`;
  }
}

showSavedTrace();
