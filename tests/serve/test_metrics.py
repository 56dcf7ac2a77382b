"""/metrics says what the engine's snapshot says, in Prometheus' own reading."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun.build.engine import load
from forerun.client.completion import complete, make_request
from forerun.options.config import EngineConfig
from forerun.serve.answers.service import cache_facts
from forerun.serve.observe.metrics import Metrics


def samples(page):
    """{(name, labels other than the model's): value}."""
    result = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith("process_"):
                result[sample.name,] = sample.value
                continue
            assert labels.pop("model_name") == "toy"
            assert labels.pop("engine") == "0"
            result[sample.name, *labels.values()] = sample.value
    return result


def test_sglangs_names_and_the_cache():
    with closing(load(EngineConfig(model="toy"))) as loaded:
        stats = loaded.engine.stats
        both, alone = Metrics(sglang=True), Metrics()
        for metrics in (both, alone):
            metrics.add("toy", stats, lambda: None, cache_facts(loaded.config))
        complete(loaded.engine, [make_request(loaded.tokenizer.encode("Hi"), max_tokens=90)])
        read, plain = samples(both.page()), alone.page()
        blocks = loaded.config.kv_tokens // loaded.config.page_size
    assert read["sglang:generation_tokens_total",] == read["vllm:generation_tokens_total",] == 90
    assert read["sglang:spec_accept_length",] > 1
    assert read["sglang:num_requests_total",] == 1
    (info,) = [key for key in read if key[0] == "vllm:cache_config_info"]
    assert {str(blocks), str(loaded.config.page_size)} < set(info) and b"sglang:" not in plain


def test_the_page_shows_the_snapshot():
    with closing(load(EngineConfig(model="toy"))) as loaded:
        metrics = Metrics()
        meter = metrics.add("toy", loaded.engine.stats, lambda: loaded.engine.fault, {})
        before = samples(metrics.page())
        assert before["vllm:generation_tokens_total",] == 0
        assert before["forerun:speculation_fault", ""] == 0
        prompts = [loaded.tokenizer.encode(text) for text in ("Hi", "Hello")]
        complete(loaded.engine, [make_request(p, max_tokens=90) for p in prompts])
        meter.gap.add(0.02)
        meter.per_token.add(0.004)
        stats, after = loaded.engine.stats(), samples(metrics.page())
    assert after["vllm:prompt_tokens_total",] == 7
    assert after["process_resident_memory_bytes",] > 1 << 20
    assert after["vllm:generation_tokens_total",] == 180
    assert after["vllm:request_success_total", "length"] == 2
    assert after["vllm:request_success_total", "abort"] == 0
    assert after["vllm:num_requests_running",] == after["vllm:num_requests_waiting",] == 0
    assert after["vllm:kv_cache_usage_perc",] == 0
    assert after["vllm:spec_decode_num_drafts_total",] == stats.drafts > 0
    assert after["vllm:spec_decode_num_draft_tokens_total",] == stats.draft_tokens > 0
    accepted = after["vllm:spec_decode_num_accepted_tokens_total",]
    per_position = [
        value
        for (name, *_), value in after.items()
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    ]
    assert accepted == stats.accepted == sum(per_position) > 0
    assert per_position == sorted(per_position, reverse=True)
    assert after["vllm:time_to_first_token_seconds_count",] == 2
    assert after["vllm:e2e_request_latency_seconds_count",] == 2
    assert after["vllm:time_to_first_token_seconds_bucket", "+Inf"] == 2
    assert after["vllm:inter_token_latency_seconds_sum",] == 0.02
    assert after["vllm:inter_token_latency_seconds_bucket", "0.01"] == 0
    assert after["vllm:inter_token_latency_seconds_bucket", "0.025"] == 1
    assert after["vllm:request_time_per_output_token_seconds_count",] == 1
    by_source = {key: value for key, value in after.items() if key[0].startswith("forerun:acc")}
    assert sum(value for key, value in by_source.items() if len(key) == 3) == accepted
    for count in stats.by_source:
        place = (str(count.depth - 1), count.source)
        assert after["forerun:draft_tokens_total", *place] == count.verified >= count.accepted
        assert after["forerun:accepted_draft_tokens_total", *place] == count.accepted


def test_where_the_time_and_the_tokens_of_requests_went():
    """Queue, prefill and decode of a sequence are all of its time, and nothing is counted twice."""
    with closing(load(EngineConfig(model="toy"))) as loaded:
        metrics = Metrics()
        metrics.add("toy", loaded.engine.stats, lambda: loaded.engine.fault, {})
        prompts = [loaded.tokenizer.encode("x" * length) for length in (3, 30)]
        requests = [make_request(p, max_tokens=20, n=2, temperature=1.0, seed=3) for p in prompts]
        complete(loaded.engine, requests)
        read = samples(metrics.page())
    names = ("queue", "prefill", "decode", "inference")
    for name in names:
        assert read[f"vllm:request_{name}_time_seconds_count",] == 4
    seconds = {name: read[f"vllm:request_{name}_time_seconds_sum",] for name in names}
    whole = read["vllm:e2e_request_latency_seconds_sum",]
    assert seconds["inference"] == pytest.approx(seconds["prefill"] + seconds["decode"])
    assert whole == pytest.approx(seconds["queue"] + seconds["inference"])
    assert read["vllm:request_prompt_tokens_sum",] == 2 * (3 + 30)
    assert read["vllm:request_prompt_tokens_bucket", "5.0"] == 2
    assert read["vllm:request_generation_tokens_sum",] == read["vllm:generation_tokens_total",]
    assert read["vllm:request_max_num_generation_tokens_count",] == 2, "per request, not choice"
    assert read["vllm:request_params_max_tokens_sum",] == 40
    assert read["vllm:request_params_n_sum",] == 4


STOCK = [
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count",
    "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total", "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
]  # fmt: skip
"""What the dashboard that vLLM ships asks for (examples/observability/prometheus_grafana)."""


def test_both_dashboards_find_what_they_ask_for():
    with closing(load(EngineConfig(model="toy"))) as loaded:
        metrics = Metrics()
        metrics.add("toy", loaded.engine.stats, lambda: loaded.engine.fault, {})
        complete(loaded.engine, [make_request(loaded.tokenizer.encode("Hi"), max_tokens=90)])
        exported = samples(metrics.page())
    there = {name for name, *_ in exported}
    file = Path(__file__).parents[2] / "docs" / "reference" / "grafana.json"
    board = json.loads(file.read_text())
    queried = set(STOCK)
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"(?:vllm|forerun):\w+", target["expr"])
            assert names and 'model_name="$model_name"' in target["expr"]
            queried |= set(names)
    assert queried <= there
