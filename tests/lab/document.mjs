// A document of as much as the widget's script touches, and a model as anywidget passes it, for
// tests/lab/test_token_view.py, which appends a program of its own. Arguments: the widget's module.
// Standard input: the widget's state.

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], vars: {}, listeners: {}, dataset: {}, className: "" });
    this.style = { setProperty: (name, x) => { this.vars[name] = x; } };
    this.classList = {
      add: (x) => { this.className += ` ${x}`; },
      remove: (x) => { this.className = this.className.replace(` ${x}`, ""); },
    };
  }
  append(...all) { for (const x of all) this.children.push(...(x instanceof Fragment ? x.children : [x])); }
  replaceChildren(...all) { this.children = []; this.append(...all); }
  setAttribute(name, x) {
    if (name === "class") this.className = x;
    if (name === "data-colour") this.dataset.colour = x;
  }
  addEventListener(name, f) { this.listeners[name] = f; }
  attachShadow() { return this.root = new Element("root"); }
  get all() { return this.children.flatMap((x) => (x instanceof Element ? [x, ...x.all] : [])); }
  get textContent() { return this.children.map((x) => (x instanceof Element ? x.textContent : String(x))).join(""); }
  querySelectorAll() { return this.all.filter((x) => x.dataset.colour); }
}
class Fragment extends Element {}
globalThis.document = { createElement: (tag) => new Element(tag), createDocumentFragment: () => new Fragment("") };

const { default: widget } = await import(process.argv[1]);
const state = JSON.parse(await new Response(process.stdin).text()), handlers = {};
const set = (name, x) => {
  if (state[name] === x) return;
  state[name] = x;
  handlers[`change:${name}`]?.();
};
const on = (name, f) => { handlers[name] = f; };
const model = { get: (name) => state[name], set, save_changes() {}, on, off: (name) => { delete handlers[name]; } };
const el = new Element("div");
widget.render({ model, el });
const root = () => el.children[0].root;
const tokens = () => root().all.filter((x) => /^t( |$)/.test(x.className));
const spans = () => tokens().map((x) => [x.textContent, x.className, x.vars["--a"]]);
const find = (test) => root().all.find(test);
