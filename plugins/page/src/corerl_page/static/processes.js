// Ranks and engines: what they are by the config, and what each of them has done by the trace.

import { get, h, number, ofWhole } from "./dom.js";

export const TITLE = "Processes", ONE_RUN = true;

export async function show(page) {
  const run = page.run();
  const [found, config] = await Promise.all([get(`runs/${run.id}/processes`), get(`runs/${run.id}/config`)]);
  const roles = Object.entries(config.roles ?? {}).map(([name, role]) => `${name}: ${role.ranks ?? "?"} ranks`);
  const facts = [
    ["backend", config.backend?.name], ["roles", roles.join(", ")], ["engine", config.rollout && `${config.rollout.engine} × ${config.rollout.replicas}`],
    ["device", config.cluster && `${config.cluster.device}, ${config.cluster.placement}`], ["model", config.model?.path || config.model?.config?.model_type],
    ["source", config.rollout?.source], ["old_logprobs", config.algorithm?.old_logprobs],
    ["directory", run.path], ["files", Object.keys(run.files).join(", ")],
  ].filter(([, value]) => value != null && value !== "");
  const rows = found.map((each) => h("tr", {},
    h("th", { scope: "row" }, each.process), h("td", {}, h("b", { class: `flag ${each.state}` }, each.state)),
    h("td", {}, each.last), h("td", {}, `${number(each.ended, 5)} s`), h("td", {}, each.calls), h("td", {}, ofWhole(each.busy, each.seconds, " s")),
    h("td", {}, Object.entries(each.idle).sort((one, other) => other[1] - one[1]).map(([cause, seconds]) => `${cause} ${number(seconds, 2)} s`).join(", ")),
    h("td", { class: "bad" }, each.errors.map((error) => h("div", {}, error)))));
  const heads = ["process", "state", "last call", "ended at", "calls", "busy", "waited for", "errors"];
  return [
    h("dl", { class: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])),
    rows.length
      ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((each) => h("th", { scope: "col" }, each)))), h("tbody", {}, rows)))
      : h("p", { class: "quiet" }, run.files["trace.json"] ? "No call has ended yet." : ["What each process did is in the trace. List the extension trace in the run's config: ", h("code", {}, '{ name = "trace" }')]),
  ];
}
