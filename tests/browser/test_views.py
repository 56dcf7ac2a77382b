"""See it speculate, the dashboard, and what axe says of all views at all sizes."""

import json
import re

import pytest

from tests.browser.conftest import findings, opened

SIZES = {"desktop": (1280, 820), "phone": (390, 844)}


def race(page, tokens=80):
    page.fill("#race-tokens", str(tokens))
    page.click(".go")
    page.wait_for_selector(".verdict.good")


def test_the_race_shows_the_same_text_and_the_steps(page):
    page.open("speculate")
    race(page)
    verdict = page.inner_text(".verdict")
    (count,) = map(int, re.findall(r"Same text: all (\d+) tokens are equal", verdict))
    one, other = (page.locator(".tokens").nth(place).inner_text() for place in (0, 1))
    assert one == other and 20 < count <= 80 and len(one) >= count - 1
    steps = (
        page.locator(".figures").first.locator("div", has_text="Steps").locator("dd").inner_text()
    )
    assert 0 < int(steps) < count
    assert page.locator(".strip .column").count() == int(steps)
    columns = "[...document.querySelectorAll('.strip .column')]"
    assert page.evaluate(f"() => {columns}.some((one) => one.children.length > 8)")
    top = "document.querySelector('.strip').getBoundingClientRect().top"
    assert page.evaluate(
        f"() => {columns}.every((one) => one.getBoundingClientRect().top >= {top})"
    ), "the column of a step of many tokens is cut"
    drafted = page.locator(".lane").first.locator(".token:not(.src-target)")
    assert drafted.count() > 0
    assert page.locator(".lane").nth(1).locator(".token:not(.src-target)").count() == 0


def test_a_token_shows_its_step(page):
    page.open("speculate")
    race(page)
    token = page.locator(".lane").first.locator(".token.src-ngram").first
    token.hover()
    assert token.get_attribute("aria-selected") == "true"
    assert "n-gram, depth" in token.get_attribute("aria-label")
    assert page.locator(".tree .kept .node").count() >= 2, "an accepted draft token, and one more"
    assert page.is_visible(".tree .node.own")
    assert "ms" in page.inner_text(".tree-panel .facts")
    assert "Why so many" in page.inner_text(".tree-panel")


STOP_BEHIND_20 = """() => new MutationObserver((_, seen) => {
  if (document.querySelectorAll(".token").length <= 20) return;
  seen.disconnect();
  document.querySelector(".go").click();
}).observe(document.body, { childList: true, subtree: true })"""
"""Stops as soon as 20 tokens are there: a click from outside may come when all are."""


def test_a_refusal_and_a_stop_are_said(page):
    page.open("speculate")
    page.fill("#race-tokens", "1999")
    page.fill("#race-temperature", "9")
    page.locator(".ask").evaluate("form => { form.noValidate = true; }")
    page.click(".go")
    page.wait_for_selector(".verdict.bad")
    assert "temperature" in page.inner_text(".verdict")
    page.fill("#race-temperature", "0")
    page.evaluate(STOP_BEHIND_20)
    page.click(".go")
    page.wait_for_selector(".verdict:has-text('Stopped')")


def say(route, token):
    """Answer with one step of this token."""
    step = {"step": 0, "position": 0, "ms": 1, "tokens": [{"id": token, "text": "a"}], "nodes": [],
            "accepted": [], "left_out": 0, "allowed": 0, "reason": ""}  # fmt: skip
    chunk = json.dumps({"choices": [{"index": 0, "delta": {}, "speculative_trace": [step]}]})
    body = f"data: {chunk}\n\ndata: [DONE]\n\n"
    route.fulfill(content_type="text/event-stream", body=body)


def test_other_text_would_be_seen(page):
    """The page compares; it does not take the server's word."""

    def answer(route):
        plain = not route.request.post_data_json["speculative"]["enabled"]
        say(route, 1 if plain else 2)

    page.route("**/v1/chat/completions", answer)
    page.open("speculate")
    page.click(".go")
    page.wait_for_selector(".verdict.bad:has-text('differ from token 1 on')")


