// The samples of a step: a list of any length, of which the server sends what is visible, and one sample token by token.

import { get, h, number, ofWhole, percent, select, state } from "./dom.js";

export const TITLE = "Samples", ONE_RUN = true;
const ROW = 56, PAGE = 100; // pixels of a row; samples of one question
const ORDERS = [
  ["", "in order"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-advantage", "highest advantage"],
  ["advantage", "lowest advantage"], ["-tokens", "longest"], ["-diff", "largest log-prob difference"],
  ["-truncated", "cut off first"], ["engines", "by engine"],
];
const PAINTS = [
  ["diff", "log-prob difference, trainer − engine"], ["engine", "log-prob when sampled"], ["advantages", "advantage"],
  ["version", "weights version"],
];
const LONG = 4000; // tokens of a run that the policy did not choose, above which it is folded
let list = null; // of the shown step, so that a newer step does not move what is looked at

export async function show(page, { again, current }) {
  const run = page.run(), steps = await get(`runs/${run.id}/steps`);
  if (!steps.length && run.running && (run.files["rollouts.jsonl"] ?? run.files["samples.jsonl"]) != null) {
    return h("p", { class: "quiet" }, "No step has ended yet.");
  }
  if (!steps.length) {
    return h("p", { class: "quiet" }, "No samples are recorded. List the extension page (or jsonl) in the run's config: ",
      h("code", {}, 'extensions = [{ name = "console" }, { name = "jsonl" }, { name = "page" }]'));
  }
  const last = steps.at(-1).step, step = Math.min(state.number("step", newest(steps)), last);
  const place = closest(steps, step), kinds = steps[place].kinds;
  const kind = state.get("kind") in kinds ? state.get("kind") : "sampled" in kinds ? "sampled" : Object.keys(kinds)[0];
  const query = { step: steps[place].step, kind, sort: state.get("sort"), q: state.get("q") };
  if (state.get("engine")) query.engine = state.get("engine");
  const address = `runs/${run.id}/samples?${new URLSearchParams(query)}`;
  if (again && list?.address === address && list.element.isConnected) {
    const total = (await get(`${address}&limit=0`)).total;
    document.querySelector(".of")?.replaceChildren(`of ${last}`);
    if (total === list.total) return null; // what one reads stays where it is
  }
  if (list?.address !== address || !list.element.isConnected || again) {
    list = await makeList(address, run.id);
    if (!current()) return null;
  }
  const detail = h("article", { class: "sample", "aria-live": "polite", tabindex: 0 });
  const chosen = state.get("sample") || list.first?.id;
  const shown = chosen != null ? drawSample(detail, run.id, query.step, chosen) : null;
  list.mark(chosen);
  await shown;
  if (document.querySelector(".samples > .list") === list.element) {
    document.querySelector(".sample").replaceWith(detail);
    document.querySelector(".bar").replaceWith(bar({ steps, place, last, kinds, kind, query }));
    return null;
  }
  return h("div", { class: "samples" }, bar({ steps, place, last, kinds, kind, query }), list.element, detail);
}

function bar({ steps, place, last, kinds, kind, query }) {
  const to = (at) => state.set({ step: steps[at]?.step, sample: "" });
  const input = h("input", {
    type: "number", value: query.step, min: 0, max: last, "aria-label": "Step",
    onchange: () => state.set({ step: input.value, sample: "" }),
  });
  const search = h("input", {
    type: "search", placeholder: "text ( / )", "aria-label": "Search samples", value: query.q,
    onchange: () => state.set({ q: search.value, sample: "" }),
  });
  return h("div", { class: "bar" },
    h("button", { type: "button", "aria-label": "Previous step", disabled: !place, onclick: () => to(place - 1) }, "‹"),
    h("label", {}, "step ", input), h("span", { class: "of" }, `of ${last}`),
    h("button", { type: "button", "aria-label": "Next step", disabled: place === steps.length - 1, onclick: () => to(place + 1) }, "›"),
    select("Kind", Object.entries(kinds).map(([each, count]) => [each, `${each}, ${count}`]), kind, (value) => state.set({ kind: value, sample: "" })),
    engineFilter(list.counts),
    select("Order", ORDERS, query.sort, (value) => state.set({ sort: value, sample: "" })), search, counts(list.counts));
}

// An engine that sampled none of the step stays in the address, for the steps where it did, and chooses nothing here.
function engineFilter({ engines, engine }) {
  if (engines.length < 2 && engine == null) return null;
  const options = engines.map((each) => [String(each.engine), `${named(each.engine)}, ${each.samples}`]);
  return select("Engine", [["", "all engines"], ...options], String(engine ?? ""), (value) => state.set({ engine: value, sample: "" }));
}

function counts({ total, cut_off, far, bad, engine, engines }) {
  const own = engines.map((each) => `${named(each.engine)} ${each.far} of ${each.diffs}`).join(", ");
  const all = engines.length > 1 && engine == null;
  return h("div", { class: "counts" },
    cut_off > 0 && h("b", { class: bad.cut_off ? "bad" : "" }, `${ofWhole(cut_off, total)} cut off`), cut_off > 0 && far > 0 && " · ",
    far > 0 && h("b", { class: bad.far ? "bad" : "" }, `${ofWhole(far, total)} differ from the trainer by more than 0.1${all ? `: ${own}` : ""}`));
}

const named = (engine) => `engine-${engine}`;

const closest = (steps, wanted) => steps.reduce((best, each, at) =>
  (Math.abs(each.step - wanted) < Math.abs(steps[best].step - wanted) ? at : best), 0);

// The last step that has sampled: held-out samples are also of the weights after it.
const newest = (steps) => (steps.findLast((each) => "sampled" in each.kinds) ?? steps.at(-1)).step;

export async function move(page, by) {
  const steps = await get(`runs/${page.run().id}/steps`);
  if (!steps.length) return;
  const place = closest(steps, state.number("step", newest(steps))) + by;
  if (place >= 0 && place < steps.length) state.set({ view: "samples", step: steps[place].step, sample: "" });
}

// ---- the list ---------------------------------------------------------------------------------------------------------

async function makeList(address) {
  const rows = new Map(), asked = new Set();
  const first = await get(`${address}&limit=${PAGE}`);
  first.samples.forEach((sample, at) => rows.set(at, sample));
  asked.add(0);
  const inner = h("div", { class: "inner", style: { height: `${first.total * ROW}px` } });
  const element = h("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": `${first.total} samples` }, inner);
  const found = { address, element, total: first.total, counts: first, first: rows.get(0), chosen: null, mark, move: go };

  function draw() {
    const begin = Math.max(0, Math.floor(element.scrollTop / ROW) - 5);
    const end = Math.min(first.total, Math.ceil((element.scrollTop + (element.clientHeight || 600)) / ROW) + 5);
    const visible = [];
    for (let at = begin; at < end; at++) {
      const page = Math.floor(at / PAGE);
      if (!rows.has(at) && !asked.has(page)) fetchPage(page);
      visible.push(line(at, rows.get(at)));
    }
    inner.replaceChildren(...visible);
    if (!first.total) inner.replaceChildren(h("p", { class: "quiet" }, "no sample is like that"));
  }

  async function fetchPage(page) {
    asked.add(page);
    const more = await get(`${address}&offset=${page * PAGE}&limit=${PAGE}`);
    more.samples.forEach((sample, at) => rows.set(page * PAGE + at, sample));
    draw();
  }

  function line(at, sample) {
    const selected = sample && String(sample.id) === String(found.chosen);
    return h("div", {
      class: "line", role: "option", "aria-selected": String(Boolean(selected)), "aria-posinset": at + 1, "aria-setsize": first.total,
      style: { top: `${at * ROW}px` }, onclick: () => sample && state.set({ sample: sample.id }),
    }, sample ? [
      h("span", { class: "reward" }, penalized(sample) ? `${number(sample.reward, 2)} → ${number(sample.shaped, 2)}` : number(sample.reward),
        sample.advantage != null && h("small", { title: "advantage, mean over its tokens" }, `A ${number(sample.advantage, 2)}`)),
      h("span", { class: "texts" }, h("span", { class: "asked" }, brief(sample.prompt)), h("span", {}, brief(sample.response) || "∅")),
      h("span", { class: "marks" },
        sample.tokens != null && [`${sample.tokens} tok`, ...sample.engines.map(named)].join(" · "), sample.truncated && h("b", { class: "bad" }, "cut off"),
        sample.diff != null && h("b", { class: sample.diff > 0.1 ? "bad" : "" }, `Δ ${number(sample.diff, 2)}`)),
    ] : "…");
  }

  function mark(id) {
    found.chosen = id;
    draw();
  }

  async function go(by) {
    const known = [...rows].find(([, sample]) => String(sample.id) === String(found.chosen));
    const at = Math.min(first.total - 1, Math.max(0, (known ? known[0] : -1) + by));
    if (!rows.has(at)) await fetchPage(Math.floor(at / PAGE));
    const top = at * ROW;
    if (top < element.scrollTop) element.scrollTop = top;
    if (top + ROW > element.scrollTop + element.clientHeight) element.scrollTop = top + ROW - element.clientHeight;
    if (rows.has(at)) state.set({ sample: rows.get(at).id }, { replace: false });
  }

  element.addEventListener("scroll", () => requestAnimationFrame(draw));
  new ResizeObserver(draw).observe(element);
  draw();
  return found;
}

