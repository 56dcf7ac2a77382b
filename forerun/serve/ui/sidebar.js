/** The list of conversations at the left: search, rename, delete, export, import. */

import { announce, composes, download, h, icon, iconButton } from "./dom.js";
import { asJson, fromJson } from "./export.js";

/**
 * The list.
 *
 * actions  {begin, select, remove, rename, imported}: called with a conversation, or a list of them
 */
export class Sidebar {
  #all = [];
  #current = null;
  #searched = "";

  constructor(actions, newId) {
    this.actions = actions;
    this.newId = newId;
    this.list = h("ul.conversations");
    this.hint = h("p.hint", { text: "Kept in this browser only." });
    this.problem = h("p.problem", { role: "status" });
    this.search = h("input", { type: "search", id: "search", "aria-label": "Search conversations", placeholder: "Search", autocomplete: "off",
      oninput: () => { this.#searched = this.search.value.trim().toLowerCase(); this.#show(); } });
    this.file = h("input.visually-hidden", { type: "file", accept: ".json,application/json", tabindex: "-1", "aria-label": "File to import", onchange: () => this.#import() });
    this.element = h("aside.side", { id: "side", "aria-label": "Conversations" },
      h("button.new", { type: "button", onclick: () => actions.begin() }, icon("plus"), "New conversation"), this.search, this.list, this.problem,
      h("div.side-foot", {}, this.hint,
        h("div.row", {}, h("button.small", { type: "button", text: "Import", onclick: () => this.file.click() }),
          h("button.small", { type: "button", text: "Export all", onclick: () => download("forerun-conversations.json", asJson(this.#all), "application/json") }))),
      this.file);
  }

  /** Show these conversations; `current` is the open one. */
  show(all, current) {
    this.#all = all;
    this.#current = current;
    this.#show();
  }

  #show() {
    const found = this.#all.filter((one) => holds(one, this.#searched));
    this.list.replaceChildren(...found.map((one) => h("li", { dataset: { id: one.id } },
      h("button.conversation", { type: "button", "aria-current": one === this.#current ? "true" : null, onclick: () => this.actions.select(one) },
        h("span", { text: one.title }), h("small.hit", { text: this.#searched ? around(one, this.#searched) : null })),
      iconButton("edit", `Rename ${one.title}`, () => this.#rename(one)),
      iconButton("trash", `Delete ${one.title}`, () => this.actions.remove(one)))));
    if (this.#searched && !found.length) this.list.append(h("li.hint", { text: "No conversation has these words." }));
  }

  #rename(conversation) {
    const row = this.list.querySelector(`[data-id="${CSS.escape(conversation.id)}"]`);
    const box = h("input", { type: "text", "aria-label": "Title of the conversation", maxlength: 200 });
    box.value = conversation.title;
    let over = false;
    const done = (keep) => {
      if (over) return;
      over = true;
      const title = box.value.trim();
      if (keep && title) this.actions.rename(conversation, title);
      this.#show();
      this.list.querySelector(`[data-id="${CSS.escape(conversation.id)}"] .conversation`)?.focus();
    };
    box.addEventListener("keydown", (event) => {
      if (composes(event)) return;
      if (event.key === "Enter") done(true);
      if (event.key === "Escape") { event.stopPropagation(); done(false); }
    });
    box.addEventListener("blur", () => done(true));
    row.replaceChildren(box);
    box.select();
  }

  async #import() {
    const [file] = this.file.files;
    this.file.value = "";
    if (!file) return;
    this.problem.textContent = "";
    try {
      const found = fromJson(await file.text(), this.newId);
      await this.actions.imported(found);
      announce(found.length === 1 ? "One conversation was imported." : `${found.length} conversations were imported.`);
    } catch (error) {
      this.problem.textContent = error.message;
    }
  }
}

/** What stands around these words in a conversation's messages; null where they are in its title alone. */
function around(conversation, words) {
  for (const { content } of conversation.messages) {
    const place = content.toLowerCase().indexOf(words);
    if (place >= 0) return `${place > 20 ? "…" : ""}${content.slice(Math.max(0, place - 20), place + 80)}`;
  }
  return null;
}

/** Whether a conversation has these words, in small letters, in its title or its messages. */
function holds(conversation, words) {
  if (!words) return true;
  const texts = [conversation.title, ...conversation.messages.map((message) => message.content)];
  return texts.some((text) => text.toLowerCase().includes(words));
}
