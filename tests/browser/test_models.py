"""Several models on the page: the one that answers."""

import json
import threading

import pytest
import uvicorn

from forerun.build.engine import load
from forerun.errors import ModelError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_models_app
from forerun.serve.models import Source
from tests.browser.conftest import findings, opened
from tests.worlds.servers import wait_for


def toy():
    return load(EngineConfig(model="toy"))


def damaged():
    raise ModelError("its file is damaged")


@pytest.fixture(scope="module")
def several():
    """The address of a server of two toys and a model that cannot be loaded."""
    loads = {"a/first": toy, "b/second": toy, "c/third": damaged}
    sources = [Source(name, (), 1000, loader) for name, loader in loads.items()]
    app = create_models_app(sources, ServeSettings())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_the_model_that_is_chosen_answers(browser, several):
    with opened(browser, several) as page:
        page.open()
        box = page.locator("#model")
        shown = ["a/first (not loaded)", "b/second (not loaded)", "c/third (not loaded)"]
        assert box.locator("option").all_inner_texts() == shown
        assert findings(page) == []
        box.select_option("b/second")
        with page.expect_request("**/v1/chat/completions") as request:
            page.ask("Hello")
        assert json.loads(request.value.post_data)["model"] == "b/second"
        assert page.answered()
        page.until("document.querySelector('#model').selectedOptions[0].text == 'b/second'")
        box.select_option("c/third")
        page.ask("And you?")
        page.wait_for_selector("text=its file is damaged")
        page.until("document.querySelector('#model').selectedOptions[0].text.includes('cannot')")
        page.page.reload()
        page.open("dashboard")
        assert box.input_value() == "c/third", "the choice is kept"
        note = ".dashboard .intro [role=status]"
        page.wait_for_selector(f"{note}:has-text('c/third is not loaded')")
        box.select_option("b/second")
        page.wait_for_selector(f"{note}:has-text('toy,')")
        page.wait_for_selector(".tiles")
        assert findings(page) == []
        assert not page.errors and not page.outside()


def test_one_model_needs_no_choice(page):
    page.open()
    assert page.locator("#model").is_hidden()