export function onKey(event) {
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") return moveToken(event.key === "ArrowRight" ? 1 : -1);
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return false;
  list?.move(event.key === "ArrowDown" ? 1 : -1);
  return true;
}

function moveToken(by) {
  const tokens = [...document.querySelectorAll(".token")], at = tokens.findIndex((each) => each.classList.contains("at"));
  const next = tokens[Math.min(tokens.length - 1, Math.max(0, at + by))];
  tokens[at]?.classList.remove("at");
  next?.classList.add("at");
  next?.scrollIntoView({ block: "nearest" });
  next?.dispatchEvent(new Event("pointerenter"));
  return true;
}

// By more than rounding.
const penalized = ({ reward, shaped }) => shaped != null && reward != null && Math.abs(shaped - reward) > 1e-5 * Math.max(1, Math.abs(reward));
const brief = (text) => text.replace(/\s+/g, " ").trim();

// ---- one sample ---------------------------------------------------------------------------------------------------------

async function drawSample(place, run, step, id) {
  let sample;
  try {
    sample = await get(`runs/${run}/samples/${id}?step=${step}`);
  } catch (error) {
    return place.replaceChildren(h("p", { class: "problem" }, error.message));
  }
  const parts = Object.entries(sample.parts ?? {}), { algorithm = {} } = await get(`runs/${run}/config`);
  const penalties = [algorithm.overlong === "penalty" && "overlong penalty", algorithm.kl_in === "reward" && "KL penalty"];
  const weighted = (algorithm.correction ?? "none") !== "none" ? ", times its importance weights" : "";
  const [peers, mean, std] = sample.peers ?? [];
  const facts = [
    ["reward", number(sample.reward)], ...parts.map(([name, value]) => [`reward, ${name}`, number(value)]),
    [`reward after ${penalties.filter(Boolean).join(" and ") || "penalties"}`,
      penalized(sample) && `${number(sample.reward)} ${sample.shaped < sample.reward ? "−" : "+"} ${number(Math.abs(sample.shaped - sample.reward))} = ${number(sample.shaped)}`],
    [`rewards of all samples of its prompt${sample.role ? ` and role ${sample.role}` : ""}${penalties.some(Boolean) ? ", after penalties" : ""}`,
      peers && `${peers} samples: mean ${number(mean)}, standard deviation ${number(std)}`],
    [`advantage, mean${weighted}`, sample.advantage != null && number(sample.advantage)],
    ["engine", sample.engines?.map(named).join(", ")],
    ["answer wanted", sample.answer], ["tokens", sample.tokens], ["sample", sample.sample], ["source", sample.source],
    ["versions", sample.versions?.length ? [...new Set(sample.versions)].join(" – ") : ""],
    ["|Δ log-prob|, mean and largest", sample.diff && sample.diff.map((each) => number(each)).join(", ")],
  ].filter(([, value]) => value !== "" && value != null && value !== false);
  const flags = [
    sample.masked && h("b", { class: "flag bad" }, "left out of training"),
    sample.truncated && h("b", { class: "flag bad" }, "cut off at the limit"),
    sample.ended === false && !sample.truncated && h("b", { class: "flag" }, "no end token"),
    sample.ended && h("b", { class: "flag good" }, "ended by itself"),
  ];
  place.replaceChildren(
    h("dl", { class: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), h("p", {}, flags),
    ...(sample.rows ? conversations(sample.rows) : [
      block("prompt", h("pre", {}, sample.prompt)), block("response", h("pre", {}, sample.response || "∅")),
      h("p", { class: "quiet" }, "Only its texts are recorded: the extension page keeps tokens, log-probs and versions of sampled ones."),
    ]));
}

function conversations(rows) {
  const has = { diff: rows.some((row) => row.trainer), engine: true, advantages: rows.some((row) => row.advantages), version: true };
  const chosen = has[state.get("paint")] ? state.get("paint") : has.diff ? "diff" : "engine";
  const readout = h("output", { class: "readout" }, "Point at a token for its numbers, or press → and ←.");
  const body = h("div", {});
  const draw = (paint) => body.replaceChildren(...rows.flatMap((row, at) => conversation(rows, row, at, paint, readout)));
  draw(chosen);
  return [
    h("div", { class: "paint" }, "colour ", select("Colour of tokens", PAINTS.filter(([name]) => has[name]), chosen, (paint) => {
      state.set({ paint }, { replace: true });
      draw(paint);
    }), h("span", { class: "scale" }, h("i", { class: "low" }), "lower", h("i", { class: "high" }), "higher"), readout),
    has.diff ? null : h("p", { class: "quiet" }, "The trainer's own log-probs of single tokens are computed with algorithm.old_logprobs = \"recompute\"; without it, rollout/logprob_diff has their mean."),
    body,
  ].filter(Boolean);
}

function conversation(rows, row, at, paint, readout) {
  const title = rows.length > 1 ? `conversation ${at + 1} of ${rows.length}${row.shared ? `, branches off the one before after ${row.shared} tokens` : ""}${row.final ? ", with the final answer" : ""}` : "";
  const spread = (counted) => (counted ?? []).flatMap(([count, each]) => Array(count).fill(each));
  const versions = spread(row.versions), engines = spread(row.engines);
  const newest = Math.max(...versions), blocks = [];
  let given = 0, number_ = 0, turn = 0;
  for (const [first, end] of [...row.spans, [row.pieces.length, row.pieces.length]]) {
    if (first > given) blocks.push(block(given ? "given: tool, environment or user" : "prompt", text(row.pieces.slice(given, first))));
    if (end > first) {
      turn += 1;
      const tokens = row.pieces.slice(first, end).map((piece, offset) => {
        const index = number_ + offset;
        const facts = { piece, place: first + offset, engine: row.engine[index], trainer: row.trainer?.[index], advantages: row.advantages?.[index], version: versions[index], by: engines[index], newest };
        return token(facts, paint, readout);
      });
      number_ += end - first;
      const reward = (row.rewards ?? []).find(([place]) => place >= first && place < end);
      const name = `sampled${row.spans.length > 1 ? `, turn ${turn}` : ""}${reward ? ` · reward ${number(reward[1])}` : ""}`;
      blocks.push(block(name, h("pre", { class: "tokens" }, tokens), "chosen"));
    }
    given = end;
  }
  return [title && h("h3", {}, title), ...blocks, row.truncated && h("p", { class: "bad" }, "✂ cut off here")].filter(Boolean);
}

function text(pieces) {
  const parts = pieces.map((piece) => (/^<.+>$/.test(piece) ? h("span", { class: "special" }, piece) : piece));
  const body = h("pre", {}, parts);
  return pieces.length > LONG ? h("details", {}, h("summary", {}, `${pieces.length} tokens`), body) : body;
}

const block = (name, body, kind = "") => h("section", { class: `turn ${kind}` }, h("h4", {}, name), body);

function token(facts, paint, readout) {
  const diff = facts.trainer == null || facts.engine == null ? null : facts.trainer - facts.engine;
  // -1 to 1; square roots, as most differences are small.
  const value = {
    diff: () => Math.sign(diff) * Math.sqrt(Math.min(1, Math.abs(diff ?? 0))),
    engine: () => -Math.sqrt(Math.min(1, -(facts.engine ?? 0) / 8)),
    advantages: () => Math.max(-1, Math.min(1, (facts.advantages ?? 0) / 2)),
    version: () => -Math.min(1, (facts.newest - facts.version) / 4),
  }[paint]();
  const shown = facts.piece.replace(/\n/g, "⏎\n") || "·";
  const far = paint === "diff" && Math.abs(diff) > 0.5;
  const line = [
    `token ${facts.place} ${JSON.stringify(facts.piece)}`,
    facts.engine != null && `sampled with ${number(facts.engine)} (probability ${percent(Math.exp(facts.engine))})${facts.by != null ? ` by ${named(facts.by)}` : ""}`,
    facts.trainer != null && `trainer ${number(facts.trainer)}, Δ ${number(diff)}`, facts.advantages != null && `advantage ${number(facts.advantages)}`,
    facts.version != null && `version ${facts.version}`,
  ].filter(Boolean).join(" · ");
  const say = () => { readout.textContent = line; };
  const element = h("span", { class: `token ${value < 0 ? "low" : "high"}${far ? " far" : ""}`, title: line, onpointerenter: say }, shown);
  element.style.setProperty("--much", `${Math.round(Math.abs(value || 0) * 75)}%`);
  return element;
}
