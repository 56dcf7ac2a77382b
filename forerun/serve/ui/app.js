/** The page: which view is shown, whether the server is there, light or dark. */

import { connection, key } from "./api.js";
import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { announce, h, icon } from "./dom.js";
import { showKeys } from "./keys.js";
import { Speculate } from "./speculate.js";
import { load, save } from "./store.js";

const by = (id) => document.getElementById(id);
const views = {
  chat: new Chat(by("view-chat")),
  speculate: new Speculate(by("view-speculate")),
  dashboard: new Dashboard(by("view-dashboard")),
};

// --- views -------------------------------------------------------------------------------------

function show() {
  const view = location.hash.slice(1).split("/")[0];
  const name = view in views ? view : "chat";
  for (const other of Object.keys(views)) {
    by(`view-${other}`).hidden = other !== name;
    const link = document.querySelector(`[data-view="${other}"]`);
    if (other === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    views[other].visible?.(other === name);
  }
  document.title = `${document.querySelector(`[data-view="${name}"]`).textContent} · Forerun`;
}

// --- the server --------------------------------------------------------------------------------

const WORDS = {
  connecting: ["Connecting", ""],
  ok: ["Ready", ""],
  loading: ["Loading", "The model is still loading. This page goes on by itself."],
  draining: ["Ending", "The server is shutting down. It takes no new requests."],
  stopped: ["Stopped", "The engine has stopped; the server's log says why. Restart the server."],
  gone: ["Gone", "The server does not answer. Your conversations are safe in this browser; the page goes on as soon as the server is back."],
  locked: ["Key wanted", "This server wants an API key."],
};
let told = "connecting";

function showServer() {
  const { state, model, fault } = connection;
  const [word, sentence] = WORDS[state];
  by("server").dataset.state = state;
  const several = connection.models.length > 1;
  by("server-text").textContent = state === "ok" && model && !several ? model.name : word;
  showModels(several);
  by("server").setAttribute("aria-label", `Server: ${word}${model ? `, model ${model.name}` : ""}. Set the API key.`);
  const banner = by("banner");
  const text = sentence || (fault ? `Speculation is off: ${fault}` : "");
  if (banner.dataset.text !== text) {
    banner.dataset.text = text;
    banner.replaceChildren(text);
    if (state === "locked") banner.append(" ", h("button.small", { type: "button", text: "Enter the key", onclick: askForKey }));
  }
  banner.hidden = !text;
  banner.className = `banner ${state}`;
  if (told === "gone" && state === "ok") announce("The server is back.");
  told = state;
}

const NOTES = { loading: " (loading)", unloaded: " (not loaded)", failed: " (cannot be loaded)" };

/** Which model is asked, where there are several. */
function showModels(several) {
  const box = by("model");
  box.hidden = !several;
  if (!several) return;
  const label = ({ name, state }) => name + (NOTES[state] ?? "");
  const text = connection.models.map(label).join("\n");
  if (box.dataset.text !== text) {
    box.dataset.text = text;
    box.replaceChildren(...connection.models.map((one) => h("option", { value: one.name, text: label(one), title: one.fault ?? null })));
  }
  box.value = connection.model.name;
  box.title = connection.model.fault ?? "";
}

by("model").addEventListener("change", (event) => {
  connection.choose(event.target.value);
  announce(`${event.target.value} answers from now on.`);
});

function askForKey() {
  const box = h("input", { type: "password", autocomplete: "off", id: "key" });
  const keep = h("input", { type: "checkbox", id: "key-keep" });
  box.value = key.get();
  keep.checked = key.kept();
  const dialog = h("dialog", { "aria-labelledby": "key-title" },
    h("form", { method: "dialog", onsubmit: () => { key.set(box.value.trim(), keep.checked); connection.watch(); } },
      h("h2", { id: "key-title", text: "API key" }),
      h("p.hint", { text: "Needed where the server was started with --api-key. It is sent to this server only." }),
      h("div.field", {}, h("label", { for: "key", text: "Key" }), box),
      h("div.field.check", {}, keep, h("label", { for: "key-keep", text: "Remember it in this browser" })),
      h("div.row", {}, h("button.primary", { type: "submit", text: "Use it" }),
        h("button", { type: "button", text: "Cancel", onclick: () => dialog.close() }))));
  dialog.addEventListener("close", () => { dialog.remove(); by("server").focus(); });
  document.body.append(dialog);
  dialog.showModal();
}

// --- light and dark ----------------------------------------------------------------------------

const THEMES = { auto: ["auto", "Colours: as the system"], light: ["sun", "Colours: light"], dark: ["moon", "Colours: dark"] };

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const [drawing, label] = THEMES[theme];
  by("theme").replaceChildren(icon(drawing));
  by("theme").setAttribute("aria-label", label);
  by("theme").title = label;
  save("theme", theme);
}

by("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  showTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});
by("keys").append(icon("keys"));
by("keys").addEventListener("click", showKeys);
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const acts = { "?": showKeys, "/": () => views.chat.box.focus(), n: () => views.chat.begin(), s: () => views.chat.sidebar.search.focus() };
  if (!acts[event.key] || (event.key !== "?" && by("view-chat").hidden)) return;
  event.preventDefault();
  acts[event.key]();
});
by("server").addEventListener("click", askForKey);
connection.addEventListener("change", showServer);
addEventListener("hashchange", () => {
  show();
  if (!by("view-chat").hidden) views.chat.visit();
  by("main").focus();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) connection.watch(); });

showTheme(load("theme", "auto") in THEMES ? load("theme", "auto") : "auto");
showServer();
show();
await views.chat.open();
connection.watch();
document.documentElement.dataset.ready = "yes";
