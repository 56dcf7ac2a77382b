"""What a draft model finds in its pages, whatever the engine does with them."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from forerun.control.policy import Budget, Decision, FixedPolicy
from forerun.draft_shape import DraftShape
from forerun.drafters import deferred_extend
from forerun.drafters.combined import CombinedDrafter
from forerun.drafters.model_drafter import PATIENCE, ModelDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.engine.thread import Engine, EngineOptions
from forerun.executors.feature_ring import HostFeatureRing, ring_places
from forerun.executors.toy import ToyExecutor
from forerun.interface.draft_model import Candidates, DraftModelTraits, FeatureNeeds
from forerun.interface.features import HostFeatures
from forerun.interface.grammars import NoGrammars
from forerun.networks.cache_layer import CacheLayer
from tests.covering import every, some_of, values
from tests.engine.toys import TOKENIZER, VOCAB, ask, finish, following, limits, run


@dataclass(frozen=True)
class ToyFeatures:
    """The feature of a node is its token; of a step that is over, nothing may read it."""

    executor: ToyExecutor
    step: int
    tokens: np.ndarray
    places: np.ndarray

    def select(self, nodes):
        return replace(self, tokens=self.tokens[nodes], places=self.places[nodes])

    def values(self):
        assert self.step == self.executor.steps, "features of a step that is over"
        return self.tokens[:, None]

    def __len__(self):
        return len(self.tokens)

    def store(self):
        """In a ring as executors have it."""
        self.executor.ring.values[self.places] = self.values()
        return self.executor.ring


class FeaturedToy(ToyExecutor):
    """A toy that hands out features."""

    steps = 0

    def __init__(self, limits):
        super().__init__(limits)
        self.ring, self.head = HostFeatureRing(limits.slots, 1), ToyHead(limits)

    def copy_page(self, source, target):
        self.head.entries[target] = self.head.entries[source]
        return super().copy_page(source, target)

    def begin(self, plan, trees, masks=None):
        self.steps += 1
        return super().begin(plan, trees, masks)

    def finish(self, round, masks=None):
        tokens = round.trees.tokens
        places = ring_places(round.plan, round.trees, np.arange(len(tokens)))
        features = ToyFeatures(self, self.steps, tokens, places)
        return replace(super().finish(round, masks), features=features)


class ToyHead:
    """A head whose entry for position q is the token after it, and which looks at all of them.

    It drafts what the toy will say once it has the text.
    """

    def __init__(self, shape):
        self.traits = DraftModelTraits(
            name="toy head",
            cache=(CacheLayer(1, 1),),
            target_ids=np.arange(VOCAB, dtype=np.int32),
            max_nodes=shape.max_nodes,
            features=FeatureNeeds("aux", (0,)),
        )
        self.entries = np.full((shape.pages, shape.page_size), -1, np.int32)
        self.texts: dict[int, list[int]] = {}
        self.looked = self.late = 0
        self.begins: list[int] = []

    def extend(self, work, features):
        kept = isinstance(features, HostFeatures)
        self.late += kept
        self.begins += work.kv_len.tolist()
        assert (features.values if kept else features.values()).ravel().tolist() == (
            work.tokens.tolist()
        )
        for row in range(len(work.slots)):
            self._look(work, row)
            own = slice(work.start[row], work.start[row + 1])
            text = self.texts[int(work.slots[row])]
            assert text[work.kv_len[row] :][: own.stop - own.start] == work.tokens[own].tolist()
            for offset, token in enumerate(work.next_tokens[own]):
                self.entries[self._place(work, row, work.kv_len[row] + offset)] = token
        return self._candidates(work, work.scored)

    def expand(self, work):
        for row in range(len(work.slots)):
            self._look(work, row)
        return self._candidates(work, np.arange(len(work.tokens)))

    def describe(self):
        return {}

    def _place(self, work, row, position):
        size = self.entries.shape[1]
        return work.pages[row, position // size], position % size

    def _look(self, work, row):
        text = self.texts[int(work.slots[row])]
        for position in range(work.kv_len[row]):
            entry = self.entries[self._place(work, row, position)]
            assert entry == text[position + 1], f"position {position} of {bytes(text)}"
            self.looked += 1

    def _candidates(self, work, nodes):
        """Two per node: what follows the row's text, right below the root, and a wrong one."""
        rows = np.searchsorted(work.start, nodes, side="right") - 1
        texts = [self.texts[int(work.slots[row])] for row in rows]
        ids = np.array([[following(text, 1)[0], 5] for text in texts], np.int32).reshape(-1, 2)
        return Candidates(ids, np.tile(np.log(np.float32([0.8, 0.1])), (len(ids), 1)))


