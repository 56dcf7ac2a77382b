"""Conversations in a real browser: two tabs, reloads, files, variants, formulas, keys."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from tests.browser.conftest import Page, findings, opened
from tests.browser.test_chat import GROWN, expected, says

TEN = {"max_tokens": "10", "temperature": "0"}
LONG = {"max_tokens": "4000", "temperature": "0"}


def another_tab(page):
    return Page(page.context.new_page(), page.root)


def said(page):
    return page.locator(".message.user .said").all_text_contents()


def test_two_tabs_on_one_conversation_keep_both_turns(page):
    page.options(max_tokens="400", temperature="0")
    page.open().ask("One")
    page.answered()
    other = another_tab(page)
    other.open().wait_for_selector(".message.user")
    assert said(other) == ["One"]
    page.ask("Two")
    page.wait_for_selector(".send[aria-label=Stop]")
    other.ask("Three")
    for tab in (page, other):
        tab.wait_for_selector(":nth-match(.message.assistant:not(.running) .facts, 3)")
        assert sorted(said(tab)) == ["One", "Three", "Two"]
        tab.reload()
        tab.wait_for_selector(":nth-match(.message.assistant, 3)")
        assert sorted(said(tab)) == ["One", "Three", "Two"]
    assert not other.errors


def test_what_one_tab_deletes_is_gone_in_the_other(page):
    page.options(**TEN)
    page.open().ask("One")
    page.answered()
    other = another_tab(page)
    other.open().wait_for_selector(".message.assistant")
    page.click(".message.assistant [aria-label=Delete]")
    other.until("!document.querySelector('.message.assistant')")
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("[aria-label='Delete One']")
    other.wait_for_selector(".welcome:visible")
    assert not other.errors


def test_a_reload_keeps_the_half_of_an_answer(page):
    page.options(**LONG)
    page.open().ask("Hi")
    page.until(GROWN)
    before = page.inner_text(".message.assistant .said")
    page.reload()
    page.wait_for_selector(".message.assistant .facts:has-text('not finished')")
    assert page.inner_text(".message.assistant .said").startswith(before)
    assert page.is_visible(".message.assistant [aria-label='Continue the answer']")


def test_an_answer_is_continued(page, server):
    page.options(**TEN)
    page.open().ask("Hi")
    first = page.answered()
    page.wait_for_selector(".facts:has-text('ended at the token limit')")
    page.click("[aria-label='Continue the answer']")
    page.until(
        f"document.querySelector('.message.assistant .said').innerText.length > {len(first)}"
    )
    assert page.answered() == expected(server, "Hi", max_tokens=20).strip()
    assert page.locator(".message").count() == 2


def test_variants_of_an_answer(page):
    page.options(**TEN)
    page.open().ask("Hi")
    first = page.answered()
    page.click("[aria-label='Settings of this conversation']")
    page.fill("#option-max_tokens", "20")
    page.click(".message.assistant [aria-label=Regenerate]")
    page.wait_for_selector(".variants:has-text('2 of 2')")
    second = page.answered()
    assert second != first
    page.click("[aria-label='The variant before']")
    assert page.answered() == first
    page.reload()
    page.wait_for_selector(".variants:has-text('1 of 2')")
    page.click("[aria-label='The next variant']")
    assert page.answered() == second


def test_search_and_rename(page):
    page.options(**TEN)
    page.open()
    for text in ("Apples and pears", "Bananas"):
        page.ask(text)
        page.answered()
        page.wait_for_selector(f".conversation[aria-current]:has-text('{text}')")
        page.click(".side .new")
    page.fill("#search", "PEARS")
    assert page.locator(".conversation span").all_inner_texts() == ["Apples and pears"]
    assert page.inner_text(".conversation .hit") == "Apples and pears"
    page.fill("#search", "plums")
    assert page.is_visible("text=No conversation has these words.")
    page.fill("#search", "")
    page.click("[aria-label='Rename Bananas']")
    page.fill("[aria-label='Title of the conversation']", "Yellow <b>fruit</b>")
    page.keyboard.press("Enter")
    page.wait_for_selector(".conversation:has-text('Yellow <b>fruit</b>')")
    page.click("[aria-label='Rename Apples and pears']")
    page.keyboard.type("Nothing of this")
    page.keyboard.press("Escape")
    page.reload()
    page.wait_for_selector(".conversation")
    titles = page.locator(".conversation").all_inner_texts()
    assert sorted(titles) == ["Apples and pears", "Yellow <b>fruit</b>"]


def test_what_was_exported_can_be_imported(page, tmp_path):
    page.options(**TEN)
    page.open().ask("Hello there")
    text = page.answered()
    with page.expect_download() as download:
        page.click("text=Export all")
    kept = tmp_path / "all.json"
    download.value.save_as(kept)
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("[aria-label='Delete Hello there']")
    page.wait_for_selector(".welcome:visible")
    page.set_input_files("[aria-label='File to import']", kept)
    page.wait_for_selector(".conversation[aria-current]:has-text('Hello there')")
    assert page.answered() == text
    for wrong, sentence in (
        ("{", "not JSON"),
        ("{}", "holds no conversations"),
        (
            json.dumps({"format": "forerun-conversations", "conversations": [{"title": "x"}]}),
            "Conversation 1 of the file",
        ),
    ):
        kept.write_text(wrong)
        page.set_input_files("[aria-label='File to import']", kept)
        page.wait_for_selector(f".side .problem:has-text('{sentence}')")
    assert page.locator(".conversation").count() == 1


def test_files_go_with_a_message_as_text(page):
    sent = []
    page.on("request", lambda request: sent.append(request.post_data))
    page.options(**TEN)
    page.open()
    page.set_input_files(
        "[aria-label='Files to attach']",
        [
            {"name": "notes.md", "mimeType": "text/plain", "buffer": b"a ``` fence\n"},
            {"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n\0"},
        ],
    )
    page.wait_for_selector(".notice:has-text('photo.png is not text')")
    assert page.locator(".chips li").all_inner_texts() == ["notes.md"]
    page.ask("What is this?")
    page.answered()
    body = json.loads(next(data for data in sent if data))
    assert body["messages"][-1]["content"] == (
        "File notes.md:\n````\na ``` fence\n````\n\nWhat is this?"
    )
    assert not page.is_visible(".chips")
    page.click(".message.user summary:has-text('notes.md')")
    assert page.is_visible("text=a ``` fence")


RICH = r"""Prices of $5 and $6. Inline $a^2 + b$ and \(c\), then

