// Colours: the page's own theme, one hue per name.

// Paul Tol's "light" scheme (personal.sron.nl/~pault): made for cells with dark text, told apart by colour-blind readers.
const HUES = ["#77aadd", "#99ddff", "#44bb99", "#bbcc33", "#eedd88", "#ffaabb"];
const COMMUNICATION = "#8b6b4a"; // one of the nine component colours, the same in every Shardscope chart
const INK_ON_LIGHT = "#1d2329";
const INK_ON_DARK = "#e8ebee";

/** @param {CanvasRenderingContext2D} ctx @param {string} colour @returns {number[]} red, green, blue */
function rgb(ctx, colour) {
  ctx.fillStyle = "#000000";
  ctx.fillStyle = colour.trim() || "#000000";
  const text = String(ctx.fillStyle);
  if (text.startsWith("#")) return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  return (text.match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number);
}

/** @param {number[]} a @param {number[]} b @param {number} share of b */
function mix(a, b, share) {
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;
}

/** Colours as the page's theme has them now. @param {HTMLElement} root @param {CanvasRenderingContext2D} ctx */
function readTheme(root, ctx) {
  const style = getComputedStyle(root);
  const value = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  const background = rgb(ctx, value("--ss-bg"));
  const dark = background[0] * 0.3 + background[1] * 0.59 + background[2] * 0.11 < 128;
  const hue = (/** @type {string} */ colour) => mix(rgb(ctx, colour), background, dark ? 0.52 : 0.18);
  return {
    dark,
    background: value("--ss-bg"),
    panel: value("--ss-panel"),
    line: value("--ss-line"),
    ink: value("--ss-ink"),
    soft: value("--ss-soft"),
    accent: value("--ss-accent"),
    // Indexed by the tile's colour numbers: muted, communication, then the hues.
    fills: [mix(background, rgb(ctx, value("--ss-soft")), dark ? 0.3 : 0.24), COMMUNICATION, ...HUES.map(hue)],
    texts: [dark ? INK_ON_DARK : INK_ON_LIGHT, "#ffffff", ...HUES.map(() => (dark ? INK_ON_DARK : INK_ON_LIGHT))],
    font: style.fontFamily,
  };
}
