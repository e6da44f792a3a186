// A trajectory as coloured tokens, from plain data and with no request of its own: the lab's page and
// the widget of notebooks (areal_x/lab/token_view.py) show the same.

import { facts, h, number, said, visible } from "./dom.js";

// key, label, how a token is coloured: a number from −1 to 1, or null for none
const COLOURS = {
  logprob: ["log-probability", (t, i) => (t.sampled(i) ? Math.min(1, -t.logprobs[i] / 4) : null), "certain", "e⁻⁴ and less", "rising"],
  advantage: ["advantage", (t, i) => bounded(t.advantages?.[i], t.largest_advantage), "lowest", "highest", "diverging"],
  gap: ["engine–trainer gap", (t, i) => (t.sampled(i) ? bounded(gapOf(t, i), 0.5) : null), "−½ nats", "½ nats", "diverging"],
  entropy: ["entropy", (t, i) => bounded(t.entropies?.[i], 3), "0", "3 nats and more", "rising"],
  version: ["version", (t, i) => (t.sampled(i) ? -(t.newest - t.versions[i]) / Math.max(1, t.newest - t.oldest) : null), "oldest", "newest", "falling"],
  mask: ["trained on", (t, i) => (t.mask[i] ? 0.6 : null), "not", "trained on", "rising"],
  credit: ["credit", (t, i) => (t.credit && t.mask[i] ? Math.max(-1, Math.min(1, t.credit[i] - 1)) : null), "0", "2", "diverging"],
  token_rewards: ["token reward", (t, i) => (t.token_rewards ? Math.max(-1, Math.min(1, t.token_rewards[i] / t.largest)) : null), "lowest", "highest", "diverging"],
  kept: ["choices kept", (t, i) => (t.kept && t.kept[i] ? Math.min(1, Math.log2(t.kept[i]) / 8) : null), "1", "256", "rising"],
};
const NEEDS = { advantage: "advantages", gap: "trainer_logprobs", entropy: "entropies", credit: "credit", token_rewards: "token_rewards", kept: "kept" };
const TRAINED = ["advantage", "gap", "entropy"];  // what the journal has of a share of the groups
const ARRAYS = ["ids", "mask", "logprobs", "versions", "pieces", ...Object.values(NEEDS)];
const bounded = (x, most) => (x === null || x === undefined ? null : Math.max(-1, Math.min(1, x / most)));
const gapOf = (t, i) => (t.trainer_logprobs?.[i] === null || t.trainer_logprobs?.[i] === undefined ? null : t.trainer_logprobs[i] - t.logprobs[i]);

// each reason once, with what it is the reason for
function lackingText(t, missing) {
  const of = new Map();
  for (const key of missing) of.set(t.lacking[NEEDS[key]], [...(of.get(t.lacking[NEEDS[key]]) ?? []), key]);
  return of.size ? `Not in the journal: ${[...of].map(([why, keys]) => `${keys.map((key) => COLOURS[key][0]).join(", ")} (${why})`).join("; ")}.` : "";
}

function prepare(t) {
  t.newest = t.newest_version; t.oldest = t.oldest_version;
  t.sampled = (i) => t.versions[i] >= 0 && t.mask[i];
  t.largest = Math.max(1e-9, ...(t.token_rewards || []).map(Math.abs));
  t.largest_advantage = Math.max(1e-9, ...(t.advantages || []).map(Math.abs));
  return t;
}

// What is known of the whole trajectory.
export function tokenFacts(t) {
  const own = t.episode_reward ?? t.reward, newest = t.newest_version, oldest = t.oldest_version;
  return h("dl", { class: "facts" }, facts([
    ["task", said(t.task)], ["group", t.ticket], ["trajectory", `${number(t.trajectory + 1)} of ${number(t.trajectories)}`], ["step", t.step ?? "not consumed"], ["reward", number(own)],
    t.mean !== null && own !== null && ["above the group’s mean", number(own - t.mean)], t.reward !== null && t.reward !== own && ["reward of this trajectory", number(t.reward)],
    ["trained", `${number(t.trained)} of ${number(t.length)} tokens`], ["versions", oldest === null ? "–" : oldest === newest ? number(newest) : `${number(oldest)} to ${number(newest)}`],
    ["mean log-probability", number(t.mean_logprob)], ["lowest", number(t.lowest_logprob)], ["end", said(t.finish)],
    ...Object.entries(t.details).map(([key, value]) => [said(key), number(value)])]));
}

