"""What is learned where a grammar leaves a choice, and that it is drafted, never imposed."""

import json

import numpy as np

from forerun.constrain.grammar import Grammar
from forerun.constrain.matcher.token_prior import Places, TokenPrior, shared_places
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.control.policy import FIXED_MIN_PROB
from forerun.engine.request import Finish, Speculation
from forerun.interface.grammars import legal
from forerun.speculative.tree import Draft, batch
from tests.constrain.test_lossless import BYTES, completion_of, engine
from tests.constrain.test_tree_mask import VOCAB, chain, guide, ids
from tests.constrain.tools import PERSON, compiled
from tests.engine.toys import ask, run

ALL, ODD = b"\xff" * 4, b"\xaa" * 4


def test_a_mask_says_what_is_legal():
    assert [token for token in range(-1, 9) if legal(b"\xaa", token)] == [1, 3, 5, 7]
    assert legal(None, 10**6)


def test_the_likeliest_token_of_a_place_and_how_sure_that_is():
    habits = TokenPrior(shared_places())
    assert habits.likely(ALL, (0, 1)) == []
    chances = []
    for _ in range(6):
        habits.learn(ALL, (0, 1), 7)
        ((token, chance),) = habits.likely(ALL, (0, 1))
        assert token == 7
        chances.append(chance)
    assert chances == sorted(chances) and chances[0] < chances[-1] < 1
    habits.learn(ALL, (0, 1), 9)
    habits.learn(ALL, (0, 1), 9)
    assert habits.likely(ALL, (0, 1))[0][0] == 9, "a sequence may change its mind"


def test_a_place_is_a_state_or_the_last_token_and_only_legal_tokens_are_guessed():
    habits = TokenPrior(shared_places())
    for _ in range(4):
        habits.learn(ALL, (0, 1), 6)
    assert habits.likely(ALL, (0, 2))[0][0] == 6, "the same state after another token"
    assert habits.likely(b"\xfe" * 4, (0, 1))[0][0] == 6, "the same token in another state"
    assert habits.likely(ODD, (0, 1)) == [], "6 is not legal there"


def test_two_tokens_say_more_than_one():
    habits = TokenPrior(shared_places())
    for _ in range(6):
        habits.learn(ALL, (1, 5), 7)
        habits.learn(ALL, (2, 5), 8)
    assert habits.likely(ALL, (1, 5))[0][0] == 7
    assert habits.likely(ALL, (2, 5))[0][0] == 8
    assert habits.likely(ALL, (3, 5))[0][1] < habits.likely(ALL, (2, 5))[0][1]


def test_a_sequence_trusts_itself_more_than_others():
    shared = shared_places()
    mine, others = TokenPrior(shared), TokenPrior(shared)
    for _ in range(5):
        others.learn(ALL, (0, 1), 3)
    assert mine.likely(ALL, (0, 1))[0][0] == 3
    for _ in range(2):
        mine.learn(ALL, (0, 1), 5)
    assert mine.likely(ALL, (0, 1))[0][0] == 5
    assert others.likely(ALL, (0, 1))[0][0] == 3


def test_what_is_remembered_is_bounded():
    places = Places(decay=0.5, size=3)
    for place in range(10):
        places.learn(place, place)
    assert [bool(places.at(place)) for place in range(10)] == [False] * 7 + [True] * 3
    for token in range(100):
        places.learn("here", token)
    assert len(places.at("here")) < 8


SPACED = Grammar.json_schema(
    {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in ("one", "two", "three", "four")},
        "required": ["one", "two", "three", "four"],
        "additionalProperties": False,
    }
)


