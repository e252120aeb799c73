// Colours: the page's own theme, one hue per name.

// Paul Tol's "light" scheme (personal.sron.nl/~pault): made for cells with dark text, told apart by colour-blind readers.
const HUES = ["#77aadd", "#99ddff", "#44bb99", "#bbcc33", "#eedd88", "#ffaabb"];
const COMMUNICATION = "#8b6b4a"; // one of the nine component colours, the same in every Shardscope chart
const INK_ON_LIGHT = "#1d2329";
const INK_ON_DARK = "#e8ebee";
const FONT = "system-ui, sans-serif";
const COUNTER = "#2f6f9f"; // the first hue, dark enough for a line on white
const PATH = { light: "#c1121f", dark: "#ff5c5c" };
const LEAST_CONTRAST = 3; // WCAG's least for large text; below it, text counts as lost in its background

// The fallbacks of style.css. An element that is not attached yet has no variables: a canvas painted with them is black.
const LIGHT = { bg: "#ffffff", panel: "#fafafa", line: "#e3e5e8", ink: INK_ON_LIGHT, soft: "#66707a", accent: "#1f6feb" };
const DARK = { bg: "#111518", panel: "#171c20", line: "#2a3138", ink: INK_ON_DARK, soft: "#98a2ad", accent: "#6cb0ff" };

/** @param {CanvasRenderingContext2D} ctx @param {string} colour @param {string} fallback where `colour` is none
 * @returns {number[]} red, green, blue */
function rgb(ctx, colour, fallback) {
  ctx.fillStyle = fallback;
  ctx.fillStyle = colour; // ignored by the canvas if it is no colour
  const text = String(ctx.fillStyle);
  if (text.startsWith("#")) return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  return (text.match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number);
}

/** @param {number[]} a @param {number[]} b @param {number} share of b */
function mix(a, b, share) {
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;
}

/** WCAG's relative luminance. @param {number[]} colour */
function luminance(colour) {
  const [red, green, blue] = colour.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** WCAG's contrast ratio, 1 to 21. @param {number[]} a @param {number[]} b */
function contrast(a, b) {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

/** Return whether the page is dark, from JupyterLab's attribute or the browser's preference. */
function isPageDark() {
  const light = document.body?.dataset.jpThemeLight;
  return light === undefined ? matchMedia("(prefers-color-scheme: dark)").matches : light === "false";
}

/** Colours as the page's theme has them now. @param {HTMLElement} root @param {CanvasRenderingContext2D} ctx */
function readTheme(root, ctx) {
  const style = getComputedStyle(root);
  const value = (/** @type {string} */ name) => style.getPropertyValue(`--ss-${name}`).trim();
  const before = isPageDark() ? DARK : LIGHT;
  const background = rgb(ctx, value("bg"), before.bg);
  const dark = luminance(background) < 0.2;
  const fallback = dark ? DARK : LIGHT;
  const solid = (/** @type {number[]} */ colour) => mix(colour, colour, 0);
  const plain = (/** @type {"panel" | "line"} */ name) => solid(rgb(ctx, value(name), fallback[name]));
  // While a theme changes, one variable may be the new theme's and another still the old one's.
  const readable = (/** @type {"ink" | "soft" | "accent"} */ name) => {
    const colour = rgb(ctx, value(name), fallback[name]);
    return solid(contrast(colour, background) < LEAST_CONTRAST ? rgb(ctx, fallback[name], fallback[name]) : colour);
  };
  const hue = (/** @type {string} */ colour) => mix(rgb(ctx, colour, colour), background, dark ? 0.52 : 0.18);
  const soft = readable("soft");
  // Indexed by the tile's colour numbers: muted, communication, then the hues.
  const fills = [mix(background, rgb(ctx, soft, fallback.soft), dark ? 0.3 : 0.24), COMMUNICATION, ...HUES.map(hue)];
  return {
    dark,
    isOfPage: root.isConnected && value("bg") !== "",
    background: solid(background),
    panel: plain("panel"),
    line: plain("line"),
    ink: readable("ink"),
    soft,
    accent: readable("accent"),
    fillParts: fills.map((fill) => rgb(ctx, fill, fill)),
    texts: [dark ? INK_ON_DARK : INK_ON_LIGHT, "#ffffff", ...HUES.map(() => (dark ? INK_ON_DARK : INK_ON_LIGHT))],
    arrow: dark ? "#ffffff" : "#111518",
    counter: dark ? HUES[0] : COUNTER,
    path: dark ? PATH.dark : PATH.light,
    font: style.fontFamily || FONT,
  };
}
