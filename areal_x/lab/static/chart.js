// Line charts in SVG: several series, the band between low and high, a crosshair for pointer and keys.

import { h, number, svg } from "./dom.js";

const WIDTH = 460, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 26;

export function smoothed(values, weight) {
  // an exponential mean that is not drawn to its first value
  let mean = 0, total = 0;
  return values.map((x) => {
    mean = weight * mean + (1 - weight) * x;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

export function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((x) => x * power).find((x) => x >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// series: [{name, colour (a class), x, y, low, high, faint}]
export function chart(title, series, { axis = "step", format = number, axisFormat = number } = {}) {
  const xs = series.flatMap((s) => s.x), ys = series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]);
  if (!xs.length) return h("figure", { class: "chart empty" }, h("figcaption", null, title), h("p", { class: "quiet" }, "not measured yet"));
  let [x0, x1] = extent(xs), [y0, y1] = extent(ys);
  if (x0 === x1) x1 = x0 + 1;
  const margin = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
  y0 -= margin; y1 += margin;
  const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const py = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const point = (x, y) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`;

  const lines = ticks(y0, y1, 4).filter((y) => y >= y0 && y <= y1).map((y) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }),
    svg("text", { class: "tick", x: LEFT - 6, y: py(y) + 3.5, "text-anchor": "end" }, format(y)),
  ]);
  const below = ticks(x0, x1, 5).filter((x) => x >= x0 && x <= x1 && (axis !== "step" || Number.isInteger(x))).map((x) =>
    svg("text", { class: "tick", x: px(x), y: HEIGHT - 8, "text-anchor": "middle" }, axisFormat(x)));
  const drawn = series.map((s) => [
    s.low && svg("path", { class: `band ${s.colour}`, d: `M${s.x.map((x, i) => point(x, s.high[i])).join("L")}L${s.x.map((x, i) => point(x, s.low[i])).reverse().join("L")}Z` }),
    s.faint && svg("path", { class: `line faint ${s.colour}`, d: `M${s.x.map((x, i) => point(x, s.faint[i])).join("L")}` }),
    s.x.length === 1
      ? svg("circle", { class: `dot ${s.colour}`, cx: px(s.x[0]), cy: py(s.y[0]), r: 3 })
      : svg("path", { class: `line ${s.colour}`, d: `M${s.x.map((x, i) => point(x, s.y[i])).join("L")}` }),
  ]);
  const cross = svg("g", { class: "cross", visibility: "hidden" });
  const read = h("output", { class: "read", "aria-live": "polite" });
  const longest = series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  let at = longest.x.length;

  function show(index) {
    at = Math.max(0, Math.min(longest.x.length - 1, index));
    const x = longest.x[at];
    const near = series.filter((s) => s.x.length).map((s) => [s, nearest(s.x, x)]);
    cross.replaceChildren(
      svg("line", { x1: px(x), x2: px(x), y1: TOP, y2: HEIGHT - BOTTOM }),
      ...near.map(([s, i]) => svg("circle", { class: `dot ${s.colour}`, cx: px(s.x[i]), cy: py(s.y[i]), r: 3.2 })));
    cross.setAttribute("visibility", "visible");
    read.replaceChildren(h("span", { class: "quiet" }, `${axis} ${axisFormat(x)}`),
      ...near.map(([s, i]) => h("span", { class: `value ${s.colour}` }, format(s.y[i]))));
  }
  function hide() {
    cross.setAttribute("visibility", "hidden");
    last();
  }
  function last() {
    read.replaceChildren(...series.filter((s) => s.x.length).map((s) => h("span", { class: `value ${s.colour}` }, format(s.y.at(-1)))));
  }
  last();

  const described = series.map((s) => `${s.name}: ${format(s.y[0])} to ${format(s.y.at(-1))}`).join("; ");
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0,
    "aria-label": `${title} over ${axis}, ${axisFormat(x0)} to ${axisFormat(x1)}. ${described}. Arrow keys read values.`,
    onpointermove: (event) => {
      const box = picture.getBoundingClientRect();
      const x = x0 + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
      show(nearest(longest.x, x));
    },
    onpointerleave: hide,
    onblur: hide,
    onkeydown: (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      show(at + by);
    },
  }, lines, below, drawn, cross);
  return h("figure", { class: "chart" }, h("figcaption", null, h("span", null, title), read), picture);
}

export function sparkline(y, label) {
  if (!y || y.length < 2) return null;
  const [low, high] = extent(y), span = high - low || 1;
  const points = y.map((v, i) => `${((i / (y.length - 1)) * 96 + 2).toFixed(1)},${(20 - ((v - low) / span) * 16).toFixed(1)}`);
  return svg("svg", { class: "spark", viewBox: "0 0 100 24", role: "img", "aria-label": label, preserveAspectRatio: "none" },
    svg("polyline", { points: points.join(" ") }));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const x of values) { if (x < low) low = x; if (x > high) high = x; }
  return [low, high];
}

function nearest(sorted, x) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (sorted[mid] < x) low = mid; else high = mid; }
  return Math.abs(sorted[low] - x) <= Math.abs(sorted[high] - x) ? low : high;
}
