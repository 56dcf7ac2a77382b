/** One message of a conversation on the page. */

import { copy, h, icon, iconButton, number, duration } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool result" };

/**
 * Shows a message and the buttons below it.
 *
 * actions  {edit, regenerate, remove, result}: called with the message
 */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = h("div.md.said");
    this.reasoning = h("details.reasoning", { hidden: true }, h("summary", {}, h("span", { text: "Reasoning" })), h("div.md"));
    this.calls = h("div.calls");
    this.note = h("p.note", { hidden: true });
    this.foot = h("div.foot");
    const head = h("h3.who", { text: WHO[message.role] ?? message.role });
    this.element = h("li.message", { class: message.role, dataset: { id: message.id } },
      h("article", { "aria-label": WHO[message.role] ?? message.role }, head, this.reasoning, this.body, this.calls, this.note, this.foot));
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
    if (!running || message.tool_calls) this.#showCalls(running);
    this.note.hidden = !message.problem;
    this.note.replaceChildren(message.problem ?? "");
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

  #showCalls(running) {
    const calls = this.message.tool_calls ?? [];
    this.calls.replaceChildren(...calls.map((call) => {
      const said = h("pre", { tabindex: "0", role: "region", "aria-label": `Arguments of ${call.function.name}`, text: pretty(call.function.arguments) });
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
    buttons.push(iconButton("trash", "Delete", () => actions.remove(message)));
    this.foot.replaceChildren(h("div.actions", {}, buttons), this.#facts());
  }

  #facts() {
    const { usage, seconds, speculation, finish } = this.message;
    const facts = [];
    if (usage) facts.push(`${number(usage.completion_tokens)} tokens`);
    if (usage && seconds?.rest > 0 && usage.completion_tokens > 1) {
      facts.push(number((usage.completion_tokens - 1) / seconds.rest, "tokens/s"));
      facts.push(`first after ${duration(seconds.first)}`);
    }
    const length = speculation?.mean_acceptance_length;
    if (length) facts.push(`${number(length)} tokens a step`);
    if (finish === "length") facts.push("ended at the token limit");
    return h("p.facts", { text: facts.join(" · ") });
  }

  /** Let the user change the text. */
  edit() {
    const { message } = this;
    const area = h("textarea", { "aria-label": "Text of the message", rows: Math.min(14, message.content.split("\n").length + 1) });
    area.value = message.content;
    const done = () => { form.replaceWith(this.body); this.foot.hidden = false; this.show(); };
    const keep = (again) => { message.content = area.value; done(); this.actions.edit(message, again); };
    const form = h("form.edit", { onsubmit: (event) => { event.preventDefault(); keep(message.role !== "assistant"); } }, area,
      h("div.row", {},
        message.role !== "assistant" && h("button.primary", { type: "submit", text: "Save and answer anew" }),
        h("button", { type: "button", text: "Save", onclick: () => keep(false) }),
        h("button", { type: "button", text: "Cancel", onclick: done })));
    area.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); done(); } });
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
