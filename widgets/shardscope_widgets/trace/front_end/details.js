// The box below the drawing: the selected slice with its arguments and callers, or hints.

const HINT =
  "Click a slice for its details, or a rank to fold or unfold it. Wheel: zoom. Drag: pan. Double click: zoom to a slice. " +
  "Shift and drag: measure and add up an area.";
const HINT_OF_KEYS =
  "W and S zoom, A and D pan, arrows pan and scroll, 0 shows all, F zooms to the selected slice, M measures, / searches, ? lists all keys.";
const MAX_LINKS = 8;

/** Let a screen reader say `text`, once. @param {View} view @param {string} text */
function say({ page: { spoken } }, text) {
  if (spoken.textContent !== text) spoken.textContent = text;
}

/** @param {View} view */
function showDetails(view) {
  const { details, canvas } = view.page;
  const slice = view.model.get("selected");
  details.classList.toggle("ss-on", Boolean(slice || view.isAreaShown));
  details.classList.remove("ss-trace-area");
  if (view.isAreaShown) return fillArea(view, details);
  if (slice) return fillSlice(view, details, slice);
  // Neither is a result, for a screen reader to say each time that the focus comes and goes.
  say(view, "");
  // Without the focus the same keys are JupyterLab's: they are named only while they work.
  details.replaceChildren(element("div", "ss-trace-hint", document.activeElement === canvas ? HINT_OF_KEYS : HINT));
}

/** @param {View} view @param {HTMLElement} box @param {any} slice the `selected` trait */
function fillSlice(view, box, slice) {
  const head = element("div", "ss-trace-head");
  const about = element("section", "");
  const facts = [
    `rank ${slice.rank} · ${slice.track}`,
    slice.category || "no category",
    `start ${shownPoint(Math.round(slice.start_seconds * 1e9))}`,
    `duration ${shownPoint(Math.round(slice.duration_seconds * 1e9))}`,
  ];
  const name = element("b", "", slice.name);
  name.title = slice.name;
  head.append(name, element("div", "", facts.join(" · ")));
  if (slice.statistics) about.append(element("div", "ss-trace-same", describeSameName(slice.statistics)));
  if (slice.module) about.append(element("div", "", `Module: ${slice.module}`));
  const links = listConnections(view, slice);
  about.append(...links);
  const columns = [head, about];
  const args = Object.entries(slice.args ?? {});
  if (args.length) {
    const list = element("dl", "");
    for (const [key, value] of args) {
      list.append(element("dt", "", key), element("dd", "", typeof value === "string" ? value : JSON.stringify(value)));
    }
    columns.push(addHeading("Arguments", list));
  }
  if (slice.callers?.length) {
    const list = element("ol", "");
    list.append(...slice.callers.map((/** @type {string} */ name) => element("li", "", name)));
    columns.push(addHeading("Called from", list));
  }
  box.replaceChildren(...columns);
  say(view, [slice.name, ...facts].join(", "));
  box.scrollTop = 0;
}

/** @param {string} title @param {HTMLElement} content */
function addHeading(title, content) {
  const section = element("section", "");
  section.append(element("h4", "", title), content);
  return section;
}

/** @param {any} same statistics of the slice's name */
function describeSameName(same) {
  const time = (/** @type {number} */ seconds) => shownTime(Math.round(seconds * 1e9));
  const elsewhere = same.num_on_all_ranks - same.count;
  const parts = [
    `Same name on rank ${same.rank}: ${counted(same.count, "call")}`,
    `total ${time(same.total_seconds)}, ${(same.share * 100).toPrecision(3)} % of its time`,
    `mean ${time(same.mean_seconds)}`,
    `min ${time(same.min_seconds)}`,
    `max ${time(same.max_seconds)}`,
  ];
  return parts.join(" · ") + (elsewhere ? ` · ${counted(elsewhere, "call")} on other ranks` : "");
}

/** Buttons that lead to the other ends of the arrows. @param {View} view @param {any} slice */
function listConnections(view, slice) {
  const connections = /** @type {Connection[]} */ (slice.connections ?? []);
  const links = connections.slice(0, MAX_LINKS).map(({ kind, source, target }) => {
    const other = source.index === slice.index ? target : target.index === slice.index ? source : target;
    const words = {
      launch: other === source ? "Launched by" : "Launches",
      flow: other === source ? "Flow from" : "Flow to",
      collective: "",
    };
    const text =
      kind === "collective"
        ? `Same collective on rank ${other.rank}: ${describeArrival(other.start_ns - source.start_ns)}`
        : `${words[/** @type {keyof words} */ (kind)]} ${other.name}, ${other.track}`;
    const link = element("button", "ss-trace-link", text);
    listen(view, link, "click", () => {
      view.isToBeRevealed = true;
      askToSelect(view, other.index);
      view.page.canvas.focus();
    });
    return link;
  });
  const rest = connections.length - links.length;
  if (rest > 0) links.push(element("div", "", `and ${rest.toLocaleString("en")} more`));
  return links;
}

/** @param {number} ns by which the other rank arrives later */
const describeArrival = (ns) => (ns === 0 ? "at the same time" : `${shownTime(Math.abs(ns))} ${ns > 0 ? "later" : "earlier"}`);
