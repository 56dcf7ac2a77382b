"""Drafts that a grammar guides, against one fresh matcher per node, and what masks cost. What masks
say: test_pure_masks.py.
"""

from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from forerun.constrain.grammar import Grammar, Start
from forerun.constrain.matcher.matcher import Matcher
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.control.policy import FIXED_MIN_PROB
from forerun.errors import RequestError
from forerun.interface.grammars import Committed
from forerun.speculative.sampling import unpack
from forerun.speculative.tree import Draft, batch
from tests.constrain.tools import BYTES, PERSON, compiled, members, random_draft

VOCAB = 300  # padded: the tokenizer has 259 ids
CITY = Grammar.regex("(Paris|Amsterdam)")
GRAMMARS = {
    "city": CITY,
    "letters": Grammar.regex("[a-c]{2,9}"),
    "json": Grammar.json_schema(PERSON),
    "nested": Grammar.grammar('root ::= "a" root "b" | "c"'),
}


def chain(*tokens: int) -> Draft:
    count = len(tokens)
    return Draft(
        np.array(tokens, np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
        np.full(count, 0.5, np.float32),
    )


def ids(text: str) -> list[int]:
    return list(text.encode())


def paths(draft: Draft) -> set[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return set(out)


def guide(grammars: TreeGrammars, draft: Draft, nodes: int, depth: int) -> Draft:
    numbers = [np.array([n], np.int32) for n in (0, nodes, depth)]
    return grammars.filter_and_extend_drafts(numbers[0], [draft], *numbers[1:])[0]


def opened(grammar: Grammar, output: str = "") -> TreeGrammars:
    grammars = TreeGrammars(VOCAB)
    grammars.open(0, compiled(grammar), ids(output))
    return grammars


class Fresh(NamedTuple):
    """What a matcher says that has been nowhere else."""

    complete: bool
    mask: bytes | None
    forced: list[int]


def fresh(grammar: Grammar, tokens) -> Fresh | None:
    """The reference: a new matcher for every node; None where the path is illegal."""
    return _fresh(grammar, tuple(tokens))


@cache
def _fresh(grammar, tokens):
    matcher = Matcher(compiled(grammar))
    if not all(matcher.advance(token) for token in tokens):
        return None
    if matcher.complete:
        return Fresh(True, None, [])
    return Fresh(False, matcher.mask(), matcher.forced())


def some_output(grammar: Grammar, random: Random, most: int = 25) -> list[int]:
    matcher, out = Matcher(compiled(grammar)), []
    for _ in range(random.randrange(most)):
        token = random.choice(members(matcher.mask()))
        if token in BYTES.eos_ids or not matcher.advance(token) or matcher.complete:
            break
        out.append(token)
    return out


@pytest.mark.parametrize("name", GRAMMARS)
def test_guided_drafts_hold_what_is_legal_and_what_is_forced(name):
    grammar, random = GRAMMARS[name], Random(2)
    for _ in range(25):
        output = some_output(grammar, random)
        tokens = [*members(fresh(grammar, output).mask)[:4], *ids('ab" :P'), 0, 257, 299]
        draft = random_draft(random, tokens, 12, 5)
        grammars = TreeGrammars(VOCAB)
        grammars.open(0, compiled(grammar), output)
        guided = guide(grammars, draft, 64, 8)
        legal = {path for path in paths(draft) if goes_on(grammar, output, path)}
        assert legal <= paths(guided), "a legal draft token was lost"
        for path in paths(guided):
            assert goes_on(grammar, output, path), "an illegal draft token stayed"
            before = fresh(grammar, [*output, *path[:-1]])
            assert path in legal or before.forced[:1] == [path[-1]], "invented"
        assert np.all(guided.parents < np.arange(len(guided)))
        assert max(map(len, paths(guided)), default=0) <= 8
        few = guide(grammars, draft, 3, 2)
        assert len(few) <= 3 and max(map(len, paths(few)), default=0) <= 2
        assert paths(few) <= paths(guided)
        assert fresh(grammar, output).mask == mask_of(grammars), "guiding moved the matcher"


def goes_on(grammar: Grammar, output, path) -> bool:
    """Legal, and nothing before the last token completed the text."""
    before = fresh(grammar, [*output, *path[:-1]])
    whole = fresh(grammar, [*output, *path])
    return before is not None and not before.complete and whole is not None


def mask_of(grammars: TreeGrammars) -> bytes:
    masks = grammars.masks(np.zeros(1, np.int32), batch([np.array([1], np.int32)], [Draft()]))
    return masks.bits[masks.row[0]].tobytes()[: len(Matcher(compiled(CITY)).mask())]


def test_forced_text_is_drafted_for_free():
    grammars = opened(CITY, "P")
    assert guide(grammars, Draft(), 8, 8).tokens.tolist() == ids("aris")
    assert guide(grammars, Draft(), 8, 2).tokens.tolist() == ids("ar")
    assert guide(grammars, Draft(), 3, 8).tokens.tolist() == ids("ari")
    assert len(guide(grammars, Draft(), 0, 0)) == 0


def test_the_draft_goes_on_where_it_agrees_with_what_is_forced():
    grammars = opened(Grammar.regex("ab(c|d)e[f-h]"), "")
    guided = guide(grammars, chain(*ids("abceg")), 8, 8)
    assert guided.tokens.tolist() == ids("abceg")
    guided = guide(grammars, chain(*ids("abxe")), 8, 8)
    assert guided.tokens.tolist() == ids("ab")


def test_likely_paths_win_a_small_budget():
    grammars = opened(Grammar.regex("[a-e][a-e]"), "")
    draft = Draft(
        np.array(ids("abcde"), np.int32),
        np.array([-1, -1, 0, 0, 1], np.int32),
        np.array([0.3, 0.6, 0.2, 0.1, 0.5], np.float32),
    )
    assert paths(guide(grammars, draft, 2, 2)) == {(98,), (98, 101)}


def test_drafts_without_scores_keep_their_order():
    grammars = opened(Grammar.regex("[a-z]+"), "")
    draft = Draft(
        np.array(ids("abcd"), np.int32), np.array([-1, -1, 0, 1], np.int32), np.zeros(4, np.float32)
    )
    assert paths(guide(grammars, draft, 3, 3)) == {(97,), (98,), (97, 99)}


def test_a_complete_text_ends_the_draft_and_the_commit():
    grammars = opened(CITY, "Pari")
    assert guide(grammars, chain(ord("s"), 257, 97), 8, 8).tokens.tolist() == [ord("s")]
    assert grammars.commit(0, [ord("s"), 257, 97]) == Committed(1, complete=True)
    grammars.close(0)
    grammars.open(0, compiled(CITY), ids("Par"))
    assert grammars.commit(0, ids("i")) == Committed(len("i"))
    assert grammars.commit(0, ids("s")) == Committed(1, complete=True)


def test_ids_that_the_tokenizer_does_not_have_never_reach_the_matcher():
    grammars = opened(Grammar.regex("[a-z]+"), "a")
    assert len(guide(grammars, chain(299, 97), 8, 8)) == 0
    bits = grammars.masks(np.zeros(1, np.int32), batch([np.array([1], np.int32)], [chain(299, 97)]))
    assert bits.row.tolist() == [0, -1, -1]
    assert not unpack(bits.bits[0], VOCAB)[259:].any()
    for token in (-1, 259, 10**9):
        assert grammars.commit(0, [token]) == Committed(0, error=f"token {token} does not fit")
        assert grammars.commit(0, ids("b")) == Committed(len("b")), "the matcher survives"


def test_special_tokens_stay_out_of_strings():
    grammars = opened(Grammar.json_schema({"type": "string"}), '"x')
    masks = grammars.masks(np.zeros(1, np.int32), batch([np.array([1], np.int32)], [Draft()]))
    legal = set(np.flatnonzero(unpack(masks.bits[0], VOCAB)))
    assert legal and not legal & set(BYTES.special_ids)


def test_the_constraint_begins_after_its_marker_wherever_it_falls():
    grammar = CITY.after(Start("</t>"))
    grammars = TreeGrammars(VOCAB)
    grammars.open(0, compiled(grammar), ids("hm"))
    draft = chain(*ids("<</t>Px"))
    guided = guide(grammars, draft, 16, 16)
    assert guided.tokens.tolist() == ids("<</t>Paris"), (
        "forced text replaces the illegal draft token"
    )
    masks = grammars.masks(np.zeros(1, np.int32), batch([np.array([1], np.int32)], [guided]))
    assert {*masks.row[:5].tolist()} == {0}
    free = np.flatnonzero(unpack(masks.bits[0], VOCAB))
    assert set(range(259)) - set(free) == set(BYTES.eos_ids), "free while it reasons, but no end"
    assert set(np.flatnonzero(unpack(masks.bits[masks.row[5]], VOCAB))) == set(ids("PA"))
    assert grammars.commit(0, ids("<</t>P")) == Committed(len("<</t>P"))
    assert guide(grammars, Draft(), 8, 8).tokens.tolist() == ids("aris")
    assert grammars.commit(0, ids("aris?")) == Committed(4, complete=True)


def test_a_marker_that_overlaps_itself_is_found():
    grammars = TreeGrammars(VOCAB)
    grammars.open(0, compiled(CITY.after(Start("aab"))), ids("aaa"))
    assert grammars.commit(0, ids("b")) == Committed(len("b"))
    assert guide(grammars, chain(ord("x"), ord("y")), 4, 4).tokens.tolist() == []


def test_only_constrained_rows_pay():
    grammars = opened(CITY)
    slots = np.array([3, 4], np.int32)
    drafts = [chain(1, 2), chain(3)]
    numbers = np.array([4, 4], np.int32)
    assert grammars.filter_and_extend_drafts(slots, drafts, numbers, numbers) == drafts
    known = np.array([1], np.int32)
    assert grammars.masks(slots, batch([known, known], drafts)) is None
    assert grammars.predicted(slots, FIXED_MIN_PROB) == [[], []]


class Counted:
    """An automaton that counts the calls of `mask`, those of its forks too."""

    def __init__(self, inner, calls=None):
        self._inner, self._calls = inner, [] if calls is None else calls

    @property
    def masks(self):
        return len(self._calls)

    def mask(self):
        self._calls.append(1)
        return self._inner.mask()

    def fork(self):
        return Counted(self._inner.fork(), self._calls)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_mask_is_computed_once_per_state_and_equal_masks_are_sent_once():
    grammars = TreeGrammars(VOCAB)
    slots, known = np.array([0, 1, 2], np.int32), np.array([1], np.int32)
    for slot in (0, 1):  # Slot 2 is not constrained.
        grammars.open(slot, compiled(Grammar.regex("[a-z]{9}")), ids("ab"))
    counts = []
    for state in grammars._states.values():
        state.matcher._automaton = Counted(state.matcher._automaton)
        counts.append(state.matcher._automaton)
    numbers = np.array([6, 6, 6], np.int32)
    assert grammars.predicted(slots, FIXED_MIN_PROB) == [[], [], []]
    drafts = grammars.filter_and_extend_drafts(
        slots, [chain(*ids("cd")), chain(*ids("xy")), Draft()], numbers, numbers
    )
    assert [len(draft) for draft in drafts] == [2, 2, 0]
    trees = batch([known] * 3, drafts)
    masks = grammars.masks(slots, trees)
    assert [count.masks for count in counts] == [3, 3], "one for each node, the root's once"
    assert masks.row.tolist() == [0, 0, 0, 0, 0, 0, -1], "letters follow everywhere: one mask"
    assert len(masks.bits) == 1
    again = grammars.masks(slots, trees)
    assert again.row.tolist() == masks.row.tolist()
    assert [count.masks for count in counts] == [3, 3], "nothing has moved"
    grammars.commit(0, ids("cde"))
    grammars.masks(slots, batch([known] * 3, [Draft()] * 3))
    assert [count.masks for count in counts] == [4, 3], "a new root, a new mask"


def broken(automaton) -> None:
    """Break it from inside, as a limit would."""
    automaton._matcher.consume_token(0)


def test_a_failed_matcher_is_reported_alone():
    grammars, grammar = TreeGrammars(VOCAB), Grammar.regex("(Paris|Amsterdam)()")
    for slot in (0, 1):
        grammars.open(slot, compiled(grammar), [])
    broken(grammars._states[0].matcher._automaton)
    known = np.array([1], np.int32)
    slots = np.array([0, 1], np.int32)
    numbers = np.array([4, 4], np.int32)
    drafts = grammars.filter_and_extend_drafts(
        slots, [chain(*ids("Pa")), chain(*ids("Pa"))], numbers, numbers
    )
    assert drafts[1].tokens.tolist() == ids("Pari")
    masks = grammars.masks(slots, batch([known, known], drafts))
    assert masks.row[-1] >= 0
    failed = grammars.commit(0, ids("P"))
    assert failed == Committed(0, must_reopen=True)
    assert compiled(grammar).expensive, "the next matcher has a process of its own"
    assert grammars.commit(1, ids("P")) == Committed(len("P"))


def test_what_is_not_compiled_is_refused():
    with pytest.raises(RequestError, match="must be compiled"):
        TreeGrammars(VOCAB).open(0, "(a|b)", [])
