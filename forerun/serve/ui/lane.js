/** One answer of the race: its tokens as they come, its numbers, its place on the track. */

import { h, number } from "./dom.js";
import { Counts, Pieces, sourceName, tokensOf } from "./trace.js";

const MAX_SHADES = 8;
let made = 0;

export class Lane {
  /** picked is called with (token, lane) when a token is hovered or reached by key. */
  constructor(title, note, picked) {
    this.picked = picked;
    this.id = `lane${made++}`;
    this.bar = h("div.run");
    this.figures = h("dl.figures");
    this.text = h("div.tokens", { tabindex: "0", role: "listbox", "aria-label": `Tokens, ${title}`, "aria-orientation": "horizontal",
      onkeydown: (event) => this.#key(event),
      onpointerover: (event) => this.#over(event),
      onclick: (event) => this.#over(event),
      onfocus: () => { if (!this.active && this.tokens.length) this.pick(0); } });
    this.element = h("section.lane", { "aria-label": title },
      h("div.lane-head", {}, h("h2", { text: title }), h("p.hint", { text: note })),
      h("div.track", { "aria-hidden": "true" }, this.bar), this.figures, this.text);
    this.clear(1);
  }

  clear(goal) {
    this.goal = goal;
    this.counts = new Counts();
    this.pieces = new Pieces();
    this.tokens = [];
    this.times = [];
    this.spans = [];
    this.active = null;
    this.first = this.last = 0;
    this.text.replaceChildren();
    this.text.removeAttribute("aria-activedescendant");
    this.progress(0, 0);
    this.bar.classList.remove("done");
  }

  /** A step arrived. */
  add(step) {
    const now = performance.now();
    if (!this.first) this.first = now;
    this.last = now;
    this.counts.add(step);
    for (const token of tokensOf(step, this.pieces)) this.#append(token);
    this.times.push([now - this.first, this.tokens.length]);
    this.progress(this.tokens.length, this.seconds);
  }

  get seconds() {
    return (this.last - this.first) / 1000;
  }

  /** Tokens a second after the first step: reading the prompt is no part of the race. */
  get speed() {
    const begun = this.times[0]?.[1] ?? 0;
    return this.seconds > 0 ? (this.tokens.length - begun) / this.seconds : NaN;
  }

  /** Show `count` tokens after `seconds`. */
  progress(count, seconds) {
    this.bar.style.setProperty("--share", String(Math.min(1, count / this.goal)));
    const { steps } = this.counts;
    const figures = { Time: number(seconds, "s"), Tokens: number(count), "Tokens/s": seconds > 0 ? number(count / seconds) : "–",
      Steps: number(steps), "Tokens a step": steps ? number(this.tokens.length / steps) : "–" };
    this.figures.replaceChildren(...Object.entries(figures).map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))));
  }

  /** How many tokens there were `ms` milliseconds after the first. */
  at(ms) {
    let count = 0;
    for (const [time, tokens] of this.times) {
      if (time > ms) break;
      count = tokens;
    }
    return count;
  }

  finish() {
    this.progress(this.tokens.length, this.seconds);
    this.figures.children[2].lastElementChild.textContent = number(this.speed);
    this.bar.style.setProperty("--share", "1");
    this.bar.classList.add("done");
  }

  #append(token) {
    const place = this.tokens.push(token) - 1;
    const span = h("span.token", { id: `${this.id}-${place}`, role: "option", "aria-selected": "false", class: `src-${token.source}`, text: token.text,
      dataset: { place }, "aria-label": label(token) });
    if (token.depth) span.style.setProperty("--depth", String(Math.min(token.depth, MAX_SHADES)));
    if (token.place === 0) span.classList.add("begins");
    this.spans.push(span);
    this.text.append(span);
  }

  #over(event) {
    const span = event.target.closest(".token");
    if (span) this.pick(Number(span.dataset.place));
  }

  #key(event) {
    const place = this.active ? Number(this.active.dataset.place) : -1;
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, ArrowDown: this.#step(place, 1), ArrowUp: this.#step(place, -1), Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to === undefined || !this.tokens.length) return;
    event.preventDefault();
    this.pick(Math.max(0, Math.min(to, this.tokens.length - 1)));
    this.active.scrollIntoView({ block: "nearest" });
  }

  /** The first token of the next step, or of this one or the one before. */
  #step(place, way) {
    if (place < 0) return 0;
    let to = place + way;
    while (this.tokens[to] && this.tokens[to].place !== 0) to += way;
    return to;
  }

  /** Choose a token; what belongs to its step is marked. */
  pick(place) {
    const token = this.tokens[place];
    if (!token || this.active === this.spans[place]) return;
    for (const span of this.text.querySelectorAll(".same-step")) span.classList.remove("same-step");
    this.active?.setAttribute("aria-selected", "false");
    this.active = this.spans[place];
    this.active.setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", this.active.id);
    const first = place - token.place;
    for (let i = first; i < first + token.step.tokens.length; i++) this.spans[i]?.classList.add("same-step");
    this.picked(token, first > 0 ? this.tokens[first - 1].text : "…", this);
  }

  unpick() {
    for (const span of this.text.querySelectorAll(".same-step")) span.classList.remove("same-step");
    this.active?.setAttribute("aria-selected", "false");
    this.active = null;
  }
}

function label(token) {
  const text = JSON.stringify(token.text);
  const from = token.depth ? `${sourceName(token.source)}, depth ${token.depth}` : "the model itself";
  return `${text}: ${from}, step ${token.step.step + 1}`;
}
