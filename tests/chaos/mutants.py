"""Mutation testing of forerun/speculative and forerun/cache: `make mutants`.

    python -m tests.chaos.mutants [--seed 0] [--minutes 60] [--out FILE] [FILE ...]

Every file is changed in one place at a time (cosmic-ray's operators), and the tests named here for
it run against the change in a process forked for it until one fails: first what has noticed most
changes, then what is cheapest. Nothing on disk is touched. A change that no test notices survives:
it is killed by a new test, or it has its reason in REASONS below. Reasons for what is noticed all
the same, or for lines that are gone, are printed. A change whose tests take four times the
processor time of the unchanged file counts as noticed.

Ends with code 1 where a change survives that has no reason, and with 2 where the tests fail without
any change.
"""

import argparse
import ast
import importlib.abc
import importlib.util
import io
import json
import math
import os
import random
import resource
import sys
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
import hypothesis
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[2]
S, C = "forerun/speculative/", "forerun/cache/"
TESTS = {
    S + "accept.py": ["speculative/test_exhaustive.py", "speculative/test_accept.py"],
    S + "tree.py": [
        "speculative/test_tree.py",
        "speculative/test_exhaustive.py",
        "speculative/test_accept.py",
        "speculative/test_draft_tree.py",
    ],
    S + "verify.py": ["speculative/test_tree.py"],
    S + "noise.py": ["speculative/test_noise.py", "speculative/test_accept.py"],
    S + "sampling.py": [
        "speculative/test_sampling.py",
        "speculative/test_accept.py",
        "speculative/test_thresholds.py",
    ],
    S + "thresholds.py": ["speculative/test_thresholds.py"],
    S + "draft_tree.py": ["speculative/test_draft_tree.py"],
    C + "table.py": ["engine/test_cache.py", "fuzz/test_pages_machine.py"],
    C + "prefix.py": ["engine/test_cache.py", "fuzz/test_pages_machine.py"],
}
PER_PLACE = 2
"""Changes tried in one place, of the many that an operator knows."""

MEMORY = 4 << 30
"""Bytes of address space of one run: a loop that no longer ends may also grow. Unchanged 0.4 GB."""

REASONS: dict[str, str] = {
    change: reason
    for reason, changes in json.loads(
        Path(__file__).with_name("mutants_survive.json").read_text()
    ).items()
    for change in changes
}
"""A surviving change, as `file: line -> changed line`, and why no test can or need notice it."""


@dataclass(frozen=True)
class Mutant:
    """One change. key: how REASONS names it."""

    key: str
    line: int
    code: str


def annotations(source: str) -> set[tuple[int, int]]:
    """Where annotations begin and everything inside them: types are mypy's business."""
    spans: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            child = getattr(node, name, None)
            if isinstance(child, ast.AST):
                spans |= {(n.lineno, n.col_offset) for n in ast.walk(child) if hasattr(n, "lineno")}
                spans |= {
                    (child.end_lineno, column)
                    for column in range(child.col_offset, child.end_col_offset)
                    if child.end_lineno == child.lineno
                }
    return spans


