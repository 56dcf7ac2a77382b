"""What a person reads in a terminal of 80 columns."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import ExitStack, contextmanager, suppress
from io import StringIO
from threading import Thread
from time import monotonic, sleep

import pytest
from rich.console import Console
from rich.text import Text

from forerun.build.tuned import Setting
from forerun.cli import console
from forerun.cli.eval import table as eval_table
from forerun.cli.main import main as cli
from forerun.cli.tune import table as tune_table
from forerun.cli.wrap import wrapped
from forerun.hub.catalog import BUILT_IN
from forerun.measure.acceptance import Finding
from forerun.measure.report import Level, table
from forerun.measure.sweep import Cell


def written_to(columns, work):
    """What `work(terminal)` writes into a terminal: its lines, without colours."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    parts = []

    def read():
        with suppress(OSError):  # The other end is closed.
            while part := os.read(main, 65536):
                parts.append(part)

    reader = Thread(target=read)
    reader.start()
    try:
        work(other)
    finally:
        os.close(other)
        reader.join()
        os.close(main)
    return b"".join(parts).decode().replace("\r\n", "\n").split("\n")


def in_terminal(*words, columns=80):
    """What such a command writes, as a program."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "forerun.cli", *words]
    return written_to(
        columns,
        lambda terminal: subprocess.run(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, check=False
        ),
    )


@contextmanager
def on(terminal, patch):
    """It is what this process reads and writes."""
    before = [os.dup(number) for number in range(3)]
    with ExitStack() as files:
        for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
            os.dup2(terminal, number)
            file = files.enter_context(os.fdopen(os.dup(number), mode))
            patch.setattr(sys, name, file)
            patch.setattr(sys, f"__{name}__", file)
        yield
    for number, file in enumerate(before):
        os.dup2(file, number)
        os.close(file)


@pytest.fixture
def here(monkeypatch, capfd):
    """As `in_terminal`, in this process."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words, columns=80):
        def work(terminal):
            with monkeypatch.context() as patch, on(terminal, patch), suppress(SystemExit):
                cli(list(words))

        return written_to(columns, work)

    with capfd.disabled():
        yield run


@pytest.mark.parametrize(
    "line",
    [
        ("run", "--temprature", "1", "hi"),
        ("run", "nosuchmodel", "hi"),
        ("run", "llama3", "hi"),
        ("run", "toy", "Say hi.", "--max-tokens", "40", "--seed", "1"),
        ("serve", "--help"),
        ("stop", "--url", "http://127.0.0.1:9"),
        ("models", "show", "toy"),
        ("prove", "toy", "--quick"),
    ],
)
def test_no_line_is_wider_than_the_terminal(here, line):
    lines = here(*line)
    assert any(lines)
    assert [one for one in lines if len(one) > 80] == []
    assert not any("…" in one for one in lines), "nothing is cut"


def test_sentences_are_broken_between_words():
    printed = "".join(one + "\n" for one in in_terminal("run", "nosuchmodel", "hi", columns=40))
    assert "there is no model" in printed and printed.count("\n") >= 4
    assert " ".join(printed.split()).endswith("or a hub id like organisation/name")


def test_the_table_of_bench_cuts_nothing():
    thousands = {"p50": 1234.5, "p99": 12345.6}
    level = Level(
        *("speculation", 64, 1024, 10, 1234.5, 12.25, 9, 99),
        *(thousands, thousands, thousands, {}, None),
    )
    drawn_on = Console(width=80, file=StringIO())
    drawn_on.print(table([level], "smollm2-135m at http://127.0.0.1:8000/v1"))
    drawn = drawn_on.file.getvalue()
    assert "…" not in drawn and all(len(line) <= 80 for line in drawn.split("\n"))
    for word in ("speculation", "tokens/s", "between", "req/s", "10 of", "1024", "12345.6"):
        assert word in drawn


class Terminal:
    def isatty(self):
        return True


