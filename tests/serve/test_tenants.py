"""Keys and salts: what is learned of one tenant's answers drafts for no other."""

import pytest
from starlette.testclient import TestClient

from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app
from tests.cli.toys import toy_loaded

KEYS = ("first", "second")


@pytest.fixture
def fresh():
    """Opens servers of two keys, each with a new engine."""
    opened = []

    def close():
        for loaded, client in opened:
            client.__exit__(None, None, None)
            loaded.__exit__(None, None, None)
        opened.clear()

    def make(keys=KEYS, **options):
        loaded = toy_loaded(EngineConfig(model="toy", policy="fixed", **options))
        client = TestClient(create_app(loaded.__enter__(), ServeSettings(api_keys=keys)))
        client.__enter__()
        opened.append((loaded, client))
        return client

    make.close = close
    yield make
    close()


def traced(client, key, **more):
    """What every step of an answer proposed and accepted, without its times."""
    body = {"prompt": "Hi", "max_tokens": 60, "temperature": 0, "speculative": {"trace": True}}
    answer = client.post(
        "/v1/completions", json=body | more, headers={"authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 200, answer.text
    steps = answer.json()["choices"][0]["speculative_trace"]
    return [{name: each for name, each in step.items() if name != "ms"} for step in steps]


def drafted(steps):
    return sum(len(step["tokens"]) for step in steps)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (("first", {}), ("second", {})),
        (("first", {"cache_salt": "x"}), ("first", {"cache_salt": "y"})),
        (("first", {"cache_salt": "x"}), ("first", {})),
        (("first", {"cache_salt": "x"}), ("second", {"cache_salt": "x"})),
    ],
)
def test_a_trace_shows_nothing_of_another_tenants_answers(fresh, mine, other):
    key, more = other
    expected = traced(fresh(), key, **more)
    server = fresh()
    first = traced(server, mine[0], **mine[1])
    assert traced(server, key, **more) == expected
    # The tenant itself profits: the test would notice if nothing were learned at all.
    assert len(traced(server, mine[0], **mine[1])) < len(first)


@pytest.mark.parametrize("keys", [("second", "first"), ("second",), ("new", "first")])
def test_what_is_kept_on_disk_follows_the_key(fresh, tmp_path, keys):
    """Not its place among the keys of a later server."""
    expected = traced(fresh(), "first")
    own = traced(fresh(kv_store=str(tmp_path / "kv")), "first")
    fresh.close()
    server = fresh(keys, kv_store=str(tmp_path / "kv"))
    assert own == traced(server, keys[0]) == expected
    if "first" in keys:
        assert len(traced(server, "first")) < len(expected)
