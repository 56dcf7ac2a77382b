/** The panel beside a conversation: system prompt, sampling, structure, tools. */

import { parsed } from "./answer.js";
import { h, iconButton } from "./dom.js";

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { answer: { type: "string" }, sources: { type: "array", items: { type: "string" } } },
  required: ["answer", "sources"],
  additionalProperties: false,
};
const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather at a place",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

/**
 * The panel. `options` is changed in place and `changed` called after each change.
 */
export class OptionsPanel {
  constructor(changed, close) {
    this.changed = changed;
    this.fields = h("form.fields", { onsubmit: (event) => event.preventDefault() });
    const head = h("div.panel-head", {}, h("h2", { text: "Settings of this conversation" }), iconButton("close", "Close the settings", close));
    this.element = h("aside.options", { id: "options", "aria-label": "Settings", hidden: true }, head, this.fields);
  }

  show(options) {
    this.options = options;
    this.fields.replaceChildren(
      this.#area("system", "System prompt", "Tells the model who it is and how to answer.", 4),
      h("fieldset", {}, h("legend", { text: "Sampling" }),
        h("p.hint", { text: "Empty: as the server decides." }),
        h("div.grid", {},
          this.#number("temperature", "Temperature", { min: 0, max: 2, step: 0.05 }),
          this.#number("top_p", "Top p", { min: 0, max: 1, step: 0.01 }),
          this.#number("top_k", "Top k", { min: -1, step: 1 }),
          this.#number("min_p", "Min p", { min: 0, max: 1, step: 0.01 }),
          this.#number("seed", "Seed", { step: 1 }),
          this.#number("max_tokens", "Max tokens", { min: 1, step: 1 }),
          this.#number("frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }),
          this.#number("presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }),
          this.#number("repetition_penalty", "Repetition penalty", { min: 0, max: 2, step: 0.05 })),
        this.#area("stop", "Stop texts, one a line", "", 2)),
      h("fieldset", {}, h("legend", { text: "Speculation" }),
        this.#check("speculation", "Draft tokens ahead", "The text is the same either way.")),
      h("fieldset", {}, h("legend", { text: "Structured answer" }),
        this.#json("schema", "JSON schema", "The answer is JSON that fits it.", EXAMPLE_SCHEMA)),
      h("fieldset", {}, h("legend", { text: "Tools" }),
        this.#json("tools", "Functions that the model may call", "A JSON list, as in the API. You answer the calls.", EXAMPLE_TOOLS),
        this.#select("tool_choice", "Must it call one?", { auto: "It decides", required: "Yes", none: "No" })),
    );
  }

  #set(name, value) {
    this.options[name] = value;
    this.changed(name);
  }

  #label(name, text, hint) {
    const id = `option-${name}`;
    return [h("label", { for: id, text }), hint && h("p.hint", { id: `${id}-hint`, text: hint })];
  }

  #attributes(name, hint) {
    const id = `option-${name}`;
    return { id, "aria-describedby": hint ? `${id}-hint` : null };
  }

  #area(name, text, hint, rows) {
    const area = h("textarea", { ...this.#attributes(name, hint), rows, oninput: () => this.#set(name, area.value) });
    area.value = this.options[name];
    return h("div.field", {}, this.#label(name, text, hint), area);
  }

  #number(name, text, bounds) {
    const box = h("input", { ...this.#attributes(name), type: "number", inputmode: "decimal", placeholder: "–", ...bounds,
      oninput: () => this.#set(name, box.value) });
    box.value = this.options[name];
    return h("div.field", {}, this.#label(name, text), box);
  }

  #check(name, text, hint) {
    const box = h("input", { ...this.#attributes(name, hint), type: "checkbox", checked: this.options[name],
      onchange: () => this.#set(name, box.checked) });
    return h("div.field.check", {}, box, this.#label(name, text, hint));
  }

  #select(name, text, choices) {
    const box = h("select", { ...this.#attributes(name), onchange: () => this.#set(name, box.value) },
      Object.entries(choices).map(([value, label]) => h("option", { value, text: label })));
    box.value = this.options[name];
    return h("div.field", {}, this.#label(name, text), box);
  }

  #json(name, text, hint, example) {
    const problem = h("p.problem", { id: `option-${name}-problem`, role: "status" });
    const area = h("textarea.mono", { ...this.#attributes(name, hint), rows: 5, spellcheck: "false" });
    const check = () => {
      problem.textContent = "";
      try {
        if (area.value.trim()) parsed(area.value, "This");
      } catch (error) {
        problem.textContent = error.message;
      }
      area.setAttribute("aria-invalid", String(problem.textContent !== ""));
    };
    area.value = this.options[name];
    area.addEventListener("input", () => { this.#set(name, area.value); check(); });
    const insert = h("button.small", { type: "button", text: "Insert an example", onclick: () => {
      area.value = JSON.stringify(example, null, 2);
      area.dispatchEvent(new Event("input"));
      area.focus();
    } });
    const clear = h("button.small", { type: "button", text: "Clear", onclick: () => {
      area.value = "";
      area.dispatchEvent(new Event("input"));
    } });
    return h("div.field", {}, this.#label(name, text, hint), area, problem, h("div.row", {}, insert, clear));
  }
}
