// What Python sends, and the sizes and limits that all parts share. The parts of this folder are joined into one ES
// module, in the order that view.py lists, because a notebook page cannot fetch a second file.
// All times are nanoseconds from the trace's first slice, in float64.

/**
 * @typedef {{rank: number, thread: string, name: string, kind: string, first_row: number, num_rows: number,
 *   num_slices: number}} Track
 * @typedef {{span_ns: number, num_slices: number, can_download: boolean, columns: [string, string][],
 *   path_columns: [string, string][],
 *   counter_columns: [string, string][], instant_columns: [string, string][], ranks: number[], notes: string[],
 *   tracks: Track[], counters: Counter[]}} Scene
 * @typedef {{t0: number, t1: number, width: number, search: string, pathNumber: number, columns: Record<string, any>,
 *   counters: Record<string, any>, instants: Record<string, any>, path: Record<string, any> | null}} Tile
 * @typedef {{mark: number, row: number}} Hit
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
