// The frame: tabs, runs, theme, keys, and asking the server whether anything has changed.

import { color, get, h, number, state } from "./dom.js";
import * as curves from "./curves.js";
import * as notices from "./notices.js";
import * as overview from "./overview.js";
import * as processes from "./processes.js";
import * as samples from "./samples.js";
import * as time from "./time.js";

const VIEWS = { overview, curves, samples, time, processes, notices };
const EVERY = 2000; // milliseconds between two questions
const page = { runs: [], hidden: new Set(), shown: () => page.runs.filter((run) => !page.hidden.has(run.id)) };
const view = document.getElementById("view");
let showing = 0, failed = false;

const name = () => (state.get("view") in VIEWS ? state.get("view") : "overview");
page.run = () => page.runs[Math.min(state.number("run"), page.runs.length - 1)];

async function show({ again = false } = {}) {
  drawFrame();
  const turn = ++showing;
  try {
    const found = await VIEWS[name()].show(page, { again, current: () => turn === showing });
    if (turn === showing && found) view.replaceChildren(...[found].flat().filter(Boolean));
  } catch (error) {
    if (turn === showing) view.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
  }
}

function drawFrame() {
  document.getElementById("tabs").replaceChildren(...Object.keys(VIEWS).map((each, at) => h("button", {
    type: "button", role: "tab", "aria-selected": String(each === name()), title: `${each} (${at + 1})`,
    onclick: () => state.set({ view: each }),
  }, VIEWS[each].TITLE)));
  const one = VIEWS[name()].ONE_RUN, chosen = page.run();
  document.getElementById("runs").replaceChildren(...page.runs.map((run) => {
    const active = one ? run === chosen : !page.hidden.has(run.id);
    const steps = run.steps ? `${run.done} / ${run.steps}` : run.done;
    return h("button", {
      type: "button", class: "run", "aria-pressed": String(active), title: run.path,
      onclick: () => {
        if (one) return state.set({ run: run.id, sample: "", engine: "" });
        if (!page.hidden.delete(run.id)) page.hidden.add(run.id);
        show();
      },
    }, h("i", { style: { background: color(run.id) } }), run.name, h("small", {}, `step ${steps}`, run.running ? " · running" : ""));
  }));
}

async function ask() {
  try {
    const before = page.runs.map((run) => run.changed).join();
    page.runs = (await get("runs")).map((run, id) => ({ ...run, id }));
    document.getElementById("live").textContent = page.runs.some((run) => run.running) ? "live" : "";
    if (before !== page.runs.map((run) => run.changed).join() || failed) await show({ again: Boolean(before) });
    failed = false;
  } catch (error) {
    failed = true;
    document.getElementById("live").textContent = "";
    if (!page.runs.length) view.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
    else document.getElementById("live").textContent = "the server has ended";
  }
  setTimeout(ask, EVERY);
}

// ---- theme and keys -----------------------------------------------------------------------------------------------

function dark() {
  const chosen = localStorage.getItem("theme");
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
function setTheme() {
  document.documentElement.dataset.theme = dark() ? "dark" : "light";
  document.getElementById("theme").textContent = dark() ? "Light" : "Dark";
}
function switchTheme() {
  localStorage.setItem("theme", dark() ? "light" : "dark");
  setTheme();
  show();
}

const KEYS = [
  ["1 … 6", "a view"], ["j  k", "next and previous step with samples"], ["↓  ↑", "next and previous sample, in the list"],
  ["/", "search samples, metrics or notices"], ["+  −", "zoom the timeline, in Time"], ["←  →", "the numbers of each token, in Samples; move the timeline, in Time"],
  ["r", "next run"], ["t", "light or dark"], ["?", "this list"], ["Esc", "close, or leave a field"],
];
const help = document.getElementById("keys");
function showKeys() {
  help.replaceChildren(h("h2", {}, "Keys"), h("dl", {}, KEYS.flatMap(([key, text]) => [h("dt", {}, key), h("dd", {}, text)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  help.showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches?.("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const views = Object.keys(VIEWS);
  if (event.key >= "1" && event.key <= String(views.length)) state.set({ view: views[event.key - 1] });
  else if (event.key === "j" || event.key === "k") samples.move(page, event.key === "j" ? 1 : -1);
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
  else if (event.key === "r") state.set({ run: (page.run().id + 1) % page.runs.length, sample: "", engine: "" });
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showKeys();
  else if (!VIEWS[name()].onKey?.(event)) return;
  event.preventDefault();
}

document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("help").addEventListener("click", showKeys);
addEventListener("keydown", onKey);
addEventListener("hashchange", () => show());
addEventListener("popstate", () => show());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setTheme);
setTheme();
ask();
