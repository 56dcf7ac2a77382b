"""A drafter that raises in a running server: answers go on, and every answer gives the reason."""

from prometheus_client.parser import text_string_to_metric_families

from tests.worlds.servers import serving

REASON = "speculation is off: the drafter ngram failed with RuntimeError: the draft caught fire"
BODY = {"max_tokens": 100, "ignore_eos": True}


def health(server):
    reply = server.http.get("/health").json()
    return reply["status"], reply["speculation_fault"]


def fault_metric(server):
    page = server.http.get("/metrics").text
    (family,) = (
        f for f in text_string_to_metric_families(page) if f.name == "forerun:speculation_fault"
    )
    (sample,) = family.samples
    return sample.value, sample.labels["reason"]


def test_answers_go_on_and_say_why_they_are_slower(tmp_path):
    # Within the second answer, for which the n-gram cache would need fewer calls.
    config = {"speculative_ngram_capacity": 0}
    with serving(tmp_path, drafter_calls=110, config=config) as server:
        plain = server.complete(**BODY, speculative={"enabled": False}).json()
        assert health(server) == ("ok", None)
        assert fault_metric(server) == (0, "")
        answers = [server.complete(**BODY) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        for answer in answers:
            assert answer.json()["choices"] == plain["choices"]
        assert health(server) == ("ok", REASON)
        assert fault_metric(server) == (1, REASON)
        info = server.http.get("/server_info").json()
        assert info["drafter"]["fault"] == REASON
        assert info["stats"]["failed_steps"] == 0
        assert server.idle()
        assert server.logged().count(REASON) == 1
