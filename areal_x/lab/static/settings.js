// A run's settings, beside another's, and its notes.

import { get, ofRun, put } from "./api.js";
import { h, number, said } from "./dom.js";
import { allRuns, go, link } from "./address.js";

export async function settings({ name, parameters, body, signal }) {
  const other = parameters.get("with") || "";
  const found = await get(ofRun(name, "/settings"), { with: other }, signal);
  const rows = found.settings.map((s) => ({ ...s, differs: other && s.a !== s.b }));
  const table = h("div", { class: "card scroll" }), count = h("p", { class: "quiet small", role: "status" });
  let match = "", only = Boolean(other);

  function draw() {
    const shown = rows.filter((s) => (!only || s.differs) && (s.name.includes(match) || (s.a || "").includes(match)));
    const cell = (text) => h("td", { class: "mono" }, text === null ? h("span", { class: "quiet" }, "not set") : said(text));
    table.replaceChildren(shown.length ? h("table", null,
      h("thead", null, h("tr", null, h("th", null, "setting"), h("th", null, name), other && h("th", null, other))),
      h("tbody", null, shown.map((s) => h("tr", { class: s.differs && !only && "differs" }, h("td", { class: "mono" }, said(s.name)), cell(s.a), other && cell(s.b))))) : h("p", { class: "quiet" }, "None."));
    count.textContent = `${number(shown.length)} of ${number(rows.length)} settings${other ? `, ${number(rows.filter((s) => s.differs).length)} differ` : ""}`;
  }
  body.append(
    found.error ? h("p", { class: "error" }, said(found.error)) : "",
    h("div", { class: "controls" },
      h("label", null, "name or value contains", h("input", { type: "search", oninput: (event) => { match = event.target.value; draw(); } })),
      h("label", null, "compare with", h("select", { onchange: (event) => { go(link(name, "settings", [], { with: event.target.value })); } },
        h("option", { value: "" }, "no other run"), allRuns().filter((run) => run.name !== name).map((run) => h("option", { value: run.name, selected: run.name === other }, run.name)))),
      other && h("button", { type: "button", "aria-pressed": String(only), onclick: (event) => { only = !only; event.target.setAttribute("aria-pressed", String(only)); draw(); } }, "only differences")),
    count, table);
  draw();
  return {};
}

export async function notes({ name, body, signal }) {
  let { text, version } = await get(ofRun(name, "/notes"), null, signal);
  let saved = text, timer;
  const status = h("span", { class: "quiet small", role: "status" }, "Saved in notes.md of the run’s directory.");
  const field = h("textarea", { id: "notes", value: text, spellcheck: "true", oninput: () => { status.textContent = "Not saved yet."; clearTimeout(timer); timer = setTimeout(save, 800); } });
  async function save() {
    clearTimeout(timer);
    const sent = field.value;
    if (sent === saved) { status.textContent = "Saved."; return; }
    try {
      ({ version } = await put(ofRun(name, "/notes"), { text: sent, version }));
      saved = sent;
      status.textContent = "Saved.";
    } catch (error) {
      status.textContent = `Not saved: ${error.message}`;
    }
  }
  signal.addEventListener("abort", save);
  body.append(h("section", { class: "card" }, h("label", { for: "notes" }, h("h3", null, "Notes")), field, h("p", { vars: { margin: "8px 0 0" } }, status)));
  return { refresh: async () => {
    if (field.value !== saved || document.activeElement === field) return;
    const now = await get(ofRun(name, "/notes"), null, signal);
    if (field.value === saved) { ({ version } = now); saved = field.value = now.text; }
  } };
}