def test_the_other_tables_cut_nothing():
    finding = Finding(
        "mt-bench", "n-grams", 0.8, 2.345, (0.91, 0.82, 0.73), 9999, 92, 90, 123.4, 99.9
    )
    setting = Setting("EAGLE+NGRAM", 16, 8, "adaptive")
    numbers = {"rounds": 2, "speed": 1234.5, "ratio": 1.234, "acceptance_length": 2.345,
               "identical": 64, "answers": 64}  # fmt: skip
    cells = [Cell(setting, batch, **numbers) for batch in (1, 4, 16)]
    tables = (
        eval_table([finding]),
        tune_table(cells, setting, "smollm2-135m"),
    )
    for made in tables:
        drawn_on = Console(width=80, file=StringIO())
        drawn_on.print(made)
        drawn = drawn_on.file.getvalue()
        assert "…" not in drawn and all(len(line) <= 80 for line in drawn.split("\n"))


def until(condition):
    """Wait for what a thread does."""
    began = monotonic()
    while not condition():
        assert monotonic() - began < 60
        sleep(0.005)


def test_bars_cut_no_number(monkeypatch):
    """Bars are drawn from one second on: what is over sooner leaves nothing."""
    terminal = Console(width=80, file=StringIO(), force_terminal=True)
    monkeypatch.setattr(console, "err", terminal)
    with console.bars() as report:
        report("answers", 24, 24)
    assert not terminal.file.getvalue()
    monkeypatch.setattr(console, "SHOWN", 0.01)
    progress = "training: loss 5.49, agreement 0.00 0.00, length 1.000 (best 1.000), 18 tokens/s"
    with console.bars() as report:
        report("answers", 24, 24)
        report(progress, 5, 24)
        report("downloading weights", 98_400_000, 98_500_000)
        report("cases", 7, 0)  # Their number is not known.
        report("timing steps", 0, 0)
        until(lambda: "timing" in terminal.file.getvalue())
    drawn = Text.from_ansi(terminal.file.getvalue()).plain
    assert "…" not in drawn and "24/24" in drawn and "5/24" in drawn
    assert "7/0" not in drawn
    assert "98.4 MB of 98.5 MB" in drawn and "best 1.000" in " ".join(drawn.split())


def test_lines_of_progress_name_no_unknown_total(monkeypatch):
    """They come also while one piece takes long: a compiler does not say how far it is."""
    lines = []
    monkeypatch.setattr(console, "err", Console(file=StringIO()))
    monkeypatch.setattr(console, "say", lines.append)
    with console.bars() as report:
        report("cases", 1, 9)
    assert not lines, "nothing took long"
    monkeypatch.setattr(console, "QUIET", 0.01)
    with console.bars() as report:
        for done, total, line in ((0, 0, "cases"), (7, 0, "cases: 7"), (0, 9, "cases: 0 of 9")):
            report("cases", done, total)
            until(lambda: lines.count(line) > 1)  # noqa: B023
    assert set(lines) == {"cases", "cases: 7", "cases: 0 of 9"}


def test_a_run_has_its_number_among_all():
    lines = []
    report = console.numbered(lambda *line: lines.append(line), 3)
    for what, done in (("plain", 1), ("plain", 2), ("tree", 1)):
        report(what, done, 2)
    assert lines == [
        ("plain, run 1 of 3", 1, 2),
        ("plain, run 1 of 3", 2, 2),
        ("tree, run 2 of 3", 1, 2),
    ]


def test_long_paths_stay_whole(here, tmp_path, monkeypatch):
    """What is pasted from a terminal has to be a path, however long it is."""
    cache = tmp_path / ("a-rather-long-name-of-a-folder-" * 3) / "cache"
    file = cache / "forerun" / "models" / BUILT_IN["smollm2-135m"].file_name
    file.parent.mkdir(parents=True)
    with file.open("wb") as sparse:
        sparse.truncate(BUILT_IN["smollm2-135m"].size)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    lines = here("models", "list")
    assert any(str(file) in line for line in lines)
    assert all(len(line) <= 80 for line in lines if str(file) not in line)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert any(f"~/{file.relative_to(tmp_path)}" in line for line in here("models", "list"))


def test_what_is_no_terminal_gets_whole_lines(monkeypatch, capsys):
    text = "a word and another " * 20
    assert wrapped(text) == text
    monkeypatch.setenv("COLUMNS", "30")
    lines = wrapped(f"two\n  {text} {'x' * 50}", 4, Terminal()).split("\n")
    assert lines[0] == "two" and lines[1].startswith("  a word") and lines[2].startswith("    ")
    assert lines[-1].strip() == "x" * 50 and all(len(one) <= 30 for one in lines[:-1])
