// Each run's state, what its newest steps say about it, and the curves that say most.

import { chart } from "./chart.js";
import { differences } from "./differences.js";
import { color, get, h, number, state } from "./dom.js";

export const TITLE = "Overview";
const CURVES = [
  ["rollout/reward", "reward"], ["eval/reward", "held-out reward"], ["rollout/truncated", "share of samples cut off"],
  ["rollout/response_length", "response length, tokens"], ["rollout/logprob_diff", "log-prob difference, trainer and engine"],
  ["rollout/staleness", "staleness, updates"], ["train/entropy", "entropy"], ["train/grad_norm", "gradient norm"],
  ["time/step", "seconds of a step"],
];
const MARKS = { error: "✕", warning: "!", info: "i" };

export async function show(page) {
  const runs = page.shown();
  const names = CURVES.map(([name]) => name).join();
  const [found, metrics, differing] = await Promise.all([
    Promise.all(runs.map((run) => get(`runs/${run.id}/findings`))),
    Promise.all(runs.map((run) => get(`runs/${run.id}/metrics?names=${names}`))),
    differences(runs),
  ]);
  const cards = runs.map((run, at) => card(run, found[at], metrics[at].series));
  const charts = CURVES.filter(([name]) => metrics.some((each) => each.series[name])).map(([name, title]) => chart({
    title,
    series: runs.map((run, at) => ({ run: run.id, label: run.name, color: color(run.id), ...metrics[at].series[name] })).filter((each) => each.steps),
    onstep: (step, { run }) => state.set({ view: "samples", step, run, sample: "", engine: "" }),
  }));
  return [h("section", { class: "cards" }, cards), differing, h("section", { class: "charts" }, charts)];
}

function card(run, findings, series) {
  const last = (name) => number(series[name]?.values.at(-1));
  const lines = findings.map((each) => h("li", { class: each.level },
    h("span", { class: "mark", "aria-label": each.level }, MARKS[each.level]),
    h("div", {}, h("strong", {}, each.what), h("p", {}, `${each.why}.`), h("p", {}, h("em", {}, "Try: "), `${each.fix}.`),
      h("p", {}, each.metric && link(`curve ${each.metric}`, { view: "curves", metrics: each.metric, run: run.id }),
        each.view !== "curves" && link(`see ${each.view}`, {
          view: each.view, run: run.id, step: "", sample: "", engine: "", sort: each.sort,
        })))));
  return h("article", { class: "card" },
    h("h2", {}, h("i", { style: { background: color(run.id) } }), run.name),
    h("p", { class: "facts" }, run.running ? "running" : "not running", ` · step ${run.done}${run.steps ? ` of ${run.steps}` : ""}`,
      ` · reward ${last("rollout/reward")} · held-out ${last("eval/reward")} · ${last("time/step")} s a step`),
    lines.length ? h("ul", { class: "findings" }, lines) : h("p", { class: "quiet" }, "Nothing stands out in the newest steps."));
}

function link(text, changes) {
  return h("button", { type: "button", class: "link", onclick: () => state.set(changes) }, text);
}
