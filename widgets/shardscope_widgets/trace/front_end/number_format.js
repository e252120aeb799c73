// Times and counts as text.

const UNITS = /** @type {[number, string][]} */ ([[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]]);

/** @param {number} ns the size that decides the unit */
const unitOf = (ns) => UNITS.find(([size]) => Math.abs(ns) >= size) ?? UNITS[3];

/** A duration to four digits: "1.234 ms". @param {number} ns */
function shownTime(ns) {
  const [size, unit] = unitOf(ns);
  const digits = Math.max(0, 3 - Math.floor(Math.log10(Math.max(Math.abs(ns) / size, 1))));
  return `${(ns / size).toFixed(size === 1 ? 0 : digits)} ${unit}`;
}

/** A point in time, to the nanosecond: "12.345678 ms". @param {number} ns */
function shownPoint(ns) {
  const [size, unit] = unitOf(ns);
  return `${(ns / size).toFixed(Math.round(Math.log10(size)))} ${unit}`;
}

const NUMBERS = new Intl.NumberFormat("en"); // toLocaleString makes one each time, in each frame

/** @param {number} count @param {string} noun */
const counted = (count, noun) => `${NUMBERS.format(count)} ${noun}${count === 1 ? "" : "s"}`;

/** The smallest 1, 2 or 5 times a power of ten that is at least `least`. @param {number} least */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999) ?? 10 * power;
}
