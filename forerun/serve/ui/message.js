/** One message of a conversation on the page. */

import { connection } from "./api.js";
import { composes, copy, h, icon, iconButton, number, duration } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool result" };

const CROWDED = 0.5;
/** The part of the context from which on an answer says how full it is. */

const ANSWER = ["content", "reasoning", "tool_calls", "finish", "usage", "seconds", "speculation", "problem", "stopped", "failed"];
/** What differs between the variants of an answer. */

/** Put the shown variant away and begin another one. */
export function beginVariant(message) {
  keepVariant(message);
  message.variant = message.variants.length;
  for (const name of ANSWER) delete message[name];
  message.content = "";
}

/** Show another variant of an answer. */
export function showVariant(message, variant) {
  keepVariant(message);
  for (const name of ANSWER) delete message[name];
  Object.assign(message, structuredClone(message.variants[variant]), { variant });
}

function keepVariant(message) {
  message.variants ??= [];
  message.variant ??= 0;
  const shown = Object.fromEntries(ANSWER.filter((name) => name in message).map((name) => [name, message[name]]));
  message.variants[message.variant] = structuredClone(shown);
}

/**
 * Shows a message and the buttons below it.
 *
 * actions  {edit, regenerate, remove, result, proceed, variant}: called with the message
 */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = h("div.md.said", { dir: "auto" });
    this.reasoning = h("details.reasoning", { hidden: true }, h("summary", {}, h("span", { text: "Reasoning" })), h("div.md"));
    this.files = h("ul.files", { hidden: true });
    this.calls = h("div.calls");
    this.note = h("p.note", { hidden: true });
    this.foot = h("div.foot");
    const head = h("h2.who", { text: WHO[message.role] ?? message.role });
    this.element = h("li.message", { class: message.role, dataset: { id: message.id } },
      h("article", { "aria-label": WHO[message.role] ?? message.role }, head, this.reasoning, this.files, this.body, this.calls, this.note, this.foot));
    this.text = new MarkdownView(this.body);
    this.thoughts = new MarkdownView(this.reasoning.lastElementChild);
    this.show();
  }

  /** Show what the message now says. `running`: it still grows. */
  show(running = false) {
    const { message } = this;
    this.element.classList.toggle("running", running);
    if (message.role === "assistant") this.text.show(message.content);
    else this.body.textContent = message.content;
    this.body.hidden = !message.content && !running;
    this.body.classList.toggle("plain", message.role !== "assistant");
    this.#showReasoning(running);
    this.#showFiles();
    if (!running || message.tool_calls) this.#showCalls(running);
    this.note.hidden = !message.problem;
    this.note.replaceChildren(message.problem ?? "");
    this.running = running;
    if (message.tooLong) {
      const text = "Answer without the oldest messages";
      this.note.append(" ", h("button.small", { type: "button", text, onclick: () => this.actions.shorten(message) }));
    }
    if (!running) this.#showFoot();
  }

  #showReasoning(running) {
    const { reasoning, content } = this.message;
    this.reasoning.hidden = !reasoning;
    if (!reasoning) return;
    const thinking = running && !content;
    this.reasoning.classList.toggle("thinking", thinking);
    this.reasoning.firstElementChild.firstElementChild.textContent = thinking ? "Thinking" : "Reasoning";
    this.thoughts.show(reasoning);
  }

  #showFiles() {
    const files = this.message.files ?? [];
    this.files.hidden = !files.length;
    this.files.replaceChildren(...files.map(({ name, text }) => h("li", {},
      h("details", {}, h("summary", { text: name }), h("pre", { tabindex: "0", role: "group", "aria-label": `File ${name}`, text })))));
  }

  #showCalls(running) {
    const calls = this.message.tool_calls ?? [];
    this.calls.replaceChildren(...calls.map((call) => {
      const said = h("pre", { tabindex: "0", role: "group", "aria-label": `Arguments of ${call.function.name}`, text: pretty(call.function.arguments) });
      const button = h("button.small", { type: "button", text: "Answer this call", onclick: () => this.actions.result(call) });
      return h("div.call", {}, h("div.code-head", {}, h("span", { text: `calls ${call.function.name}` }), !running && button), said);
    }));
  }

  #showFoot() {
    const { message, actions } = this;
    const copied = iconButton("copy", "Copy", () => copy(copied, message.content || message.reasoning || ""));
    const buttons = [copied];
    buttons.push(iconButton("edit", "Edit", () => this.edit()));
    if (message.role === "assistant") buttons.push(iconButton("again", "Regenerate", () => actions.regenerate(message)));
    const cut = message.finish === "length" || message.stopped || message.unfinished;
    if (message.role === "assistant" && cut && message.content && !message.tool_calls) {
      buttons.push(iconButton("play", "Continue the answer", () => actions.proceed(message), { class: "proceed" }));
    }
    buttons.push(iconButton("trash", "Delete", () => actions.remove(message)));
    this.foot.replaceChildren(h("div.actions", {}, buttons), this.#variants(), this.#facts());
  }

  #variants() {
    const { variants = [], variant = 0 } = this.message;
    if (variants.length < 2) return h("span", { hidden: true });
    const step = (by, name, label) => iconButton(name, label, () => this.actions.variant(this.message, variant + by),
      { disabled: !(variant + by in variants) });
    return h("div.variants", { role: "group", "aria-label": "Variants of this answer" },
      step(-1, "left", "The variant before"), h("span", { text: `${variant + 1} of ${variants.length}` }), step(1, "right", "The next variant"));
  }

  #facts() {
    const { usage, seconds, speculation, finish, stopped, unfinished } = this.message;
    const facts = [];
    if (stopped) facts.push("stopped");
    else if (unfinished) facts.push("not finished");
    if (usage) facts.push(`${number(usage.completion_tokens)} tokens`);
    if (usage && seconds?.rest > 0 && usage.completion_tokens > 1) {
      facts.push(number((usage.completion_tokens - 1) / seconds.rest, "tokens/s"));
      facts.push(`first after ${duration(seconds.first)}`);
    }
    const length = speculation?.mean_acceptance_length;
    if (length) facts.push(`${number(length)} tokens a step`);
    if (finish === "length") facts.push("ended at the token limit");
    const full = usage && connection.model?.context ? (usage.prompt_tokens + usage.completion_tokens) / connection.model.context : 0;
    if (full >= CROWDED) facts.push(`context ${Math.round(100 * full)} % full`);
    return h("p.facts", { text: facts.join(" · ") });
  }

  /** Let the user change the text. */
  edit() {
    const { message } = this;
    const area = h("textarea", { dir: "auto", "aria-label": "Text of the message", rows: Math.min(14, message.content.split("\n").length + 1) });
    area.value = message.content;
    const done = () => { form.replaceWith(this.body); this.foot.hidden = false; this.show(); };
    const keep = (again) => { message.content = area.value; done(); this.actions.edit(message, again); };
    const form = h("form.edit", { onsubmit: (event) => { event.preventDefault(); keep(message.role !== "assistant"); } }, area,
      h("div.row", {},
        message.role !== "assistant" && h("button.primary", { type: "submit", text: "Save and answer anew" }),
        h("button", { type: "button", text: "Save", onclick: () => keep(false) }),
        h("button", { type: "button", text: "Cancel", onclick: done })));
    area.addEventListener("keydown", (event) => { if (event.key === "Escape" && !composes(event)) { event.stopPropagation(); done(); } });
    this.body.replaceWith(form);
    this.foot.hidden = true;
    area.focus();
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
