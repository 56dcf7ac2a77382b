/** Formulas and coloured code: added to elements that already show the plain text, once the code that can is loaded. */

let katex = null;
let highlighter = null;

const LONGEST = 50_000;
/** Characters of code that are coloured, and of a formula that is set: beyond that the plain text stays. */

/** Set a formula in `target`, which shows its source until then. */
export async function setFormula(target, source, display) {
  if (source.length > LONGEST) return;
  katex ??= import("./vendor/katex.js").then(() => globalThis.katex);
  const { render } = await katex;
  render(source, target, { displayMode: display, output: "mathml", throwOnError: false, trust: false, maxExpand: 1000, maxSize: 20 });
  target.classList.add("set");
}

/** Colour the code in `target`; a language that is not known stays plain. `clean`: HTML text to a safe fragment. */
export async function colourCode(target, language, clean) {
  const text = target.textContent;
  if (text.length > LONGEST) return;
  highlighter ??= import("./vendor/highlight.js");
  const { default: hljs } = await highlighter;
  if (!hljs.getLanguage(language) || target.textContent !== text) return;
  target.replaceChildren(clean(hljs.highlight(text, { language, ignoreIllegals: true }).value));
}
