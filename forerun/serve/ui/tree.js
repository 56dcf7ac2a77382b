/** The tree of one step: what was drafted, which path was accepted, what the model said itself. */

import { h, number, percent } from "./dom.js";
import { sourceName } from "./trace.js";

/** A token's text with its blanks to be seen. */
export const shownToken = (text) => text.replace(/^ +| +$| {2,}/g, (blanks) => "·".repeat(blanks.length)).replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";

/** What there is to say of a step, as an element. `before` is the text of the token above its root. */
export function stepView(step, before) {
  const own = step.tokens[step.accepted.length];
  const facts = [`${number(step.ms)} ms`, `${step.nodes.length + step.left_out} drafted of ${step.allowed} allowed`, `${step.accepted.length} accepted`];
  return h("div.step", {},
    h("h3", { text: `Step ${step.step + 1}` }),
    h("p.facts", { text: facts.join(" · ") }),
    h("div.tree-frame", { tabindex: "0", role: "region", "aria-label": "Tree of the step" },
      h("ul.tree", {}, h("li", {}, h("span.node.root", { text: shownToken(before) }), h("span.visually-hidden", { text: ", the last known token" }), branch(step, -1, own)))),
    step.left_out > 0 && h("p.hint", { text: `${step.left_out} more draft tokens are not shown.` }),
    step.reason && h("p.reason", {}, h("strong", { text: "Why so many: " }), step.reason));
}

function branch(step, parent, own) {
  const last = step.accepted.at(-1) ?? -1;
  const kept = new Set(step.accepted);
  const items = [];
  step.nodes.forEach((node, place) => {
    if (node.parent !== parent) return;
    items.push(h("li", { class: kept.has(place) ? "kept" : "rejected" }, drawn(node, kept.has(place)), branch(step, place, own)));
  });
  if (parent === last && own) {
    items.unshift(h("li.kept", {}, h("span.node.own", {}, h("span.piece", { text: shownToken(own.text) })),
      h("span.visually-hidden", { text: ", the model's own choice" })));
  }
  return items.length ? h("ul", {}, items) : null;
}

function drawn(node, kept) {
  const score = node.score > 0 ? h("small", { text: percent(node.score), title: "The drafter's estimate that the path to here is right" }) : null;
  return [
    h("span.node", { class: `src-${node.source}`, title: `${sourceName(node.source)}: ${kept ? "accepted" : "rejected"}` },
      h("span.mark", { "aria-hidden": "true", text: kept ? "✓" : "✕" }), h("span.piece", { text: shownToken(node.text) }), score),
    h("span.visually-hidden", { text: `, ${kept ? "accepted" : "rejected"}, from ${sourceName(node.source)}` }),
  ];
}
