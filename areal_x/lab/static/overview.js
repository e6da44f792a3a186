// What is going on: progress, where the time goes, outcomes, evaluations.

import { get, ofRun } from "./api.js";
import { chart } from "./chart.js";
import { duration, h, number, percent, said } from "./dom.js";
import { link } from "./address.js";

const PHASES = [["wait_seconds", "waits for groups"], ["logprob_seconds", "log-probabilities"], ["update_seconds", "update"], ["publish_seconds", "publishes weights"]];
const LANES = { trainer: "trainer", engine: "weights", episodes: "episodes", generation: "generation", rewards: "rewards" };
const FIRST = ["reward", "accuracy", "response_length", "staleness_mean"];
const STATES = {
  running: "The run goes on.",
  finished: "The run took its last step.",
  stopped: "The run ended before its last step: it was interrupted, or an error ended it. Its journal was closed.",
  crashed: "The run’s process was killed: its journal was not closed. What it had written is here.",
};

export async function overview({ name, body, signal }) {
  async function refresh() {
    const [run, measured] = await Promise.all([
      get(ofRun(name), null, signal),
      get(ofRun(name, "/metrics"), { key: [...FIRST, "held_out/loss", "evaluation_failed"], points: 400 }, signal),
    ]);
    body.replaceChildren(...parts(name, run, measured.curves));
  }
  await refresh();
  return { refresh };
}

function parts(name, run, curves) {
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
    run.damaged_rows > 0 && h("p", { class: "error" }, `${number(run.damaged_rows)} lines of metrics.jsonl are damaged and left out.`),
    h("div", { class: "tiles" }, tiles.filter(Boolean).map(([value, what]) => h("div", { class: "tile" }, h("b", null, value), h("span", null, what)))),
    h("div", { class: "two", vars: { "margin-bottom": "16px" } }, trainer(run), lanes(run)),
    h("div", { class: "charts" }, FIRST.filter((key) => curves[key]?.step.length).map((key) => chart(key, [
      { name: key, colour: "k0", x: curves[key].step, y: curves[key].value, low: curves[key].low, high: curves[key].high }]))),
    h("div", { class: "two", vars: { "margin-top": "16px" } }, outcomes(name, run), evaluations(curves)),
  ].filter(Boolean);
}

function trainer(run) {
  const known = PHASES.filter(([key]) => run.phases[key] !== undefined);
  const rest = 1 - known.reduce((sum, [key]) => sum + run.phases[key], 0);
  return h("section", { class: "card" }, h("h3", null, "The trainer’s time"),
    known.length
      ? [h("div", { class: "bar", role: "img", "aria-label": known.map(([key, what]) => `${what} ${percent(run.phases[key])}`).join(", ") },
          known.map(([key], i) => h("span", { class: `fill${i}`, vars: { "--share": run.phases[key] } }))),
        h("ul", { class: "legend" }, known.map(([key, what], i) => h("li", null, h("i", { class: `fill${i}` }), `${what} ${percent(run.phases[key])}`)),
          rest > 0.005 && h("li", null, `other ${percent(rest)}`)),
        h("p", { class: "quiet small", vars: { margin: "10px 0 0" } }, `Shares of ${duration(run.seconds)} in ${number(run.step)} steps, from metrics.jsonl; evaluations and checkpoints are outside steps.`)]
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
        }), h("p", { class: "quiet small", vars: { margin: "10px 0 0" } }, `Shares of the ${duration(run.busy.seconds)} that timeline.json covers, in which at least one span was open. It is written at checkpoints and at the end.`)]
      : h("p", { class: "quiet" }, "timeline.json is written at the first checkpoint."));
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