class TextFeedingDrafter(ModelDrafter):
    """Gives the toy head the texts, as the contract gives them to a drafter."""

    def begin(self, slot_init):
        self._model.texts[slot_init.slot] = slot_init.text.tokens.tolist()
        super().begin(slot_init)

    def observe(self, plan, trees, outcome):
        for row, slot in enumerate(plan.slots.tolist()):
            emitted = outcome.tokens[row, : outcome.n_tokens[row]].tolist()
            self._model.texts[slot].extend(emitted)
        super().observe(plan, trees, outcome)


def engine_with_head(policy=None, beside=None, **shape):
    executor = FeaturedToy(limits(**shape))
    device = executor.head
    drafter = TextFeedingDrafter(device, executor.limits, DraftShape(width=2, depth=3))
    drafter = CombinedDrafter(beside, drafter) if beside else drafter
    made = Engine(
        executor, drafter, policy or FixedPolicy(4, 3), TOKENIZER, NoGrammars(), EngineOptions()
    )  # fmt: skip
    return made, device


def requests_for(*prompts, max_tokens=12, **changes):
    return [ask(str(index), prompt, max_tokens, **changes) for index, prompt in enumerate(prompts)]


SHARED = "A page and then"
FORKS = [f"{SHARED[:count]}{letter} it goes" for count in (4, 7, 8, 12) for letter in "abba"]


