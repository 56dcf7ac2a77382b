/** Reading /metrics: Prometheus' text format, as far as this server writes it. */

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** A page of metrics at one moment; of one model alone, where that is named. */
export class Metrics {
  #samples = new Map();

  constructor(text, time, model = null) {
    this.time = time;
    for (const line of text.split("\n")) {
      const found = LINE.exec(line);
      if (!found) continue;
      const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\(.)/g, "$1")]));
      if (model && (labels.model_name ?? model) !== model) continue;
      const list = this.#samples.get(found[1]) ?? [];
      list.push({ labels, value: Number(found[3]) });
      this.#samples.set(found[1], list);
    }
  }

  /** All samples of a family. */
  all(name) {
    return this.#samples.get(name) ?? [];
  }

  /** The sum of a family's samples with these labels; 0 where there is none. */
  value(name, labels = {}) {
    const wanted = Object.entries(labels);
    return this.all(name).filter((sample) => wanted.every(([key, value]) => sample.labels[key] === value)).reduce((sum, sample) => sum + sample.value, 0);
  }

  /** The mean of a family's samples, one a replica, or of those above zero; 0 where there is none. */
  mean(name, aboveZero = false) {
    const found = this.all(name).filter(({ value }) => !aboveZero || value > 0);
    return found.reduce((sum, { value }) => sum + value, 0) / (found.length || 1);
  }

  /** How many a histogram counts up to each bound, of all replicas together. */
  #buckets(name) {
    const counts = new Map();
    for (const { labels, value } of this.all(`${name}_bucket`)) counts.set(labels.le, (counts.get(labels.le) ?? 0) + value);
    return counts;
  }

  /**
   * A quantile of a histogram, of what it has counted since `before` (or ever, without one). NaN
   * where that is nothing. Between two bounds, values are taken to lie evenly.
   */
  quantile(name, share, before = null) {
    const earlier = before?.#buckets(name);
    const buckets = [...this.#buckets(name)].map(([le, count]) => [Number(le.replace("+Inf", "Infinity")), count - (earlier?.get(le) ?? 0)]);
    const total = buckets.at(-1)?.[1] ?? 0;
    if (total <= 0) return NaN;
    let [low, below] = [0, 0];
    for (const [bound, count] of buckets) {
      if (count >= share * total) return bound === Infinity ? low : low + ((bound - low) * (share * total - below)) / (count - below || 1);
      [low, below] = [bound, count];
    }
    return NaN;
  }
}
