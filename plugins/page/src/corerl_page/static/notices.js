// What the run had to say, newest last, and the errors of its calls.

import { color, get, h } from "./dom.js";

export const TITLE = "Notices";
let filter = "";

export async function show(page) {
  const runs = page.shown();
  const found = await Promise.all(runs.map(async (run) => {
    const [notices, processes] = await Promise.all([get(`runs/${run.id}/notices`), get(`runs/${run.id}/processes`)]);
    const errors = processes.flatMap((each) => each.errors.map((text) => ({ step: "call", text: `${each.process}: ${text}`, bad: true })));
    return [...notices, ...errors].map((each) => ({ ...each, run }));
  }));
  const rows = found.flat(), body = h("tbody", {});
  const draw = () => body.replaceChildren(...rows.filter((each) => each.text.toLowerCase().includes(filter.toLowerCase())).map((each) => h("tr", {},
    h("td", {}, h("i", { class: "dot", style: { background: color(each.run.id) } }), each.run.name), h("td", {}, each.step), h("td", { class: each.bad ? "bad" : "" }, each.text))));
  draw();
  const search = h("input", { type: "search", placeholder: "text ( / )", "aria-label": "Search notices", value: filter, oninput: () => { filter = search.value; draw(); } });
  return rows.length
    ? [h("div", { class: "bar" }, search), h("table", { class: "notices" }, h("thead", {}, h("tr", {}, ["run", "step", "notice"].map((each) => h("th", { scope: "col" }, each)))), body)]
    : h("p", { class: "quiet" }, "These runs have had nothing to say.");
}
