// The order of tracks: pinned ones stand above all ranks and do not scroll, others move within their rank.

/** Tracks of a rank in groups that move together: a thread and its Python stacks. @param {Track[]} tracks */
function groupTracks(tracks) {
  const groups = /** @type {Track[][]} */ ([]);
  for (const track of tracks) {
    const before = groups.at(-1)?.[0];
    if (track.kind === "python" && before?.kind === "cpu" && before.thread === track.thread) groups.at(-1)?.push(track);
    else groups.push([track]);
  }
  return groups;
}

/** The tracks among which `track` can move, in order: the pinned ones, or the others of its rank.
 * @param {View} view @param {Track} track */
function listNeighbours(view, track) {
  return view.pinned.includes(track) ? view.pinned : (view.order.get(track.rank) ?? []);
}

/** @param {View} view @param {Track} track @param {number} direction -1: up */
function moveTrack(view, track, direction) {
  const isPinned = view.pinned.includes(track);
  if (track.kind === "counter" && !isPinned) return announce(view, "A counter stays below its rank unless it is pinned");
  const groups = isPinned ? view.pinned.map((one) => [one]) : groupTracks(view.order.get(track.rank) ?? []);
  let from = groups.findIndex((group) => group.includes(track));
  const [moved] = groups.splice(from, 1);
  // Skip the rank's pinned tracks, which are drawn elsewhere.
  do from += direction;
  while (!isPinned && groups[from - (direction > 0 ? 1 : 0)]?.every((one) => view.pinned.includes(one)));
  groups.splice(Math.min(Math.max(from, 0), groups.length), 0, moved);
  if (isPinned) view.pinned = groups.flat();
  else view.order.set(track.rank, groups.flat());
  rearrange(view);
  showTrack(view, track);
  const place = groups.findIndex((group) => group.includes(track)) + 1;
  announce(view, `${track.name} of rank ${track.rank}, place ${place} of ${groups.length}`);
}

/** @param {View} view @param {Track} track */
function pinOrUnpin(view, track) {
  const isPinned = view.pinned.includes(track);
  view.pinned = isPinned ? view.pinned.filter((one) => one !== track) : [...view.pinned, track];
  rearrange(view);
  showTrack(view, track);
  announce(view, `${track.name} of rank ${track.rank} ${isPinned ? "is back at its rank" : "is pinned to the top"}`);
}

/** The bands that can be pinned: tracks, which also move within their rank, and counters. @param {View} view */
function namedBands(view) {
  const tracks = view.places.bands.filter(({ track, tall }) => track.kind !== "python" && tall >= READABLE_ROW);
  const counters = view.places.counters.map(({ number, top }) => ({
    ...{ track: /** @type {Track} */ (view.counterTracks[number]), top, height: COUNTER_HEIGHT, tall: COUNTER_HEIGHT },
  }));
  return [...tracks, ...counters].sort((a, b) => a.top - b.top);
}

/** Go to the next track, or the one before. @param {View} view @param {number} direction */
function stepTrack(view, direction) {
  const bands = namedBands(view);
  if (!bands.length) return announce(view, "All ranks are folded");
  const at = bands.findIndex(({ track }) => track === view.currentTrack);
  const next = at < 0 ? (direction > 0 ? 0 : bands.length - 1) : Math.min(Math.max(at + direction, 0), bands.length - 1);
  view.currentTrack = bands[next].track;
  showTrack(view, view.currentTrack);
  announce(view, `${view.currentTrack.name} of rank ${view.currentTrack.rank}`);
}

/** @param {View} view @param {(track: Track) => void} action */
function withCurrentTrack(view, action) {
  if (view.currentTrack) action(view.currentTrack);
  else stepTrack(view, 1);
}

/** Scroll to a track. @param {View} view @param {Track} track */
function showTrack(view, track) {
  const band = namedBands(view).find((one) => one.track === track);
  if (!band || band.top < view.sticky) return scheduleDraw(view);
  const isHidden = band.top < view.scroll + view.sticky || band.top + ROW > view.scroll + view.height - RULER;
  scrollRowsTo(view, isHidden ? band.top - view.sticky - HEADER : view.scroll);
}

/** The band whose name is at a point of the gutter. @param {View} view @param {number} x @param {number} y */
function namedBandAt(view, x, y) {
  if (view.isNarrow || x >= view.gutterWidth || y <= RULER) return undefined;
  const top = contentAt(view, y);
  return namedBands(view).find((band) => top >= band.top && top < band.top + band.height);
}

/** Carry a track with the pointer: it changes places with the one that the pointer is on.
 * @param {View} view @param {Track} track @param {number} y */
function carryTrack(view, track, y) {
  const target = namedBandAt(view, 0, y)?.track;
  if (!target || target === track) return;
  const tracks = listNeighbours(view, track);
  if (!tracks.includes(target) || view.pinned.includes(target) !== view.pinned.includes(track)) return;
  const direction = tracks.indexOf(target) > tracks.indexOf(track) ? 1 : -1;
  moveTrack(view, track, direction);
}

/** One button that pins, at the track under the pointer or the current one. @param {View} view */
function placePinButton(view) {
  const { pin } = view.page;
  const track = view.hoverTrack ?? view.currentTrack;
  const band = track && namedBands(view).find((one) => one.track === track);
  const y = band ? yOfTop(view, band.top) : -1;
  pin.hidden = !band || y < RULER + (band.top < view.sticky ? 0 : view.sticky) || y > view.height - ROW;
  if (pin.hidden || !track) return;
  const isPinned = view.pinned.includes(track);
  pin.textContent = isPinned ? "↓" : "↑";
  pin.title = isPinned ? "Unpin: back to its rank" : "Pin to the top";
  pin.setAttribute("aria-label", `${isPinned ? "Unpin" : "Pin"} ${track.name} of rank ${track.rank}`);
  const x = view.isNarrow ? view.width - pin.offsetWidth - 12 : view.gutterWidth - pin.offsetWidth - 3;
  pin.style.transform = `translate(${x}px, ${view.isNarrow ? y - NAME_LINE : y}px)`;
}

/** @param {View} view @param {string} text for screen readers */
function announce(view, text) {
  view.page.status.textContent = text;
}