def spell(grammars: TreeGrammars, slot: int, text: str) -> int:
    """Commit a text as steps would. The steps it takes where what is certain or likely is right."""
    tokens, steps = ids(text), 0
    while tokens:
        rows = np.array([slot], np.int32)
        (predicted,) = grammars.predicted(rows, FIXED_MIN_PROB)
        sizes = np.array([len(predicted)], np.int32)
        (draft,) = grammars.filter_and_extend_drafts(rows, [Draft()], sizes, sizes)
        grammars.masks(rows, batch([np.zeros(1, np.int32)], [draft]))
        right = 0
        while right < min(len(draft), len(tokens) - 1) and draft.tokens[right] == tokens[right]:
            right += 1
        done, tokens = tokens[: right + 1], tokens[right + 1 :]
        grammars.commit(slot, done)
        steps += 1
    return steps


def test_the_white_space_of_one_text_is_expected_in_the_next():
    text = json.dumps({"one": True, "two": False, "three": True, "four": False}, indent=2)
    grammars, steps = TreeGrammars(VOCAB), []
    for slot in range(3):
        grammars.open(slot, compiled(SPACED), [])
        steps.append(spell(grammars, slot, text))
        grammars.close(slot)
    assert steps[0] < 0.5 * len(text), "names and literals are forced"
    assert steps[2] < 0.8 * steps[0], "the rest is habit"


def test_what_a_tenant_wrote_is_drafted_for_no_other():
    """Also not shown in another's trace."""
    made, drafted = engine("grammar", "bytes"), []
    for id, tenant, salt in (("0", "a", ""), ("1", "a", ""), ("2", "b", ""), ("3", "a", "x")):
        request = ask(
            id,
            max_tokens=60,
            grammar=compiled(Grammar.regex("(x[a-p]y[a-p]z[a-p]){4}")),
            speculation=Speculation(trace=True),
            tenant=tenant,
            cache_salt=salt,
        )
        steps = [step for delta in run(made, request).of(id) for step in delta.trace]
        drafted.append([(step.tokens, step.nodes.tokens) for step in steps])
    assert len(drafted[1]) < len(drafted[0]), "the tenant itself profits"
    assert drafted[0] == drafted[2] == drafted[3]


def test_where_nodes_are_dear_only_forced_tokens_are_ahead():
    grammars = TreeGrammars(VOCAB)
    for slot in range(4):
        grammars.open(slot, compiled(Grammar.regex("ab(c|d)ef")), [])
        if slot < 3:
            spell(grammars, slot, "abcef")
    assert [draft_token.score for draft_token in grammars._states[3].predicted(1.0)] == [1.0, 1.0]
    grammars.open(3, compiled(Grammar.regex("ab(c|d)ef")), [])
    (predicted,) = grammars.predicted(np.array([3], np.int32), FIXED_MIN_PROB)
    assert len(predicted) == 5, "habit says c; then e and f are certain"


def test_a_draft_that_agrees_with_the_chain_goes_on_below_it():
    grammars = TreeGrammars(VOCAB)
    grammars.open(0, compiled(Grammar.regex("(Paris|Amsterdam)!?")), ids("P"))
    guided = guide(grammars, chain(*ids("aris!")), 8, 8)
    assert guided.tokens.tolist() == ids("aris!")
    assert guided.parents.tolist() == [-1, 0, 1, 2, 3], "one path, not two"


def test_habits_change_no_token():
    """The same requests again and again on one engine: ever fewer steps, always the same text."""
    grammar, known = compiled(Grammar.json_schema(PERSON)), engine("none", "bytes")
    taught = engine("ngram", "bytes", nodes=16, depth=16)
    steps = []
    for turn in range(3):
        for seed in range(2):
            request = ask(
                f"{turn} {seed}",
                "x",
                250,
                grammar=grammar,
                temperature=0.8,
                seed=seed,
                stop_tokens=BYTES.eos_ids,
            )
            wanted, actual = run(known, request), run(taught, request)
            assert completion_of(actual, request.id) == completion_of(wanted, request.id)
            assert wanted.last(request.id).finish in (Finish.STOP, Finish.LENGTH)
            steps.append(actual.last(request.id).stats.steps)
    assert sum(steps[-3:]) < sum(steps[:3])
