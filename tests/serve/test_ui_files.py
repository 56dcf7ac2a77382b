"""The web UI's files: what is served, with which headers, within which size."""

import re

import httpx
import pytest

from forerun.build.engine import load
from forerun.errors import ConfigError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app
from forerun.serve.http.static_files import FOLDER

BUDGET, FIRST_BUDGET = 660_000, 300_000
"""Bytes of all files, and of those that a first look at the page loads (decision 0025)."""
TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
    ".md": "text/", ".txt": "text/plain",
}  # fmt: skip
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
OWN = [path for path in FILES if "vendor" not in path.parts]


def client(**settings):
    """A client of an application whose model never loads: its files need none."""
    app = create_app(lambda: load(EngineConfig(model="toy")), ServeSettings(**settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://forerun")


def names(paths):
    return [str(path.relative_to(FOLDER)) for path in paths]


@pytest.fixture
def anyio_backend():
    return "asyncio"


def imported(path, pattern):
    """The modules that a module names so."""
    return [(path.parent / name).resolve() for name in re.findall(pattern, path.read_text())]


AT_ONCE = r'(?m)^import (?:.* from )?"([^"]+)";$'
WHEN_NEEDED = r'import\("([^"]+)"\)'


def reached(*patterns):
    """All modules that app.js comes to."""
    seen = {FOLDER / "app.js"}
    todo = list(seen)
    while todo:
        path = todo.pop()
        for name in (name for pattern in patterns for name in imported(path, pattern)):
            assert name.is_file(), f"{path.name} imports {name.name}"
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen


def test_all_files_together_fit_the_budget():
    assert sum(path.stat().st_size for path in FILES) < BUDGET
    lazy = {path for path in FILES if path.suffix == ".js"} - reached(AT_ONCE)
    licences = {path.with_suffix(".LICENSE.txt") for path in lazy}
    assert {path.name for path in lazy} == {"katex.js", "highlight.js"}
    assert sum(path.stat().st_size for path in set(FILES) - lazy - licences) < FIRST_BUDGET


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/", *(f"/ui/{name}" for name in names(FILES))])
async def test_every_file_has_its_type_and_the_strict_headers(path):
    async with client(api_keys=("secret",)) as http:
        answer = await http.get(path)
        again = await http.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert answer.status_code == 200, "and that without a key"
    suffix = "." + path.rsplit(".")[-1] if "." in path else ".html"
    assert answer.headers["content-type"].startswith(TYPES[suffix])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["img-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert again.status_code == 304 or path == "/"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path", ["/ui/", "/ui/none.js", "/ui/../routes.py", "/ui/%2e%2e/routes.py"]
)
async def test_nothing_else_is_served(path):
    async with client() as http:
        answer = await http.get(path)
    assert answer.status_code == 404
    assert "There is no route" in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_the_ui_can_be_left_out():
    async with client(ui=False) as http:
        answers = [await http.get(path) for path in ("/", "/ui/app.js")]
    assert [answer.status_code for answer in answers] == [404, 404]


def test_the_page_has_no_inline_code_and_names_only_files_that_exist():
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="ui/app.js">']
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    for name in re.findall(r'(?:src|href)="ui/([^"]+)"', page):
        assert (FOLDER / name).is_file(), name


def test_modules_import_each_other_and_nothing_else():
    assert {path for path in FILES if path.suffix == ".js"} == reached(AT_ONCE, WHEN_NEEDED), (
        "no module uses one"
    )


@pytest.mark.parametrize("path", OWN, ids=names(OWN))
def test_own_files_name_no_other_host_and_take_no_html(path):
    text = path.read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/)[\w.-]+", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


def test_licences_lie_beside_the_code_of_others():
    for path in (FOLDER / "vendor").glob("*.js"):
        licence = path.with_suffix(".LICENSE.txt")
        assert (
            "Licen" in licence.read_text() or "Permission is hereby granted" in licence.read_text()
        )
        assert path.name in (FOLDER / "vendor" / "README.md").read_text()


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://", "", "https://a b"]
)
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ConfigError, match="allowed-origins"):
        ServeSettings(allowed_origins=(origin,))


@pytest.mark.parametrize(
    "origin", ["*", "https://a.example", "http://127.0.0.1:8080", "http://[::1]:80"]
)
def test_origins(origin):
    assert ServeSettings(allowed_origins=(origin,)).allowed_origins == (origin,)
