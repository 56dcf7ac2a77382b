/** The chat: conversations at the left, one of them in the middle, its settings at the right. */

import { answer, DEFAULTS, requestOf } from "./answer.js";
import { connection, ConnectionError, ServerError } from "./api.js";
import { announce, download, h, icon, iconButton } from "./dom.js";
import { asJson, asMarkdown, fileName } from "./export.js";
import { MessageView } from "./message.js";
import { OptionsPanel } from "./options.js";
import { conversations, load, save } from "./store.js";

const IDEAS = [
  "Why is the sky blue?",
  "Write a Python function that counts the vowels in a string.",
  "Plan a weekend in Lisbon as a table.",
  "Explain speculative decoding to a ten-year-old.",
];
const NEAR = 80;
/** Pixels from the end at which the page follows what comes. */

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

export class Chat {
  #running = null;
  #views = new Map();

  constructor(root) {
    this.root = root;
    this.list = h("ul.conversations");
    this.side = h("aside.side", { id: "side", "aria-label": "Conversations" },
      h("button.new", { type: "button", onclick: () => this.begin() }, icon("plus"), "New conversation"), this.list,
      h("div.side-foot", {}, h("p.hint", { text: "Kept in this browser only." }),
        h("button.small", { type: "button", text: "Export all", onclick: () => this.exportAll() })));
    this.messages = h("ol.messages");
    this.empty = this.#welcome();
    this.scroller = h("div.scroller", { tabindex: "0", role: "region", "aria-label": "Messages" }, this.empty, this.messages);
    this.jump = iconButton("down", "To the end", () => this.#toEnd(), { class: "jump", hidden: true });
    this.panel = new OptionsPanel(() => this.#optionsChanged(), () => this.toggleOptions(false));
    root.append(this.side, h("div.middle", {}, this.#head(), h("div.stage", {}, this.scroller, this.jump), this.#composer()), this.panel.element);
    this.scroller.addEventListener("scroll", () => { this.jump.hidden = this.#following(); }, { passive: true });
    root.addEventListener("keydown", (event) => { if (event.key === "Escape") this.#escape(); });
    connection.addEventListener("change", () => this.#showState());
  }

  async open() {
    const kept = await conversations.open();
    if (!kept) this.side.querySelector(".hint").textContent = "This browser keeps nothing: conversations end with the page.";
    this.all = await conversations.all();
    const last = this.all.find((one) => one.id === load("open", null)) ?? this.all[0];
    if (last) this.select(last);
    else this.begin();
  }

  // --- conversations ---------------------------------------------------------------------------

  begin() {
    this.stop();
    const options = { ...DEFAULTS, ...load("options", {}) };
    this.current = { id: newId(), title: "New conversation", created: Date.now(), updated: Date.now(), messages: [], options };
    this.#shown();
    this.box.focus();
  }

  select(conversation) {
    this.stop();
    this.current = conversation;
    conversation.options = { ...DEFAULTS, ...conversation.options };
    save("open", conversation.id);
    this.#shown();
  }

  async remove(conversation) {
    if (!confirm(`Delete “${conversation.title}” for good?`)) return;
    await conversations.remove(conversation.id);
    this.all = this.all.filter((one) => one !== conversation);
    if (conversation !== this.current) this.#showList();
    else if (this.all[0]) this.select(this.all[0]);
    else this.begin();
  }

  exportAll() {
    download("forerun-conversations.json", asJson(this.all), "application/json");
  }

  async #keep() {
    this.current.updated = Date.now();
    if (!this.current.messages.length) return;
    if (!this.all.includes(this.current)) this.all.unshift(this.current);
    this.all.sort((one, other) => other.updated - one.updated);
    save("open", this.current.id);
    this.#showList();
    try {
      await conversations.put(this.current);
    } catch (error) {
      announce(`This conversation could not be kept: ${error.message}`);
    }
  }

  #shown() {
    this.#showList();
    this.panel.show(this.current.options);
    this.#views.clear();
    this.messages.replaceChildren(...this.current.messages.map((message) => this.#view(message).element));
    this.#markCut();
    this.#showTitle();
    this.#showState();
    this.root.classList.remove("side-open");
    this.#toEnd();
  }

  #showList() {
    this.list.replaceChildren(...this.all.map((one) => h("li", {},
      h("button.conversation", { type: "button", "aria-current": one === this.current ? "true" : null, text: one.title, onclick: () => this.select(one) }),
      iconButton("trash", `Delete ${one.title}`, () => this.remove(one)))));
  }

  #showTitle() {
    this.title.textContent = this.current.title;
    this.empty.hidden = this.current.messages.length > 0;
    for (const button of this.exports) button.disabled = this.empty.hidden === false;
  }

  // --- messages --------------------------------------------------------------------------------

  #view(message) {
    const view = new MessageView(message, {
      edit: (changed, again) => this.#edited(changed, again),
      regenerate: (old) => this.#regenerate(old),
      remove: (old) => this.#remove(old),
      result: (call) => this.#result(call),
      shorten: (old) => this.#shorten(old),
    });
    this.#views.set(message, view);
    return view;
  }

  #add(message) {
    this.current.messages.push({ id: newId(), ...message });
    const added = this.current.messages.at(-1);
    this.messages.append(this.#view(added).element);
    this.#showTitle();
    return added;
  }

  #cut(from) {
    for (const message of this.current.messages.splice(from)) {
      this.#views.get(message)?.element.remove();
      this.#views.delete(message);
    }
    this.#showTitle();
  }

  #edited(message, again) {
    this.stop();
    if (again) {
      this.#cut(this.current.messages.indexOf(message) + 1);
      this.#ask();
    } else this.#keep();
  }

  #regenerate(message) {
    this.stop();
    this.#cut(this.current.messages.indexOf(message));
    const { seed, temperature } = this.current.options;
    if (seed !== "" || temperature === "0") this.#hint("The same seed or temperature 0 gives the same answer again.");
    this.#ask();
  }

  #remove(message) {
    this.stop();
    const place = this.current.messages.indexOf(message);
    this.current.messages.splice(place, 1);
    this.#views.get(message).element.remove();
    this.#showTitle();
    this.#keep();
    this.box.focus();
  }

  #result(call) {
    const message = this.#add({ role: "tool", tool_call_id: call.id, content: "" });
    this.#views.get(message).edit();
    this.#toEnd();
  }

  // --- asking ----------------------------------------------------------------------------------

  send() {
    const text = this.box.value.trim();
    if (!text || this.#running) return;
    this.box.value = "";
    this.#grow();
    this.#add({ role: "user", content: text });
    if (this.current.messages.length === 1) this.#name(text);
    this.#ask();
  }

  #name(text) {
    const line = text.split("\n")[0];
    this.current.title = line.length > 60 ? `${line.slice(0, 57)}…` : line;
    this.#showTitle();
  }

  async #ask() {
    let body;
    try {
      body = requestOf(this.current.messages.slice(this.#sentFrom()), this.current.options);
    } catch (error) {
      this.#fail(this.#add({ role: "assistant", content: "" }), error);
      return;
    }
    const message = this.#add({ role: "assistant", content: "" });
    const running = { stop: new AbortController(), message, conversation: this.current };
    this.#running = running;
    this.#views.get(message).show(true);
    this.#showState();
    this.#toEnd();
    announce("The model answers.");
    try {
      await answer(body, message, running.stop.signal, () => this.#soon(message));
      announce(`Answer complete. ${message.content.slice(0, 300)}`);
    } catch (error) {
      this.#fail(message, error);
    } finally {
      if (this.#running === running) this.#running = null;
      this.#views.get(message)?.show();
      this.#showState();
      if (this.current === running.conversation) this.#keep();
      else conversations.put(running.conversation).catch(() => {});
    }
  }

  #fail(message, error) {
    if (error.name === "AbortError") message.problem = "Stopped.";
    else if (error instanceof ConnectionError) {
      message.problem = `${error.message} What came so far is kept; regenerate once the server is back.`;
      connection.watch();
    } else if (error instanceof ServerError || error instanceof SyntaxError) message.problem = error.message;
    else throw error;
    message.failed = !message.content && !message.tool_calls;
    message.tooLong = error.code === "context_length_exceeded" && this.#questions().length > 1;
    if (error.name !== "AbortError") announce(message.problem);
    this.#views.get(message)?.show();
    this.#toEnd();
  }

  /** The first message that the server is told of; those before no longer fit. */
  #sentFrom() {
    return Math.max(0, this.current.messages.findIndex((message) => message.id === this.current.from));
  }

  /** The user's messages that are still sent. */
  #questions() {
    return this.current.messages.slice(this.#sentFrom()).filter((message) => message.role === "user");
  }

  /** Leave out the older half of what is sent, and ask again. */
  #shorten(message) {
    const questions = this.#questions();
    this.current.from = questions[Math.ceil(questions.length / 2)].id;
    this.#markCut();
    this.#regenerate(message);
  }

  #markCut() {
    this.messages.querySelector(".cut")?.classList.remove("cut");
    const first = this.current.messages[this.#sentFrom()];
    if (first && this.current.from) this.#views.get(first).element.classList.add("cut");
  }

  stop() {
    this.#running?.stop.abort();
    this.#running = null;
  }

  #soon(message) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const follow = this.#following();
      this.#views.get(message)?.show(this.#running?.message === message);
      if (follow) this.#toEnd();
    });
  }

  // --- the frame around it ---------------------------------------------------------------------

  #head() {
    this.title = h("h1.title");
    const menu = iconButton("menu", "Conversations", () => this.root.classList.toggle("side-open"), { class: "menu", "aria-controls": "side" });
    const markdown = h("button.small", { type: "button", title: "Export as Markdown", onclick: () => this.#export(asMarkdown, "md", "text/markdown") }, icon("download"), "Markdown");
    const data = h("button.small", { type: "button", title: "Export as JSON", onclick: () => this.#export((one) => asJson([one]), "json", "application/json") }, icon("download"), "JSON");
    this.exports = [markdown, data];
    this.settings = iconButton("sliders", "Settings of this conversation", () => this.toggleOptions(), { "aria-expanded": "false", "aria-controls": "options" });
    return h("div.chat-head", {}, menu, this.title, h("div.row", {}, markdown, data, this.settings));
  }

  #export(words, kind, type) {
    download(fileName(this.current, kind), words(this.current), type);
  }

  #welcome() {
    const ideas = IDEAS.map((idea) => h("button.idea", { type: "button", text: idea, onclick: () => { this.box.value = idea; this.send(); } }));
    return h("div.welcome", {}, h("p.lead", { text: "What would you like to know?" }),
      h("p.hint", { text: "The model runs on this server. Nothing that you write leaves it." }), h("div.ideas", {}, ideas));
  }

  #composer() {
    this.box = h("textarea", { rows: 1, "aria-label": "Your message", placeholder: "Write a message", enterkeyhint: "send",
      oninput: () => this.#grow(), onkeydown: (event) => this.#typed(event) });
    this.go = h("button.send", { type: "submit", "aria-label": "Send" }, icon("send"));
    this.notice = h("p.notice", { role: "status" });
    return h("form.composer", { onsubmit: (event) => { event.preventDefault(); if (this.#running) this.stop(); else this.send(); } },
      h("div.composer-box", {}, this.box, this.go), this.notice);
  }

  #typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  #grow() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight, 260)}px`;
  }

  #escape() {
    if (this.root.classList.contains("side-open")) this.root.classList.remove("side-open");
    else if (!this.panel.element.hidden && this.panel.element.contains(document.activeElement)) this.toggleOptions(false);
    else this.stop();
  }

  toggleOptions(open = this.panel.element.hidden) {
    this.panel.element.hidden = !open;
    this.root.classList.toggle("options-open", open);
    this.settings.setAttribute("aria-expanded", String(open));
    if (open) this.panel.element.querySelector("textarea").focus();
    else this.settings.focus();
  }

  #optionsChanged() {
    const { system, schema, tools, ...lasting } = this.current.options;
    save("options", lasting);
    this.#keep();
  }

  #hint(text) {
    this.notice.textContent = text;
    setTimeout(() => this.#showState(), 5000);
  }

  #showState() {
    const running = this.#running !== null;
    this.go.setAttribute("aria-label", running ? "Stop" : "Send");
    this.go.replaceChildren(icon(running ? "stop" : "send"));
    this.go.classList.toggle("stopping", running);
    this.go.disabled = !running && connection.state !== "ok";
    this.notice.textContent = connection.state === "ok" ? "" : "You can go on as soon as the server answers.";
  }

  #following() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  #toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
