/** The dashboard: what /metrics and /server_info say, every two seconds while it is looked at. */

import { connection, json, text } from "./api.js";
import { bar, lines, share, stacked } from "./charts.js";
import { duration, h, number, percent } from "./dom.js";
import { Metrics } from "./prom.js";
import { sourceName } from "./trace.js";

const PAUSE = 2000;
const KEPT = 90;
/** Readings that the charts show: three minutes. */
const WINDOW = 15;
/** Readings over which rates and quantiles are taken: half a minute. */

const PARTS = { draft: "c2", verify: "c1", mask: "c6", accept: "c3", host: "c5" };

export class Dashboard {
  #timer = 0;
  #shown = false;
  #readings = [];
  #model = null;

  constructor(root) {
    this.note = h("p.hint", { role: "status", text: "Reading /metrics and /server_info …" });
    this.body = h("div.panels");
    root.append(h("div.page", {}, h("div.intro", {}, h("h1", { text: "Dashboard" }), this.note), this.body));
  }

  visible(shown) {
    clearTimeout(this.#timer);
    this.#shown = shown;
    if (shown) this.#loop();
  }

  async #loop() {
    if (!document.hidden) await this.#read();
    if (this.#shown) this.#timer = setTimeout(() => this.#loop(), PAUSE);
  }

  async #read() {
    const { model = null } = connection.named;
    try {
      const [page, info] = await Promise.all([text("metrics"), json(model === null ? "server_info" : `server_info?${new URLSearchParams({ model })}`)]);
      const metrics = new Metrics(page, performance.now() / 1000, model);
      if (model !== this.#model) this.#readings = [];
      this.#model = model;
      const before = this.#readings.at(-1);
      if (before && metrics.value("forerun:steps_total") < before.value("forerun:steps_total")) this.#readings = []; // A new server.
      this.#readings = [...this.#readings.slice(1 - KEPT), metrics];
      this.note.textContent = `${info.model}, ${info.executor.kernels ?? info.executor.device ?? info.config.executor} kernels. Rates are those of the last half minute, as far as this page has been open.`;
      this.#draw(metrics, info);
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  /** Per second, between a reading and the one before it. */
  #rates(name, labels) {
    return this.#readings.slice(1).map((now, place) => rate(now, this.#readings[place], name, labels));
  }

  #draw(now, info) {
    const since = this.#readings.at(-1 - WINDOW) ?? this.#readings[0];
    const open = new Set([...this.body.querySelectorAll("details[open]")].map((one) => one.id));
    const focused = document.activeElement?.id;
    this.body.replaceChildren(this.#tiles(now, since), this.#speed(), this.#depths(now), this.#reasons(now, info), this.#stages(now, since),
      this.#cache(now, info), this.#latencies(now, since), this.#requests(now, info), this.#facts(info));
    for (const one of this.body.querySelectorAll("details")) one.open = open.has(one.id);
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  #tiles(now, since) {
    const idle = now.value("forerun:steps_total") === since.value("forerun:steps_total");
    const gain = (name) => now.value(name) - (idle ? 0 : since.value(name));
    const span = idle ? " since the start" : "";
    const steps = gain("forerun:steps_total");
    const looked = now.value("vllm:prefix_cache_queries_total");
    const drafted = gain("vllm:spec_decode_num_draft_tokens_total");
    const tile = (name, value, hint) => h("div.tile", {}, h("dt", { text: name }), h("dd", {}, amount(value)), h("dd.hint", { text: hint }));
    return h("dl.tiles", {},
      tile("Output", number(rate(now, since, "vllm:generation_tokens_total"), "tokens/s"), `${number(now.value("vllm:generation_tokens_total"))} since the start`),
      tile("Running", number(now.value("vllm:num_requests_running")), `${number(now.value("vllm:num_requests_waiting"))} waiting`),
      tile("Tokens per step", number(now.mean("forerun:acceptance_length", true) || NaN), "per sequence, last 512"),
      tile("Drafts accepted", percent(gain("vllm:spec_decode_num_accepted_tokens_total") / drafted), drafted ? `of ${number(drafted)} draft tokens${span}` : "nothing was drafted"),
      tile("Step", duration(gain("forerun:step_seconds_sum") / steps), `mean of ${number(steps)} steps${span}`),
      tile("Cache in use", percent(now.mean("vllm:kv_cache_usage_perc")), looked ? `${percent(now.value("vllm:prefix_cache_hits_total") / looked)} of prompts found there` : "no prompt yet"));
  }

  #speed() {
    return card("Tokens per second", "wide", lines([
      { name: "Output", color: "c1", values: this.#rates("vllm:generation_tokens_total") },
      { name: "Draft tokens verified", color: "c2", values: this.#rates("vllm:spec_decode_num_draft_tokens_total") },
      { name: "of these accepted", color: "c3", values: this.#rates("vllm:spec_decode_num_accepted_tokens_total") },
    ], { unit: "/s", label: "Tokens per second over the last three minutes" }));
  }

  #depths(now) {
    const verified = now.all("forerun:draft_tokens_total");
    const rows = verified.map(({ labels, value }) => ({ ...labels, value, accepted: now.value("forerun:accepted_draft_tokens_total", { source: labels.source, position: labels.position }) }))
      .sort((one, other) => one.source.localeCompare(other.source) || one.position - other.position);
    const overall = now.all("vllm:spec_decode_num_accepted_tokens_per_pos_total");
    const drafts = now.value("vllm:spec_decode_num_drafts_total");
    return card("Acceptance by source and depth", "", rows.length
      ? table(["Drafted by", "Depth", "Verified", "Accepted"], rows.map((row) => [
        h("span.source", {}, h("span.swatch", { class: `src-${row.source}`, "aria-hidden": "true", text: "ab" }), ` ${sourceName(row.source)}`),
        number(Number(row.position) + 1), number(row.value), share(row.accepted / row.value, `src-${row.source}`)]), "Acceptance by source and depth")
      : h("p.hint", { text: "Nothing was drafted yet." }),
    drafts > 0 && h("p.hint", { text: `Of ${number(drafts)} drafts, ${overall.map(({ value }, depth) => `${percent(value / drafts)} were right to depth ${depth + 1}`).slice(0, 3).join(", ") || "none was right"}.` }));
  }

  #reasons(now, info) {
    const fault = now.all("forerun:speculation_fault").find(({ value }) => value > 0);
    const { speculation } = info;
    const counts = Object.entries(speculation?.reasons ?? {}).sort((one, other) => other[1] - one[1]);
    const most = counts[0]?.[1] || 1;
    const granted = info.stats.load.granted;
    return card("Why so many draft tokens, or none", "",
      fault && h("p.problem", { text: fault.labels.reason }),
      speculation?.speed_over_plain > 0 && h("p", {}, h("strong", { text: speculation.disabled ? "Disabled now. " : "On. " }),
        `Steps were ${number(speculation.speed_over_plain)} times as fast as plain ones would have been, by the engine's own account; disabled ${speculation.times_disabled === 1 ? "once" : `${number(speculation.times_disabled)} times`} so far.`),
      counts.length > 0 && table(["Reason", "Rows"], counts.map(([reason, count]) => [reason, bar(count / most, number(count), "c1")]), "Reasons"),
      granted.length > 0 && h("p.hint", {}, h("strong", { text: "Last step: " }), [...new Set(granted.map(({ nodes, reason }) => `${nodes} allowed (${reason})`))].slice(0, 4).join("; ")),
      !counts.length && !granted.length && !fault && h("p.hint", { text: "No step yet." }));
  }

  #stages(now, since) {
    const steps = now.value("forerun:steps_total") - since.value("forerun:steps_total");
    const recent = steps > 0 ? since : new Metrics("", 0);
    const count = steps > 0 ? steps : now.value("forerun:steps_total");
    const parts = Object.entries(PARTS).map(([name, color]) => ({ name, color,
      value: (now.value("forerun:step_part_seconds_total", { part: name }) - recent.value("forerun:step_part_seconds_total", { part: name })) / (count || 1) }));
    return card("Where a step's time goes", "", count ? stacked(parts, duration, "Time per step") : h("p.hint", { text: "No step yet." }),
      h("p.hint", { text: steps > 0 ? "Mean of the last half minute." : "Mean since the server started: this page has seen no step in the last half minute." }));
  }

  #latencies(now, since) {
    const row = (title, name) => {
      const recent = now.value(`${name}_count`) > since.value(`${name}_count`) ? since : null;
      return [title, ...[0.5, 0.9, 0.99].map((part) => duration(now.quantile(name, part, recent)))];
    };
    return card("Waiting times", "", table(["", "p50", "p90", "p99"], [
      row("First token", "vllm:time_to_first_token_seconds"),
      row("Between two pieces", "vllm:inter_token_latency_seconds"),
      row("Per output token", "vllm:request_time_per_output_token_seconds"),
      row("In the queue", "vllm:request_queue_time_seconds"),
      row("Reading the prompt", "vllm:request_prefill_time_seconds"),
      row("Writing the answer", "vllm:request_decode_time_seconds"),
      row("Whole request", "vllm:e2e_request_latency_seconds"),
    ], "Waiting times"), h("p.hint", { text: "Estimated from histograms; of the last half minute, or since the server started where this page has seen nothing end in it." }));
  }

