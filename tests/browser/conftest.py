"""A headless Chromium for the web UI. Everything here is skipped where there is none."""

import shutil
from contextlib import contextmanager

import pytest

from tests.worlds.servers import serving, wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 120_000

axe_module = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="needs the package axe-playwright-python"
)
playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/browser/" in str(item.path):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium in the PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A toy that takes 5 ms per step."""
    with serving(tmp_path_factory.mktemp("browser"), delay=0.005) as running:
        yield running


class Page:
    """A page with its errors, and its requests."""

    def __init__(self, page, root):
        self.page, self.root = page, root
        self.errors, self.requests = [], []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._heard)
        page.on("request", lambda request: self.requests.append(request.url))

    def _heard(self, message):
        # A refused or failed request is said on the console, whatever the page makes of it.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    def __getattr__(self, name):
        return getattr(self.page, name)

    def open(self, view="chat", state="ok"):
        self.page.goto(f"{self.root}/#{view}")
        self.page.wait_for_selector("html[data-ready]")
        self.page.wait_for_selector(f"#server[data-state={state}]")
        return self

    def options(self, **options):
        """Settings that new conversations begin with; call before `open`."""
        self.page.add_init_script(
            f"localStorage.setItem('forerun.options', JSON.stringify({options}))"
        )

    def ask(self, text):
        self.page.fill(".composer textarea", text)
        self.page.press(".composer textarea", "Enter")

    def answered(self, count=1):
        """Wait for the end of the answer; its text."""
        self.page.wait_for_selector(f":nth-match(.message.assistant:not(.running), {count})")
        return self.page.locator(".message.assistant .said").nth(count - 1).inner_text()

    def until(self, condition):
        """Wait until this JavaScript expression holds. (Playwright's own wait needs eval, which
        the page's policy forbids.)
        """
        assert wait_for(lambda: self.page.evaluate(f"() => Boolean({condition})")), condition

    def outside(self):
        """Requests that went elsewhere than to the server."""
        return [url for url in self.requests if not url.startswith((self.root, "blob:"))]


@contextmanager
def opened(browser, root, **options):
    context = browser.new_context(viewport={"width": 1280, "height": 820}, **options)
    page = Page(context.new_page(), root)
    try:
        yield page
    finally:
        context.close()


@pytest.fixture
def page(browser, server):
    """A fresh page of the toy's server; fails where the page had an error."""
    with opened(browser, server.root) as view:
        yield view
        assert not view.errors
        assert not view.outside()


def streamed(*chunks):
    """The body of a stream of these choices, as the server would send it."""
    lines = [f"data: {chunk}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"])


def findings(page):
    """What axe finds, in words."""
    # It colours while it fades; there is nothing to wait for but the next frame.
    page.evaluate("() => new Promise(requestAnimationFrame)")
    violations = axe_module.Axe().run(page.page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']][:3]}"
        for one in violations
    ]
