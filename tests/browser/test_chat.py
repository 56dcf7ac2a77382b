"""The chat in a real browser: answers, refusals, a server that goes, hostile text, the keyboard."""

import json
import socket

from tests.browser.conftest import opened, streamed
from tests.worlds.servers import serving

PLAIN = {"max_tokens": 10, "temperature": 0}

GROWN = "document.querySelector('.message.assistant .said')?.innerText.length > 9"

SEE_IT_GROW = """window.grewWhileRunning = false;
new MutationObserver(() => {
  const said = document.querySelector(".message.assistant.running .said")?.innerText ?? "";
  window.grewWhileRunning ||= said.length > 9;
}).observe(document, { childList: true, characterData: true, subtree: true });"""
"""Looked at from outside, a short answer may be over before the second look."""

KEEP_MANY = """async (count) => {
  const messages = Array.from({length: count}, (_, i) => i % 2
    ? {id: `m${i}`, role: "assistant", content: `Answer **${i}**\\n\\n- one\\n- two`}
    : {id: `m${i}`, role: "user", content: `Question ${i}`});
  const database = await new Promise((done) => {
    const request = indexedDB.open("forerun", 1);
    request.onsuccess = () => done(request.result);
  });
  const put = database.transaction("conversations", "readwrite").objectStore("conversations")
    .put({id: "many", title: "Many", created: 1, updated: 1, messages,
      options: {max_tokens: "10", temperature: "0"}});
  await new Promise((done) => { put.onsuccess = done; });
}"""


def expected(server, text, **options):
    """What the server answers to this by the API alone."""
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, **PLAIN, **options}
    return server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]


def content(text, finish=None):
    delta = {"content": text} if text else {}
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def says(page, text):
    """Have the server say this, whatever the request."""
    body = streamed(
        *(content(text[at : at + 7]) for at in range(0, len(text), 7)), content("", "stop")
    )
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )


def test_the_first_load_shows_the_model_and_requests_nothing_elsewhere(page):
    page.open()
    assert page.inner_text("#server-text") == "toy"
    assert page.title() == "Chat · Forerun"
    assert page.is_visible(".welcome") and page.is_enabled(".send")
    assert not page.outside()


def test_an_answer_streams_and_is_kept(page, server):
    page.options(max_tokens="600", temperature="0")
    page.add_init_script(SEE_IT_GROW)
    page.open().ask("Hi")
    page.wait_for_selector(".send[aria-label=Stop]")
    text = page.answered()
    assert page.evaluate("grewWhileRunning"), "the text came at the end only"
    assert text == expected(server, "Hi", max_tokens=600).strip()
    assert "600 tokens" in page.inner_text(".message.assistant .facts")
    page.wait_for_selector(".conversation[aria-current]")
    page.reload()
    page.wait_for_selector(".message.assistant")
    assert page.answered() == text


def test_stop_keeps_what_came_and_ends_the_request(page, server):
    page.options(max_tokens="4000", temperature="0")
    page.open().ask("Hi")
    page.until(GROWN)
    page.click(".send[aria-label=Stop]")
    page.wait_for_selector(".message.assistant .facts:has-text('stopped')")
    assert not page.is_visible(".message.assistant .note"), "that is no error"
    assert len(page.inner_text(".message.assistant .said")) > 9
    assert server.idle()


def test_regenerate_edit_and_delete(page):
    page.options(max_tokens="20", temperature="0")
    page.open().ask("First")
    first = page.answered()
    page.click(".message.assistant [aria-label=Regenerate]")
    assert page.answered() == first
    page.hover(".message.user")
    page.click(".message.user [aria-label=Edit]")
    page.fill(".message.user textarea", "Second")
    page.click("text=Save and answer anew")
    page.answered()
    assert page.locator(".message").count() == 2
    assert page.inner_text(".message.user .said") == "Second"
    page.click(".message.assistant [aria-label=Delete]")
    assert page.locator(".message").count() == 1


def test_settings_reach_the_server(page):
    sent = []
    page.on("request", lambda request: sent.append(request.post_data))
    page.open()
    page.click("[aria-label='Settings of this conversation']")
    page.fill("#option-system", "Be brief.")
    page.fill("#option-seed", "11")
    page.fill("#option-max_tokens", "9")
    page.fill("#option-stop", "a\nb")
    page.uncheck("#option-speculation")
    page.ask("Hi")
    page.answered()
    body = json.loads(next(data for data in sent if data))
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert (body["seed"], body["max_tokens"], body["stop"]) == (11, 9, ["a", "b"])
    assert body["speculative"] == {"enabled": False, "stats": True}
    assert "temperature" not in body, "what is left empty is the server's choice"


