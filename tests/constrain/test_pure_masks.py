"""A mask is a function of the tokens before it: of no draft and no other mask on the way.

The oracle is always a matcher that never was never rolled back and computed no mask before.
"""

from functools import cache
from random import Random

import numpy as np
import pytest

from forerun.constrain.grammar import Grammar
from forerun.constrain.matcher.matcher import Matcher
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.control.policy import FIXED_MIN_PROB
from forerun.interface.grammars import Committed
from forerun.speculative.sampling import unpack
from forerun.speculative.tree import Draft, batch
from tests.constrain.tools import SPANNING, TOKENIZERS, compiled, members

TEXT, NUMBER, YES_NO = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
PAIR = {"name": TEXT, "age": NUMBER}
MANY = PAIR | {"city": TEXT, "zip": TEXT, "active": YES_NO}


def record(properties: dict, **more) -> dict:
    return {"type": "object", "properties": properties} | more


CLOSED = {"additionalProperties": False}
KINDS = [
    record({"kind": {"const": "a"}, "name": TEXT}, required=["kind"]),
    record({"kind": {"const": "b"}, "age": NUMBER}, required=["kind"]),
]
SCHEMAS = {
    "open": record(PAIR),
    "open with tags": record(MANY | {"tags": {"type": "array", "items": TEXT}}),
    "open to numbers": record(PAIR, additionalProperties=NUMBER),
    "closed": record(MANY, required=["age"], **CLOSED),
    "nested": record({"name": record(PAIR), "age": record({"age": record(PAIR)}, **CLOSED)}),
    "listed": {"type": "array", "items": record(PAIR), "maxItems": 3},
    "any of": {"anyOf": [*KINDS, {"type": "array", "items": NUMBER}, NUMBER]},
    "enum": record({"name": {"enum": ["name", "age", 1, None, True]}, "kind": {"enum": [1, 12]}}),
    "anything": {"type": "object"},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": record({
        "age": NUMBER, "name": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "kind": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    }, **CLOSED)}},
    "mutual": {"$ref": "#/$defs/a", "$defs": {
        "a": {"anyOf": [NUMBER, {"type": "array", "items": {"$ref": "#/$defs/b"}}]},
        "b": record({"name": {"$ref": "#/$defs/a"}}, required=["name"]),
    }},
    "a large constant": {"type": "array", "items": {"enum": [2**60, 2**60 + 2**40, 2**62, "1"]}},
}  # fmt: skip
LARGE = {
    "large bounds": {
        "type": "array",
        "items": {**NUMBER, "minimum": 2**60 - 5, "maximum": 2**63 - 1},
    }
}
GRAMMARS = {name: Grammar.json_schema(schema) for name, schema in (SCHEMAS | LARGE).items()}
GRAMMARS |= {
    "one line": GRAMMARS["open with tags"].on_one_line(),
    "regex": Grammar.regex('("name"|"age"):[1-3]*(true|false)?'),
    "left recursion": Grammar.grammar(
        'root ::= sum "}"\nsum ::= sum "," part | part\npart ::= [0-9]{1,3} | "{" root'
    ),
    "hidden left recursion": Grammar.grammar(
        'root ::= a\na ::= b a "," c | c\nb ::= "1"?\nc ::= "{" a "}" | "name" | "age" d\n'
        'd ::= d [0-9] | ""'
    ),
    "nothing in between": Grammar.grammar('root ::= x x x "1"\nx ::= "" | "[" x "]" | x "{}"'),
    "recursive": Grammar.grammar('root ::= "{" (key root | "1") "}"\nkey ::= ("name" | "age") ":"'),
}
FAST = ("open", "closed", "regex", "tree", "large bounds", "left recursion")
NAMES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in GRAMMARS]
SEEDS = 2
"""Walks through a grammar: so many find each of ten planted faults twice or more."""
ENDED = (set[int](), [], True, "")

_State = tuple[set[int], list[int], bool, str]


def state(matcher: Matcher) -> _State:
    """All that a matcher says of its place."""
    if matcher.complete:
        return ENDED
    # A mask is computed last here and first by others: neither may matter.
    forced = matcher.forced()
    return {*members(matcher.mask() or b"")}, forced, False, matcher.error


