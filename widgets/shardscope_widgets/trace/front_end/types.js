// Types of what Python sends, and the sizes and limits that all parts share. The parts of this folder are joined into one ES
// module, in the order that view.py lists, because a notebook page cannot fetch a second file.
// All times are nanoseconds from the trace's first slice, in float64.

/**
 * @typedef {{rank: number, thread: string, name: string, kind: string, first_row: number, num_rows: number,
 *   num_slices: number, number?: number}} Track a counter, too, can be pinned: its kind is "counter"
 * @typedef {{span_ns: number, num_slices: number, can_download: boolean, download_limit: number, perfetto: string, ranks: number[], notes: string[],
 *   tracks: Track[], counters: Counter[]}} Scene
 * @typedef {{t0: number, t1: number, width: number}} Stretch of time, at a width in pixels
 * @typedef {Stretch & {search: string, isExact: boolean, start: any, duration: any, slice: any, name: any, count: any,
 *   colour: any, density: any, match: any, instants: {time: any, name: any, count: any}}} RowMarks slice: the first one
 * @typedef {Stretch & {time: any, value: any}} Samples
 * @typedef {Stretch & {number: number, start: any, end: any, row: any, is_slice: any}} Path
 * @typedef {{rows: Map<number, RowMarks>, counters: Map<number, Samples>, path: Path | null, names: number[]}} Tile
 * @typedef {{mark: number, row: number, marks: RowMarks}} Hit
 */

const RULER = 24;
const HEADER = 24;
const GUTTER = 168;
const NARROW = 560; // below this width track names stand above their rows
const NARROW_GUTTER = 72;
const NAME_LINE = 16;
const STACK_LINE = 22;
const ROW = 18;
const TRACK_GAP = 6;
const FOLD_MARGIN = 4;
const READABLE_ROW = 14;
const MIN_SPAN_NS = 50;
const MIN_TEXT_PX = 26;
const SETTLE_MS = 150;
const REPLY_MS = 5000;
const WAITING_MS = 1000; // without a tile before the view says so
const MAX_KEPT_ROWS = 1000; // of a trace with thousands, those near the view
