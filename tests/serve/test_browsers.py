"""Pages of other origins, where the server lets them."""

from forerun.options.config import ServeSettings
from tests.worlds.toy_app import toy_client

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
