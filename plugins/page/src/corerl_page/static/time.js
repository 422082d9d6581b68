// Where the time of a step goes: phases, idle time by cause, and the timeline of every process.

import { chart } from "./chart.js";
import { get, h, number, ofWhole, percent, state } from "./dom.js";

export const TITLE = "Time", ONE_RUN = true;
const LANE = 18, LABELS = 190, HEAD = 20;
const HUES = ["--run0", "--run1", "--run2", "--run3", "--run4", "--run5", "--run6", "--run7"];
let line = null;

export async function show(page, { again }) {
  const run = page.run();
  if (again && line?.run === run.id && line.element.isConnected) {
    line.refresh();
    return null;
  }
  const { names } = await get(`runs/${run.id}/metrics`);
  const of = (prefix) => names.filter((name) => name.startsWith(prefix) && !name.endsWith("/total") && name !== "time/step");
  const wanted = [...of("time/"), ...of("idle/ranks/"), ...of("idle/engines/"), ...of("memory/"), "time/step"];
  const { series } = await get(`runs/${run.id}/metrics?names=${wanted.join()}`);
  const stacked = (title, prefix) => of(prefix).length ? [chart({
    title, stacked: true, onstep: (step) => state.set({ view: "samples", step, sample: "" }),
    series: of(prefix).map((name, at) => ({ label: name.slice(prefix.length), color: `var(${HUES[at % 8]})`, ...series[name] })),
  })] : [];
  line = timeline(run);
  const memory = of("memory/");
  return [
    h("section", { class: "charts" }, stacked("seconds of a step, by phase", "time/"),
      stacked("ranks idle, seconds a step, by what they wait for", "idle/ranks/"), stacked("engines idle, seconds a step", "idle/engines/"),
      memory.length ? chart({
        title: "memory of the fullest device, GiB, by stage",
        series: memory.map((name, at) => ({ label: name.slice(7), color: `var(${HUES[at % 8]})`, ...series[name] })),
      }) : []),
    shares(series, of("idle/ranks/"), of("idle/engines/")), h("h2", {}, "Timeline"), line.element,
  ];
}

function shares(series, ...sides) {
  const sum = (name) => (series[name]?.values ?? []).reduce((before, value) => before + (value ?? 0), 0);
  const whole = sum("time/step");
  const rows = sides.flat().filter((name) => sum(name) > 0).map((name) => {
    const [, who, cause] = name.split("/");
    return h("tr", {}, h("td", {}, who), h("td", {}, cause), h("td", {}, ofWhole(sum(name), whole, " s")),
      h("td", { class: "meter" }, h("i", { style: { width: percent(Math.min(1, sum(name) / whole)).replace(" ", "") } })));
  });
  return rows.length ? h("table", {}, h("caption", {}, "Idle share of the whole run"),
    h("thead", {}, h("tr", {}, ["who", "waits for", "of all steps", ""].map((each) => h("th", {}, each)))), h("tbody", {}, rows)) : null;
}

