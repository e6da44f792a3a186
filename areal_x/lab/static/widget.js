// The token view as an anywidget. areal_x/lab/token_view.py joins this file with those that it imports,
// and with the style sheet as STYLE: a widget's module can import nothing by a relative address.

import { h } from "./dom.js";
import { tokenFacts, tokenView } from "./token_view.js";

const SHOWN = 2000;  // tokens at first, and by each press of "show more"

function render({ model, el }) {
  const host = h("div"), root = host.attachShadow({ mode: "open" });  // the notebook's styles stay outside
  let colour;
  const draw = () => {
    const whole = model.get("trajectory");
    const part = (begin) => Object.fromEntries(Object.entries(whole).map(([name, x]) => [name, Array.isArray(x) ? x.slice(begin, begin + SHOWN) : x]));
    colour = model.get("colour");
    const coloured = (key) => { colour = key; model.set("colour", key); model.save_changes(); };
    const view = tokenView(part(0), { colour, coloured, more: async (begin) => part(begin), failed: console.error });
    root.replaceChildren(h("style", null, STYLE),
      h("div", { class: "widget" }, h("section", { class: "card" }, tokenFacts(whole)), h("section", { class: "card" }, view)));
  };
  const recolour = () => { if (model.get("colour") !== colour) draw(); };
  model.on("change:trajectory", draw);
  model.on("change:colour", recolour);
  el.append(host);
  draw();
  return () => { model.off("change:trajectory", draw); model.off("change:colour", recolour); };
}

export default { render };
