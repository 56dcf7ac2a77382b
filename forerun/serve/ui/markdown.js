/**
 * Markdown to elements. What a model writes is not trusted: HTML in it is shown as text, images
 * become links, and all that is left goes through the sanitiser.
 */

import { marked } from "./vendor/marked.js";
import "./vendor/purify.js";
import { copy, h, icon } from "./dom.js";
import { colourCode, setFormula } from "./enrich.js";

const HARMLESS = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i;
const escape = (text) => text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);

/** A formula between marks, as a token of marked. Between dollars only where no digit or blank makes them prices. */
const formula = (name, level, marks) => ({
  name,
  level,
  start: (text) => {
    const places = marks.map(([open]) => text.indexOf(open)).filter((place) => place >= 0);
    return places.length ? Math.min(...places) : undefined;
  },
  tokenizer(text) {
    for (const [, pattern] of marks) {
      const found = pattern.exec(text);
      if (found) return { type: name, raw: found[0], text: found[1].trim() };
    }
    return undefined;
  },
  renderer: ({ text }) => `<span class="${name}">${escape(text)}</span>`,
});

/** A part that is folded away, as GitHub has it. */
const details = {
  name: "details",
  level: "block",
  start: (text) => { const place = text.search(/<details[ >]/i); return place < 0 ? undefined : place; },
  tokenizer(text) {
    const found = /^<details(?: open)?>\s*(?:<summary>([^<]*)<\/summary>)?/i.exec(text);
    const end = found ? text.toLowerCase().indexOf("</details>", found[0].length) : -1;
    if (end < 0) return undefined;
    const tokens = this.lexer.blockTokens(text.slice(found[0].length, end).trim(), []);
    return { type: "details", raw: text.slice(0, end + "</details>".length), summary: found[1]?.trim() || "Details", tokens };
  },
  renderer(token) { return `<details><summary>${escape(token.summary)}</summary>${this.parser.parse(token.tokens)}</details>`; },
};

/** A footnote's text, and the sign that leads to it. */
const footnote = {
  name: "footnote",
  level: "block",
  start: (text) => { const place = text.indexOf("[^"); return place < 0 ? undefined : place; },
  tokenizer(text) {
    const found = /^\[\^([^\]\s]+)\]:[ \t]+([^\n]*)(?:\n|$)/.exec(text);
    if (!found) return undefined;
    return { type: "footnote", raw: found[0], sign: found[1], tokens: this.lexer.inlineTokens(found[2], []) };
  },
  renderer(token) { return `<p><sup>${escape(token.sign)}</sup> ${this.parser.parseInline(token.tokens)}</p>`; },
};
const footnoteSign = {
  name: "footnote-sign",
  level: "inline",
  start: (text) => { const place = text.indexOf("[^"); return place < 0 ? undefined : place; },
  tokenizer(text) {
    const found = /^\[\^([^\]\s]+)\]/.exec(text);
    return found ? { type: "footnote-sign", raw: found[0], text: found[1] } : undefined;
  },
  renderer: ({ text }) => `<sup>${escape(text)}</sup>`,
};

marked.use({
  gfm: true,
  extensions: [
    details, footnote, footnoteSign,
    formula("formula-block", "block", [["$$", /^\$\$([^$]+)\$\$(?:\n|$)/], ["\\[", /^\\\[([\s\S]+?)\\\](?:\n|$)/]]),
    formula("formula-line", "inline", [["$$", /^\$\$([^$]+)\$\$/], ["$", /^\$(?![\s\d$])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)/],
      ["\\(", /^\\\(([\s\S]+?)\\\)/], ["\\[", /^\\\[([\s\S]+?)\\\]/]]),
  ],
  renderer: {
    html: ({ text }) => (HARMLESS.test(text.trim()) ? text : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}">image: ${escape(text || href)}</a>`,
  },
});

const RULES = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "input",
    "details", "kbd", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "title", "start", "align", "type", "checked", "disabled", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "checked", "disabled", "start", "type"], // Values of others must be addresses.
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const CLASSES = /^(?:language-[\w+#.-]+|formula-(?:line|block)|hljs-[\w-]+(?: [\w-]+_+)*)$/;
/** Classes that stay: a fence's language, our formulas, what highlight.js writes. */

const COLOURED = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true };

const purify = globalThis.DOMPurify;
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.tagName === "INPUT" && node.getAttribute("type") !== "checkbox") node.remove();
  if (node.hasAttribute?.("class") && !CLASSES.test(node.className)) node.removeAttribute("class");
});

/** Shows a growing text in `target`: only the blocks that changed are made anew. */
export class MarkdownView {
  #blocks = [];

  constructor(target) {
    this.target = target;
  }

  show(text) {
    const tokens = marked.lexer(text);
    const blocks = tokens.filter((token) => token.type !== "space" && token.type !== "def");
    blocks.forEach((token, place) => {
      const before = this.#blocks[place];
      if (before?.raw === token.raw && before.type === token.type) return;
      const element = h("div.block", { dir: "auto" }, rendered(token, tokens.links));
      if (before) before.element.replaceWith(element);
      else this.target.append(element);
      this.#blocks[place] = { raw: token.raw, type: token.type, element };
    });
    for (const { element } of this.#blocks.splice(blocks.length)) element.remove();
  }
}

function rendered(token, links) {
  const tokens = [token];
  tokens.links = links;
  const fragment = purify.sanitize(marked.parser(tokens), RULES);
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div.table", { tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const list of fragment.querySelectorAll("ol")) list.style.setProperty("--digits", String(list.start + list.children.length - 1).length);
  for (const span of fragment.querySelectorAll(".formula-line, .formula-block")) {
    setFormula(span, span.textContent, span.className === "formula-block").catch(() => {});
  }
  for (const box of fragment.querySelectorAll("input")) box.setAttribute("aria-label", box.checked ? "done" : "to do");
  return fragment;
}

function codeBlock(pre) {
  const language = pre.firstElementChild?.className.replace("language-", "") || "text";
  const button = h("button.small", { type: "button", "aria-label": "Copy the code", onclick: () => copy(button, pre.textContent) }, icon("copy"));
  const frame = h("div.code", {}, h("div.code-head", {}, h("span", { text: language }), button));
  pre.setAttribute("tabindex", "0");
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", `Code, ${language}`);
  const shown = pre.cloneNode(true);
  frame.append(shown);
  colourCode(shown.firstElementChild ?? shown, language, (html) => purify.sanitize(html, COLOURED)).catch(() => {});
  return frame;
}
