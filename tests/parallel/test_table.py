"""The table of equality in docs/use/scaling.md has what these tests compare, and nothing else."""

import re

from tests.e2e.drafts import METHODS
from tests.parallel import test_captured_ranks, test_experts, test_methods, test_window_ranks
from tests.parity.driver import SHAPED
from tests.worlds.servers import ROOT


def cells(test):
    """Values of each of a test's parameters, by name."""
    found = {}
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            key = names if isinstance(names, str) else ", ".join(names)
            found[key] = [getattr(value, "values", value) for value in values]
    return found


def table():
    page = (ROOT / "docs" / "use" / "scaling.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("| compared with one process | cells | ranks |")
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", rest.partition("\n\n")[0], re.MULTILINE)
    return {what: (count, ranks) for what, count, ranks in rows if not what.startswith("---")}


def row(begins):
    (found,) = (each for each in table().items() if each[0].startswith(begins))
    what, (count, ranks) = found
    return what, count, ranks


def test_draft_methods():
    what, count, ranks = row("every draft method")
    named = what.partition(": ")[2].split("; ")
    assert named == list(METHODS)
    assert count == str(len(METHODS))
    asked = cells(test_methods.test_every_draft_method)["method, size"]
    assert ranks == " or ".join(sorted({str(size) for _, size in asked}))
    assert {method for method, _ in asked} == {*named}


def test_parameters_and_families():
    assert row("every sampling parameter")[1:] == (str(len(SHAPED)), "2, 4")
    assert row("every family")[1:] == (str(len(test_methods.ABLE)), "2")
    (asked,) = cells(test_window_ranks.test_any_schedule_meets_the_same_texts).values()
    assert row("window pages")[1:] == (str(len(asked)), "2")


def test_divided_experts():
    families, ways = len(test_experts.MODELS), test_experts.WAYS
    what, count, ranks = row("divided experts,")
    assert count == f"{families} families, {len(ways)} ways"
    assert ranks == ", ".join(sorted({str(way.size) for way in ways.values()}))
    (asked,) = cells(test_experts.test_chains_and_trees_of_every_size).values()
    what, count, ranks = row("divided experts under")
    assert count == str(len(asked)) and all(method in what for method, *_ in asked)
    assert ranks == ", ".join(sorted({str(size) for _, size, *_ in asked}))


def test_captured_rounds():
    asked = cells(test_captured_ranks.test_ranks_launch_what_rank_0_does)
    count = 1
    for values in asked.values():
        count *= len(values)
    assert row("captured rounds, plain")[1:] == (str(count), "2, 4")
    (models,) = cells(test_captured_ranks.test_a_draft_model_drafts_between_rounds).values()
    what, count, ranks = row("captured rounds beside")
    assert count == str(len(models)) and ranks == "2 or 4"
    assert all(algorithm in what for algorithm, *_ in models)
