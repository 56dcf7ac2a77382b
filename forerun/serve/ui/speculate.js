/**
 * See it speculate: one question, answered without draft tokens and with them, under one seed.
 *
 * One after the other, because requests that run together share their steps. While the second
 * runs, the first is shown again at the pace that it had.
 */

import { connection, ConnectionError, ServerError, stream } from "./api.js";
import { announce, h, icon, number, percent } from "./dom.js";
import { Lane } from "./lane.js";
import { parting, SOURCES, sourceName } from "./trace.js";
import { stepView } from "./tree.js";

const PLANETS = {
  type: "array",
  items: {
    type: "object",
    properties: { name: { type: "string" }, moons: { type: "integer" }, rings: { type: "boolean" } },
    required: ["name", "moons", "rings"],
    additionalProperties: false,
  },
  minItems: 4,
  maxItems: 8,
};

/** [what it is called, prompt, JSON schema] */
const EXAMPLES = [
  ["Code", "Write a Python function that counts the vowels in a string."],
  ["Prose", "Why is the sky blue?"],
  ["Repetition", "Repeat this sentence five times: The quick brown fox jumps over the lazy dog near the quiet river."],
  ["JSON under a grammar", "List planets of the solar system as JSON.", PLANETS],
];

export class Speculate {
  #stop = null;

  constructor(root) {
    const picked = (token, before, lane) => this.#inspect(token, before, lane);
    this.plain = new Lane("Without speculation", "One token a step.", picked);
    this.drafted = new Lane("With speculation", "Draft tokens that the model confirms come together.", picked);
    this.verdict = h("div.verdict", { role: "status" });
    this.tree = h("div.tree-panel", {}, h("p.hint", { text: "Point at a token, or walk through them with the arrow keys, to see the step that made it." }));
    this.strip = h("div.strip", { role: "img", "aria-label": "Tokens of each step" });
    this.sources = h("div.sources");
    this.live = h("div.live", {}, this.verdict, h("div.lanes", {}, this.drafted.element, this.plain.element), this.#legend(),
      h("div.inspect", {}, h("section.card", { "aria-label": "The step" }, h("h2", { text: "Inside the step" }), this.tree),
        h("section.card", { "aria-label": "The whole answer" }, h("h2", { text: "The whole answer" }), this.strip, this.sources)));
    root.append(h("div.page", {}, h("div.intro", {}, h("h1", { text: "See it speculate" }),
      h("p", { text: "A cheap drafter proposes the next tokens; the model checks them all in one pass and keeps those that it would have chosen itself. The text stays the same, to the token." })),
    this.#form(), this.live));
    connection.addEventListener("change", () => this.#showState());
    this.#showState();
  }

  // --- what is asked ---------------------------------------------------------------------------

  #form() {
    const field = (id, text, box) => h("div.field", {}, h("label", { for: id, text }), box);
    this.prompt = h("textarea", { id: "race-prompt", rows: 2 });
    this.schema = h("textarea.mono", { id: "race-schema", rows: 4, spellcheck: "false" });
    this.schemaField = h("details.schema", {}, h("summary", { text: "JSON schema" }), field("race-schema", "The answer must fit this schema; empty for free text", this.schema));
    this.tokens = h("input", { id: "race-tokens", type: "number", min: 1, max: 2000, step: 1, value: "160" });
    this.temperature = h("input", { id: "race-temperature", type: "number", min: 0, max: 2, step: 0.1, value: "0" });
    this.seed = h("input", { id: "race-seed", type: "number", step: 1, value: "7" });
    this.both = h("input", { id: "race-both", type: "checkbox", checked: true });
    this.go = h("button.primary.go", { type: "submit" }, icon("play"), h("span", { text: "Run the race" }));
    this.both.addEventListener("change", () => this.#showState());
    const examples = EXAMPLES.map(([name, prompt, schema]) => h("button.idea", { type: "button", text: name, onclick: () => this.#example(prompt, schema) }));
    this.#example(EXAMPLES[0][1]);
    return h("form.card.ask", { onsubmit: (event) => { event.preventDefault(); this.#stop ? this.#stop.abort() : this.run(); } },
      h("div.ask-head", {}, h("label", { for: "race-prompt", text: "Question" }), h("div.examples", { role: "group", "aria-label": "Examples" }, examples)),
      this.prompt, this.schemaField,
      h("div.ask-row", {}, field("race-tokens", "Tokens", this.tokens), field("race-temperature", "Temperature", this.temperature), field("race-seed", "Seed", this.seed),
        h("div.field.check", {}, this.both, h("label", { for: "race-both", text: "Race against plain decoding" })), this.go));
  }

  #example(prompt, schema) {
    this.prompt.value = prompt;
    this.schema.value = schema ? JSON.stringify(schema, null, 2) : "";
    this.schemaField.open = schema !== undefined;
  }

  #asked() {
    const body = {
      ...connection.named,
      messages: [{ role: "user", content: this.prompt.value }],
      stream: true,
      max_tokens: Number(this.tokens.value) || 160,
      temperature: Number(this.temperature.value) || 0,
      seed: Number(this.seed.value) || 0,
    };
    if (this.schema.value.trim()) {
      const schema = JSON.parse(this.schema.value);
      body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
    }
    return body;
  }

  // --- the race --------------------------------------------------------------------------------

  async run() {
    const race = this.both.checked;
    const stop = new AbortController();
    this.#stop = stop;
    this.#showState();
    this.plain.element.hidden = !race;
    this.live.classList.add("began");
    this.#say("", race ? "Without speculation first …" : "");
    for (const lane of [this.plain, this.drafted]) lane.clear(Number(this.tokens.value) || 160);
    this.#forget();
    try {
      const asked = this.#asked(); // Once: what is typed meanwhile is for the next race.
      if (race) await this.#answer(this.plain, asked, false, stop.signal);
      if (race) this.#say("", "Now with speculation; the other lane is shown again at the pace that it had.");
      const replay = race && this.#replay(this.plain, this.drafted, stop.signal);
      await this.#answer(this.drafted, asked, true, stop.signal);
      if (replay) await replay;
      this.#judge(race);
    } catch (error) {
      if (error.name === "AbortError") this.#say("", "Stopped.");
      else if (error instanceof ServerError || error instanceof ConnectionError) this.#say("bad", error.message);
      else if (error instanceof SyntaxError) this.#say("bad", `The JSON schema is not JSON: ${error.message}`);
      else throw error;
    } finally {
      stop.abort(); // Also ends what is shown again.
      this.#stop = null;
      this.#showState();
    }
  }

  async #answer(lane, asked, enabled, signal) {
    const body = { ...asked, speculative: { enabled, trace: true } };
    for await (const chunk of stream("v1/chat/completions", body, signal)) {
      for (const step of chunk.choices.flatMap((choice) => choice.speculative_trace ?? [])) {
        lane.add(step);
        if (enabled) this.#drawStep(step);
      }
    }
    lane.finish();
    if (enabled) this.#drawSources(lane);
  }

  /** Show a finished lane again, from the moment that the other one has its first token. */
  async #replay(done, live, signal) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    done.bar.classList.remove("done");
    const length = done.seconds * 1000;
    for (let spent = 0; spent < length && !signal.aborted;) {
      await new Promise(requestAnimationFrame);
      spent = live.first ? performance.now() - live.first : 0;
      done.progress(done.at(spent), Math.min(spent, length) / 1000);
    }
    done.finish();
  }

  #judge(race) {
    const { counts, tokens } = this.drafted;
    if (!race) {
      this.#say("good", h("strong", { text: `${number(counts.tokens / counts.steps)} tokens a step` }), ` over ${number(counts.steps)} steps.`);
      return;
    }
    const place = parting(this.plain.tokens, tokens);
    if (place >= 0) {
      this.#say("bad", `The texts differ from token ${place + 1} on. That must not be: please report it, with the server's version.`);
      return;
    }
    const ratio = this.drafted.speed / this.plain.speed;
    const faster = ratio >= 1 ? `${number(ratio)} times as fast` : `${number(ratio)} times the speed`;
    this.#say("good", h("strong", { text: faster }), ` in ${number(counts.steps)} steps instead of ${number(this.plain.counts.steps)}. `,
      h("strong", { text: "Same text" }), `: all ${number(tokens.length)} tokens are equal.`);
    announce(this.verdict.textContent);
  }

  #say(kind, ...words) {
    this.verdict.className = `verdict ${kind}`;
    this.verdict.replaceChildren(...words);
  }

  #showState() {
    const running = this.#stop !== null;
    const label = running ? "Stop" : this.both.checked ? "Run the race" : "Run";
    this.go.replaceChildren(icon(running ? "stop" : "play"), h("span", { text: label }));
    this.go.disabled = !running && connection.state !== "ok";
  }