@cache
def oracle(name: str, path: tuple[int, ...], kind: str) -> _State | None:
    """The state behind a path; None where the path is illegal."""
    matcher = Matcher(compiled(GRAMMARS[name], kind))
    for token in path:
        if matcher.complete or not matcher.commit(token):
            return None
    return state(matcher)


class Walk:
    """Random tokens, most of them legal and of those that reach over several marks of JSON."""

    def __init__(self, name: str, seed: int, kind: str = "spanning") -> None:
        self.name, self.kind, self.random = name, kind, Random(f"{name} {seed}")
        tokenizer = TOKENIZERS[kind]
        wanted = {*SPANNING, *'{}[]":, 1'}
        texts = enumerate(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
        self.ends = {*tokenizer.eos_ids}
        self.favourites = {token for token, text in texts if text.decode("latin-1") in wanted}

    def oracle(self, path: tuple[int, ...]) -> _State | None:
        return oracle(self.name, path, self.kind)

    def token(self, path: tuple[int, ...]) -> int:
        """One that may follow, or now and then any; seldom one that completes the text."""
        legal = (self.oracle(path) or ENDED)[0]
        if not legal or self.random.random() < 0.05:
            return self.random.randrange(TOKENIZERS[self.kind].vocab_size)
        likely = sorted(legal & self.favourites)
        pool = likely if likely and self.random.random() < 0.9 else sorted(legal)
        tokens = self.random.sample(pool, min(3, len(pool)))
        goes_on = (t for t in tokens if (self.oracle((*path, t)) or ENDED)[0] - self.ends)
        return next(goes_on, tokens[0])

    def draft(self, path: tuple[int, ...], nodes: int, depth: int) -> Draft:
        """A tree of such tokens below `path`."""
        paths: list[tuple[int, ...]] = [()]
        node_of: dict[tuple[int, ...], int] = {(): -1}
        parents: list[int] = []
        for _ in range(nodes):
            above = self.random.choice([p for p in paths if len(p) < depth])
            below = (*above, self.token(path + above))
            if below not in node_of:
                node_of[below] = len(parents)
                parents.append(node_of[above])
                paths.append(below)
        tokens = [below[-1] for below in paths[1:]]
        score = np.linspace(0.9, 0.1, len(tokens), dtype=np.float32)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), score)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_matcher_says_does_not_depend_on_where_it_has_been(name):
    """Steps ahead, back and for good in any order, and questions between them or not."""
    for seed in range(SEEDS):
        walk = Walk(name, seed)
        random, matcher = walk.random, Matcher(compiled(GRAMMARS[name], "spanning"))
        path: tuple[int, ...] = ()
        decided = 0
        for _ in range(250):
            expected = walk.oracle(path)
            assert expected is not None
            legal, forced, complete, _ = expected
            action = random.choice(("ahead", "back", "mask", "forced", "commit"))
            if action == "ahead":
                for _ in range(random.randint(1, 4)):
                    token = walk.token(path)
                    fits = walk.oracle((*path, token)) is not None
                    assert matcher.complete or matcher.advance(token) == fits
                    path = (*path, token) if fits else path
            elif action == "back" and len(path) > decided:
                steps = random.randint(1, len(path) - decided)
                matcher.back(steps)
                path = path[: len(path) - steps]
            elif action == "mask" and not complete:
                assert {*members(matcher.mask())} == legal
            elif action == "forced":
                assert matcher.forced() == forced
            elif action == "commit" and random.random() < 0.2:
                token = walk.token(path[:decided])
                fits = walk.oracle((*path[:decided], token)) is not None
                assert matcher.commit(token) == fits
                decided += fits
                path = (*path[: decided - 1], token) if fits else path[:decided]
            assert matcher.complete == (walk.oracle(path) or ENDED)[2]
            if matcher.complete and len(path) == decided:
                break
        assert not matcher.error