def test_an_answer_says_how_full_the_context_is(page):
    page.options(max_tokens="4")
    page.open()
    for turn, text in enumerate(("Hi", "x " * 1100), start=1):
        page.ask(text)
        page.answered(turn)
    facts = page.locator(".message.assistant .facts")
    assert "context" not in facts.nth(0).inner_text()
    assert "context 5" in facts.nth(1).inner_text() and "% full" in facts.nth(1).inner_text()


def test_a_refused_request_shows_the_servers_own_sentence(page):
    page.options(max_tokens="99999999")
    page.open().ask("Hi")
    page.wait_for_selector(".message.assistant .note:visible")
    assert "99999999" in page.inner_text(".message.assistant .note")
    assert page.is_enabled(".send"), "and it goes on"


def test_a_schema_that_is_no_json_is_said_before_anything_is_sent(page):
    page.open()
    page.click("[aria-label='Settings of this conversation']")
    page.fill("#option-schema", "{nonsense")
    assert "not JSON" in page.inner_text("#option-schema-problem")
    page.ask("Hi")
    page.wait_for_selector(".message.assistant .note:has-text('not JSON')")
    assert not [url for url in page.requests if url.endswith("completions")]


def test_reasoning_is_folded_and_calls_can_be_answered(page):
    call = {
        "index": 0,
        "id": "abc",
        "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'},
    }
    deltas = [
        {"reasoning_content": "Where is Rome?"},
        {"content": "I look."},
        {"tool_calls": [call]},
    ]
    body = streamed(
        *(json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas),
        content("", "tool_calls"),
    )
    sent = []

    def answer(route):
        sent.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    page.open().ask("Weather?")
    page.answered()
    assert not page.is_visible("text=Where is Rome?")
    page.click(".message.assistant .reasoning summary")
    assert page.is_visible("text=Where is Rome?")
    assert '"city": "Rome"' in page.inner_text(".call")
    page.click("text=Answer this call")
    page.fill(".message.tool textarea", "Sunny")
    page.click("text=Save and answer anew")
    page.answered(2)
    assert sent[1]["messages"][1]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert sent[1]["messages"][2] == {"role": "tool", "content": "Sunny", "tool_call_id": "abc"}


def test_export(page, tmp_path):
    page.options(max_tokens="10", temperature="0")
    page.open().ask("Hello there")
    text = page.answered()
    files = {}
    for name in ("Markdown", "JSON"):
        with page.expect_download() as download:
            page.click(f"button[title='Export as {name}']")
        download.value.save_as(tmp_path / name)
        files[download.value.suggested_filename] = (tmp_path / name).read_text()
    assert text in files["hello-there.md"] and "## You" in files["hello-there.md"]
    (kept,) = json.loads(files["hello-there.json"])["conversations"]
    assert [message["content"] for message in kept["messages"]] == ["Hello there", text]


HOSTILE = """<script>window.hacked = 1</script><img src="//evil.example/a.png" onerror="hacked=2">
<svg onload="hacked=3"><iframe src="https://evil.example/"></iframe><style>*{display:none}</style>

![pixel](https://evil.example/pixel.png) [run](javascript:window.hacked=4) [data](data:text/html,x)
<a href="//evil.example/" onmouseover="hacked=5">over</a> <form action="/x"><input name=a>

[ok](https://fine.example/ "title") <b id="main" class="view">bold</b> **real**

```html
<script>window.hacked = 6</script>
```

| a | b |
| - | - |
| <img src=x onerror=hacked=7> | `<script>` |
"""


def test_hostile_markdown_runs_nothing_and_fetches_nothing(page):
    says(page, HOSTILE)
    page.open().ask("Be evil")
    page.answered()
    page.mouse.move(600, 300)
    inside = page.locator(".message.assistant .said")
    for tag in ("script", "img", "iframe", "style", "form", "svg:not(.icon)", "[id]", "[onerror]"):
        assert inside.locator(tag).count() == 0, tag
    links = inside.locator("a").evaluate_all(
        "links => links.map(link => link.getAttribute('href'))"
    )
    assert [link for link in links if link] == [
        "https://evil.example/pixel.png",
        "https://fine.example/",
    ]
    rel = inside.locator("a").first.get_attribute("rel")
    assert rel == "noopener noreferrer nofollow"
    assert inside.locator("strong").inner_text() == "real"
    # What the model wrote is to be read, not to be done.
    assert "<script>window.hacked = 1</script>" in inside.inner_text()
    assert page.evaluate("window.hacked") is None
    assert not page.outside()