// t: the lab's answer about a trajectory, with the arrays of its first tokens. more(begin): a promise of
// the same of the tokens from there on. colour: the first one. coloured(key): called for each other.
// failed(error): called if a promise fails. elsewhere: where the missing colours are to be found. Returns elements.
export function tokenView(t, { colour: first, coloured, more, failed, elsewhere = "" }) {
  prepare(t);
  const available = Object.keys(COLOURS).filter((key) => !NEEDS[key] || t[NEEDS[key]]);
  const missing = TRAINED.filter((key) => !available.includes(key));
  let colour = available.includes(first) ? first : "logprob", at = -1;

  const text = h("div", { class: "tokens", tabindex: 0, role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": "tokens; arrow keys read each" });
  const inspect = h("div", { class: "inspect", "aria-live": "polite" }), scale = h("span", { class: "scale" }), further = h("div");
  const spans = [];

  function add(from) {
    const fragment = document.createDocumentFragment();
    for (let i = from; i < t.ids.length; i++) {
      const piece = t.pieces ? t.pieces[i] : `${t.ids[i]} `;
      const span = h("span", { class: "t" }, piece === "" ? "·" : visible(piece).replaceAll("\n", "↵\n"));
      spans.push(span);
      fragment.append(span);
    }
    text.append(fragment);
  }
  function paint(from = 0) {
    const [, value] = COLOURS[colour];
    for (let i = from; i < spans.length; i++) {
      const x = value(t, i);
      spans[i].className = `t${x === null ? " out" : x > 0 ? " pos" : x < 0 ? " neg" : ""}${i === at ? " at" : ""}`;
      spans[i].style.setProperty("--a", x === null ? "0" : (0.08 + 0.52 * Math.abs(x)).toFixed(3));
    }
    const [what, , low, high, kind] = COLOURS[colour];
    scale.replaceChildren(`${what}: ${colour === "version" ? t.oldest ?? "–" : low}`, h("i", { class: kind }), `${colour === "version" ? t.newest ?? "–" : high}`);
    for (const button of buttons.querySelectorAll("button[data-colour]")) button.setAttribute("aria-pressed", String(button.dataset.colour === colour));
  }
  async function addMore() {
    const part = await more(t.ids.length);
    const from = t.ids.length;
    for (const key of ARRAYS) if (t[key]) t[key].push(...part[key]);
    add(from); paint(from); remaining();
  }
  function remaining() {
    further.replaceChildren(t.ids.length < t.length ? h("button", { type: "button", onclick: () => addMore().catch(failed) }, `show more: ${number(t.ids.length)} of ${number(t.length)} tokens`) : "");
  }
  function point(i) {
    if (!(i >= 0 && i < spans.length)) return;
    spans[at]?.classList.remove("at");
    at = i;
    spans[at].classList.add("at");
    spans[at].scrollIntoView({ block: "nearest" });
    const sampled = t.sampled(i);
    inspect.replaceChildren(h("dl", { class: "facts" }, facts([
      ["token", number(i)], ["text", said(t.pieces ? t.pieces[i] : "–")], ["id", t.ids[i]], ["trained on", t.mask[i] ? "yes" : "no"],
      ["version", t.versions[i] < 0 ? "not sampled by a policy" : number(t.versions[i])],
      sampled && ["log-probability", number(t.logprobs[i])], sampled && ["probability", number(Math.exp(t.logprobs[i]))],
      t.advantages && t.mask[i] && ["advantage", number(t.advantages[i])], sampled && gapOf(t, i) !== null && ["trainer − engine", number(gapOf(t, i))], t.entropies && t.mask[i] && ["entropy", number(t.entropies[i])],
      t.credit && ["credit", number(t.credit[i])], t.token_rewards && ["token reward", number(t.token_rewards[i])], t.kept && ["choices kept", t.kept[i] || "all"]])));
  }
  const nothing = () => inspect.replaceChildren(h("span", { class: "quiet" }, "Point at a token, or use ← and →, to read it."));
  const buttons = h("fieldset", null, h("legend", null, "colour by"),
    available.map((key) => h("button", { type: "button", "data-colour": key, onclick: () => { colour = key; paint(); coloured(key); } }, COLOURS[key][0])),
    missing.map((key) => h("button", { type: "button", disabled: true, "aria-describedby": "lacking", title: t.lacking[NEEDS[key]] }, COLOURS[key][0])));
  text.addEventListener("pointerover", (event) => { const i = spans.indexOf(event.target); if (i >= 0) point(i); });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (by === undefined && !["Home", "End"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    point(event.key === "Home" ? 0 : event.key === "End" ? spans.length - 1 : Math.max(0, Math.min(spans.length - 1, at + by)));
  });
  add(0); paint(); remaining(); nothing();
  return [h("div", { class: "controls" }, buttons, scale),
    h("p", { class: "quiet small", id: "lacking" }, lackingText(t, missing), missing.length === TRAINED.length && elsewhere,
      t.has_images ? " The images of the prompt are not shown." : "", t.no_text ? ` Token ids are shown: ${t.no_text}.` : ""),
    text, further, inspect];
}