  #requests(now, info) {
    const running = this.#readings.map((reading) => reading.value("vllm:num_requests_running"));
    const waiting = this.#readings.map((reading) => reading.value("vllm:num_requests_waiting"));
    const ended = now.all("vllm:request_success_total").map(({ labels, value }) => `${number(value)} ${labels.finished_reason}`);
    return card("Requests", "", lines([{ name: "Running", color: "c1", values: running }, { name: "Waiting", color: "c2", values: waiting }], { height: 90, label: "Requests over the last three minutes" }),
      h("p.hint", { text: `Ended: ${ended.join(", ")}. Preempted: ${number(now.value("vllm:num_preemptions_total"))}. Room for ${number(info.config.max_sequences)} at once.` }));
  }

  #cache(now, info) {
    const { pages, pages_held: held, pages_evictable: kept } = info.stats.load;
    const parts = [{ name: "in use", color: "c1", value: held }, { name: "kept for later prompts", color: "c3", value: kept }, { name: "free", color: "c0", value: Math.max(0, pages - held - kept) }];
    const looked = now.value("vllm:prefix_cache_queries_total");
    return card("Key/value cache", "", stacked(parts, (value) => number(value), "Pages"),
      h("p.hint", { text: `${number(pages)} pages of ${number(info.config.page_size)} tokens. Prompt tokens found there: ${number(now.value("vllm:prefix_cache_hits_total"))} of ${number(looked)}.` }));
  }

  #facts(info) {
    const facts = { Version: info.version, Model: info.model, Context: number(info.context, "tokens"), ...flat(info.executor), ...flat(info.drafter), ...flat(info.speculation ?? {}), ...flat(info.costs ?? {}) };
    return h("section.card.wide", { "aria-label": "About the server" }, h("details", { id: "facts" }, h("summary", {}, h("h2", { text: "About the server" })),
      h("dl.facts-list", {}, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))))));
  }
}

