// Elements and formats. Text only ever becomes a text node: nothing here, or in any other file of
// this page, parses a string as markup, because most strings were written by a model.

export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, x] of Object.entries(value)) element.style.setProperty(key, x);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((x) => x !== null && x !== undefined && x !== false));
  return element;
}

export function number(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (Math.abs(x) < 1e-12) return "0";
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return minus(x.toLocaleString("en"));
  const size = Math.abs(x);
  if (size >= 1e6) return minus(compact.format(x));
  if (size >= 1000) return minus(Math.round(x).toLocaleString("en"));
  if (size < 1e-4) return minus(x.toExponential(1));
  return minus(String(Number(x.toPrecision(digits))));
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
const minus = (text) => text.replace("-", "−");

export function percent(x) {
  return x === null || x === undefined ? "–" : `${number(100 * x, 2)} %`;
}

export function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 120) return `${number(seconds, 2)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${number(seconds / 3600, 2)} h`;
  return `${number(seconds / 86400, 2)} days`;
}

export function ago(time) {
  const seconds = Date.now() / 1000 - time;
  return !time ? "never" : seconds < 10 ? "now" : duration(Math.round(seconds));
}

// What a terminal or a text direction would act on is shown as a sign of its own.
const INVISIBLE = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
export function visible(text) {
  return text.replace(INVISIBLE, (x) => {
    const code = x.charCodeAt(0);
    if (x === "\t") return "⇥\t";
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code === 127) return "␡";
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

export function said(text) {
  return h("bdi", { class: "said", dir: "ltr" }, visible(text ?? ""));
}

export function facts(pairs) {
  return pairs.filter(Boolean).map(([what, value]) => h("div", null, h("dt", null, what), h("dd", null, value)));
}

export function announce(text) {
  document.getElementById("status").textContent = text;
}
