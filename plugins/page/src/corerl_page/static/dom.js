// Elements, numbers and the run's JSON. What a model wrote only ever becomes text of a node.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((each) => each != null && each !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function number(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1);
  if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function select(label, options, value, onchange) {
  const box = h("select", { "aria-label": label, onchange: () => onchange(box.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return box;
}

// ---- the server ---------------------------------------------------------------------------------------------------

const given = new URLSearchParams(location.hash.slice(1));
if (given.has("key")) {
  sessionStorage.setItem("key", given.get("key"));
  given.delete("key");
  history.replaceState(null, "", "#" + given);
}

export async function get(path) {
  const found = await fetch("api/" + path, { headers: { "X-Key": sessionStorage.getItem("key") ?? "" } });
  const body = await found.json();
  if (!found.ok) throw new Error(body.error);
  return body;
}

// ---- what is shown, kept in the address -------------------------------------------------------------------------------

export const state = {
  get: (name, otherwise = "") => new URLSearchParams(location.hash.slice(1)).get(name) ?? otherwise,
  number(name, otherwise = 0) {
    const text = this.get(name);
    return /^\d+$/.test(text) ? Number(text) : otherwise;
  },
  set(changes, { replace = false } = {}) {
    const fields = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value == null) fields.delete(name);
      else fields.set(name, value);
    }
    const hash = "#" + fields;
    if (hash === location.hash) return;
    history[replace ? "replaceState" : "pushState"](null, "", hash);
    if (!replace) dispatchEvent(new Event("hashchange"));
  },
};

export const color = (run) => `var(--run${run % 8})`;
export const percent = (share) => `${Math.round(100 * share)} %`;
export const ofWhole = (part, whole, unit = "") => `${number(part)} of ${number(whole)}${unit} (${percent(part / whole)})`;
