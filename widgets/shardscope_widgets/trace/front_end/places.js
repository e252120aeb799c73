// Where ranks, tracks and rows stand, and which marks a row has at a time.

/** Heights from the top of the scrolled content. A folded rank is one band with all its rows, too thin for names.
 * @param {Scene} scene @param {Set<number>} folded ranks */
function arrange(scene, folded) {
  const numRows = scene.tracks.reduce((sum, track) => sum + track.num_rows, 0);
  const rowTop = new Float64Array(numRows);
  const rowTall = new Float64Array(numRows);
  const headers = /** @type {{rank: number, top: number, height: number, tracks: Track[]}[]} */ ([]);
  const bands = /** @type {{track: Track, top: number, height: number, tall: number}[]} */ ([]);
  let y = 0;
  for (const rank of scene.ranks) {
    const tracks = scene.tracks.filter((track) => track.rank === rank);
    const isFolded = folded.has(rank);
    const rows = tracks.reduce((sum, track) => sum + track.num_rows, 0);
    const thin = Math.min(Math.max(Math.floor(48 / rows), 1), 4);
    const gap = isFolded ? 1 : TRACK_GAP / 2;
    const header = { rank, top: y, height: HEADER, tracks };
    headers.push(header);
    y += isFolded ? FOLD_MARGIN : HEADER;
    for (const track of tracks) {
      const tall = !isFolded ? ROW : track.kind === "gpu" ? thin + 2 : thin; // streams are few and matter most
      y += gap;
      bands.push({ track, top: y, height: track.num_rows * tall, tall });
      for (let row = 0; row < track.num_rows; row++) rowTop[track.first_row + row] = y + row * tall;
      rowTall.fill(tall, track.first_row, track.first_row + track.num_rows);
      y += track.num_rows * tall + gap;
    }
    if (!isFolded) continue;
    y = Math.max(y + FOLD_MARGIN, header.top + HEADER);
    header.height = y - header.top;
  }
  return { rowTop, rowTall, headers, bands, height: y };
}

const ARRAYS = /** @type {Record<string, any>} */ ({ "<f8": Float64Array, "<u4": Uint32Array, u1: Uint8Array });

/** @param {Scene} scene @param {any} message @param {DataView[]} buffers @returns {Tile} */
function readTile(scene, message, buffers) {
  const columns = /** @type {Record<string, any>} */ ({});
  scene.columns.forEach(([name, kind], i) => {
    const view = buffers[i];
    // Copied, because a typed array needs its bytes aligned and a message part may start anywhere.
    columns[name] = new ARRAYS[kind](view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
  });
  return { t0: message.t0_ns, t1: message.t1_ns, width: message.width, search: message.search, columns };
}

/** First mark of `row` that ends after `time`. @param {Tile} tile @param {number} row @param {number} time */
function firstMarkAfter(tile, row, time) {
  const { row_first: bounds, start, duration } = tile.columns;
  let low = bounds[row];
  let high = bounds[row + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[middle] + duration[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}
