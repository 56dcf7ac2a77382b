/** The sheet of keys. */

import { h } from "./dom.js";

const KEYS = [
  ["Enter", "send the message"],
  ["Shift + Enter", "a new line"],
  ["Esc", "stop the answer; close what is open"],
  ["/", "write a message"],
  ["n", "a new conversation"],
  ["s", "search conversations"],
  ["Tab, arrows", "walk through messages; in “See it speculate” from token to token"],
  ["?", "this sheet"],
];

/** Show which keys do what. */
export function showKeys() {
  const before = document.activeElement;
  const dialog = h("dialog", { "aria-labelledby": "keys-title" },
    h("form", { method: "dialog" },
      h("h2", { id: "keys-title", text: "Keys" }),
      h("dl.keys", {}, KEYS.map(([key, does]) => h("div", {}, h("dt", {}, h("kbd", { text: key })), h("dd", { text: does })))),
      h("div.row", {}, h("button.primary", { type: "submit", text: "Close" }))));
  dialog.addEventListener("close", () => { dialog.remove(); before?.focus?.(); });
  document.body.append(dialog);
  dialog.showModal();
}
