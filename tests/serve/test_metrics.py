"""/metrics says what the engine's snapshot says, in Prometheus' own reading."""

from prometheus_client.parser import text_string_to_metric_families

from forerun.build.engine import load
from forerun.client.completion import complete, make_request
from forerun.config import EngineConfig
from forerun.serve.metrics import Meter


def samples(page):
    """{(name, labels other than the model's): value}."""
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "toy"
            assert labels.pop("engine") == "0"
            found[sample.name, *labels.values()] = sample.value
    return found


def test_the_page_shows_the_snapshot():
    loaded = load(EngineConfig(model="toy"))
    try:
        meter = Meter("toy", loaded.engine.stats, lambda: loaded.drafter.fault)
        before = samples(meter.page())
        assert before["vllm:generation_tokens_total",] == 0
        assert before["forerun:speculation_fault", ""] == 0
        prompts = [loaded.tokenizer.encode(text) for text in ("Hi", "Hello")]
        complete(loaded.engine, [make_request(p, max_tokens=90) for p in prompts])
        meter.gap(0.02)
        meter.per_token(0.004)
        stats, after = loaded.engine.stats(), samples(meter.page())
    finally:
        loaded.close()
    assert after["vllm:prompt_tokens_total",] == 7
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
