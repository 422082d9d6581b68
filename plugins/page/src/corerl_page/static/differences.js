// A table of the settings and versions in which the shown runs differ.

import { color, get, h } from "./dom.js";

const FIRST = 8; // rows that are open; more are folded

export async function differences(runs) {
  if (runs.length < 2) return null;
  const found = await get(`differences?runs=${runs.map((run) => run.id).join()}`);
  if (!found.length) return h("p", { class: "quiet" }, "These runs' settings, and the versions they know, are equal.");
  const table = (rows, title) => h("div", { class: "scroll" }, h("table", { class: "differences" }, title && h("caption", {}, title),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), runs.map((run) => h("th", { scope: "col" },
      h("i", { class: "dot", style: { background: color(run.id) } }), run.name)))),
    h("tbody", {}, rows.map((each) => h("tr", {}, h("th", { scope: "row" }, each.name),
      each.values.map((value) => h("td", {}, value == null ? "–" : h("code", {}, value))))))));
  const rest = found.slice(FIRST);
  return h("section", {}, table(found.slice(0, FIRST), "What differs between these runs"),
    rest.length ? h("details", {}, h("summary", {}, `${rest.length} more`), table(rest)) : null);
}
