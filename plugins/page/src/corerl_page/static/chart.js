// Curves over rollout steps. All charts of the page share one cursor.

import { h, number, svg } from "./dom.js";

const cursor = new EventTarget();
const WIDTH_OF_AXIS = 52, TOP = 8, BOTTOM = 20, RIGHT = 10;

export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight); // so that the first values are not drawn towards 0
    return mean / total;
  });
}

// At most two points for each pixel: the smallest and the largest of each column.
function thinned(points, columns) {
  if (points.length <= 2 * columns) return points;
  const found = [], size = points.length / columns;
  for (let column = 0; column < columns; column++) {
    const part = points.slice(Math.floor(column * size), Math.floor((column + 1) * size));
    let low = part[0], high = part[0];
    for (const point of part) {
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
    found.push(...(low[0] <= high[0] ? [low, high] : [high, low]).filter((each, at, both) => !at || each !== both[0]));
  }
  return found;
}

// Values to places on the axis, and back. A logarithm has no place for 0 and below: then the axis is linear around 0, up
// to the smallest size that there is, but for a millionth of the largest.
function axis(log, values) {
  if (!log) return { convert: (each) => each, back: (each) => each, says: "" };
  if (values.every((each) => each > 0)) return { convert: Math.log10, back: (each) => 10 ** each, says: "log" };
  const sizes = values.map(Math.abs).filter(Boolean), largest = sizes.reduce((one, other) => Math.max(one, other), 0);
  const linear = Math.max(sizes.reduce((one, other) => Math.min(one, other), largest || 1), largest * 1e-6);
  return {
    convert: (each) => Math.sign(each) * Math.log10(1 + Math.abs(each) / linear),
    back: (each) => Math.sign(each) * linear * (10 ** Math.abs(each) - 1),
    says: `log, linear within ±${number(linear, 2)}: there are values of 0 or below`,
  };
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

/**
 * A chart of `series`: [{label, color, steps, values}]. With `stacked` they add up, as areas. `onstep` is called with
 * the step of a click, and with the series whose line is nearest.
 */
export function chart({ title, series, smoothing = 0, log = false, stacked = false, height = 170, onstep }) {
  const plot = svg("svg", { role: "img", "aria-label": describe(title, series) });
  const legend = h("div", { class: "legend" });
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, title, " ", h("small", {})), plot, legend);
  const known = series.flatMap((each) => each.steps), last = known.reduce((most, each) => Math.max(most, each), -Infinity);
  let scale = null, at = null;

  const lines = series.map((each) => ({ ...each, smooth: smoothed(each.values, stacked ? 0 : smoothing) }));
  const layers = stacked ? stack(series) : [];

  function draw() {
    const width = plot.clientWidth || 300;
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.style.height = `${height}px`;
    plot.replaceChildren();
    const all = stacked ? [0, ...layers.flatMap((each) => each.high)] : lines.flatMap((each) => each.smooth);
    const finite = all.filter((each) => each != null);
    if (!known.length || !finite.length) {
      plot.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }));
      plot.lastChild.textContent = "nothing recorded";
      return;
    }
    const limits = (values) => values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);
    const [first] = limits(known);
    const { convert, back, says } = axis(log, finite);
    figure.querySelector("small").textContent = says;
    let [low, high] = limits(finite.map(convert));
    const margin = (high - low || Math.abs(high) || 1) * 0.06;
    [low, high] = stacked ? [0, high + margin] : [low - margin, high + margin];
    scale = {
      first, last, width,
      x: (step) => WIDTH_OF_AXIS + ((step - first) / (last - first || 1)) * (width - WIDTH_OF_AXIS - RIGHT),
      y: (value) => TOP + (1 - (convert(value) - low) / (high - low)) * (height - TOP - BOTTOM),
    };
    for (const tick of ticks(low, high, 4)) {
      const y = TOP + (1 - (tick - low) / (high - low)) * (height - TOP - BOTTOM);
      plot.append(svg("line", { x1: WIDTH_OF_AXIS, x2: width - RIGHT, y1: y, y2: y, class: "grid" }));
      const text = svg("text", { x: WIDTH_OF_AXIS - 6, y: y + 4, "text-anchor": "end" });
      text.textContent = number(back(tick), 2);
      plot.append(text);
    }
    for (const tick of ticks(first, last, Math.max(2, width / 110)).filter(Number.isInteger)) {
      const text = svg("text", { x: scale.x(tick), y: height - 5, "text-anchor": "middle" });
      text.textContent = tick;
      plot.append(text);
    }
    const columns = Math.max(50, Math.floor(width)), taken = new Set();
    let over = 0;
    if (stacked) layers.forEach((layer) => plot.append(area(layer)));
    else for (const each of lines) {
      if (smoothing) plot.append(path(each, each.values, columns, "raw"));
      const element = path(each, each.smooth, columns, "line"), places = element.getAttribute("points")?.split(" ") ?? [];
      // What lies over other lines leaves gaps to see them through, each in another rhythm.
      const covers = places.filter((place) => taken.has(place)).length;
      if (covers > places.length / 2) element.setAttribute("stroke-dasharray", `8 ${8 * ++over}`);
      places.forEach((place) => taken.add(place));
      plot.append(element);
    }
    plot.append(svg("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" }));
    show(at);
  }

  function path(line, values, columns, kind) {
    const points = line.steps.map((step, index) => [step, values[index]]).filter(([, value]) => value != null);
    const found = thinned(points, columns).map(([step, value]) => `${scale.x(step).toFixed(1)},${scale.y(value).toFixed(1)}`);
    const element = found.length === 1
      ? svg("circle", { cx: scale.x(points[0][0]), cy: scale.y(points[0][1]), r: 3, class: "dot" })
      : svg("polyline", { points: found.join(" "), class: kind });
    element.style.setProperty("--color", line.color);
    return element;
  }

  function area(layer) {
    const up = layer.steps.map((step, index) => `${scale.x(step)},${scale.y(layer.high[index])}`);
    const down = layer.steps.map((step, index) => `${scale.x(step)},${scale.y(layer.low[index])}`).reverse();
    const element = svg("polygon", { points: [...up, ...down].join(" "), class: "area" });
    element.style.setProperty("--color", layer.color);
    return element;
  }

  function show(step) {
    at = step;
    const line = plot.querySelector(".cursor");
    if (line && scale) {
      const inside = step != null && step >= scale.first && step <= scale.last;
      line.setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) for (const end of ["x1", "x2"]) line.setAttribute(end, scale.x(step));
    }
    legend.replaceChildren(...lines.map((each) => {
      const index = step == null ? each.steps.length - 1 : nearest(each.steps, step);
      const other = each.steps[index] !== (step ?? last) && each.values[index] != null ? ` at ${each.steps[index]}` : "";
      return h("span", {}, h("i", { style: { background: each.color } }), each.label, " ",
        h("b", {}, number(each.values[index])), other);
    }));
    if (step != null) legend.append(h("span", { class: "step" }, `step ${step}`));
  }

  function stepAt(event) {
    const place = event.clientX - plot.getBoundingClientRect().left - WIDTH_OF_AXIS;
    const share = place / (scale.width - WIDTH_OF_AXIS - RIGHT);
    return Math.round(scale.first + Math.min(1, Math.max(0, share)) * (scale.last - scale.first));
  }

  plot.addEventListener("pointermove", (event) => {
    if (scale) cursor.dispatchEvent(new CustomEvent("step", { detail: stepAt(event) }));
  });
  plot.addEventListener("pointerleave", () => cursor.dispatchEvent(new CustomEvent("step", { detail: null })));
  function lineAt(event, step) {
    const y = event.clientY - plot.getBoundingClientRect().top;
    const away = (each) => {
      const value = each.smooth[nearest(each.steps, step)];
      return value == null ? Infinity : Math.abs(scale.y(value) - y);
    };
    return lines.reduce((best, each) => (away(each) < away(best) ? each : best));
  }

  plot.addEventListener("click", (event) => {
    if (scale) onstep?.(stepAt(event), lineAt(event, stepAt(event)));
  });
  const follow = (event) => (figure.isConnected ? show(event.detail) : cursor.removeEventListener("step", follow));
  cursor.addEventListener("step", follow);
  new ResizeObserver(() => draw()).observe(plot);
  show(null);
  return figure;
}

function nearest(steps, wanted) {
  let best = -1;
  for (let index = 0; index < steps.length; index++)
    if (best < 0 || Math.abs(steps[index] - wanted) < Math.abs(steps[best] - wanted)) best = index;
  return best;
}

function stack(series) {
  const steps = [...new Set(series.flatMap((each) => each.steps))].sort((one, other) => one - other);
  let low = steps.map(() => 0);
  return series.map((each) => {
    const values = new Map(each.steps.map((step, index) => [step, each.values[index] ?? 0]));
    const high = steps.map((step, index) => low[index] + (values.get(step) ?? 0));
    const layer = { steps, low, high, color: each.color };
    low = high;
    return layer;
  });
}

function describe(title, series) {
  const ends = series.map((each) => `${each.label}: from ${number(each.values[0])} to ${number(each.values.at(-1))}`);
  return `${title}. ${ends.join("; ")}`;
}
