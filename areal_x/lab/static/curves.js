// Metrics over steps or time, of one run or several.

import { get, ofRun } from "./api.js";
import { chart, smoothed } from "./chart.js";
import { duration, h, number } from "./dom.js";
import { allRuns, go, link } from "./address.js";

const FIRST = ["reward", "accuracy", "loss", "entropy_estimate", "response_length", "truncated", "grad_norm", "policy_gap", "staleness_mean", "trainer_idle", "rollout_idle", "generation_tokens_per_second"];
const MOST_RUNS = 6, MOST_CHARTS = 48;

export async function curves({ name, parameters, body, signal }) {
  const others = (parameters.get("with") || "").split(",").filter((x) => x && x !== name && allRuns().some((run) => run.name === x)).slice(0, MOST_RUNS - 1);
  const state = { axis: parameters.get("axis") || "step", smooth: Number(parameters.get("smooth") || 0), match: parameters.get("match") || "" };
  const chosen = [name, ...others];
  const charts = h("div", { class: "charts" });
  let found = [];

  const change = (more) => {
    const next = link(name, "curves", [], { with: others.join(","), axis: state.axis === "step" ? "" : state.axis, smooth: state.smooth || "", match: state.match, ...more });
    if (`#${location.hash.slice(1)}` !== next) go(next);
  };
  const keep = () => history.replaceState(null, "", link(name, "curves", [], { with: others.join(","), axis: state.axis === "step" ? "" : state.axis, smooth: state.smooth || "", match: state.match }));

  async function refresh() {
    const { keys } = await get(ofRun(name, "/metrics"), null, signal);
    const matching = state.match ? keys.filter((key) => key.includes(state.match)) : [...FIRST.filter((key) => keys.includes(key)), ...keys.filter((key) => key.startsWith("reward/"))];
    const wanted = matching.filter((key) => key !== "step").slice(0, MOST_CHARTS);
    found = await Promise.all(chosen.map((run) => get(ofRun(run, "/metrics"), { key: wanted, points: 600 }, signal)));
    draw(wanted, matching.length);
  }
  function draw(keys, total) {
    const axis = state.axis === "seconds" ? "time" : "step";
    charts.replaceChildren(...keys.map((key) => {
      const series = found.map((answer, i) => [answer.curves[key], i]).filter(([curve]) => curve?.step.length).map(([curve, i]) => ({
        name: chosen[i], colour: `k${i}`, x: curve[state.axis], y: state.smooth ? smoothed(curve.value, state.smooth) : curve.value,
        faint: state.smooth ? curve.value : null, low: state.smooth || chosen.length > 1 ? null : curve.low, high: curve.high,
      }));
      for (const s of series) if (!s.low) delete s.high;
      return chart(key, series, { axis, axisFormat: state.axis === "seconds" ? duration : number });
    }));
    more.textContent = total > MOST_CHARTS ? `${total} metrics match; the first ${MOST_CHARTS} are drawn.` : "";
  }
  const more = h("p", { class: "quiet small", role: "status" });
  const button = (axis, what) => h("button", { type: "button", "aria-pressed": String(state.axis === axis), onclick: () => change({ axis: axis === "step" ? "" : axis }) }, what);
  const comparable = allRuns().filter((run) => run.name !== name && !others.includes(run.name));
  let typed;
  body.append(
    h("div", { class: "controls" },
      h("fieldset", null, h("legend", null, "axis"), button("step", "steps"), button("seconds", "time in steps")),
      h("label", null, "smoothing", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, oninput: (event) => { state.smooth = Number(event.target.value); keep(); redraw(); } })),
      h("label", null, "metrics whose name contains", h("input", { type: "search", value: state.match, placeholder: "the usual ones", oninput: (event) => { clearTimeout(typed); typed = setTimeout(() => { state.match = event.target.value; keep(); refresh().catch(() => {}); }, 200); } })),
      chosen.length < MOST_RUNS && comparable.length > 0 && h("label", null, "compare with", h("select", { onchange: (event) => change({ with: [...others, event.target.value].join(",") }) },
        h("option", { value: "" }, "a run…"), comparable.map((run) => h("option", { value: run.name }, run.name))))),
    others.length === 0 ? "" : h("ul", { class: "legend", vars: { margin: "0 0 14px" } }, chosen.map((run, i) => h("li", null, h("i", { class: `fill${i}` }), run,
      i > 0 && [" ", h("button", { type: "button", "aria-label": `leave out ${run}`, onclick: () => change({ with: others.filter((x) => x !== run).join(",") }) }, "×")]))),
    charts, more);
  function redraw() {
    const drawn = [...charts.querySelectorAll("figcaption > span")].map((x) => x.textContent);
    draw(drawn, drawn.length);
  }
  await refresh();
  return { refresh };
}