$$\frac{1}{2}$$

```python
def f(x):
    return "<b>" + x
```

```python
print(f(1))
```

| a | b |
| --- | --- |
| 1 | 2 |

| c | d |
| --- | --- |
| 3 | 4 |

- [x] done
- [ ] open

3. third

$\href{javascript:alert(1)}{x}$ $\includegraphics{https://evil.example/x.png}$
"""


def test_formulas_coloured_code_and_tasks(page):
    says(page, RICH)
    page.open().ask("Be rich")
    page.answered()
    page.wait_for_selector(".formula-block math mfrac")
    page.wait_for_selector(".code .hljs-keyword:has-text('def')")
    assert page.locator(".message.assistant math").count() >= 3
    assert "Prices of $5 and $6." in page.inner_text(".message.assistant .said")
    assert 'return "<b>" + x' in page.inner_text(".code pre")
    boxes = page.locator(".message.assistant input[type=checkbox]")
    assert [box.is_checked() for box in boxes.all()] == [True, False]
    assert page.get_attribute(".message.assistant ol", "start") == "3"
    assert page.locator(".message.assistant :is(img, [href^=javascript])").count() == 0
    assert not page.outside()
    assert findings(page) == []


def test_brackets_are_as_high_as_what_they_stand_around(page):
    """Also where no mathematical font is installed, and in a part that was folded away."""
    formula = (
        r"$$\begin{pmatrix} a \\ b \\ c \end{pmatrix} = \left[\frac{\frac{a}{b}}{c}\right] (d)$$"
    )
    says(page, f"{formula}\n\n<details><summary>More</summary>\n\n{formula}\n</details>")
    page.open().ask("Hi")
    page.answered()
    page.wait_for_selector(".said > .block > .formula-block math mtable")
    page.click(".said summary")
    short = """[...document.querySelectorAll(".said mo[fence=true]")].filter((bracket) =>
        bracket.getBoundingClientRect().height
            < .9 * bracket.parentElement.getBoundingClientRect().height).length"""
    page.until(f"document.querySelectorAll('.said math').length === 2 && !{short}")
    assert page.locator(".said mo[fence=true]").count() == 8
    plain = page.locator(".said mo[stretchy=false]").first
    assert plain.evaluate("mo => mo.style.transform") == ""


def test_large_libraries_are_loaded_when_they_are_needed(page):
    says(page, "Plain text.")
    page.open().ask("Be plain")
    page.answered()
    assert not [url for url in page.requests if "katex" in url or "highlight" in url]


def test_escape_stops_and_that_is_no_error(page, server):
    page.options(**LONG)
    page.open().ask("Hi")
    page.until(GROWN)
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.assistant .facts:has-text('stopped')")
    assert not page.is_visible(".message.assistant .note")
    assert server.idle()


def test_keys_have_a_sheet(page):
    page.open()
    page.click("h1.title")
    page.keyboard.press("?")
    assert page.is_visible("dialog:has-text('stop the answer')")
    page.keyboard.press("Escape")
    assert not page.is_visible("dialog")
    page.click("#keys")
    page.click("dialog button")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("s")
    assert page.evaluate("document.activeElement.id") == "search"
    page.click("h1.title")
    page.keyboard.press("/")
    page.keyboard.type("n?/")
    assert page.input_value(".composer textarea") == "n?/"


@pytest.mark.parametrize("width", [390, 1280])
def test_icons_differ_and_headings_are_in_order(browser, server, width):
    with opened(browser, server.root) as page:
        page.set_viewport_size({"width": width, "height": 844})
        page.options(**TEN)
        page.open().ask("Hi")
        page.answered()
        buttons = page.locator("button:visible:has(svg)").evaluate_all(
            """all => all.map(one => [one.querySelector("svg").innerHTML,
              (one.getAttribute("aria-label") || one.title || one.textContent).trim()])"""
        )
        meanings = defaultdict(set)
        for drawn, name in buttons:
            meanings[drawn].add(name.split()[0].replace("Rename", "Edit"))
        assert all(len(names) == 1 for names in meanings.values()), meanings.values()
        for view in ("chat", "speculate", "dashboard"):
            page.click(f"[data-view={view}]")
            levels = page.locator(":is(h1, h2, h3, h4):visible").evaluate_all(
                "all => all.map(one => Number(one.tagName[1]))"
            )
            assert levels[0] == 1, view
            assert all(b - a <= 1 for a, b in pairwise(levels)), view
        assert not page.errors


def test_a_conversation_has_an_address(page):
    page.options(**TEN)
    page.open()
    for text in ("One", "Two"):
        page.ask(text)
        page.answered()
        page.wait_for_selector(f".conversation[aria-current]:has-text('{text}')")
        page.until("location.hash.startsWith('#chat/')")
        page.click(".side .new")
        page.until("location.hash === '#chat'")
    page.click(".conversation:has-text('One')")
    page.until("location.hash.startsWith('#chat/')")
    one = page.url
    page.click(".conversation:has-text('Two')")
    page.until(f"location.href !== {json.dumps(one)}")
    page.go_back()
    page.wait_for_selector(".message.user:has-text('One')")
    page.go_forward()
    page.wait_for_selector(".message.user:has-text('Two')")
    other = another_tab(page)
    other.goto(one)
    other.wait_for_selector(".message.user:has-text('One')")
    page.click("[data-view=dashboard]")
    page.click("[data-view=chat]")
    page.until("location.hash.startsWith('#chat/')")
    for before in (one, "about:blank"):  # The page is there, or it opens at that address.
        other.goto(before)
        other.goto(f"{page.root}/#chat/unknown")
        other.wait_for_selector(".notice:has-text('not in this browser')")


def test_a_conversation_opens_at_its_end(page):
    line = "A paragraph of some words that takes a few lines where the page is narrow. " * 12
    says(page, "\n\n".join([line] * 8))
    page.set_viewport_size({"width": 700, "height": 600})
    page.open()
    for number in range(1, 7):
        page.ask(f"Question {number}")
        page.answered(number)
    at_end = (
        "(({scrollTop, scrollHeight, clientHeight}) => scrollHeight - scrollTop - clientHeight < 4)"
        "(document.querySelector('.scroller'))"
    )
    page.until(at_end)
    page.reload()
    page.wait_for_selector(":nth-match(.message.assistant, 6)")
    page.wait_for_timeout(500)
    assert page.evaluate(at_end)
    page.hover(".scroller")
    page.mouse.wheel(0, -2000)
    page.wait_for_selector(".jump:visible")
    page.wait_for_timeout(300)
    assert not page.evaluate(at_end), "scrolled up, the page stays there"


def test_lists_tables_footnotes_and_parts_that_are_folded_away(page):
    says(page, "\n".join([
        *(f"{number}. Item" for number in range(98, 102)),
        "", "A claim[^1].", "", "[^1]: Its *source*.", "",
        "| a | b |", "| --- | --: |", "| 1 | 2 |", "",
        "<details><summary>More <b></summary>", "", "- hidden **words**", "</details>", "", "End.",
    ]))  # fmt: skip
    page.open().ask("Hi")
    page.answered()
    said = page.locator(".message.assistant .said")
    assert said.locator("ol").evaluate("list => list.style.getPropertyValue('--digits')") == "3"
    aligned = "cells => cells.map(cell => getComputedStyle(cell).textAlign)"
    assert said.locator("td").evaluate_all(aligned) == ["start", "right"]
    assert said.locator("sup").all_inner_texts() == ["1", "1"]
    assert said.locator("p:has(sup) em").inner_text() == "source"
    assert not said.locator("details strong").is_visible()
    said.locator("summary").click()
    assert said.locator("details strong").inner_text() == "words"
    assert said.locator("p").last.inner_text() == "End."


def test_texts_run_the_way_of_their_script(page):
    """Each block of its own; code from left to right."""
    says(page, "שלום עולם.\n\nHello.\n\n- שלום\n\n```\nx = 1\n```\n")
    page.open().ask("שלום")
    page.answered()
    way = "all => all.map(one => getComputedStyle(one).direction)"
    assert page.locator(".assistant .block").evaluate_all(way) == ["rtl", "ltr", "rtl", "ltr"]
    assert page.locator(".user .said").evaluate_all(way) == ["rtl"]
    assert page.locator(".assistant pre").evaluate_all(way) == ["ltr"]


def test_a_second_tab_says_that_the_first_is_writing(page):
    page.options(**LONG)
    page.open().ask("Hi")
    page.until(GROWN)
    other = another_tab(page)
    other.open().wait_for_selector(".notice:has-text('Another tab is writing this answer.')")
    page.click(".send[aria-label=Stop]")
