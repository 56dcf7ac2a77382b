/** Small helpers to build elements. Text is always text: nothing here takes HTML. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. `attributes` may hold `class`, `text`, `dataset`, handlers as `onclick`, properties
 * that are booleans (`hidden: true`), and attributes; null and undefined are left out.
 */
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes ?? {})) set(element, key, value);
  append(element, children);
  return element;
}

function set(element, key, value) {
  if (value === null || value === undefined) return;
  if (key === "text") element.textContent = value;
  else if (key === "class") element.className = `${element.className} ${value}`.trim();
  else if (key === "dataset") Object.assign(element.dataset, value);
  else if (key === "vars") for (const [name, it] of Object.entries(value)) element.style.setProperty(`--${name}`, it);
  else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
  else if (typeof value === "boolean" && !key.startsWith("aria-")) element.toggleAttribute(key, value);
  else if (key === "value") element.value = value;
  else element.setAttribute(key, value);
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** An SVG element; children are elements. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  append(element, children);
  return element;
}

const ICONS = {
  plus: "M8 3v10M3 8h10",
  menu: "M2.500 4.500h11M2.500 8h11M2.500 11.500h11",
  close: "M4 4l8 8M12 4l-8 8",
  send: "M8 13V3.500M3.800 7.500L8 3.300l4.200 4.200",
  stop: "M4.500 4.500h7v7h-7z",
  copy: "M5.500 5.500v-3h8v8h-3M2.500 5.500h8v8h-8z",
  check: "M3 8.500l3.200 3.200L13 4.800",
  edit: "M3 13l.7-3L11 2.700l2.300 2.300L6 12.300zM9.500 4.200l2.300 2.300",
  again: "M13 8a5 5 0 1 1-1.600-3.700M13 2.500v3h-3",
  trash: "M3 4.500h10M6.500 4.500v-2h3v2M4.500 4.500l.6 9h5.800l.6-9",
  sliders: "M2.500 5h6M12 5h1.500M2.500 11h1.500M7.500 11h6M10.200 3.300v3.400M5.700 9.300v3.400",
  download: "M8 2.500v7.500M4.800 7L8 10.200 11.200 7M3 13.500h10",
  sun: "M8 5.200a2.800 2.800 0 1 0 0 5.600 2.800 2.800 0 0 0 0-5.600M8 1.500v1.300M8 13.200v1.300M1.500 8h1.300M13.200 8h1.300M3.400 3.400l.9.9M11.700 11.700l.9.9M12.600 3.400l-.9.9M4.300 11.700l-.9.9",
  moon: "M13 9.600A5.500 5.500 0 0 1 6.400 3 5.500 5.500 0 1 0 13 9.600z",
  auto: "M8 2.500a5.500 5.500 0 1 0 0 11zM8 2.500a5.500 5.500 0 0 1 0 11",
  down: "M8 3v9.500M4 8.800L8 12.700l4-3.900",
  left: "M10 3L5 8l5 5",
  right: "M6 3l5 5-5 5",
  clip: "M12.500 7.500l-5 5a2.800 2.800 0 0 1-4-4l5.500-5.500a1.900 1.900 0 0 1 2.700 2.700L6.300 11a.9.9 0 0 1-1.300-1.300l4.600-4.600",
  page: "M4 2.500h5.500L12 5v8.500H4zM9.300 2.500V5.200H12M6 8h4M6 10.500h4",
  braces: "M6 2.800c-1.800 0-1.800 1-1.800 2.400 0 1.600-.2 2.300-1.700 2.800 1.500.5 1.700 1.200 1.700 2.800 0 1.400 0 2.400 1.800 2.400M10 2.800c1.800 0 1.800 1 1.800 2.400 0 1.600.2 2.300 1.700 2.800-1.500.5-1.700 1.200-1.700 2.800 0 1.400 0 2.400-1.800 2.400",
  keys: "M2 4.500h12v7.500H2zM4.300 7h.4M7 7h.4M9.500 7h.4M11.700 7h.4M4.800 9.600h6.400",
  play: "M5 3.200l7.500 4.800L5 12.800z",
};

/** One of the drawings above; decoration, so hidden from screen readers. */
export function icon(name) {
  const path = s("path", { d: ICONS[name] });
  return s("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, path);
}

/** A button with a drawing; `label` is what it is called. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h("button.icon-button", { type: "button", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

/** Whether a key belongs to a word that is being composed, as in Chinese; Safari says so by its code alone. */
export const composes = (event) => event.isComposing || event.keyCode === 229;

/** Tell a screen reader. */
export function announce(text) {
  const log = document.getElementById("announcer");
  log.append(h("p", { text }));
  while (log.childElementCount > 3) log.firstElementChild.remove();
}

/** A number with few digits: 0.0123, 1.23, 12.3, 123, 12,345. */
export function number(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : size >= 0.1 || size === 0 ? 2 : 4;
  const text = value.toLocaleString("en", { maximumFractionDigits: digits });
  return unit ? `${text}\u202f${unit}` : text;
}

export const percent = (share) => (Number.isFinite(share) ? `${number(100 * share)}\u202f%` : "–");

/** Seconds as people write them. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  return seconds < 1 ? number(1000 * seconds, "ms") : number(seconds, "s");
}

/** Hand a text to the browser as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Copy, and show on the button that it was done. */
export async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { value: text, class: "visually-hidden" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied");
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"));
  setTimeout(() => button.replaceChildren(...before), 1200);
}
