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
  if (target.querySelector(FENCE)) new ResizeObserver(() => stretchBrackets(target)).observe(target.querySelector("math"));
}

const FENCE = "mo[fence=true]";

/** Make brackets as high as what they stand around, where no font of the reader's can. */
function stretchBrackets(target) {
  for (const bracket of target.querySelectorAll(FENCE)) {
    const own = bracket.getBoundingClientRect();
    const row = bracket.parentElement.getBoundingClientRect();
    if (bracket.style.transform || own.height === 0 || row.height < 1.3 * own.height) continue;
    const down = (row.top + row.bottom - own.top - own.bottom) / 2;
    bracket.style.transform = `translateY(${down}px) scaleY(${row.height / own.height})`;
  }
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