@pytest.mark.parametrize("name", NAMES)
def test_every_node_of_every_tree_of_a_text_has_the_mask_of_its_path(name):
    """Step after step as the engine makes them, with what the grammar drafts by itself."""
    slots, many = np.zeros(1, np.int32), np.array([14], np.int32)
    size = TOKENIZERS["spanning"].vocab_size
    for seed in range(SEEDS):
        walk = Walk(name, 100 + seed)
        grammars = TreeGrammars(size)
        grammars.open(0, compiled(GRAMMARS[name], "spanning"), [])
        output: tuple[int, ...] = ()
        for _ in range(8):
            if walk.random.random() < 0.5:
                grammars.predicted(slots, FIXED_MIN_PROB)
            draft = walk.draft(output, 12, 5)
            if walk.random.random() < 0.7:
                draft = grammars.filter_and_extend_drafts(slots, [draft], many, many)[0]
            trees = batch([np.array([1, 2], np.int32)], [draft])
            masks = grammars.masks(slots, trees)
            assert masks.row[0] == -1, "a known token needs no mask"
            below = in_order(draft)
            for node, path in enumerate([(), *below], 1):
                expected = walk.oracle(output + path)
                if expected is None or expected[2]:
                    assert masks.row[node] == -1
                    continue
                actual = np.flatnonzero(unpack(masks.bits[masks.row[node]], size))
                assert {*actual.tolist()} == expected[0], path
            legal = [path for path in [(), *below] if (walk.oracle(output + path) or ENDED)[0]]
            kept = walk.random.choice(legal)
            bonus = walk.token(output + kept)
            while walk.oracle((*output, *kept, bonus)) is None:
                bonus = walk.token(output + kept)
            committed = grammars.commit(0, [*kept, bonus])
            assert not committed.error
            output = (*output, *kept, bonus)
            complete = walk.oracle(output)[2]
            assert committed.complete == complete
            if complete:
                break


def in_order(draft: Draft) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


class FailingMask:
    """An automaton whose `mask` fails behind certain tokens, as at a limit."""

    def __init__(self, inner, where, taken=()):
        self._inner, self._where, self._taken, self._failed = inner, where, taken, False

    @property
    def error(self):
        return "a limit was reached" if self._failed else ""

    @property
    def complete(self):
        return self._inner.complete

    def fork(self):
        assert not self._failed
        return FailingMask(self._inner.fork(), self._where, self._taken)

    def take(self, token):
        fits = self._inner.take(token)
        self._taken += (token,) if fits else ()
        return fits

    def forced(self):
        return self._inner.forced()

    def mask(self):
        self._failed |= self._taken == self._where
        return self._inner.mask()


def test_a_draft_token_that_breaks_a_matcher_breaks_nothing_unless_it_was_right():
    """Plain decoding would not have gone there either."""
    a, b, c = map(ord, "abc")
    slots, grammar = np.zeros(1, np.int32), Grammar.regex("[abc]{9}")
    wide = Draft(np.array([a, b, b, c, c], np.int32), np.array([-1, 0, 1, 0, -1], np.int32))
    for emitted, fails in (((a, c, a), False), ((b,), False), ((a, b, c), True)):
        grammars = TreeGrammars(300)
        grammars.open(0, compiled(grammar), [])
        matcher = grammars._states[0].matcher
        matcher._automaton = FailingMask(matcher._automaton, (a, b))
        masks = grammars.masks(slots, batch([np.array([1], np.int32)], [wide]))
        assert not matcher.error
        reached = masks.row >= 0
        assert reached.tolist() == [True, True, True, False, True, True], "behind it nothing counts"
        assert len({*masks.row[[0, 1, 4, 5]]}) == 1
        if fails:
            failed = grammars.commit(0, emitted)
            assert failed == Committed(2, must_reopen=True), "what came before counts"
        else:
            assert grammars.commit(0, emitted) == Committed(len(emitted))
            assert grammars.mask(0) is not None


def test_a_token_that_breaks_an_automaton_is_forgotten_with_its_copy():
    """As a limit does while a token is taken."""
    matcher = Matcher(compiled(Grammar.regex("[a-c]{9}")))
    a, b = map(ord, "ab")

    class FailingTake(FailingMask):
        def fork(self):
            return FailingTake(self._inner.fork(), self._where, self._taken)

        def take(self, token):
            self._failed |= (*self._taken, token) == self._where
            return not self._failed and super().take(token)

    matcher._automaton = FailingTake(matcher._automaton, (a, a, b))
    assert matcher.advance(a) and matcher.advance(a)
    before = matcher.mask()
    assert not matcher.advance(b) and not matcher.error
    assert matcher.mask() == before and matcher.advance(a)
    matcher.back(3)
    assert matcher.commit(a) and matcher.commit(a) and not matcher.error
    assert not matcher.commit(b) and matcher.error, "this one was decided"