def test_the_policy_holds_even_where_code_gets_in(page):
    page.open()
    added = page.evaluate("""() => {
      try { document.body.innerHTML += "<img src=x>"; } catch (error) { return error.name; }
    }""")
    assert added == "TypeError", "HTML from a string needs the sanitiser"
    page.evaluate("""() => {
      const script = document.createElement("img");
      script.src = "https://evil.example/x.png";
      document.body.append(script);
    }""")
    page.until("document.querySelector('body > img').complete")
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()
    page.requests.clear()


def test_five_hundred_messages(page):
    page.open()
    page.evaluate(KEEP_MANY, 500)
    page.options(max_tokens="10", temperature="0")
    page.reload()
    page.click(".conversation:has-text('Many')")
    assert page.locator(".message").count() == 500
    assert page.locator(".message").last.is_visible(), "it begins at the end"
    page.ask("One more")
    # They do not fit any more: the server says so, and the page offers to leave some out.
    for left_out in (252, 378):
        page.wait_for_selector(".note:has-text('maximum context length is 4096 tokens')")
        page.click("text=Answer without the oldest messages")
        assert page.locator(".message.cut").get_attribute("data-id") == f"m{left_out}"
    page.wait_for_selector(":nth-match(.message, 502):not(.running) .facts:has-text('tokens')")


def test_the_server_goes_and_comes_back(browser, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings = {"port": free.getsockname()[1]}
    with opened(browser, f"http://127.0.0.1:{settings['port']}") as page:
        page.options(max_tokens="4000", temperature="0")
        with serving(tmp_path, delay=0.01, settings=settings) as server:
            page.open().ask("Hi")
            page.until("document.querySelector('.message.assistant .said')?.innerText.length > 9")
            server.process.kill()
            page.wait_for_selector(".message.assistant .note:has-text('connection was lost')")
            page.wait_for_selector("#server[data-state=gone]")
            assert "does not answer" in page.inner_text("#banner")
            assert page.is_disabled(".send")
        with serving(tmp_path, settings=settings) as back:
            page.wait_for_selector("#server[data-state=ok]")
            assert not page.is_visible("#banner")
            page.options(max_tokens="10", temperature="0")
            page.click("[aria-label='Settings of this conversation']")
            page.fill("#option-max_tokens", "10")
            page.click(".message.assistant [aria-label=Regenerate]")
            assert page.answered() == expected(back, "Hi")
        assert not page.errors


def test_a_server_with_a_key_asks_for_it(browser, tmp_path):
    with (
        serving(tmp_path, settings={"api_keys": ["secret"]}) as server,
        opened(browser, server.root) as page,
    ):
        page.options(max_tokens="10", temperature="0")
        page.open(state="locked")
        page.click("#banner button")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#server[data-state=ok]")
        page.ask("Hi")
        page.wait_for_selector(".message.assistant .facts:has-text('10 tokens')")
        assert page.evaluate("localStorage.getItem('forerun.key')") is None, "only on request"
        assert not page.errors


def focused(page):
    return page.evaluate("""() => {
      const element = document.activeElement;
      return (element.getAttribute("aria-label") || element.textContent).trim();
    }""")


def tab_to(page, name, way="Tab"):
    """Press Tab until the focus is on what has this name."""
    for _ in range(60):
        if focused(page).startswith(name):
            return
        page.keyboard.press(way)
    raise AssertionError(f"Tab never reaches {name!r}")


def test_everything_by_keyboard(page):
    page.options(max_tokens="30", temperature="0")
    page.open()
    page.keyboard.press("Control+Home")
    tab_to(page, "Your message")
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    page.answered()
    tab_to(page, "Regenerate", "Shift+Tab")
    page.keyboard.press("Enter")
    page.answered()
    tab_to(page, "Settings of this conversation", "Shift+Tab")
    page.keyboard.press("Enter")
    assert page.is_visible("#options")
    page.keyboard.press("Escape")
    assert not page.is_visible("#options")
    assert focused(page) == "Settings of this conversation"
    tab_to(page, "See it speculate", "Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#view-speculate:not([hidden])")
    tab_to(page, "Run the race")
    page.keyboard.press("Enter")
    page.wait_for_selector(".verdict.good")
    tab_to(page, "Tokens, With speculation")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token[aria-selected=true]").count() == 1
    assert page.is_visible(".tree .node")
    tab_to(page, "Dashboard", "Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#view-dashboard:not([hidden])")
