// Any metrics of several runs over each other.

import { chart } from "./chart.js";
import { differences } from "./differences.js";
import { color, get, h, select, state } from "./dom.js";

export const TITLE = "Curves";
const FIRST = ["rollout/reward", "rollout/response_length", "train/entropy", "train/loss", "train/grad_norm", "rollout/logprob_diff"];
let filter = "";

export async function show(page) {
  const runs = page.shown();
  const wanted = state.get("metrics") ? state.get("metrics").split(",") : FIRST;
  const [differing, ...found] = await Promise.all([differences(runs),
    ...runs.map((run) => get(`runs/${run.id}/metrics?names=${wanted.map(encodeURIComponent).join()}`))]);
  const names = [...new Set(found.flatMap((each) => each.names))].sort();
  const smoothing = Number(state.get("smooth", "0")), log = state.get("log") === "1";
  const search = h("input", {
    type: "search", placeholder: "metric ( / )", "aria-label": "Search metrics", value: filter,
    oninput: () => { filter = search.value; list.replaceChildren(...boxes()); },
  });
  const boxes = () => groups(names.filter((each) => each.includes(filter))).flatMap(([group, members]) => [
    h("h3", {}, group), ...members.map((each) => h("label", {}, h("input", {
      type: "checkbox", checked: wanted.includes(each),
      onchange: (event) => choose(wanted, each, event.target.checked),
    }), each.slice(each.indexOf("/") + 1))),
  ]);
  const list = h("div", { class: "metrics" }, boxes());
  const charts = wanted.map((name) => chart({
    title: name, smoothing, log, height: 210,
    series: runs.map((run, at) => ({ run: run.id, label: run.name, color: color(run.id), ...found[at].series[name] })).filter((each) => each.steps),
    onstep: (step, { run }) => state.set({ view: "samples", step, run, sample: "", engine: "" }),
  }));
  return h("div", { class: "columns" },
    h("aside", {}, search,
      h("p", { class: "controls" }, "smooth ", select("Smoothing", [["0", "none"], ["0.6", "0.6"], ["0.8", "0.8"], ["0.9", "0.9"], ["0.97", "0.97"]], state.get("smooth", "0"), (value) => state.set({ smooth: value })),
        h("label", {}, h("input", { type: "checkbox", checked: log, onchange: (event) => state.set({ log: event.target.checked ? "1" : "" }) }), "log")),
      list),
    h("div", {}, h("section", { class: "charts wide" }, charts), differing));
}

function choose(wanted, name, on) {
  state.set({ metrics: (on ? [name, ...wanted] : wanted.filter((each) => each !== name)).join(",") });
}

function groups(names) {
  const found = new Map();
  for (const name of names) {
    const group = name.split("/")[0];
    found.set(group, [...(found.get(group) ?? []), name]);
  }
  return [...found];
}