function timeline(run) {
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline of each process; the table in Processes has its sums" });
  const hint = h("output", { class: "readout" }, "Drag to move; wheel, or + and −, to zoom; point at a slice for its call.");
  const element = h("div", { class: "timeline" }, hint, canvas);
  let data = null, from = null, to = null, turn = 0, waiting = null;

  async function fetchWindow() {
    const mine = ++turn;
    const window_ = from == null ? "" : `&from=${Math.max(0, Math.round(from))}&to=${Math.round(to)}`;
    const found = await get(`runs/${run.id}/timeline?width=${Math.max(200, canvas.clientWidth - LABELS)}${window_}`);
    if (mine !== turn) return;
    data = found;
    if (from == null) [from, to] = [found.from, found.to];
    draw();
  }
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(fetchWindow, 120);
    if (data) draw();
  };

  function draw() {
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    const tracks = data.tracks.filter((track) => track.slices.length || track.process !== "idle");
    const height = HEAD + tracks.length * LANE + 4;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const css = (name) => style.getPropertyValue(name).trim();
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    if (!tracks.length) {
      hint.textContent = run.files["trace.json"] ? "No call has ended yet." : "No trace is recorded. List the extension trace in the run's config: { name = \"trace\" }";
      return;
    }
    const x = (time) => LABELS + ((time - from) / (to - from)) * (width - LABELS);
    context.fillStyle = css("--quiet");
    const seconds = (to - from) / 1e6, unit = 10 ** Math.floor(Math.log10(seconds / 2));
    for (let at = Math.ceil(from / 1e6 / unit) * unit; at * 1e6 <= to; at += unit) {
      if (x(at * 1e6) > width - 30) break;
      context.fillText(`${number(at, 6)} s`, x(at * 1e6) + 3, HEAD / 2);
      context.fillRect(x(at * 1e6), HEAD, 1, height);
    }
    let before = "";
    tracks.forEach((track, at) => {
      const y = HEAD + at * LANE;
      context.fillStyle = css("--ink");
      const label = track.process === before ? `    ${track.track}` : `${track.process}  ${track.track}`;
      context.fillText(label.slice(0, 32), 4, y + LANE / 2, LABELS - 8);
      if (track.process !== before && at) {
        context.fillStyle = css("--line");
        context.fillRect(0, y, width, 1);
      }
      before = track.process;
      for (const slice of track.slices) {
        const left = Math.max(LABELS, x(slice.start)), right = Math.min(width, x(slice.end));
        if (right < LABELS || left > width) continue;
        context.fillStyle = slice.detail.includes(" error: ") ? css("--bad") : css(HUES[hash(slice.name) % 8]);
        context.globalAlpha = slice.count > 1 ? 0.45 : 0.85;
        context.fillRect(left, y + 2, Math.max(1, right - left), LANE - 4);
        context.globalAlpha = 1;
        if (right - left > 34) {
          context.save();
          context.beginPath();
          context.rect(left, y, right - left - 2, LANE);
          context.clip();
          context.fillStyle = css("--on");
          context.fillText(slice.name, left + 4, y + LANE / 2);
          context.restore();
        }
      }
    });
    canvas.tracks = tracks;
  }

  function zoom(factor, middle = 0.5) {
    if (!data) return;
    const center = from + middle * (to - from), size = Math.min(data.of, Math.max(200, (to - from) * factor));
    from = Math.max(0, Math.min(data.of - size, center - middle * size));
    to = from + size;
    soon();
  }
  function shift(share) {
    if (!data) return;
    const by = Math.max(-from, Math.min(data.of - to, share * (to - from)));
    [from, to] = [from + by, to + by];
    soon();
  }
  const share = (event) => (event.clientX - canvas.getBoundingClientRect().left - LABELS) / (canvas.clientWidth - LABELS);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) shift(event.deltaX / 800);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, share(event)));
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = share(event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held != null) {
      shift(held - share(event));
      held = share(event);
      return;
    }
    const lane = Math.floor((event.clientY - canvas.getBoundingClientRect().top - HEAD) / LANE), track = canvas.tracks?.[lane];
    const time = from + share(event) * (to - from), reach = (to - from) / 400;
    const slice = track?.slices.find((each) => each.start - reach <= time && time <= each.end + reach);
    if (slice) {
      const name = slice.count > 1 ? `${slice.count} slices (${slice.name})` : slice.detail || slice.name;
      hint.textContent = `${track.process} · ${track.track} · ${name} · ${number((slice.end - slice.start) / 1e6)} s from ${number(slice.start / 1e6, 6)} s`;
    }
  });
  new ResizeObserver(() => (data ? draw() : fetchWindow())).observe(canvas);
  return { run: run.id, element, zoom, shift, refresh: () => { if (data && to >= data.of) from = null; fetchWindow(); } };
}

export function onKey(event) {
  const does = { "+": () => line?.zoom(0.7), "=": () => line?.zoom(0.7), "-": () => line?.zoom(1.4), ArrowLeft: () => line?.shift(-0.25), ArrowRight: () => line?.shift(0.25) };
  does[event.key]?.();
  return event.key in does;
}

const hash = (text) => [...text].reduce((sum, letter) => (31 * sum + letter.charCodeAt(0)) >>> 0, 7);
