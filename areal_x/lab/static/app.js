// The frame: the list of runs, the pages of one, addresses, keys, and the beat that asks for news.

import { address, go, known, link, runNamed } from "./address.js";
import { get } from "./api.js";
import { sparkline } from "./chart.js";
import { ago, announce, h, number } from "./dom.js";
import { curves } from "./curves.js";
import { failures } from "./failures.js";
import { group } from "./group.js";
import { overview } from "./overview.js";
import { notes, settings } from "./settings.js";
import { tokens } from "./tokens.js";
import { trajectories } from "./trajectories.js";

const TABS = [["overview", "Overview"], ["curves", "Curves"], ["trajectories", "Trajectories"], ["failures", "Failures"], ["settings", "Settings"], ["notes", "Notes"]];
const PAGES = { overview, curves, trajectories, failures, settings, notes, group, tokens };
const RUNNING_SECONDS = 3, IDLE_SECONDS = 15;

let page = null, leaving = new AbortController(), shown = "";

async function showRuns() {
  const found = await get("runs");
  const { runs } = found;
  known.runs = runs;
  const { name } = address();
  const list = h("ul", null, runs.map((run) => h("li", null,
    h("a", { class: "run", href: link(run.name, "overview"), "aria-current": run.name === name && "true", title: run.name },
      h("span", { class: `state ${run.state}`, "aria-hidden": "true" }),
      h("span", { class: "name" }, run.name),
      h("span", { class: "about" }, `${run.state} · ${run.step ?? 0}${run.steps ? `/${number(run.steps)}` : ""} · ${ago(run.changed)}`),
      sparkline(run.reward && run.reward.value, "reward over steps")))));
  const holder = document.getElementById("run-list");
  const focused = holder.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  holder.replaceChildren(runs.length ? list : h("p", { class: "quiet" }, `No run is in ${found.place} yet.`));
  if (focused) [...holder.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const main = document.getElementById("main");
  const at = address();
  try {
    if (!known.runs.length || !runNamed(at.name)) await showRuns();
    if (signal.aborted) return;
    if (!at.name && known.runs.length) return location.replace(link(known.runs[0].name, "overview"));
    if (!at.name) return main.replaceChildren(h("h2", null, "No runs yet"), h("p", { class: "quiet" }, "A run that begins appears here by itself."));
    for (const a of document.querySelectorAll(".run")) {
      if (a.title === at.name) a.setAttribute("aria-current", "true"); else a.removeAttribute("aria-current");
    }
    const body = h("div", { id: "page" });
    const make = PAGES[at.kind] || overview;
    page = await make({ ...at, body, signal, main });
    if (signal.aborted) return;
    main.replaceChildren(frame(at), body);
    document.title = `${at.name} · ${at.kind} · AReaL-X lab`;
    const place = `${at.name}/${at.kind}/${at.rest.join("/")}`;
    if (place !== shown && shown) { window.scrollTo(0, 0); announce(`${at.kind} of ${at.name}`); main.focus({ preventScroll: true }); }
    shown = place;
  } catch (error) {
    if (error.name === "AbortError") return;
    page = null;
    main.replaceChildren(at.name && runNamed(at.name) ? frame(at) : "", h("p", { class: "error", role: "alert" }, error.message));
  }
}

function frame({ name, kind }) {
  const run = runNamed(name);
  const tab = { group: "trajectories", tokens: "trajectories" }[kind] || kind;
  return h("div", null,
    h("div", { class: "head" }, h("h2", null, name), run && h("span", { class: `badge ${run.state}` }, run.state)),
    h("nav", { class: "tabs", "aria-label": "Pages of the run" },
      TABS.map(([key, title]) => h("a", { href: link(name, key), "aria-current": key === tab && "page" }, title))));
}

// ---- news

async function beat() {
  const run = runNamed(address().name);
  try {
    if (document.visibilityState === "visible") {
      await showRuns();
      if (page && page.refresh) await page.refresh();
    }
  } catch (error) {
    if (error.name !== "AbortError") announce(error.message);
  }
  const soon = known.runs.some((one) => !one.complete) || run && (run.state === "running" || (page && page.soon && page.soon()));
  setTimeout(beat, 1000 * (soon ? RUNNING_SECONDS : IDLE_SECONDS));
}

// ---- keys

const KEYS = [["1 – 6", "the pages of the run"], ["/", "search the trajectories"], ["j  k", "next, previous row"], ["Enter", "open the row"], ["[  ]", "previous, next trajectory of a group"], ["←  →", "read a curve or a token"], ["u", "up: from tokens to the group, to the list"], ["?", "this list"]];

function help() {
  const dialog = document.getElementById("keys");
  dialog.replaceChildren(h("h3", { id: "keys-title" }, "Keys"),
    h("table", null, h("tbody", null, KEYS.map(([key, what]) => h("tr", null, h("td", null, h("kbd", null, key)), h("td", null, what))))),
    h("form", { method: "dialog" }, h("button", null, "Close")));
  dialog.querySelector("button").addEventListener("click", (event) => { event.preventDefault(); dialog.close(); });
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  const { name } = address();
  const tab = TABS[Number(event.key) - 1];
  if (event.key === "?") help();
  else if (tab && name) go(link(name, tab[0]));
  else if (event.key === "/" && name) {
    event.preventDefault();
    const field = document.getElementById("search-text");
    if (field) field.focus();
    else go(link(name, "trajectories", [], { focus: 1 }));
  } else if (page && page.key) page.key(event);
});

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();  // the address is the page's own
  document.getElementById("main").focus();
});
window.addEventListener("hashchange", show);
await show();
setTimeout(beat, 1000 * RUNNING_SECONDS);