function card(title, kind, ...content) {
  return h("section.card", { class: kind, "aria-label": title }, h("h2", { text: title }), content);
}

/** A value with its unit in smaller letters. */
function amount(text) {
  const [value, unit] = text.split("\u202f");
  return unit ? [value, " ", h("small", { text: unit })] : value;
}

function table(heads, rows, label) {
  return h("div.table", { tabindex: "0", role: "group", "aria-label": label, id: `table-${label.replace(/\W+/g, "-")}` }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((text) => (text ? h("th", { scope: "col", text }) : h("td"))))),
    h("tbody", {}, rows.map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, first), rest.map((cell) => h("td", {}, cell)))))));
}

function rate(now, before, name, labels) {
  return before && now.time > before.time ? (now.value(name, labels) - before.value(name, labels)) / (now.time - before.time) : NaN;
}

function flat(facts, prefix = "") {
  const found = {};
  for (const [name, value] of Object.entries(facts)) {
    if (name === "reasons" || value === null) continue;
    if (Array.isArray(value)) found[prefix + name] = value.map((one) => (typeof one === "number" ? number(one) : one)).join(", ");
    else if (typeof value === "object") Object.assign(found, flat(value, `${prefix}${name} `));
    else found[prefix + name] = typeof value === "number" ? number(value) : String(value);
  }
  return found;
}