@pytest.mark.parametrize(("page_size", "pages"), some_of(every([1, 2, 4], [16, 200]), values))
def test_entries_fit_the_text_that_finds_them(page_size, pages):
    """Texts that part after a page or within, at the same time and one after the other."""
    made, device = engine_with_head(page_size=page_size, pages=pages * 4 // page_size)
    requests = requests_for(*FORKS)
    sink = run(made, *requests)
    sink.expect(*requests)
    run(made, *requests_for(*FORKS[::-1]))
    for number, prompt in enumerate(FORKS):
        run(made, ask(f"again {number}", prompt, 12))
    stats = made.stats()
    assert stats.failed_steps == 0 and stats.accepted > 0 and device.looked > 1000
    assert stats.cached_tokens > 0


class MinProbPolicy(FixedPolicy):
    """Wants passes below paths of a probability only."""

    def decide(self, slots, kv_len, constrained=False):
        decision = super().decide(slots, kv_len, constrained)
        return replace(decision, rows=tuple(replace(b, pass_prob=0.7) for b in decision.rows))


def test_no_pass_is_run_below_an_improbable_path():
    """The best path has .8 after one level and .64 after two, so of three levels two are grown."""
    depths = []
    for policy in (FixedPolicy(4, 3), MinProbPolicy(4, 3)):
        made, _ = engine_with_head(policy)
        sink = run(made, *requests_for("A prompt"))
        sink.expect(*requests_for("A prompt"))
        depths.append(max(count.depth for count in made.stats().by_source))
    assert depths == [3, 2]


def test_chunks_choices_and_preemption_keep_the_entries():
    made, device = engine_with_head(page_size=2, pages=20, max_nodes=7)
    prompts = "A prompt of several chunks", "A prompt of"
    requests = requests_for(*prompts, n=2, temperature=0.9, seed=3)
    sink = run(made, *requests)
    sink.expect(*requests)
    assert made.stats().preemptions > 0 and made.stats().failed_steps == 0 and device.looked


def test_a_page_is_found_again_up_to_the_last_token():
    """What a head needs of a page is there as soon as the token after it matches."""
    made, _ = engine_with_head(page_size=4, pages=64)
    run(made, *requests_for("12345678abc"))
    sink = run(made, ask("same", "12345678a", 4))
    assert sink.of("same")[0].cached_tokens == 8
    sink = run(made, ask("other", "12345678b", 4))
    assert sink.of("other")[0].cached_tokens == 7
    finish(made)


def test_what_a_head_keeps_is_for_texts_of_its_salt():
    """Its entries lie in the pages, and what it lags behind with in the ring of a slot that another
    had before: it reads of neither what is of another salt.
    """
    policy = IntermittentPolicy(lambda step: step % 13 >= 10)
    made, device = engine_with_head(policy, page_size=4, pages=64)
    for salt, cached in (("a", 0), ("b", 0), ("", 0), ("a", 13), ("b", 13)):
        device.begins.clear()
        request = replace(ask("same", "12345678abcdef", 40), cache_salt=salt)
        sink = run(made, request)
        sink.expect(request)
        assert sink.of("same")[0].cached_tokens == cached, salt
        assert device.begins[0] == cached, "it reads all that was not shared"
    assert made.stats().failed_steps == 0 and device.late


class IntermittentPolicy(FixedPolicy):
    """Wants draft tokens in some steps only."""

    def __init__(self, wanted):
        super().__init__(4, 3)
        object.__setattr__(self, "wanted", wanted)
        object.__setattr__(self, "steps", iter(range(10**6)))

    def decide(self, slots, kv_len, constrained=False):
        if self.wanted(next(self.steps)):
            return super().decide(slots, kv_len)
        return Decision("not now", (Budget(0, 0, "not now"),) * len(slots))


@pytest.mark.parametrize("rest", [2, 10, 40])
def test_a_head_catches_up_in_one_pass(rest):
    """While no row wants drafts it does no work; afterwards its entries are as ever."""
    made, device = engine_with_head(
        IntermittentPolicy(lambda step: step % (rest + 3) >= rest), page_size=2, pages=200
    )
    requests = requests_for("A prompt", "Another one", max_tokens=60)
    sink = run(made, *requests)
    sink.expect(*requests)
    stats = made.stats()
    assert stats.accepted > 0 and stats.failed_steps == 0 and device.looked
    assert (device.late > 0) == (rest > PATIENCE)


class Alternating(FixedPolicy):
    """Has n-grams draft in all steps, and the head beside them in some."""

    def decide(self, slots, kv_len, constrained=False):
        wanted = 3 if kv_len.min() % 40 >= 30 else 0
        rows = (Budget(4, 3, "", model_depth=wanted),) * len(slots)
        return Decision("", rows)


@pytest.mark.parametrize("most", [7, 250])
def test_a_head_catches_up_on_what_n_grams_had_accepted(monkeypatch, most):
    """Steps that verify trees without it leave it behind by whole paths."""
    monkeypatch.setattr(deferred_extend, "MAX_LAG", most)
    made, device = engine_with_head(
        Alternating(4, 3), beside=NgramDrafter(8), page_size=2, pages=200
    )
    requests = requests_for("A prompt, a prompt, a prompt", "Another, another one", max_tokens=100)
    sink = run(made, *requests)
    sink.expect(*requests)
    stats = made.stats()
    assert stats.accepted > 50 and stats.failed_steps == 0 and device.looked
    assert 6 <= device.late <= (60 if most == 7 else 12)


@pytest.mark.parametrize("most", [7, 30])
def test_a_head_that_lags_far_catches_up_unasked(monkeypatch, most):
    """No more features are kept than can be, and draft tokens are there whenever they are wanted
    for: in the middle of a long answer as at its beginning.
    """
    monkeypatch.setattr(deferred_extend, "MAX_LAG", most)
    behind = []
    observe = ModelDrafter.observe

    def observed(self, plan, trees, outcome):
        observe(self, plan, trees, outcome)
        after = replace(plan, kv_len=plan.kv_len + np.array(outcome.committed(plan), np.int32))
        behind.append(self._deferred.lag(after).max())

    monkeypatch.setattr(ModelDrafter, "observe", observed)
    made, device = engine_with_head(IntermittentPolicy(lambda step: step > 95), page_size=8)
    requests = requests_for("A prompt", "Another one", max_tokens=160)
    sink = run(made, *requests)
    sink.expect(*requests)
    assert max(behind) == most
    assert 95 // most < device.late < 20, "passes of many tokens"
    stats = made.stats()
    assert stats.failed_steps == 0 and stats.accepted == 63, "one of each row and step but the last"