def test_both_lanes_get_the_same_request(page):
    """Whatever is typed between them."""
    bodies = []

    def answer(route):
        bodies.append(route.request.post_data_json["messages"])
        page.page.evaluate("document.getElementById('race-prompt').value += '!'")
        say(route, 1)

    page.route("**/v1/chat/completions", answer)
    page.open("speculate")
    page.click(".go")
    page.wait_for_selector(".verdict.good")
    assert len(bodies) == 2 and bodies[0] == bodies[1]


def test_the_dashboard_shows_what_the_server_did(page, server):
    server.complete(max_tokens=200)
    page.open("dashboard")
    page.wait_for_selector(".tiles")
    total = server.http.get("/server_info").json()["stats"]["output_tokens"]
    assert f"{total:,} since the start" in page.inner_text(".tiles")
    for title in ("Tokens per second", "Acceptance by source and depth", "Where a step's time goes",
                  "Why so many draft tokens, or none", "Waiting times", "Requests",
                  "Key/value cache", "About the server"):  # fmt: skip
        assert page.is_visible(f'h2:text-is("{title}")'), title
    depths = page.locator("section[aria-label='Acceptance by source and depth'] tbody tr")
    assert depths.count() > 0 and "n-gram" in depths.first.inner_text()
    pages = page.inner_text("section[aria-label='Key/value cache'] .chart-key")
    assert "free" in pages and "–" not in pages
    requested = {url.removeprefix(server.root) for url in page.requests}
    own = {url for url in requested if not url.startswith(("/ui/", "/#"))}
    assert own <= {"/", "/metrics", "/server_info", "/health", "/v1/models"}


def test_the_dashboard_says_why_speculation_rests(page, server):
    """The toy's policy is fixed and gives no reasons: here it has some."""
    speculation = {
        "reasons": {"off: it did not pay": 30, "on: it pays": 10},
        "speed_over_plain": 1.04,
        "disabled": True,
        "times_disabled": 1,
    }

    def answer(route):
        reply = route.fetch().json() | {"speculation": speculation}
        route.fulfill(json=reply)

    page.route("**/server_info", answer)
    page.open("dashboard")
    card = page.locator("section[aria-label^='Why so many']")
    card.locator("tbody tr").first.wait_for()
    assert [row.split() for row in card.locator("tbody tr").all_inner_texts()] == [
        ["off:", "it", "did", "not", "pay", "30"],
        ["on:", "it", "pays", "10"],
    ]
    assert "Disabled now" in card.inner_text() and "1.04 times" in card.inner_text()
    assert "disabled once so far" in card.inner_text()


CUT = """() => [...document.querySelectorAll(".view:not([hidden]) .table")]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"""
"""Tables of ours that are wider than their card: the last column would not be seen."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_nothing(browser, server, size, scheme):
    width, height = SIZES[size]
    with opened(browser, server.root, color_scheme=scheme) as page:
        page.set_viewport_size({"width": width, "height": height})
        page.options(max_tokens="20", temperature="0")
        page.open()
        assert findings(page) == []
        page.ask("Hi")
        page.answered()
        assert findings(page) == []
        page.click("[aria-label='Settings of this conversation']")
        assert findings(page) == []
        page.click("#options [aria-label='Close the settings']")
        page.click("#server")
        assert findings(page) == []
        page.keyboard.press("Escape")
        page.click("[data-view=speculate]")
        assert findings(page) == []
        race(page)
        page.locator(".token.src-ngram").first.click()
        assert findings(page) == []
        assert page.evaluate(CUT) == []
        page.click("[data-view=dashboard]")
        page.wait_for_selector(".tiles")
        assert findings(page) == []
        assert page.evaluate(CUT) == []
        sideways = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not sideways, "nothing is wider than the screen"
        assert not page.errors
