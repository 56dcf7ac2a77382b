"""One page for all replicas: what Prometheus' parser, llm-d and the Gateway API extension read."""

from prometheus_client.parser import text_string_to_metric_families

from forerun.engine.metrics import EngineMetrics
from forerun.engine.stats import Load, snapshot
from forerun.ray.metrics import merged
from forerun.serve.observe.metrics import Metrics

READ_BY_ROUTERS = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)


def page(gap):
    metrics = Metrics()
    stats = snapshot(EngineMetrics(), Load(0, 0, 64, 0, 0))
    meter = metrics.add("m", lambda: stats, lambda: None, {"block_size": 16, "num_gpu_blocks": 64})
    meter.gap.add(gap)
    return metrics.page().decode()


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_family_is_there_once_with_every_replicas_samples():
    pages = {"b": page(0.25), "a": page(0.5), "c": page(0.75)}
    merged_, one = families(merged(pages)), families(pages["a"])
    assert merged_.keys() == one.keys()
    for name, family in merged_.items():
        assert family.type == one[name].type and family.documentation == one[name].documentation
        assert len(family.samples) == 3 * len(one[name].samples), name
    gaps = {
        (sample.labels["engine"], sample.labels["replica"]): sample.value
        for sample in merged_["vllm:inter_token_latency_seconds"].samples
        if sample.name.endswith("_sum")
    }
    assert gaps == {("0", "a"): 0.5, ("1", "b"): 0.25, ("2", "c"): 0.75}


def test_names_that_routers_of_kubernetes_read():
    named = families(merged({"a": page(1.0), "b": page(1.0)}))
    for name in READ_BY_ROUTERS:
        assert [sample.labels["engine"] for sample in named[name].samples] == ["0", "1"]
    assert {sample.labels["block_size"] for sample in named[READ_BY_ROUTERS[-1]].samples} == {"16"}


def test_what_has_no_label_gets_its_replicas():
    samples = families(merged({"a": page(1.0), "b": page(1.0)}))["process_open_fds"].samples
    assert [sample.labels for sample in samples] == [{"replica": "a"}, {"replica": "b"}]
