/** Small drawings of numbers. Each says in words what it shows. */

import { h, number, percent, s } from "./dom.js";

const WIDTH = 600;

/**
 * Lines over time. series: [{name, color, values: [number]}], oldest first, equally spaced.
 */
export function lines(series, { unit = "", height = 150, label }) {
  const most = Math.max(1, ...series.flatMap(({ values }) => values.filter(Number.isFinite)));
  const top = nice(most);
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const part of [0.25, 0.5, 0.75, 1]) svg.append(s("line", { x1: 0, x2: WIDTH, y1: height - part * (height - 6), y2: height - part * (height - 6), class: "grid-line" }));
  for (const { values, color } of series) {
    const points = values.map((value, place) => [(WIDTH * place) / Math.max(values.length - 1, 1), height - ((value || 0) / top) * (height - 6)]);
    const path = points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    if (points.length > 1) {
      svg.append(s("path", { d: `${path}L${WIDTH} ${height}L0 ${height}Z`, class: `area ${color}` }));
      svg.append(s("path", { d: path, class: `line ${color}`, "vector-effect": "non-scaling-stroke" }));
    }
  }
  const now = series.map(({ name, values }) => `${name} ${number(values.at(-1) ?? NaN, unit)}`).join(", ");
  const key = h("ul.chart-key", {}, series.map(({ name, color, values }) => h("li", {}, h("i", { class: color }), `${name} `, h("strong", { text: number(values.at(-1) ?? NaN, unit) }))));
  return h("figure.chart", {}, h("div.plot", { role: "img", "aria-label": `${label}. Now: ${now}` }, h("span.top", { text: number(top, unit) }), svg), key);
}

function nice(value) {
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * size).find((step) => step >= value);
}

/** One bar of parts. parts: [{name, color, value}]; `word` says a value. */
export function stacked(parts, word, label) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const said = parts.map((part) => `${part.name} ${word(part.value)}`).join(", ");
  return h("figure.chart", {},
    h("div.stack", { role: "img", "aria-label": `${label}: ${said}` }, parts.map((part) => h("i", { class: part.color, vars: { share: part.value / total } }))),
    h("ul.chart-key", {}, parts.map((part) => h("li", {}, h("i", { class: part.color }), `${part.name} `, h("strong", { text: word(part.value) }), ` ${percent(part.value / total)}`))));
}

/** A bar for a table's cell, `part` of its length filled, and what it stands for. */
export function bar(part, text, color) {
  const filled = h("i", { class: color, vars: { share: Math.min(1, part || 0) } });
  return h("div.share", {}, h("span.share-bar", { "aria-hidden": "true" }, filled), h("span", { text }));
}

/** The same of a share from 0 to 1. */
export const share = (value, color) => bar(value, percent(value), color);
