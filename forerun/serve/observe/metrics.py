"""/metrics: the engine's counters for Prometheus, under vLLM's names if it has them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from forerun.engine.metrics import SECONDS, LiveHistogram
from forerun.engine.request import Finish
from forerun.engine.stats import Histogram as Counts
from forerun.engine.stats import Stats

LABELS = ["model_name", "engine"]
"""Labels of every metric family, as in vLLM, whose dashboards select by them; there is one engine,
number 0.
"""

ENGINE = "0"


def _stored(name: str) -> Callable[[Stats], float]:
    """Return a function that reads a counter of the page store; 0 without a store."""
    return lambda stats: getattr(stats.store, name, 0)


_COUNTERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens of ended sequences.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.output_tokens),
    ("vllm:num_preemptions", "Sequences that were preempted.", lambda s: s.preemptions),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prompt_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found in pages.", lambda s: s.cached_tokens),
    ("vllm:spec_decode_num_drafts", "Drafts verified.", lambda s: s.drafts),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", lambda s: s.draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda s: s.accepted),
    ("forerun:steps", "Steps of the engine.", lambda s: s.steps),
    ("forerun:failed_steps", "Steps that raised an error.", lambda s: s.failed_steps),
    (
        "forerun:carried_steps",
        "Steps begun before the previous outcome was read.",
        lambda s: s.carried,
    ),
    ("forerun:kv_store_hits", "Prompts that got pages from disk.", _stored("hits")),
    ("forerun:kv_store_tokens", "Prompt tokens of pages from disk.", _stored("tokens")),
    ("forerun:kv_store_read_bytes", "Bytes read from disk.", _stored("read_bytes")),
    ("forerun:kv_store_written_bytes", "Bytes written to disk.", _stored("written_bytes")),
    ("forerun:kv_store_dropped", "Pages that were not written.", _stored("dropped")),
)
_GAUGES: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("vllm:num_requests_running", "Sequences in a slot.", lambda s: s.load.running),
    ("vllm:num_requests_waiting", "Sequences that wait.", lambda s: s.load.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of pages that sequences hold, 0 to 1.",
        lambda s: s.load.pages_held / s.load.pages,
    ),
    (
        "forerun:kv_pages_kept",
        "Pages that only the prefix index keeps.",
        lambda s: s.load.pages_evictable,
    ),
    (
        "forerun:acceptance_length",
        "Tokens per sequence and step, over the last steps.",
        lambda s: s.acceptance_length,
    ),
    ("forerun:kv_store_bytes", "Bytes of the folder, all models.", _stored("size")),
    ("forerun:kv_store_pages", "Pages of this model on disk.", _stored("pages")),
    (
        "forerun:kv_store_saved_seconds",
        "What reading those prompt tokens would have taken, less the time of the disk.",
        _stored("seconds_saved"),
    ),
)
_SGLANG_COUNTERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("sglang:prompt_tokens", "Prompt tokens of ended sequences.", lambda s: s.prompt_tokens),
    ("sglang:generation_tokens", "Tokens generated.", lambda s: s.output_tokens),
    ("sglang:cached_tokens", "Prompt tokens found in pages.", lambda s: s.cached_tokens),
    ("sglang:num_requests", "Ended sequences.", lambda s: sum(s.finished.values())),
    ("sglang:num_aborted_requests", "Aborted sequences.",
     lambda s: s.finished.get(Finish.ABORT, 0)),
)  # fmt: skip
_SGLANG_GAUGES: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("sglang:num_running_reqs", "Sequences in a slot.", lambda s: s.load.running),
    ("sglang:num_queue_reqs", "Sequences that wait.", lambda s: s.load.waiting),
    ("sglang:token_usage", "Share of pages that sequences hold, 0 to 1.",
     lambda s: s.load.pages_held / s.load.pages),
    ("sglang:cache_hit_rate", "Prompt tokens found in pages, 0 to 1.",
     lambda s: s.cached_tokens / s.prompt_tokens if s.prompt_tokens else 0.0),
    ("sglang:spec_accept_length", "Tokens per verified draft.",
     lambda s: 1 + s.accepted / s.drafts if s.drafts else 0.0),
    ("sglang:spec_accept_rate", "Accepted draft tokens, 0 to 1.",
     lambda s: s.accepted / s.draft_tokens if s.draft_tokens else 0.0),
)  # fmt: skip
_SGLANG_HISTOGRAMS: tuple[tuple[str, str, Callable[[Stats], Counts]], ...] = (
    ("sglang:time_to_first_token_seconds", "From submission to the first token.",
     lambda s: s.first_token),
    ("sglang:e2e_request_latency_seconds", "From submission to the end.", lambda s: s.duration),
    ("sglang:queue_time_seconds", "From submission to a free slot.", lambda s: s.queued),
)  # fmt: skip
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Stats], Counts]], ...] = (
    (
        "vllm:time_to_first_token_seconds",
        "From submission to the first token.",
        lambda s: s.first_token,
    ),
    ("vllm:e2e_request_latency_seconds", "From submission to the end.", lambda s: s.duration),
    ("vllm:request_queue_time_seconds", "From submission to a free slot.", lambda s: s.queued),
    (
        "vllm:request_prefill_time_seconds",
        "From the slot to the first token.",
        lambda s: s.prefill,
    ),
    ("vllm:request_decode_time_seconds", "From the first token to the end.", lambda s: s.decode),
    ("vllm:request_inference_time_seconds", "From the slot to the end.", lambda s: s.inference),
    ("vllm:request_prompt_tokens", "Prompt tokens of a sequence.", lambda s: s.prompt_length),
    ("vllm:request_generation_tokens", "Tokens of an answer.", lambda s: s.output_length),
    (
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest answer of a request.",
        lambda s: s.longest_output,
    ),
    ("vllm:request_params_max_tokens", "max_tokens as requested.", lambda s: s.max_tokens),
    ("vllm:request_params_n", "n as requested.", lambda s: s.choices),
    ("forerun:step_seconds", "Time of a step.", lambda s: s.step_seconds),
    ("forerun:step_nodes", "Tokens and draft tokens of a step.", lambda s: s.step_nodes),
)


_LABELLED: tuple[
    tuple[str, str, tuple[str, ...], Callable[[Stats], Iterable[tuple[Any, ...]]]], ...
] = (
    (
        "vllm:request_success",
        "Ended sequences.",
        ("finished_reason",),
        lambda s: s.finished.items(),
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts whose draft token at this depth (from 0) was accepted.",
        ("position",),
        lambda s: enumerate(s.accepted_at),
    ),
    (
        "forerun:draft_tokens",
        "Draft tokens verified, by source and depth (from 0).",
        ("source", "position"),
        lambda s: ((count.source, count.depth - 1, count.verified) for count in s.by_source),
    ),
    (
        "forerun:accepted_draft_tokens",
        "Draft tokens accepted, by source and depth (from 0).",
        ("source", "position"),
        lambda s: ((count.source, count.depth - 1, count.accepted) for count in s.by_source),
    ),
    (
        "forerun:adapter_steps",
        "Steps that emitted tokens, by LoRA adapter.",
        ("adapter",),
        lambda s: ((count.name, count.steps) for count in s.by_adapter),
    ),
    (
        "forerun:adapter_draft_tokens",
        "Draft tokens verified, by LoRA adapter.",
        ("adapter",),
        lambda s: ((count.name, count.verified) for count in s.by_adapter),
    ),
    (
        "forerun:adapter_accepted_draft_tokens",
        "Draft tokens accepted, by LoRA adapter.",
        ("adapter",),
        lambda s: ((count.name, count.accepted) for count in s.by_adapter),
    ),
    ("forerun:step_part_seconds", "Time of steps.", ("part",), lambda s: s.seconds.items()),
    (
        "forerun:kv_store_misses",
        "Prompts that got no pages from disk, or not all.",
        ("reason",),
        lambda s: s.store.misses.items() if s.store else (),
    ),
)
"""Counters with labels of their own: (family, description, label names, stats -> (label values,
count)).
"""


@dataclass(frozen=True, slots=True)
class Meter:
    """The metrics of one engine, which serves the model `name`.

    stats      returns its counters
    fault      returns why speculation is off although it was requested; None = it is on
    cache      facts about the key/value cache, by name
    gap        seconds between two deltas of one sequence
    per_token  seconds per token of an ended request, after its first delta
    """

    name: str
    stats: Callable[[], Stats]
    fault: Callable[[], str | None]
    cache: Mapping[str, Any]
    gap: LiveHistogram = field(default_factory=lambda: LiveHistogram(SECONDS))
    per_token: LiveHistogram = field(default_factory=lambda: LiveHistogram(SECONDS))


_METERED: tuple[tuple[str, str, Callable[[Meter], LiveHistogram]], ...] = (
    (
        "vllm:inter_token_latency_seconds",
        "Between two outputs of one sequence; a step may bring several tokens.",
        lambda meter: meter.gap,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Per request, time per token after the first output.",
        lambda meter: meter.per_token,
    ),
)


class Metrics:
    """The contents of /metrics: the process, and every engine that was `add`ed.

    sglang  also under SGLang's names
    """

    def __init__(self, sglang: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._engines = EngineCollector(sglang)
        self._registry.register(self._engines)
        ProcessCollector(registry=self._registry)

    def add(
        self,
        name: str,
        stats: Callable[[], Stats],
        fault: Callable[[], str | None],
        cache: Mapping[str, Any],
    ) -> Meter:
        """Include an engine from now on, under `name`, and return its meter. Parameters as in
        Meter.
        """
        meter = Meter(name, stats, fault, cache)
        self._engines.meters.append(meter)
        return meter

    def remove(self, meter: Meter) -> None:
        """Remove an engine: its counters begin at zero if it is added again."""
        self._engines.meters.remove(meter)

    def page(self) -> bytes:
        """Return all metrics in the text format that Prometheus reads, UTF-8."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """Takes one snapshot of every engine per scrape, so that its numbers are consistent."""

    def __init__(self, sglang: bool) -> None:
        self.meters: list[Meter] = []
        self._counters = (*_COUNTERS, *(_SGLANG_COUNTERS if sglang else ()))
        self._gauges = (*_GAUGES, *(_SGLANG_GAUGES if sglang else ()))
        self._histograms = (*_HISTOGRAMS, *(_SGLANG_HISTOGRAMS if sglang else ()))

    def collect(self) -> Iterable[Metric]:
        """Yield one metric family per counter, gauge and histogram, with a sample per engine from
        its last snapshot.
        """
        engines = [([meter.name, ENGINE], meter.stats()) for meter in self.meters]
        kinds = (CounterMetricFamily, self._counters), (GaugeMetricFamily, self._gauges)
        for kind, families in kinds:
            for name, text, value in families:
                numbers = kind(name, text, labels=LABELS)
                for labels, stats in engines:
                    numbers.add_metric(labels, value(stats))
                yield numbers
        yield self._faults()
        yield self._caches()
        for name, text, counts in self._histograms:
            yield _histogram(name, text, [(labels, counts(stats)) for labels, stats in engines])
        for name, text, times in _METERED:
            rows = [([meter.name, ENGINE], times(meter)) for meter in self.meters]
            yield _histogram(name, text, rows)
        for name, text, names, values in _LABELLED:
            family = CounterMetricFamily(name, text, labels=[*LABELS, *names])
            for labels, stats in engines:
                for *keys, count in values(stats):
                    family.add_metric([*labels, *map(str, keys)], count)
            yield family

    def _faults(self) -> Metric:
        text = "1 if speculation is off although it was requested, and why."
        family = GaugeMetricFamily("forerun:speculation_fault", text, labels=[*LABELS, "reason"])
        for meter in self.meters:
            fault = meter.fault()
            family.add_metric([meter.name, ENGINE, fault or ""], float(fault is not None))
        return family

    def _caches(self) -> Metric:
        """Return vLLM's gauge of value 1 whose labels are facts about the cache."""
        names = dict.fromkeys(name for meter in self.meters for name in meter.cache)
        text = "The key/value cache, in labels."
        family = GaugeMetricFamily("vllm:cache_config_info", text, labels=[*LABELS, *names])
        for meter in self.meters:
            values = (str(meter.cache.get(name, "")) for name in names)
            family.add_metric([meter.name, ENGINE, *values], 1.0)
        return family


def _histogram(
    name: str, text: str, engines: Sequence[tuple[list[str], Counts | LiveHistogram]]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=LABELS)
    for labels, counts in engines:
        bounds = [*(str(float(bound)) for bound in counts.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts.counts), strict=True))
        family.add_metric(labels, buckets, counts.total)
    return family
