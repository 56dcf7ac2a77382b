"""Output for the user: progress on stderr, results on stdout."""

import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread, Timer
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from forerun.build.engine import Loaded, load, text_table_of
from forerun.build.executor_entry import Progress as Report
from forerun.build.memory import human
from forerun.build.target import Target, open_target
from forerun.cli.wrap import wrapped
from forerun.options.config import EngineConfig

QUIET = 20.0
"""Seconds between two lines of progress in a log."""
SHOWN = 1.0
"""Seconds until a progress bar is drawn. Shorter tasks have none; by then a server, which starts
its engine first, has printed its address.
"""

err = Console(stderr=True, highlight=False)
# A pipe has no width, so tables get a fixed one.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def say(text: str, indent: int = 0) -> None:
    """Print one line on stderr, which keeps stdout free for results; on a terminal it is wrapped,
    with all lines but the first indented by `indent` spaces. A failed write is ignored: a log may
    be on a full disk.
    """
    with suppress(OSError):
        err.print(wrapped(text, indent), markup=False, soft_wrap=True)


def emit_json(value: Any) -> None:
    """Print the result of a command with --json to stdout, indented; values that JSON does not have
    are printed as text.
    """
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def emit(arguments: Namespace, facts: Any, show: Callable[[], object]) -> None:
    """Print the result of a command: `facts` with `emit_json` if --json is given, else what `show`
    prints.
    """
    if arguments.json:
        emit_json(facts)
    else:
        show()


@contextmanager
def lines(tell: Callable[[str], None]) -> Iterator[Report]:
    """Yield a function (what, done, total) that passes a line of progress to `tell` every QUIET
    seconds, even if it is not called meanwhile. A task that ends within QUIET seconds gets no line.
    """
    latest, over = "", Event()

    def report(what: str, done: int, total: int) -> None:
        nonlocal latest
        latest = ": ".join(filter(None, (what, _so_far(done, " of ", total))))

    def repeat() -> None:
        while not over.wait(QUIET):
            if latest:
                tell(latest)

    thread = Thread(target=repeat, name="forerun-progress", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        over.set()
        thread.join()


@contextmanager
def bars() -> Iterator[Report]:
    """Yield a function (what, done, total) that draws progress bars, one per task; a task is named
    by the text before the first colon. Bars appear after SHOWN seconds. If stderr is not a
    terminal, lines are written instead.
    """
    if not err.is_terminal:
        with lines(say) as logged:
            yield logged
        return
    # In a narrow terminal the description is wrapped, and no number is cut.
    columns = (
        TextColumn("{task.description}", table_column=Column()),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    drawn, lock = Progress(*columns, console=err, transient=True), Lock()
    over = False

    def draw() -> None:
        with lock:
            if not over:
                drawn.start()

    timer = Timer(SHOWN, draw)
    timer.daemon = True
    timer.start()

    def report(what: str, done: int, total: int) -> None:
        amount = f"{human(done)} of {human(total)}" if total > 10_000 else _so_far(done, "/", total)
        task = what.partition(":")[0]
        if task not in tasks:
            tasks[task] = drawn.add_task(what, total=total, amount=amount, speed="")
        rate = drawn.tasks[tasks[task]].speed or 0 if total > 10_000 else 0
        drawn.update(
            tasks[task],
            description=what,
            completed=done,
            total=total or None,
            amount=amount,
            speed=f"{human(int(rate))}/s" if rate else "",
        )

    try:
        yield report
    finally:
        timer.cancel()
        with lock:
            over = True
            if drawn.live.is_started:
                drawn.stop()


def _so_far(done: int, of: str, total: int) -> str:
    """Return "done of total" as text; only `done` if the total is 0 (unknown)."""
    return f"{done}{of}{total}" if total else str(done or "")


def numbered(report: Report, runs: int) -> Report:
    """Return a function (what, done, total) that reports to `report` with ", run i of `runs`"
    appended to `what`; each new `what` counts as the next run.
    """
    seen: list[str] = []

    def number(what: str, done: int, total: int) -> None:
        if what not in seen:
            seen.append(what)
        report(f"{what}, run {seen.index(what) + 1} of {runs}", done, total)

    return number


@contextmanager
def plain_warnings(tell: Callable[[str], None] = say) -> Iterator[None]:
    """Pass the text of warnings to `tell`, without their source lines."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        tell(f"forerun: {message}")

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def load_with_progress(config: EngineConfig, listener: Report = lambda *_: None) -> Loaded:
    """Load and start a model while showing the progress, which is passed to `listener` too."""
    with plain_warnings(), bars() as report:
        return load(config, both(report, listener))


def both(one: Report, other: Report) -> Report:
    """Return a function that reports progress to both functions."""

    def report(what: str, done: int, total: int) -> None:
        one(what, done, total)
        other(what, done, total)

    return report


def load_shown(config: EngineConfig) -> Loaded:
    """Load and start a model while showing progress, then print its device, tuned profile and lossy
    settings.
    """
    loaded = load_with_progress(config)
    _say_device(loaded.target)
    if loaded.info["profile"]:
        say(f"speculation as tuned on this machine: {loaded.info['profile']}")
    if loaded.info["lossy"]:
        say(loaded.info["lossy"])
    return loaded


def open_shown(config: EngineConfig) -> Target:
    """Load a model without an engine while showing progress. Waits until an n-gram table of
    ordinary text, if one is used, has been counted, so that measurements draft as a server does.
    """
    with plain_warnings(), bars() as report:
        target = open_target(config, report)
    _say_device(target)
    table = text_table_of(target)
    if table is not None and table.counting:
        say("an n-gram table of ordinary text is counted first, once for this tokenizer")
        try:
            table.wait()
        except BaseException:  # Interrupted: the caller has no target to close.
            table.close()
            target.close()
            raise
    return target


def _say_device(target: Target) -> None:
    """Print the target's device and why it was chosen, on a machine with a GPU."""
    if target.device is not None and target.device.gpu:
        say(target.device.sentence())


def interactive() -> bool:
    """Return whether stdin is a terminal."""
    return sys.stdin.isatty()