  // --- what is seen of it ----------------------------------------------------------------------

  #legend() {
    const entries = Object.entries(SOURCES).filter(([source]) => source !== "unknown");
    return h("ul.legend", { "aria-label": "Colours" }, entries.map(([source, [name, why]]) =>
      h("li", {}, h("span.swatch", { class: `src-${source}`, "aria-hidden": "true", text: "ab" }), h("span", {}, h("strong", { text: name }), ` ${why}`))));
  }

  #forget() {
    this.strip.replaceChildren();
    this.sources.replaceChildren();
    this.tree.replaceChildren(h("p.hint", { text: "Point at a token, or walk through them with the arrow keys, to see the step that made it." }));
  }

  #inspect(token, before, lane) {
    (lane === this.plain ? this.drafted : this.plain).unpick();
    this.tree.replaceChildren(stepView(token.step, before));
    const bars = this.strip.children;
    this.strip.querySelector(".picked")?.classList.remove("picked");
    if (lane === this.drafted) bars[token.step.step]?.classList.add("picked");
  }

  /** A column for each step, as high as it has tokens. */
  #drawStep(step) {
    const place = this.drafted.tokens.length - step.tokens.length;
    const cells = step.tokens.map((_, at) => {
      const node = step.accepted[at];
      return h("i", { class: `src-${node === undefined ? "target" : step.nodes[node].source}` });
    });
    this.strip.append(h("div.column", { onpointerover: () => this.drafted.pick(place), onclick: () => this.drafted.pick(place) }, cells.reverse()));
  }

  #drawSources(lane) {
    const { counts } = lane;
    const rows = [...counts.bySource].filter(([source, count]) => source === "target" || count.drafted).map(([source, { drafted, accepted }]) => h("tr", {},
      h("th", { scope: "row" }, h("span.swatch", { class: `src-${source}`, "aria-hidden": "true", text: "ab" }), ` ${sourceName(source)}`),
      h("td", { text: source === "target" ? "–" : number(drafted) }), h("td", { text: number(accepted) }),
      h("td", { text: source === "target" ? "–" : percent(accepted / drafted) }), h("td", { text: percent(accepted / counts.tokens) })));
    this.strip.setAttribute("aria-label", `Tokens of each of ${counts.steps} steps, ${number(counts.tokens / counts.steps)} on average`);
    this.sources.replaceChildren(h("div.table", { tabindex: "0", role: "group", "aria-label": "Tokens by source" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Source", "Drafted", "In the text", "Right", "Of the text"].map((text) => h("th", { scope: "col", text })))), h("tbody", {}, rows))));
  }
}
