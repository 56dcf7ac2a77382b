/** The chat: conversations at the left, one of them in the middle, its settings at the right. */

import { answer, DEFAULTS, requestOf } from "./answer.js";
import { connection, ConnectionError, ServerError } from "./api.js";
import { readText } from "./attachments.js";
import { announce, composes, download, h, icon, iconButton } from "./dom.js";
import { asJson, asMarkdown, fileName } from "./export.js";
import { MessageView, beginVariant, showVariant } from "./message.js";
import { OptionsPanel } from "./options.js";
import { Sidebar } from "./sidebar.js";
import { conversations, load, save } from "./store.js";

const IDEAS = [
  "Why is the sky blue?",
  "Write a Python function that counts the vowels in a string.",
  "Plan a weekend in Lisbon as a table.",
  "Explain speculative decoding to a ten-year-old.",
];
const NEAR = 80;
/** Pixels from the end at which the page follows what comes. */

const KEEP_EVERY = 1000;
/** Milliseconds after which a growing answer is kept again, so that a reload loses no more than that. */

/** The id of the conversation that the address names; null where it names none. */
const addressed = () => /^#chat\/(.+)$/.exec(location.hash)?.[1] ?? null;

const ELSEWHERE = "The conversation of this address is not in this browser.";

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

export class Chat {
  #running = null;
  #follows = true;
  hint = "";
  #views = new Map();
  #files = [];

