"""Documents that are true: links lead somewhere, commands exist, symbols are where they say."""

import re
import shlex
from functools import cache

import pytest

from forerun.cli.command_line import build_parser
from forerun.cli.commands import COMMANDS
from forerun.cli.verbs import SAME
from tests import everything
from tests.shape.tree import ROOT, sources

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\n]+)(?:#[^)]*)?\)")
SYMBOL = re.compile(r"`(\w+(?:\.\w+)*)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    for _, target in LINK.findall(document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name}: {target}"


README_WORDS, WORDS = 700, 45_000
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATE = re.compile(
    rf"\b(?:20\d\d-\d\d-\d\d|\d{{1,2}} (?:{MONTHS})|(?:{MONTHS}) \d{{1,2}}(?:st|nd|rd|th)?)\b"
)


def test_documents_stay_readable():
    """A page that grows takes its words from another one."""
    words = {document: len(document.read_text().split()) for document in DOCUMENTS}
    assert words[ROOT / "README.md"] <= README_WORDS
    assert sum(words.values()) <= WORDS


def test_only_results_have_dates():
    """Pages say what is; results say when it was measured."""
    pages = [page for page in DOCUMENTS if page.parent.name != "results"]
    dated = {page.name: DATE.findall(page.read_text()) for page in pages}
    assert not {name: dates for name, dates in dated.items() if dates}


def test_the_site_has_every_page():
    """mkdocs.yml names each page of docs/ once: a new page or decision needs a line there."""
    named = re.findall(r"(?m)^ +- [^\n]+: ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text())
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


def test_kept_numbers_stand_in_results():
    """bench/results holds the JSON of numbers that a page of docs/results shows, and no other."""
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "results").glob("*.md"))
    kept = [path.name for path in (ROOT / "bench" / "results").glob("*.json")]
    assert [name for name in kept if f"bench/results/{name}" not in pages] == []


OF_OTHERS = {
    *("server_args.py", "bench_speculative.py", "test_acceptance_length.py"),
    "docs/gguf.md",
}
"""Files of other projects."""


def test_sources_name_files_that_exist():
    """Comments and docstrings; a file that has moved is named by its new name."""
    sources_of = [*sources("forerun"), *sources("bench"), *(ROOT / "csrc").glob("*.*")]
    known = {path.name for folder in ("forerun", "bench", "csrc", "tests", "docs")
             for path in (ROOT / folder).rglob("*.*")}  # fmt: skip
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources_of
        if path.suffix in (".py", ".h", ".cpp", ".inl")
        for name in re.findall(r"\bdocs/[\w./-]+\.\w+|[\w-]+\.py\b", path.read_text())
        if name not in known | OF_OTHERS and not (ROOT / name).exists()
    ]
    assert not stale


NAMED = re.compile(r"\[[^\]]+\]\([./]*((?:forerun|bench|tests)/[^)]+\.py)\):?((?:\s*`[\w.]+`,?)*)")
"""A link to a source, and the symbols that follow it."""


def test_symbols_behind_a_link_are_in_that_file():
    """`[step](../../forerun/engine/step.py): `begin`, `finish``, on every page."""
    named = [
        (page.name, path, symbol)
        for page in DOCUMENTS
        for path, symbols in NAMED.findall(page.read_text())
        for symbol in SYMBOL.findall(symbols)
    ]
    assert sum(page == "path.md" for page, _, _ in named) >= 40
    for page, path, symbol in named:
        source = (ROOT / path).read_text()
        for name in symbol.split("."):
            defined = rf"(?m)^\s*(?:async )?(?:def|class) {name}\b|^{name}\s*[:=]"
            assert re.search(defined, source), f"{page}: {symbol} is not in {path}"


def commands_of(text):
    """Lines of code blocks and inline code that call make or forerun."""
    blocks = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, re.S)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`((?:make|forerun|\.venv/bin/forerun) [^`]+)`", text)
    return [line for line in lines if re.match(r"(make|forerun|\.venv/bin/forerun) ", line)]


whole_parser = cache(build_parser)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_exist(document):
    verbs = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
    for line in commands_of(document.read_text()):
        words = shlex.split(line.split("#")[0].rstrip("\\ "))
        if words[0] == "make":
            assert words[1] in verbs, line
            continue
        assert words[1] in COMMANDS | SAME or words[1].startswith("--"), line
        flags = [word.split("=")[0] for word in words[2:] if word.startswith("--")]
        known = whole_parser()._subparsers._group_actions[0].choices.get(words[1])
        for flag in flags:
            assert flag in known._option_string_actions, f"{line}: no {flag}"


def test_every_suite_is_run_by_everything_or_named_there():
    """What `make test-slow` leaves out has a verb of its own."""
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"(?m)^([a-z-]+):.*\n((?:\t.*\n)*)", makefile))
    runs = re.compile(r"\$\((?:FAST|SLOW)\)|-m (?:pytest|tests\.)")
    suites = {verb for verb, recipe in recipes.items() if runs.search(recipe)} - {"suite"}
    assert suites <= {*everything.SUITES, *everything.NAMED_ONLY} <= recipes.keys()
    (slow,) = re.findall(r"(?m)^SLOW (?:.*\\\n)*.*\n", makefile)
    for path in re.findall(r"--ignore (\S+)", slow):
        assert any(path in recipe for recipe in recipes.values()), path


def test_the_table_of_clients_names_what_is_installed_for_them():
    """docs/use/clients.md has every client of the requirement files, with its version."""
    table = (ROOT / "docs" / "use" / "clients.md").read_text()
    files = sorted((ROOT / "tests" / "clients").glob("*.txt"))
    lines = [line for file in files for line in file.read_text().splitlines() if "==" in line]
    assert len(lines) > 10
    for line in lines:
        name, version = re.sub(r"\[\w+\]", "", line).split("==")
        if name not in ("openai",):  # make test runs a newer one.
            assert f"| {name} | {version} |" in table, line


def test_the_readme_begins_with_two_commands():
    head = (ROOT / "README.md").read_text()[:600]
    assert head.index("make demo") < head.index("make test")


def glossary():
    text = (ROOT / "docs" / "inside" / "glossary.md").read_text()
    return dict(re.findall(r"(?m)^\*\*([\w /-]+)\*\*\s+(.+)$", text))


def test_the_glossary_has_every_word_and_the_code_uses_them():
    words = glossary()
    for word in (
        "request", "sequence", "plan", "row", "tree", "node", "draft token", "draft", "draft model",
        "target", "accept", "page", "slot", "step",
    ):  # fmt: skip
        assert word in words, word
    code = "\n".join(path.read_text().lower() for path in sources("forerun"))
    for word in words:
        spelled = (
            re.escape(word.split("/")[0].strip()).replace(r"\ ", r"[ _]?").replace(r"\-", "[-_ ]?")
        )
        assert re.search(rf"\b{spelled}", code), f"{word} is used nowhere"


def test_the_readmes_python_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(block.replace("smollm2-135m", "toy"), {})
    assert len(capsys.readouterr().out) == 65


def test_messages_that_are_explained_exist():
    """Every message that heads a paragraph of docs/use/troubleshooting.md is one of the code."""
    text = (ROOT / "docs" / "use" / "troubleshooting.md").read_text()
    messages = re.findall(r"(?m)^\*\*`([^`]+)`", text)
    assert len(messages) >= 5
    code = "".join(path.read_text() for path in sources("forerun"))
    # A message may run over lines: the quotes between its parts go.
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    for message in messages:
        for part in message.split("..."):
            assert part.strip(" ;().") in code, message
