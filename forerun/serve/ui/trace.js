/** Traces of steps (docs/reference/trace.md): tokens with their sources, counts, comparisons. */

export const SOURCES = {
  target: ["The model itself", "decided without a draft"],
  ngram: ["n-gram", "repeats something earlier in the text"],
  table: ["n-gram table", "what the model usually says"],
  prediction: ["Prediction", "what the client expects"],
  draft_model: ["Draft model", "a small network's proposal"],
  grammar: ["Grammar, forced", "alone can follow there"],
  token_prior: ["Grammar, likely", "usually follows there"],
  unknown: ["Other draft", "the drafter does not say"],
};

/** A name for a source, also for one that this page does not know yet. */
export const sourceName = (source) => SOURCES[source]?.[0] ?? source;

/** Joins tokens to text: a character may be spread over several. */
export class Pieces {
  #decoder = new TextDecoder();
  #encoder = new TextEncoder();

  next(token) {
    return this.#decoder.decode(token.bytes ? new Uint8Array(token.bytes) : this.#encoder.encode(token.text), { stream: true });
  }
}

/** The tokens that a step decided: {text, source, depth, node}; depth 0 is the target's own. */
export function tokensOf(step, pieces) {
  return step.tokens.map((token, place) => {
    const node = step.accepted[place];
    const drafted = node !== undefined;
    return { id: token.id, text: pieces.next(token), step, place, source: drafted ? step.nodes[node].source : "target", depth: drafted ? place + 1 : 0 };
  });
}

/** Counts over the steps of one answer. */
export class Counts {
  steps = 0;
  tokens = 0;
  drafted = 0;
  accepted = 0;
  ms = 0;
  bySource = new Map();

  add(step) {
    this.steps += 1;
    this.tokens += step.tokens.length;
    this.drafted += step.nodes.length + step.left_out;
    this.accepted += step.accepted.length;
    this.ms += step.ms;
    const kept = new Set(step.accepted);
    step.nodes.forEach((node, place) => {
      const count = this.#of(node.source);
      count.drafted += 1;
      count.accepted += kept.has(place) ? 1 : 0;
    });
    this.#of("target").accepted += step.tokens.length - Math.min(step.tokens.length, step.accepted.length);
  }

  #of(source) {
    if (!this.bySource.has(source)) this.bySource.set(source, { drafted: 0, accepted: 0 });
    return this.bySource.get(source);
  }
}

/** Where two lists of tokens part, or -1 where they are the same. */
export function parting(one, other) {
  const shorter = Math.min(one.length, other.length);
  for (let place = 0; place < shorter; place++) if (one[place].id !== other[place].id) return place;
  return one.length === other.length ? -1 : shorter;
}
