// The trajectories of a run: filters, the list, and the search for a text.

import { get, ofRun } from "./api.js";
import { announce, h, number, percent, said } from "./dom.js";
import { go, link } from "./address.js";

const PAGE = 50, MOST_FOUND = 500;
const NUMBERS = [["reward_min", "reward from"], ["reward_max", "to"], ["step_min", "step from"], ["step_max", "to"], ["length_min", "tokens from"], ["length_max", "to"]];
const ORDERS = [["newest", "newest first"], ["oldest", "oldest first"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-length", "longest"], ["length", "shortest"]];
const HELD = ["recorded", "outcome", "task", "finish", "status", "error", "ticket", ...NUMBERS.map(([key]) => key)];

export async function trajectories({ name, parameters, body, signal }) {
  const state = Object.fromEntries([...HELD, "order", "text", "begin"].map((key) => [key, parameters.get(key) || ""]));
  let at = -1, rows = [], searching = null, last = null;
  const list = h("div", { class: "card scroll" }), count = h("p", { class: "quiet small", role: "status" }), more = h("div", { class: "controls" });

  const conditions = () => Object.fromEntries([...HELD, "order"].map((key) => [key, state[key]]));
  const keep = () => history.replaceState(null, "", link(name, "trajectories", [], { ...conditions(), text: state.text, begin: state.begin }));

  async function load() {
    searching?.abort();
    searching = null;
    keep();
    if (state.text) return await search();
    const began = performance.now();
    const found = await get(ofRun(name, "/trajectories"), { ...conditions(), begin: state.begin || 0, count: PAGE }, signal);
    last = found;
    rows = found.rows;
    draw(false);
    tell(`${number(found.total)} trajectories`, found, performance.now() - began);
    pages(found.total);
    preview();
  }

  // a slice of time after another, until enough are found, everything is searched or another question is asked
  async function search() {
    searching = new AbortController();
    const mine = searching;
    signal.addEventListener("abort", () => mine.abort());
    rows = [];
    draw(true);
    let begin = 0, total = 0, left = 0;
    const stop = h("button", { type: "button", onclick: () => { mine.abort(); more.replaceChildren(h("span", { class: "quiet" }, `stopped after ${number(begin)} of ${number(total)}`)); } }, "Stop");
    const bar = h("progress", { value: 0, max: 1, "aria-label": "searched" });
    more.replaceChildren(bar, stop);
    try {
      do {
        const part = await get(ofRun(name, "/search"), { ...conditions(), text: state.text, begin }, mine.signal);
        begin = part.next; total = part.total; left += part.left_out; last = part;
        rows.push(...part.rows);
        if (part.rows.length || begin >= total) draw(true);
        bar.value = total ? begin / total : 1;
        tell(`${number(rows.length)} found in ${number(begin)} of ${number(total)} trajectories${left ? `, ${number(left)} could not be searched` : ""}`, part);
      } while (begin < total && rows.length < MOST_FOUND && !mine.signal.aborted);
      more.replaceChildren(h("span", { class: "quiet" }, rows.length >= MOST_FOUND && begin < total ? `the first ${number(rows.length)} are shown` : "everything was searched"));
    } catch (error) {
      if (error.name === "AbortError") return;
      more.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    }
  }

  function tell(what, found, ms) {
    const notes = [what];
    if (found.progress < 1) notes.push(`indexing, ${percent(found.progress)}`);
    if (found.unreadable) notes.push(`${number(found.unreadable)} damaged groups left out`);
    if (ms !== undefined) notes.push(`${Math.round(ms)} ms`);
    count.replaceChildren(notes.join(" · "), ...(found.error ? [h("span", { class: "error" }, said(found.error))] : []));
    const known = [...reasons.options].map((option) => option.value);
    for (const reason of found.reasons) if (!known.includes(reason)) reasons.append(h("option", { value: reason }, reason));
    if (state.finish && reasons.value !== state.finish) reasons.value = state.finish;
  }

  function draw(excerpts) {
    at = Math.min(at, rows.length - 1);
    const wide = excerpts ? "where it is" : "how the answer begins";
    list.replaceChildren(rows.length
      ? h("table", null,
          h("thead", null, h("tr", null, ["step", "group", "task", "outcome", "reward", "tokens", "end"].map((x) => h("th", { class: ["step", "group", "reward", "tokens"].includes(x) && "n" }, x)), h("th", null, wide))),
          h("tbody", null, rows.map((row, i) => h("tr", { "data-open": target(row), "data-of": row.trajectory < 0 ? null : `${row.ticket}.${row.trajectory}`, onclick: (event) => { if (!event.target.closest("a")) go(target(row)); } },
            h("td", { class: "n" }, row.step < 0 ? h("span", { class: "quiet", title: "waits, or was given back" }, row.status === "given back" ? "given back" : "–") : number(row.step)),
            h("td", { class: "n" }, h("a", { href: link(name, "group", [row.ticket]), title: "the whole group" }, row.ticket)),
            h("td", null, said(row.task.slice(0, 60))),
            h("td", null, h("span", { class: `badge ${row.outcome}` }, row.outcome.replace("_", " "))),
            h("td", { class: "n" }, number(row.reward)),
            h("td", { class: "n" }, row.trajectory < 0 ? "–" : number(row.length)),
            h("td", null, said(row.finish)),
            h("td", { class: "text" }, row.excerpt ? [said(row.excerpt[0]), h("mark", null, said(row.excerpt[1])), said(row.excerpt[2])] : row.error ? said(row.error) : ""),
          ))))
      : h("p", { class: "quiet" }, excerpts ? "Nothing found yet." : last && last.progress < 1 ? "The journal is being read." : "No trajectory meets these conditions."));
    mark();
  }
  const target = (row) => (row.trajectory < 0 ? link(name, "group", [row.ticket]) : link(name, "tokens", [row.ticket, row.trajectory]));

  async function preview() {
    const cells = [...list.querySelectorAll("tr[data-of]")];
    if (!cells.length) return;
    try {
      const found = await get(ofRun(name, "/previews"), { of: cells.map((x) => x.dataset.of).join(",") }, signal);
      if (found.reason) cells[0].lastChild.replaceChildren(h("span", { class: "quiet", title: found.reason }, "no tokenizer is on this machine"));
      else cells.forEach((row, i) => found.texts[i] !== null && row.lastChild.replaceChildren(said(found.texts[i])));
    } catch (error) {
      if (error.name !== "AbortError") announce(error.message);
    }
  }

  function pages(total) {
    const begin = Number(state.begin || 0);
    const turn = (to) => { state.begin = to > 0 ? String(to) : ""; at = -1; return attempt(); };
    more.replaceChildren(
      h("button", { type: "button", disabled: begin === 0, onclick: () => turn(begin - PAGE) }, "← before"),
      h("span", { class: "quiet" }, total ? `${number(begin + 1)} to ${number(Math.min(begin + PAGE, total))} of ${number(total)}` : ""),
      h("button", { type: "button", disabled: begin + PAGE >= total, onclick: () => turn(begin + PAGE) }, "after →"));
  }
  function mark() {
    list.querySelectorAll("tbody tr").forEach((row, i) => {
      row.classList.toggle("at", i === at);
      if (i === at) row.scrollIntoView({ block: "nearest" });
    });
  }
  async function attempt() {
    try { await load(); } catch (error) {
      if (error.name === "AbortError") return;
      list.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
      count.textContent = "";
    }
  }
  let typed;
  const changed = (key, wait = 0) => (event) => {
    clearTimeout(typed);
    const value = event.target.value;
    typed = setTimeout(() => { state[key] = value; state.begin = ""; at = -1; attempt(); }, wait);
  };
  const select = (key, options, label) => h("label", null, label, h("select", { onchange: changed(key) }, options.map(([value, text]) => h("option", { value, selected: value === state[key] }, text))));
  const reasons = h("select", { onchange: changed("finish") }, h("option", { value: "" }, "any"));
  body.append(
    h("div", { class: "controls", role: "search" },
      h("label", null, "text of the answer or prompt", h("input", { id: "search-text", type: "search", value: state.text, maxlength: 1000, size: 26, oninput: changed("text", 350) })),
      h("label", null, "task", h("input", { type: "search", value: state.task, size: 14, oninput: changed("task", 60) })),
      select("outcome", [["", "any"], ["scored", "scored"], ["failed", "failed"], ["timed_out", "timed out"]], "outcome"),
      NUMBERS.map(([key, what]) => h("label", null, what, h("input", { type: "number", step: "any", value: state[key], oninput: changed(key, 60) }))),
      h("label", null, "end", reasons),
      select("status", [["", "any"], ["finished", "finished"], ["given back", "given back"]], "group"),
      select("recorded", [["", "any"], ["yes", "with advantages"]], "tokens"),
      select("order", ORDERS, "order")),
    state.error === "" && state.ticket === "" ? "" : h("p", null, h("a", { href: link(name, "trajectories") }, state.error !== "" ? "Only episodes with one error are shown: show all" : "Only one group is shown: show all")),
    count, list, more);
  await attempt();
  if (parameters.get("focus")) setTimeout(() => document.getElementById("search-text")?.focus());
  return {
    soon: () => last && last.progress < 1,
    refresh: async () => { if (!state.text && !Number(state.begin || 0) && at < 0 && !list.contains(document.activeElement)) await load(); },
    key: (event) => {
      const by = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (by !== undefined && rows.length) { event.preventDefault(); at = Math.max(0, Math.min(rows.length - 1, at + by)); mark(); announce(`${rows[at].outcome}, reward ${number(rows[at].reward)}, task ${rows[at].task.slice(0, 60)}`); }
      if (event.key === "Enter" && at >= 0 && !event.target.closest("a, button")) go(target(rows[at]));
    },
  };
}
