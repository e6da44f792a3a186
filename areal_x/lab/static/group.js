// The attempts at one task, side by side.

import { get, ofRun } from "./api.js";
import { facts, h, number, said } from "./dom.js";
import { go, link } from "./address.js";

export async function group({ name, rest, body, signal }) {
  const ticket = rest[0];
  const found = await get(ofRun(name, `/groups/${encodeURIComponent(ticket)}`), null, signal);
  const first = found.episodes.flatMap((episode) => episode.trajectories)[0];
  const shared = first && found.episodes.flatMap((e) => e.trajectories).every((t) => t.prompt.text === first.prompt.text);
  body.append(
    h("p", null, h("a", { href: link(name, "trajectories") }, "← trajectories")),
    h("section", { class: "card" },
      h("dl", { class: "facts" }, facts([["group", ticket], ["task", said(found.task)], ["consumed by step", found.step ?? found.status], ["admitted at version", number(found.version)], ["mean reward", number(found.mean)], ["deviation", number(found.std)], found.greedy_reward !== null && ["greedy answer’s reward", number(found.greedy_reward)]])),
      found.no_text && h("p", { class: "quiet small" }, `Token ids are shown: ${found.no_text}.`),
      shared && [h("h3", { vars: { margin: "14px 0 6px" } }, "Prompt"), text(first.prompt)]),
    h("div", { class: "side" }, found.episodes.map((episode, i) => attempt(name, ticket, found, episode, i, shared))));
  return { key: (event) => { if (event.key === "u") go(link(name, "trajectories")); } };
}

function text({ text, whole }) {
  return h("pre", { tabindex: 0 }, said(text), whole ? "" : h("span", { class: "quiet" }, " … shortened"));
}

function attempt(name, ticket, found, episode, i, shared) {
  const above = episode.reward - found.mean;
  return h("section", { class: "card", "aria-label": `attempt ${i + 1}` },
    h("header", null, h("b", null, `Attempt ${i + 1}`), h("span", { class: `badge ${episode.outcome}` }, episode.outcome.replace("_", " ")),
      episode.outcome === "scored" && [h("span", null, `reward ${number(episode.reward)}`),
        Math.abs(above) > 1e-9 && h("span", { class: above > 0 ? "above" : "below", title: "reward minus the group’s mean" }, `${above > 0 ? "▲" : "▼"} ${number(Math.abs(above))}`)]),
    episode.details && Object.keys(episode.details).length > 0 && h("dl", { class: "facts small" }, facts(Object.entries(episode.details).map(([key, value]) => [said(key), number(value)]))),
    episode.outcome === "failed" && [h("pre", { tabindex: 0 }, said(episode.error)), episode.traceback ? h("details", null, h("summary", null, "traceback"), h("pre", { tabindex: 0 }, said(episode.traceback))) : h("p", { class: "quiet small" }, "Tracebacks are kept for a run’s first different errors.")],
    episode.outcome === "timed_out" && h("p", null, `ended after ${number(episode.seconds)} s`),
    episode.trajectories.map((t) => [
      !shared && [h("h3", null, "Prompt"), text(t.prompt)],
      text(t.answer),
      h("p", { class: "small quiet", vars: { margin: "auto 0 0" } }, h("a", { href: link(name, "tokens", [ticket, t.number]) }, "token by token"), ` · ${number(t.trained)} of ${number(t.length)} tokens trained · ${t.finish}${t.logprob === null ? "" : ` · mean log-probability ${number(t.logprob)}`}`)]),
    episode.trajectories.length === 0 && episode.outcome === "scored" && h("p", { class: "quiet small" }, "The journal has no tokens of this attempt: its group was given back."));
}
