"""The simulated fleet: nothing is lost in it, and the same case is the same."""

import json
from dataclasses import replace

import pytest

from bench.simulated_fleet import STILL, TROUBLES, Case, Router, Trouble, conversations, simulated
from tests.covering import every, some_of, values
from tests.worlds.servers import ROOT

KINDS = ("round robin", "least load", "prefix")
CASE = Case(replicas=6, load=2.0, seconds=12.0, seed=3)


@pytest.mark.parametrize(("trouble", "kind"), some_of(every(TROUBLES, KINDS), values))
def test_every_request_is_answered_in_the_end(kind, trouble):
    case = replace(CASE, trouble=TROUBLES[trouble])
    fleet, turns = simulated(case, [Router(kind), Router(kind)])
    assert all(turn.arrived <= turn.first <= turn.done and turn.left <= 0 for turn in turns)
    by_conversation = {}
    for turn in turns:
        by_conversation.setdefault(turn.conversation, []).append(len(turn.blocks))
    every = conversations(case.work, case.load * case.replicas, case.seconds, case.seed)
    assert by_conversation.keys() == {one.number + 1 for one in every}
    assert all(sorted(set(lengths)) == lengths for lengths in by_conversation.values())
    assert bool(fleet["lost"]) == bool(case.trouble.dies or case.trouble.still)


def test_the_same_case_is_the_same():
    case = replace(CASE, trouble=TROUBLES["all"])
    one, other = (simulated(case, [Router("prefix")])[0] for _ in range(2))
    assert one == other
    assert simulated(replace(case, seed=4), [Router("prefix")])[0] != one


def test_a_prefix_is_found_where_it_was_sent():
    cached = {kind: simulated(CASE, [Router(kind)])[0]["cached_percent"] for kind in KINDS}
    assert cached["prefix"] > 1.3 * max(cached["round robin"], cached["least load"])


def test_a_stalled_replica_gets_no_more_than_the_bound():
    """Round robin sends it its share until it is ended; the others see that it has enough."""
    case = replace(CASE, seconds=24.0, trouble=Trouble(still=0.1))

    def waited(kind):
        _, turns = simulated(case, [Router(kind)])
        return sum(turn.first - turn.arrived > STILL / 2 for turn in turns)

    assert waited("round robin") > 3 * max(waited("least load"), waited("prefix"))


def test_the_docs_say_what_the_results_are():
    """Each row of the table in docs/results/serving.md is of the points that were kept."""
    page = (ROOT / "docs" / "results" / "serving.md").read_text(encoding="utf-8")
    kept = {}
    for path in (ROOT / "bench" / "results").glob("fleet-trouble-*.json"):
        for point in json.loads(path.read_text(encoding="utf-8"))["points"]:
            case = f"{point['replicas']:,}", f"{point['load']:g}", point["trouble"]
            mean, slowest = point["first_token_ms_mean"], point["first_token_ms_p99"]
            kept.setdefault(case, {})[point["router"]] = f"{mean:,.0f}, {slowest:,.0f}"
    head = "| replicas | load | trouble | round robin | least load | by prefix |\n"
    rows = page.partition(head)[2].partition("\n\n")[0].splitlines()[1:]
    said = {}
    for row in rows:
        *case, one, two, three = (cell.strip() for cell in row.strip("|").split("|"))
        said[tuple(case)] = {
            kind: cell.strip("*") for kind, cell in zip(KINDS, (one, two, three), strict=True)
        }
    assert said == kept
