"""Where requests go: their own beginnings, within bounds of load, alike from every router."""

import json
from collections import Counter

import pytest

from forerun.ray.affinity import BLOCK, MOST_BLOCKS, NOWHERE, Affinity, PrefixAffinity, affinity_of

SYSTEM = {"role": "system", "content": "You are the help of a shop. " * 40}


def body(*messages, **more):
    return json.dumps({"model": "m", "messages": [SYSTEM, *messages], **more}).encode()


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def loads(*counts):
    return {f"r{index}": count for index, count in enumerate(counts)}


def test_later_turns_begin_as_earlier_ones_did():
    first = affinity_of({}, body(user("a" * 600)))
    second = affinity_of({}, body(user("a" * 600), said("b" * 600), user("c" * 600)))
    assert len(first.blocks) > 4
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert len(second.blocks) > len(first.blocks)
    assert first.conversation == second.conversation


@pytest.mark.parametrize(
    "headers, more",
    [
        ({"authorization": "Bearer other"}, {}),
        ({"x-api-key": "other"}, {}),
        ({}, {"cache_salt": "s"}),
        ({}, {"model": "n"}),
        ({}, {"tools": [{"type": "function"}]}),
    ],
)
def test_tenants_apart_share_no_block(headers, more):
    message = user("a" * 600)
    mine, theirs = affinity_of({}, body(message)), affinity_of(headers, body(message, **more))
    assert not set(mine.blocks) & set(theirs.blocks)
    assert mine.conversation != theirs.conversation


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b"3"])
def test_what_is_no_object_belongs_nowhere(text):
    affinity = affinity_of({}, text)
    assert affinity == NOWHERE or not affinity.blocks


@pytest.mark.parametrize("name", ["prompt", "input", "text", "messages", "input_ids", "contents"])
def test_every_dialect_has_a_beginning(name):
    value = [7] * 999 if name == "input_ids" else ["word " * 200]
    request = json.dumps({name: value if name != "prompt" else "word " * 200}).encode()
    assert len(affinity_of({}, request).blocks) > 2


def test_a_long_text_costs_a_bounded_number_of_blocks():
    request = json.dumps({"prompt": "x" * (MOST_BLOCKS + 50) * BLOCK}).encode()
    assert len(affinity_of({}, request).blocks) == MOST_BLOCKS


def test_surrogates_are_text():
    request = {"prompt": "\ud800" * 300, "prompt_cache_key": "\udfff", "model": "\ud800"}
    assert affinity_of({}, json.dumps(request).encode()).blocks


def test_a_client_may_name_the_conversation():
    one = affinity_of({}, body(user("a"), prompt_cache_key="k"))
    two = affinity_of({}, body(user("quite another"), prompt_cache_key="k"))
    other = affinity_of({"x-session-id": "s"}, body(user("a")))
    assert one.conversation == two.conversation != other.conversation


def test_a_conversation_finds_its_replica_again():
    router = PrefixAffinity()
    first = affinity_of({}, body(user("a" * 600)))
    place = router.order(first, loads(0, 0, 0, 0))[0]
    router.sent(first, place)
    second = affinity_of({}, body(user("a" * 600), said("b" * 600), user("c")))
    assert router.order(second, loads(1, 1, 1, 1))[0] == place
    assert router.cached(second.blocks, loads(0, 0, 0, 0))[place] == len(first.blocks)


def test_a_busy_replica_sends_others_on_to_the_least_loaded():
    """The bound is 1.5 times the mean: 30 requests on 3 replicas with the new one are 10.33."""
    router = PrefixAffinity(overload=1.5, weight=0)
    affinity = affinity_of({}, body(user("a" * 600)))
    router.sent(affinity, "r0")
    assert router.order(affinity, loads(15, 8, 7))[0] == "r0"
    assert router.order(affinity, loads(16, 9, 4))[-1] == "r0"


def test_what_is_cached_is_weighed_against_waiting_requests():
    """Seven blocks are worth one request more at a weight of 4, and not two."""
    router, affinity = PrefixAffinity(overload=9, weight=4), Affinity(tuple(range(7)), 1)
    router.sent(affinity, "r0")
    assert router.order(affinity, loads(3, 2))[0] == "r0"
    assert router.order(affinity, loads(4, 2))[0] == "r1"


def test_many_conversations_behind_one_system_prompt_are_spread():
    """None of three replicas has more than the bound, however much they share."""
    router, busy, sent = PrefixAffinity(overload=1.5), loads(0, 0, 0), Counter()
    for index in range(300):
        affinity = affinity_of({}, body(user(f"question {index} " * 100)))
        place = router.order(affinity, busy)[0]
        router.sent(affinity, place)
        busy[place] += 1
        sent[place] += 1
    assert len(sent) == 3
    assert max(sent.values()) <= 1.5 * 301 / 3 + 1


def test_routers_that_know_nothing_of_each_other_agree():
    """A conversation whose first turn another router has sent goes where that one sent it."""
    for index in range(50):
        affinity = Affinity((index, index + 1000), conversation=index)
        one, two = PrefixAffinity(), PrefixAffinity()
        place = one.order(affinity, loads(2, 2, 2, 2))[0]
        one.sent(affinity, place)
        later = Affinity((*affinity.blocks, index + 2000), conversation=index)
        assert two.order(later, loads(2, 2, 2, 2))[0] == one.order(later, loads(2, 2, 2, 2))[0]


def test_routers_that_see_other_loads_agree_while_no_replica_is_at_the_bound():
    """Each knows its own requests, and of others' what replicas last said. The bound is 4."""
    places = set()
    for index in range(50):
        affinity = Affinity((index, index + 1000), conversation=index)
        one = PrefixAffinity().order(affinity, loads(3, 2, 3, 2))[0]
        assert one == PrefixAffinity().order(affinity, loads(2, 3, 2, 3))[0]
        places.add(one)
        assert PrefixAffinity().order(affinity, loads(5, 5, 5, 0))[0] == "r3"
    assert len(places) == 4


def test_few_conversations_move_when_a_replica_comes():
    """Rendezvous hashing: a fifth of them, all to the new one."""
    router, moved = PrefixAffinity(), 0
    for index in range(500):
        affinity = Affinity((), conversation=index)
        before, after = (router.order(affinity, loads(*[0] * n))[0] for n in (4, 5))
        assert after in (before, "r4")
        moved += after != before
    assert 60 < moved < 140


def test_what_a_lost_replica_had_is_forgotten():
    router, affinity = PrefixAffinity(), affinity_of({}, body(user("a" * 600)))
    router.sent(affinity, "r0")
    router.lost("r0")
    assert not any(router.cached(affinity.blocks, loads(0, 0)).values())


def test_memory_is_bounded():
    router = PrefixAffinity(remembered=10)
    for index in range(100):
        router.sent(Affinity((index,)), "r0")
    assert router.cached([89], loads(0))["r0"] == 0
    assert router.cached([90], loads(0))["r0"] == 1


def test_a_stored_answer_is_fetched_where_it_is():
    affinity = Affinity((1, 2), conversation=3, replica="r2")
    assert PrefixAffinity().order(affinity, loads(0, 0, 90))[0] == "r2"
    assert PrefixAffinity().order(affinity, loads(0, 0))[0] in ("r0", "r1")


def test_no_replica_is_no_place():
    assert PrefixAffinity().order(NOWHERE, {}) == []