  constructor(root) {
    this.root = root;
    this.sidebar = new Sidebar({
      begin: () => this.begin(),
      select: (one) => this.select(one),
      remove: (one) => this.remove(one),
      rename: (one, title) => this.#rename(one, title),
      imported: (found) => this.#imported(found),
    }, newId);
    this.side = this.sidebar.element;
    this.messages = h("ol.messages");
    this.empty = this.#welcome();
    this.scroller = h("div.scroller", { tabindex: "0", role: "region", "aria-label": "Messages" }, this.empty, this.messages);
    this.jump = iconButton("down", "To the end", () => this.#toEnd(), { class: "jump", hidden: true });
    this.panel = new OptionsPanel(() => this.#optionsChanged(), () => this.toggleOptions(false));
    root.append(this.side, h("div.middle", {}, this.#head(), h("div.stage", {}, this.scroller, this.jump), this.#composer()), this.panel.element);
    this.scroller.addEventListener("scroll", () => {
      this.jump.hidden = this.#following();
      this.#follows ||= this.jump.hidden;
    }, { passive: true });
    // Messages get their height when they are seen: the end stays in sight until somebody scrolls.
    for (const act of ["wheel", "touchmove", "keydown", "pointerdown"]) this.scroller.addEventListener(act, () => { this.#follows = false; }, { passive: true });
    new ResizeObserver(() => { if (this.#follows) this.#toEnd(); }).observe(this.messages);
    root.addEventListener("dragover", (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
    root.addEventListener("drop", (event) => { if (event.dataTransfer?.files.length) { event.preventDefault(); this.#attach(event.dataTransfer.files); } });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !composes(event) && !root.hidden && !document.querySelector("dialog[open]")) this.#escape();
    });
    addEventListener("pagehide", () => this.#saveUnfinished());
    conversations.addEventListener("elsewhere", ({ detail }) => this.#elsewhere(detail.id));
    connection.addEventListener("change", () => this.#showState());
  }

  async open() {
    const kept = await conversations.open();
    if (!kept) this.sidebar.hint.textContent = "This browser keeps nothing: conversations end with the page.";
    this.all = await conversations.all();
    await this.#restoreUnfinished();
    const wanted = addressed();
    const last = this.all.find((one) => one.id === (wanted ?? load("open", null))) ?? this.all[0];
    if (last) this.select(last, true);
    else this.begin();
    if (wanted && wanted !== last?.id) this.#hint(ELSEWHERE);
  }

  /** Show the conversation that the address names, as after going back. */
  visit() {
    const wanted = addressed(), found = this.all?.find((one) => one.id === wanted);
    if (found && found !== this.current) this.select(found, true);
    else if (this.all) this.#address(true);
    if (this.all && wanted && !found) this.#hint(ELSEWHERE);
  }

  /** Have the address name the open conversation, once it is kept; in place of the last one, or as a step to go back from. */
  #address(instead) {
    const address = this.all.includes(this.current) ? `#chat/${this.current.id}` : "#chat";
    const view = location.hash.slice(1).split("/")[0];
    if (location.hash === address || (view && view !== "chat")) return;
    if (instead) history.replaceState(null, "", address);
    else history.pushState(null, "", address);
  }

  /** While the page goes only local storage is sure to be written. */
  #saveUnfinished() {
    if (this.#running) save("unfinished", { id: this.#running.conversation.id, message: this.#running.message });
  }

  async #restoreUnfinished() {
    const { id, message } = load("unfinished", null) ?? {};
    save("unfinished", null);
    const conversation = this.all.find((one) => one.id === id);
    const kept = conversation?.messages.find((one) => one.id === message.id);
    if (!kept?.unfinished || kept.content.length > message.content.length) return;
    Object.assign(kept, message);
    await this.#put(conversation);
  }

  // --- conversations ---------------------------------------------------------------------------

  begin() {
    this.stop();
    const options = { ...DEFAULTS, ...load("options", {}) };
    this.current = { id: newId(), title: "New conversation", created: Date.now(), updated: Date.now(), messages: [], options };
    this.#shown();
    this.#address(false);
    this.box.focus();
  }

  select(conversation, instead = false) {
    this.stop();
    this.current = conversation;
    conversation.options = { ...DEFAULTS, ...conversation.options };
    save("open", conversation.id);
    this.#shown();
    this.#address(instead);
  }

  async remove(conversation) {
    if (!confirm(`Delete “${conversation.title}” for good?`)) return;
    await conversations.remove(conversation.id);
    this.all = this.all.filter((one) => one !== conversation);
    if (conversation !== this.current) this.#showList();
    else if (this.all[0]) this.select(this.all[0]);
    else this.begin();
  }

  async #rename(conversation, title) {
    conversation.title = title;
    if (conversation === this.current) this.#showTitle();
    await this.#put(conversation);
  }

  async #imported(found) {
    for (const one of found) await conversations.put(one);
    this.all = await conversations.all();
    this.select(this.all.find((one) => one.id === found[0]?.id) ?? this.all[0]);
  }

  async #keep() {
    this.current.updated = Date.now();
    if (!this.current.messages.length && !this.current.removed?.length) return;
    if (!this.all.includes(this.current)) this.all.unshift(this.current);
    this.all.sort((one, other) => other.updated - one.updated);
    save("open", this.current.id);
    this.#showList();
    this.#address(true);
    await this.#put(this.current);
  }

  /** Keep a conversation, and take over what another tab has added to it. */
  async #put(conversation) {
    try {
      const kept = await conversations.put(conversation);
      if (!this.#running) this.#take(conversation, kept);
    } catch (error) {
      announce(`This conversation could not be kept: ${error.message}`);
    }
  }

  #take(conversation, kept) {
    const same = (one, other) => one.length === other.length && one.every((message, place) => message.id === other[place].id);
    const changed = !same(conversation.messages, kept.messages);
    conversation.removed = kept.removed;
    if (!changed) return;
    const own = new Map(conversation.messages.map((message) => [message.id, message]));
    conversation.messages = kept.messages.map((message) => own.get(message.id) ?? message);
    if (conversation === this.current) this.#shown(false);
  }

  /** Another tab has put or removed a conversation. */
  async #elsewhere(id) {
    const stored = await conversations.get(id);
    const known = this.all.find((one) => one.id === id);
    if (this.#running?.conversation.id === id) return; // Both are merged when this answer is kept.
    if (!stored) {
      this.all = this.all.filter((one) => one !== known);
      if (known && known === this.current) this.begin();
    } else if (known) {
      Object.assign(known, stored);
      if (known === this.current) {
        this.#shown(false);
        if (stored.messages.at(-1)?.unfinished) this.#hint("Another tab is writing this answer.");
      }
    } else this.all.unshift(stored);
    this.#showList();
  }

  #shown(moved = true) {
    const follow = moved || this.#following();
    this.#showList();
    this.panel.show(this.current.options);
    this.#views.clear();
    this.messages.replaceChildren(...this.current.messages.map((message) => this.#view(message).element));
    this.#markCut();
    this.#showTitle();
    this.#showState();
    if (moved) this.root.classList.remove("side-open");
    if (follow) this.#toEnd();
  }

  #showList() {
    this.sidebar.show(this.all, this.current);
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
      proceed: (old) => this.#proceed(old),
      variant: (old, variant) => this.#showVariant(old, variant),
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
      (this.current.removed ??= []).push(message.id);
      this.#views.get(message)?.element.remove();
      this.#views.delete(message);
    }
    this.#showTitle();
  }

  #edited(message, again) {
    this.stop();
    message.changed = Date.now();
    if (again) {
      this.#cut(this.current.messages.indexOf(message) + 1);
      this.#ask();
    } else this.#keep();
  }

  #regenerate(message) {
    this.stop();
    this.#cut(this.current.messages.indexOf(message) + 1);
    beginVariant(message);
    const { seed, temperature } = this.current.options;
    if (seed !== "" || temperature === "0") this.#hint("The same seed or temperature 0 gives the same answer again.");
    this.#ask(message);
  }

  #showVariant(message, variant) {
    this.stop();
    showVariant(message, variant);
    message.changed = Date.now();
    this.#views.get(message).show();
    this.#keep();
  }

  /** Let the model go on with an answer that was cut. */
  #proceed(message) {
    this.stop();
    this.#cut(this.current.messages.indexOf(message) + 1);
    this.#ask(message, true);
  }

  #remove(message) {
    this.stop();
    const place = this.current.messages.indexOf(message);
    this.current.messages.splice(place, 1);
    (this.current.removed ??= []).push(message.id);
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
    if ((!text && !this.#files.length) || this.#running) return;
    this.box.value = "";
    this.#grow();
    const files = this.#files.length ? { files: this.#files } : {};
    this.#add({ role: "user", content: text, ...files });
    if (this.current.messages.length === 1) this.#name(text || this.#files[0].name);
    this.#files = [];
    this.#showFiles();
    this.#ask();
  }

  async #attach(files) {
    for (const file of files) {
      try {
        this.#files.push(await readText(file));
      } catch (error) {
        this.#hint(error.message);
        announce(error.message);
      }
    }
    this.#showFiles();
    this.box.focus();
  }

  #showFiles() {
    this.chips.hidden = !this.#files.length;
    this.chips.replaceChildren(...this.#files.map((file) => h("li", {}, h("span", { text: file.name }),
      iconButton("close", `Leave out ${file.name}`, () => { this.#files = this.#files.filter((one) => one !== file); this.#showFiles(); }))));
  }

  #name(text) {
    const line = text.split("\n")[0];
    this.current.title = line.length > 60 ? `${line.slice(0, 57)}…` : line;
    this.#showTitle();
  }

  /** Have the model answer; into `message`, where that is given, which `continues` goes on with. */
  async #ask(message = null, continues = false) {
    const last = message ? this.current.messages.indexOf(message) + (continues ? 1 : 0) : undefined;
    let body;
    try {
      body = requestOf(this.current.messages.slice(this.#sentFrom(), last), this.current.options, continues);
    } catch (error) {
      this.#fail(message ?? this.#add({ role: "assistant", content: "" }), error);
      return;
    }
    message ??= this.#add({ role: "assistant", content: "" });
    for (const name of ["problem", "stopped", "failed", "finish"]) delete message[name];
    const running = { stop: new AbortController(), message, conversation: this.current, kept: performance.now() };
    this.#running = running;
    Object.assign(message, { unfinished: true, changed: Date.now() });
    this.#views.get(message).show(true);
    this.#showState();
    this.#toEnd();
    this.#keep();
    announce("The model answers.");
    try {
      await answer(body, message, running.stop.signal, () => this.#soon(running));
      announce(`Answer complete. ${message.content.slice(0, 300)}`);
    } catch (error) {
      this.#fail(message, error);
    } finally {
      delete message.unfinished;
      message.changed = Date.now();
      if (message.variants) showVariant(message, message.variant);
      if (this.#running === running) this.#running = null;
      this.#views.get(message)?.show();
      this.#showState();
      if (this.current === running.conversation) this.#keep();
      else this.#put(running.conversation);
    }
  }

  #fail(message, error) {
    if (error.name === "AbortError") message.stopped = true;
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

  #soon(running) {
    const { message, conversation } = running;
    if (performance.now() - running.kept > KEEP_EVERY) {
      running.kept = performance.now();
      message.changed = Date.now();
      conversations.put(conversation).catch(() => {}); // What fails here is said at the end of the answer.
    }
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
    const markdown = h("button.small", { type: "button", title: "Export as Markdown", onclick: () => this.#export(asMarkdown, "md", "text/markdown") }, icon("page"), "Markdown");
    const data = h("button.small", { type: "button", title: "Export as JSON", onclick: () => this.#export((one) => asJson([one]), "json", "application/json") }, icon("braces"), "JSON");
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
    this.box = h("textarea", { rows: 1, dir: "auto", "aria-label": "Your message", placeholder: "Write a message", enterkeyhint: "send",
      oninput: () => this.#grow(), onkeydown: (event) => this.#typed(event),
      onpaste: (event) => { if (event.clipboardData?.files.length) { event.preventDefault(); this.#attach([...event.clipboardData.files]); } } });
    this.go = h("button.send", { type: "submit", "aria-label": "Send" }, icon("send"));
    this.notice = h("p.notice", { role: "status" });
    this.chips = h("ul.chips", { hidden: true, "aria-label": "Files that go with the message" });
    this.picker = h("input.visually-hidden", { type: "file", multiple: true, tabindex: "-1", "aria-label": "Files to attach",
      onchange: () => { this.#attach([...this.picker.files]); this.picker.value = ""; } });
    const clip = iconButton("clip", "Attach text files", () => this.picker.click());
    return h("form.composer", { onsubmit: (event) => { event.preventDefault(); if (this.#running) this.stop(); else this.send(); } },
      this.chips, h("div.composer-box", {}, clip, this.box, this.go), this.picker, this.notice);
  }

  #typed(event) {
    if (event.key !== "Enter" || event.shiftKey || composes(event)) return;
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
    this.hint = text;
    this.#showState();
    clearTimeout(this.hinted);
    this.hinted = setTimeout(() => { this.hint = ""; this.#showState(); }, 5000);
  }

  #showState() {
    const running = this.#running !== null;
    this.go.setAttribute("aria-label", running ? "Stop" : "Send");
    this.go.replaceChildren(icon(running ? "stop" : "send"));
    this.go.classList.toggle("stopping", running);
    this.go.disabled = !running && connection.state !== "ok";
    this.notice.textContent = this.hint || (connection.state === "ok" ? "" : "You can go on as soon as the server answers.");
  }

  #following() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  #toEnd() {
    this.#follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
