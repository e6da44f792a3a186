// What is going on: progress, where the time goes, outcomes, evaluations.

import { get, ofRun } from "./api.js";
import { chart } from "./chart.js";
import { duration, h, number, percent, said } from "./dom.js";
import { link } from "./address.js";

const LANES = { trainer: "trainer", engine: "weights", episodes: "episodes", generation: "generation", rewards: "rewards" };
const FIRST = ["reward", "accuracy", "response_length", "staleness_mean"];
const STATES = {
  running: "The run goes on.",
  finished: "The run took its last step.",
  stopped: "The run ended before its last step: it was interrupted, or an error ended it. Its journal was closed.",
  crashed: "The run’s process was killed: its journal was not closed. What it had written is here.",
};

export async function overview({ name, body, signal }) {
  const open = new Set();  // stacks, which stay open while the page is renewed
  async function refresh() {
    const [run, measured] = await Promise.all([
      get(ofRun(name), null, signal),
      get(ofRun(name, "/metrics"), { key: [...FIRST, "held_out/loss", "evaluation_failed"], points: 400 }, signal),
    ]);
    body.replaceChildren(...parts(name, run, measured.curves, open));
  }
  await refresh();
  return { refresh };
}

function parts(name, run, curves, open) {
  const { all } = run;
  const tiles = [
    [number(run.step ?? 0), run.steps ? `of ${number(run.steps)} steps` : "steps"],
    [number(all.reward), "reward"],
    all.accuracy !== undefined && [percent(all.accuracy), "held-out accuracy"],
    [number(all.generation_tokens_per_second), "generated tokens/s"],
    [number(all.training_tokens_per_second), "trained tokens/s"],
    [number(all.staleness_mean), "versions stale, mean"],
    run.outcomes && [number(run.outcomes.failed + run.outcomes.timed_out), "failed or late"],
  ];
  return [
    h("p", { class: "quiet" }, STATES[run.state], " ", run.model && [h("span", { class: "mono" }, said(String(run.model))), " · "], run.algorithm && h("span", { class: "mono" }, said(String(run.algorithm)))),
    run.journal && run.journal.error && h("p", { class: "error" }, said(run.journal.error)),
    run.stall && stall(run, open),
    run.damaged_rows > 0 && h("p", { class: "error" }, `${number(run.damaged_rows)} lines of metrics.jsonl are damaged and left out.`),
    h("div", { class: "tiles" }, tiles.filter(Boolean).map(([value, what]) => h("div", { class: "tile" }, h("b", null, value), h("span", null, what)))),
    h("div", { class: "two", vars: { "margin-bottom": "16px" } }, times(run), lanes(run)),
    h("div", { class: "charts" }, FIRST.filter((key) => curves[key]?.step.length).map((key) => chart(key, [
      { name: key, colour: "k0", x: curves[key].step, y: curves[key].value, low: curves[key].low, high: curves[key].high }]))),
    h("div", { class: "two", vars: { "margin-top": "16px" } }, outcomes(name, run), evaluations(curves)),
  ].filter(Boolean);
}

// who waits for whom, as the run's log and display say it
function stall(run, open) {
  const { sentences, waits, threads, silent_seconds } = run.stall;
  const fold = (key, title, content) => h("details", { open: open.has(key), ontoggle: (event) => (event.target.open ? open.add(key) : open.delete(key)) }, h("summary", null, title), content);
  const of = Object.entries(Object.groupBy(waits, (wait) => wait.who));
  return h("section", { class: "card stalled" }, h("h3", null, run.state === "running" ? `Nothing has moved for ${duration(silent_seconds)}` : `Nothing had moved for ${duration(silent_seconds)} when the run ended`),
    h("ul", null, sentences.map((sentence) => h("li", null, said(sentence)))),
    fold("waits", `every wait: ${number(waits.length)}`, h("dl", { class: "waits" }, of.map(([who, theirs]) => [h("dt", null, said(who)), theirs.map((wait) => h("dd", { class: wait.idle && "quiet" }, said(wait.about), wait.idle && " (waits for work)"))]))),
    threads.map(({ name, stack }, i) => fold(`thread ${i}`, ["thread ", said(name)], h("pre", { tabindex: 0 }, said(stack)))));
}

