// One trajectory, token by token, coloured by what the journal has of each.

import { get, ofRun } from "./api.js";
import { announce, h } from "./dom.js";
import { go, link } from "./address.js";
import { tokenFacts, tokenView } from "./token_view.js";

const PART = 2000;

export async function tokens({ name, rest, parameters, body, signal }) {
  const [ticket, trajectory] = rest;
  const path = ofRun(name, `/groups/${encodeURIComponent(ticket)}/${encodeURIComponent(trajectory)}`);
  const more = (begin) => get(path, { begin, count: PART }, signal);
  const t = await more(0);
  let colour = parameters.get("colour") ?? "";
  const coloured = (key) => {
    colour = key;
    history.replaceState(null, "", link(name, "tokens", [ticket, trajectory], { colour }));
  };
  const elsewhere = [" ", h("a", { href: link(name, "trajectories", [], { recorded: "yes" }) }, "Those that have them"), "."];
  body.append(
    h("p", null, h("a", { href: link(name, "group", [ticket]) }, "← the group"), " · ", h("a", { href: link(name, "trajectories") }, "trajectories")),
    h("section", { class: "card" }, tokenFacts(t)),
    h("section", { class: "card" }, tokenView(t, { colour, coloured, more, failed: (error) => announce(error.message), elsewhere })));
  const step = (by) => { const next = t.trajectory + by; if (next >= 0 && next < t.trajectories) go(link(name, "tokens", [ticket, next], { colour })); };
  return { key: (event) => {
    if (event.key === "[") step(-1);
    if (event.key === "]") step(1);
    if (event.key === "u") go(link(name, "group", [ticket]));
  } };
}