def mutants(path: str, draw: int = 0) -> list[Mutant]:
    """At most PER_PLACE changes in every place of a file, the same ones for every `draw`."""
    source = (ROOT / path).read_text()
    skip, nodes = annotations(source), list(ast_nodes(get_ast(source)))
    lines = source.splitlines()
    places: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name in cosmic_ray.plugins.operator_names():
        operator_class = cosmic_ray.plugins.get_operator(name)
        if operator_class.arguments() or name.endswith(("NoOp", "RemoveDecorator")):
            continue
        positions = [at for n in nodes for at in operator_class().mutation_positions(n)]
        for occurrence, (start, _) in enumerate(positions):
            if start not in skip and not lines[start[0] - 1].startswith("@"):
                places.setdefault(start, []).append((name, occurrence))
    made: list[Mutant] = []
    for (line, column), known in sorted(places.items()):
        # Whatever else changes in the file.
        seed = f"{draw or ''}{path}{lines[line - 1].strip()}{column}"
        chosen = random.Random(seed).sample(known, min(PER_PLACE, len(known)))
        for name, occurrence in chosen:
            code = mutate_code(source, cosmic_ray.plugins.get_operator(name)(), occurrence)
            if code is None or code == source:
                continue
            changed = [(a, b) for a, b in zip(lines, code.splitlines(), strict=False) if a != b]
            if changed:
                was, now = (text.strip() for text in changed[0])
                made.append(Mutant(f"{path}: {was} -> {now}", line, code))
    return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module the code of a mutant."""

    def __init__(self, path: str, code: str):
        self.name = path.removesuffix(".py").replace("/", ".")
        self.path, self.code = str(ROOT / path), code

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_loader(name, self, origin=self.path)

    def exec_module(self, module):
        module.__file__ = self.path
        exec(compile(self.code, self.path, "exec"), module.__dict__)


class Order:
    """A plugin of pytest: what has noticed most changes runs first, then what is cheap.

    costs    seconds of each test without any change; a test that is not in it runs last
    noticed  changes that made each test fail
    """

    def __init__(self) -> None:
        self.costs: Counter[str] = Counter()
        self.noticed: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest before the first test."""
        cost = {item.nodeid: self.costs.get(item.nodeid, math.inf) for item in items}
        items.sort(key=lambda item: (-self.noticed[item.nodeid], cost[item.nodeid]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after each part of a test."""
        self.costs[report.nodeid] += report.duration
        self.noticed[report.nodeid] += report.failed


def run(path: str, code: str, seconds: float, order: Order) -> tuple[bool, float]:
    """Whether the tests pass with this code, and their processor time. Bounded by `seconds`.

    order  learns from it: of the costs only where it knew none
    """
    receiver, tell = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        sys.meta_path.insert(0, Finder(path, code))
        tests = [str(ROOT / "tests" / name) for name in TESTS[path]]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=900"]
        options += ["-m", "not slow"]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            failed = int(pytest.main([*options, *tests], plugins=[order]))
        with os.fdopen(tell, "w") as pipe:
            json.dump([order.costs, order.noticed], pipe)
        os._exit(failed)
    os.close(tell)
    with os.fdopen(receiver) as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if text:
        costs, noticed = json.loads(text)
        order.costs, order.noticed = order.costs or Counter(costs), Counter(noticed)
    return status == 0, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="another draw of the changes")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no file after these")
    parser.add_argument("--out", type=Path, help="a JSON file of what survived")
    parser.add_argument("files", nargs="*", default=list(TESTS))
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    survived, report = [], {}
    for path in given.files:
        order, source = Order(), (ROOT / path).read_text()
        passes, baseline = run(path, source, 600, order)
        if not passes:
            print(f"{path}: its tests fail without any change")
            sys.exit(2)
        tried, alive, needless = 0, [], set()
        for key in REASONS:
            if key.startswith(f"{path}: ") and key[len(path) + 2 :].split(" -> ")[0] not in source:
                needless.add(key)
        for mutant in mutants(path, given.seed):
            if time.monotonic() > until:
                print(f"{path}: time is up after {tried}")
                break
            tried += 1
            if run(path, mutant.code, 4 * baseline + 5, order)[0]:
                alive.append(mutant.key)
                print(f"survives, line {mutant.line}: {mutant.key}", flush=True)
            elif mutant.key in REASONS:
                needless.add(mutant.key)
        for key in needless:
            print(f"needs no reason: {key}")
        reasoned = [key for key in alive if key in REASONS]
        survived += [key for key in alive if key not in REASONS]
        report[path] = {"tried": tried, "survived": alive, "with a reason": len(reasoned)}
        print(f"{path}: {tried} changes, {len(alive)} survive, {len(reasoned)} with a reason")
        sys.stdout.flush()
        if given.out:
            given.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    os.environ["CI"] = "1"  # Hypothesis then draws the same examples every time.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    # What every test imports and no change touches, once for all processes.
    import hypothesis.stateful
    import hypothesis.strategies
    import numpy as np
    import scipy.stats

    assert np and hypothesis.stateful and hypothesis.strategies and scipy
    # A change that an example shows is noticed: the smallest such example is not looked for.
    looking = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", hypothesis.settings.get_profile("ci"), phases=looking
    )
    hypothesis.settings.load_profile("mutants")
    main()