function times(run) {
  const { shares, labels, steps, seconds } = run.parts;
  const shown = Object.entries(labels).map(([key, label], colour) => [key, label, colour]).filter(([key]) => shares[key] > 0.0005);
  const what = (key, label) => `${label} ${percent(shares[key])}`;
  return h("section", { class: "card" }, h("h3", null, "Where a step’s time goes"),
    shown.length
      ? [run.cause && h("p", { class: "cause" }, said(run.cause.sentence)),
        h("div", { class: "bar", role: "img", "aria-label": shown.map(([key, label]) => what(key, label)).join(", ") },
          shown.map(([key, , colour]) => h("span", { class: `fill${colour}`, vars: { "--share": shares[key] } }))),
        h("ul", { class: "legend" }, shown.map(([key, label, colour]) => h("li", null, h("i", { class: `fill${colour}` }), what(key, label)))),
        h("p", { class: "quiet small", vars: { margin: "10px 0 0" } }, shares.rollout === undefined
          ? `Shares of the ${duration(seconds)} of the newest ${number(steps)} steps, from timeline.json: what the trainer did, or what it waited for.`
          : `Shares of the ${duration(seconds)} of ${number(steps)} steps, from metrics.jsonl.`)]
      : h("p", { class: "quiet" }, "No step was taken yet."));
}

function lanes(run) {
  const known = run.busy ? Object.entries(run.busy.lanes) : [];
  return h("section", { class: "card" }, h("h3", null, "How busy each part was"),
    known.length
      ? [known.map(([lane, { share, spans }]) => {
          const parts = Object.entries(spans).map(([what, x]) => `${what} ${percent(x)}`).join(", ");
          return h("div", { class: "lane", title: parts }, h("span", null, LANES[lane] || lane),
            h("div", { class: "bar", role: "img", "aria-label": `${LANES[lane] || lane}: ${parts}` }, h("span", { class: "fill0", vars: { "--share": share } })), h("span", null, percent(share)));
        }), h("p", { class: "quiet small", vars: { margin: "10px 0 0" } }, `Shares of the ${duration(run.busy.seconds)} that timeline.json covers, in which at least one span was open. It is written at checkpoints, at the end and now and then.`)]
      : h("p", { class: "quiet" }, "timeline.json is written some seconds after the start."));
}

function outcomes(name, run) {
  if (!run.outcomes) return h("section", { class: "card" }, h("h3", null, "Episodes"), h("p", { class: "quiet" }, "The run has no journal."));
  const kinds = [["scored", "scored"], ["failed", "failed"], ["timed_out", "timed out"]];
  const total = kinds.reduce((sum, [key]) => sum + run.outcomes[key], 0) || 1;
  return h("section", { class: "card" }, h("h3", null, "Episodes in the journal"),
    h("div", { class: "bar", role: "img", "aria-label": kinds.map(([key, what]) => `${run.outcomes[key]} ${what}`).join(", ") }, kinds.map(([key], i) => h("span", { class: ["fill2", "fill1", "fill4"][i], vars: { "--share": run.outcomes[key] / total } }))),
    h("ul", { class: "legend" }, kinds.map(([key, what], i) => h("li", null, h("i", { class: ["fill2", "fill1", "fill4"][i] }), h("a", { href: link(name, "trajectories", [], { outcome: key }) }, `${number(run.outcomes[key])} ${what}`)))),
    run.journal.progress < 1 && h("p", { class: "quiet small" }, h("progress", { value: run.journal.progress, max: 1, "aria-label": "indexing" }), ` indexing, ${percent(run.journal.progress)}`),
    run.journal.unreadable > 0 && h("p", { class: "error" }, `${number(run.journal.unreadable)} groups are damaged.`));
}

function evaluations(curves) {
  const found = ["accuracy", "held_out/loss"].filter((key) => curves[key]?.step.length);
  if (!found.length) return h("section", { class: "card" }, h("h3", null, "Evaluations"), h("p", { class: "quiet" }, "None was recorded."));
  return found.map((key) => {
    const curve = curves[key], best = key === "accuracy" ? Math.max(...curve.value) : Math.min(...curve.value);
    const rows = curve.step.map((step, i) => [step, curve.value[i]]).slice(-12).reverse();
    return h("section", { class: "card" }, h("h3", null, `Evaluations: ${key}`),
      h("table", null, h("thead", null, h("tr", null, h("th", { class: "n" }, "step"), h("th", { class: "n" }, key))),
        h("tbody", null, rows.map(([step, value]) => h("tr", null, h("td", { class: "n" }, number(step)), h("td", { class: "n" }, value === best ? [h("b", null, number(value)), " (best)"] : number(value)))))));
  });
}
