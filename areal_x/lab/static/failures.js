// The errors of a run's episodes: how often each, and where it came from.

import { get, ofRun } from "./api.js";
import { h, number, percent, said } from "./dom.js";
import { link } from "./address.js";

export async function failures({ name, body, signal }) {
  const open = new Set();
  async function refresh() {
    const found = await get(ofRun(name, "/failures"), null, signal);
    const total = Object.values(found.outcomes).reduce((a, b) => a + b, 0);
    body.replaceChildren(
      h("p", { class: "quiet" }, `${number(found.outcomes.failed)} of ${number(total)} episodes in the journal failed (${percent(found.outcomes.failed / (total || 1))}), `,
        h("a", { href: link(name, "trajectories", [], { outcome: "timed_out" }) }, `${number(found.outcomes.timed_out)} timed out`), ".", found.progress < 1 ? ` Indexing, ${percent(found.progress)}.` : ""),
      found.error ? h("p", { class: "error" }, said(found.error)) : "",
      ...found.failures.map((failure) => h("section", { class: "card" },
        h("div", { class: "head" }, h("b", null, `${number(failure.count)}×`), h("a", { href: link(name, "trajectories", [], { error: failure.number, outcome: "failed" }) }, "episodes"), h("a", { href: link(name, "group", [failure.first_ticket]) }, `first in group ${failure.first_ticket}`)),
        h("pre", { tabindex: 0 }, said(failure.error)),
        failure.traceback
          ? h("details", { open: open.has(failure.number), ontoggle: (event) => (event.target.open ? open.add(failure.number) : open.delete(failure.number)) }, h("summary", null, "traceback"), h("pre", { tabindex: 0 }, said(failure.traceback)))
          : h("p", { class: "quiet small", vars: { margin: "8px 0 0" } }, "The run kept no traceback of it: it keeps those of its first different errors."))),
      found.failures.length ? "" : h("p", { class: "quiet" }, "No episode failed with an error."));
  }
  await refresh();
  return { refresh };
}
