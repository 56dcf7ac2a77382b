"""Under which names the server answers, on every route."""

import pytest

from forerun.errors import ConfigError
from forerun.options.config import ServeSettings
from forerun.serve.http.hosts import AllowedHosts
from tests.worlds.toy_app import toy_client

GOOD = [
    *("127.0.0.1", "127.0.0.1:8000", "192.168.1.4:80", "[::1]:8000", "[fe80::1%25eth0]"),
    *("localhost", "LOCALHOST:8000", "app.localhost", "forerun", "forerun:8000", "laptop.local"),
    *("llm.default.svc", "llm.default.svc.cluster.local:80", "llm.internal.", "nas.lan"),
    *("llm.example.org", "LLM.example.org:443", "a.b.below.example", None),
]
BAD = [
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"),
    *("[::1].evil.example", "[::1]evil", "127.0.0.1:80@evil", "127.0.0.1:80.evil.example", "[::1"),
    *("localhost:x", "a@localhost", "localhost/.evil.example", "localhost,evil.example"),
    *("llm.example.org.evil.example", "example.org", "below.example", "1.2.3", "a.local.evil.com"),
]
NAMES = ("llm.example.org", "*.below.example")


@pytest.mark.parametrize("host", GOOD)
def test_addresses_local_and_listed_names_are_answered(host):
    assert AllowedHosts("127.0.0.1", NAMES).admits(host)


@pytest.mark.parametrize("host", BAD)
def test_public_names_are_refused_unless_listed(host):
    assert not AllowedHosts("127.0.0.1", NAMES).admits(host)
    assert AllowedHosts("127.0.0.1", ("*",)).admits(host)


def test_the_name_that_the_server_is_bound_to_is_its_own():
    assert AllowedHosts("llm.example.org", ()).admits("llm.example.org:8000")


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "*a", "a b", ""])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ConfigError, match="allowed-hosts"):
        AllowedHosts("127.0.0.1", (name,))


def test_every_route_refuses_a_foreign_name():
    rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
    with toy_client() as client:
        paths = {route.path for route in client.app.routes if "{" not in route.path}
        assert len(paths) > 20
        for path in sorted(paths | {"/ui/app.js", "/nothing"}):
            for method in ("GET", "POST"):
                answer = client.request(method, path, headers=rebound)
                assert answer.status_code == 403, path
                assert "--allowed-hosts" in answer.text
        assert client.get("/v1/models", headers={"Host": "localhost:8000"}).status_code == 200


# --- pages of other origins, where the server lets them ------------------------------------------


PAGE = "https://chat.example"
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


def test_pages_of_allowed_origins_may_ask():
    keys = ServeSettings(api_keys=("k",), allowed_origins=(PAGE,))
    with toy_client(keys) as client:
        before = client.options("/v1/chat/completions", headers=ASKS)
        assert before.status_code == 200  # A preflight has no key.
        assert before.headers["access-control-allow-origin"] == PAGE
        refused = client.get("/v1/models", headers={"Origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE
        other = client.get("/v1/models", headers={"Origin": "https://elsewhere.example"})
        assert "access-control-allow-origin" not in other.headers


def test_no_page_may_ask_unless_it_is_said():
    with toy_client() as client:
        assert client.options("/v1/models", headers=ASKS).status_code == 405
        answer = client.get("/v1/models", headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers


MAY = [{}, {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin"}, {"Origin": PAGE},
       {"Origin": "http://testserver", "sec-fetch-site": "same-origin"}]  # fmt: skip
MAY_NOT = [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"Origin": "null"},
           {"Origin": "https://elsewhere.example", "sec-fetch-site": "cross-site"}]  # fmt: skip


def test_what_needs_no_body_is_not_for_pages_of_other_sites():
    """An image of such a page is enough for a GET, a form for a POST."""
    settings = ServeSettings(allowed_origins=(PAGE,))
    with toy_client(settings) as client:
        for method in ("GET", "POST"):
            for status, some in ((200, MAY), (403, MAY_NOT)):
                for headers in some:
                    answer = client.request(method, "/flush_cache", headers=headers)
                    assert answer.status_code == status, headers
