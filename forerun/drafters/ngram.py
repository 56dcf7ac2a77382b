"""Drafts from the text itself: proposes what followed the same tokens earlier.

After prompt lookup (Saxena 2023) and suffix decoding (arXiv 2411.04975), on hash chains as in LZ77.
For each order n, every position is linked to the previous one that follows the same n tokens. The
links of the longest order, followed first, lead to the most recent earlier places that follow the
same tokens as the end of the text; what comes after them, merged into a trie, is the draft. If
there are none, a table of the target's usual continuations (drafts/ngram_table.py) drafts, or
counts of its answers while serving (drafters/ngram_cache.py). At a temperature above 0 the next
position's noise, which is known in advance, modifies the scores (`coupled`).

A prediction (SlotInit) is treated as earlier text: it is placed before the prompt, behind a copy of
the prompt's end, so that it looks like an earlier continuation of it.

The compiled core has a twin (csrc/ngram.h) that drafts the same tokens 4 to 20 times faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, gamma
from typing import Any, NamedTuple, TypeVar

import numpy as np

from forerun.drafters.ngram_cache import NgramCache
from forerun.drafts.ngram_table import NgramTable, interpolated
from forerun.errors import EngineError
from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SequenceText, SlotInit
from forerun.speculative.draft_tree import Offer, best_first
from forerun.speculative.noise import gumbel_of
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NO_DRAFT, Draft, DraftSource, TreeBatch
from forerun.types import Ints

ORDERS = (4, 1)
"""Lengths of the runs of tokens that are indexed, longest first."""
PLACES = 8
"""Most earlier places considered: first those of the longest run, then the most recent."""
LONGEST = 16
"""Most agreeing tokens that count."""
DOUBT = 7.0
"""Weight of any other continuation, where a place with m agreeing tokens weighs m * m. (Replayed as
MIN_PROB: 5 gives 1.953 and 1.390, 10 1.953 and 1.394.)
"""
SURE = 0.93
"""Highest probability of a vote, unless LONGEST tokens agree. (Replayed as MIN_PROB: .96 gives
1.952 and 1.393.)
"""
SUREST = 0.97
"""Highest probability of a vote if LONGEST tokens agree. (Replayed, an agent's edits of files,
costs of a Xeon with 512 bits, one stream and four, .93, .97 and .99: whole files 3.27 3.53 3.62 and
1.44 1.50 1.51 of plain decoding, blocks 2.68 2.69 2.66 and 1.32 1.32 1.30; answers of the default
model 1.396 1.396 1.396 and 1.090 1.087 1.081.)
"""

MIN_PROB = 0.02
"""Least estimated probability of a draft token. (`bench/replay.py run`, speed over plain decoding
at T=0 and .8, one stream, for .05 and .02. Costs of a Xeon with 512 bits, default model: 1.500 and
1.309, 1.502 and 1.311: there the cost decides. Costs of Gemma 3 270M, with a table of ordinary
text: 2.37 and 1.33, 2.40 and 1.33. Nodes that cost next to nothing, default model: 2.074 and 1.700,
2.134 and 1.749; .01 2.130 and 1.752.)
"""
COUPLING = 0.5
"""How strongly the noise of a position modifies the probability of its tokens, by temperature, up
to 1: with noise g, a token's probability is multiplied by e**(COUPLING * temperature * g).
(Replayed with the native twin's costs, held-out answers of the default model, speed over plain
decoding with 0, .2, .4, .5 and .6 instead of the product: 1.417 1.414 1.399 1.393 1.384 at T=.4,
1.265 1.289 1.298 1.300 1.297 at .8, 1.108 1.128 1.144 1.146 1.149 at 1.)
"""
COUNTED = 16
"""Tokens of an answer that the cache counts per call that drafted for it, so that counting takes a
fraction of the time of drafting, and none without drafting. (.5 us a token on the core and 13 here,
Zen 3, where a draft takes the core 100 us.)
"""
TAIL = 8
"""Tokens of the text passed to a table: more than any table's contexts have."""

_BASE, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1

State = TypeVar("State")

Usual = Callable[[Sequence[int]], dict[int, float]]
"""A text -> probabilities, at most 1 together, of the tokens that may come after it."""
Voters = list[tuple[int, int]]
"""(position, agreeing tokens) of places that agree so far; each votes for the token at its
position.
"""


class Coupling(NamedTuple):
    """The effect of a position's noise on the probabilities of its tokens.

    seed       of the noise
    strength   factor of the noise in the logarithm of a probability; 0: no noise
    elsewhere  mean of e**(strength * noise), for tokens that no source proposes
    """

    seed: int
    strength: float
    elsewhere: float


def coupling(sampling: Sampling) -> Coupling:
    """Return the coupling for the request's seed and temperature."""
    strength = COUPLING * min(max(sampling.temperature, 0.0), 1.0)
    return Coupling(sampling.seed & 0xFFFFFFFFFFFFFFFF, strength, gamma(1.0 - strength))


class OpenSlots(dict[int, State]):
    """State of sequences, by slot. Raises EngineError for a slot that is not open."""

    def __missing__(self, slot: int) -> State:
        raise EngineError(f"slot {slot} is not open")


class _Chains:
    """Links between equal token runs of one length.

    before[p]  the last position before p that follows the same `order` tokens as p, or -1
    """

    def __init__(self, order: int, tokens: Ints) -> None:
        self.order = order
        self._drop = pow(_BASE, order, 2**64)
        keys = np.zeros(max(len(tokens) - order + 1, 0), np.uint64)
        for offset in range(order):
            run = tokens[offset : offset + len(keys)].astype(np.uint64) + np.uint64(1)
            keys = keys * np.uint64(_BASE) + run
        self._key = 0
        for token in tokens[-order:].tolist():
            self._key = (self._key * _BASE + token + 1) & _MASK
        self._last = dict(zip(keys.tolist(), range(order, len(tokens) + 1), strict=True))
        before = np.full(len(tokens) + 1, -1, np.int64)
        if len(keys) > 1:
            by_key = np.argsort(keys, kind="stable")
            same = np.flatnonzero(keys[by_key[1:]] == keys[by_key[:-1]])
            before[by_key[same + 1] + order] = by_key[same] + order
        self.before: list[int] = before.tolist()

    def extend(self, text: list[int]) -> None:
        """Index the tokens appended to `text` since the last call."""
        key, order = self._key, self.order
        for end in range(len(self.before), len(text) + 1):
            key = key * _BASE + text[end - 1] + 1
            if end > order:
                key -= (text[end - order - 1] + 1) * self._drop
            key &= _MASK
            if end < order:
                self.before.append(-1)
                continue
            self.before.append(self._last.get(key, -1))
            self._last[key] = end
        self._key = key


GAP = -1
"""Marks the end of a prediction before the prompt: no token follows, so it gets no votes."""


def indexed(slot_init: SlotInit) -> tuple[Ints, int]:
    """Return the tokens to search for repetitions, int32[.], and how many of them precede the
    sequence itself (0 without a prediction).

    The preceding ones are the LONGEST last tokens of the prompt (padded with GAP), the prediction,
    and a GAP: so the prediction looks like an earlier continuation of the prompt's end.
    """
    tokens, prediction = slot_init.text.tokens, slot_init.prediction
    if not len(prediction):
        return tokens, 0
    end = tokens[: slot_init.prompt_len][-LONGEST:]
    pad, gap = np.full(LONGEST - len(end), GAP), np.array([GAP])
    before = np.concatenate([pad, end, prediction, gap]).astype(np.int32)
    return np.concatenate([before, tokens]), len(before)


@dataclass(slots=True)
class _Text:
    """The index of one sequence: its tokens, `predicted` others before them, and the links between
    equal runs.

    It is updated when the sequence may draft, not before: a sequence that does not draft should
    cost nothing.

    source     the sequence's decided tokens
    chains     one per length of ORDERS
    begun      number of tokens when it began
    drafts     number of calls that drafted for it since then
    predicted  how many of the tokens are before the sequence itself (`indexed`)
    noise      the position's noise and its strength
    tenant     as of SlotInit
    """

    source: SequenceText
    tokens: list[int]
    chains: list[_Chains]
    begun: int
    predicted: int
    prompt_len: int
    noise: Coupling
    tenant: int
    drafts: int = 0

    def update(self) -> None:
        """Append the tokens that were decided since the last call."""
        self.tokens += self.source.tokens[len(self.tokens) - self.predicted :].tolist()

    def places(self) -> Voters:
        """Return (position, agreeing tokens) of earlier positions that follow the same tokens as
        the end of the text.

        Longest order first, then most recent first, PLACES at most.
        """
        text, end = self.tokens, len(self.tokens)
        agreement: dict[int, int] = {}
        for chain in self.chains:
            chain.extend(text)
            place = chain.before[end]
            while place >= 0 and len(agreement) < PLACES:
                if place not in agreement:
                    agree = 0
                    while agree < min(LONGEST, place) and text[place - 1 - agree] == text[~agree]:
                        agree += 1
                    agreement[place] = agree
                place = chain.before[place]
        return list(agreement.items())


class _Paths:
    """The most probable paths that follow earlier places of a text, and the target's usual ones.

    A place that agrees in m tokens votes with weight m * m for the token that follows it, and with
    (m + 1) * (m + 1) for the next one once that was right, and so on. A draft token's share of the
    votes, DOUBT's among them, times SURE is its probability; the share of DOUBT is divided as the
    table or the cache says. A draft token's score is the product along its path; those with a score
    below `min_prob` are left out. (Fitted freely, by the likelihood of 39,000 held-out tokens, a
    place's weight over DOUBT is .1, .7, 1.8, 2.4, 3.5, 5.5, 14 and 70 for 1, 2, 3, 4, 5, 8, 12 and
    16 tokens; squares come almost as close to the text, .875 nats to .873 at T=0 and 1.096 to 1.094
    at .8; powers of two had .925 and 1.167: they trust one agreeing token far too much.)

    State of an offer: the tokens of its path, and the voters that agree with it.
    """

    def __init__(self, text: _Text, min_prob: float, depth: int, usual: Usual) -> None:
        self._text, self._predicted, self._noise = text.tokens, text.predicted, text.noise
        self._position = len(text.tokens) - text.predicted - text.prompt_len
        self._min_prob, self._depth, self._usual = min_prob, depth, usual

    def draft(self, places: Voters, nodes: int) -> Draft:
        """Return the best `nodes` draft tokens, best first."""
        return best_first(self._offers(places, (), 1.0, -1), self._below, nodes)

    def _below(self, taken: Offer, number: int) -> list[Offer]:
        minus_score, _, _, _, (path, agreeing), _ = taken
        if len(path) == self._depth:
            return []
        return self._offers(agreeing, path, -minus_score, number)

    def _offers(
        self, voters: Voters, path: tuple[int, ...], score: float, parent: int
    ) -> list[Offer]:
        """Return the votes of `voters`, and the usual tokens, after `path`, which has this
        score.
        """
        text, total, last = self._text, DOUBT, self._predicted
        votes: dict[int, Voters] = {}
        for place, agree in voters:
            if place < len(text) and text[place] != GAP:
                total += agree * agree
                votes.setdefault(text[place], []).append((place + 1, agree + 1))
        usual = self._usual([*text[max(self._predicted, len(text) - TAIL) :], *path])
        # Votes come first, then usual tokens, each in their own order.
        tokens = list(dict.fromkeys([*votes, *usual]))
        weights = [sum((agree - 1) ** 2 for _, agree in votes.get(token, ())) for token in tokens]
        sure = [_sure(votes.get(token, [])) for token in tokens]
        pairs = zip(sure, weights, strict=True)
        voted = [highest * score * weight / total for highest, weight in pairs]
        expected = [score * DOUBT * usual.get(token, 0.0) / total for token in tokens]
        chances = [one + other for one, other in zip(voted, expected, strict=True)]
        if self._noise.strength and tokens:
            chances = coupled(chances, score, self._noise, self._position + len(path), tokens)
        offers: list[Offer] = []
        for number, token in enumerate(tokens):
            if chances[number] < self._min_prob:
                continue
            # At equal scores: nearer the root first, then in the order above.
            order = ((len(path) + 1) << 8) + number
            agreeing = votes.get(token, [])
            # The source is the one with the larger part; a client's prediction wins ties.
            by_vote = voted[number] >= expected[number]
            source = DraftSource.NGRAM if by_vote else DraftSource.TABLE
            foretold = sum((agree - 1) ** 2 for place, agree in agreeing if LONGEST < place <= last)
            if 0 < foretold >= weights[number] - foretold:
                source = DraftSource.PREDICTION
            state = ((*path, token), agreeing)
            offers.append((-chances[number], order, token, parent, state, source))
        return offers


def _sure(agreeing: Voters) -> float:
    """Return the highest probability that a token may get from these votes, now one token
    longer.
    """
    longest = max((agree for _, agree in agreeing), default=0)
    return SUREST if longest > LONGEST else SURE


def coupled(
    chances: list[float], score: float, noise: Coupling, position: int, tokens: list[int]
) -> list[float]:
    """Return the probabilities of `tokens` after a path with this score, modified by the noise g of
    output position `position`, which is added to the target's logits (speculative/accept.py):
    probability p becomes p * e**(strength * g), divided by the sum of that over all tokens.
    """
    drawn = gumbel_of(noise.seed, position, np.array(tokens, np.int64)).tolist()
    left, total, products = score, 0.0, list[float]()
    for chance, each in zip(chances, drawn, strict=True):
        left -= chance
        products.append(chance * exp(noise.strength * each))
        total += products[-1]
    total += max(left, 0.0) * noise.elsewhere
    return [score * chance / total for chance in products]


def shared_facts(min_prob: float, table: NgramTable | None, cache: int) -> dict[str, Any]:
    """Return facts for /server_info that both twins report: `least`, the smallest probability of a
    proposed draft token; `table`, how many contexts the n-gram table has (0 = there is no table);
    and `cache`, how many contexts were counted in answers.
    """
    return {"least": min_prob, "table": table.contexts if table else 0, "cache": cache}


class NgramDrafter:
    """Proposes continuations that occur in prompt and output (prompt lookup, suffix decoding).

    slots     S
    min_prob  least estimated probability of a draft token
    table     the target's usual continuations; None = no table
    capacity  most contexts of finished answers to count, in addition to a table; 0 = none
    counts    these contexts
    """

    def __init__(
        self,
        slots: int,
        min_prob: float = MIN_PROB,
        table: NgramTable | None = None,
        capacity: int = 0,
    ) -> None:
        self.traits = DrafterTraits(name="ngram", max_depth=64, no_draft_model=True)
        self._table, self._min_prob = table, min_prob
        self.counts = NgramCache(capacity)
        self._slots = slots
        self._texts: OpenSlots[_Text] = OpenSlots()

    def begin(self, slot_init: SlotInit) -> None:
        """Index all tokens of the sequence, replacing the slot's state. Raises EngineError if there
        is no such slot.
        """
        if not 0 <= slot_init.slot < self._slots:
            raise EngineError(f"there is no slot {slot_init.slot}")
        tokens, predicted = indexed(slot_init)
        chains = [_Chains(order, tokens) for order in ORDERS]
        self._texts[slot_init.slot] = _Text(
            source=slot_init.text,
            tokens=tokens.tolist(),
            chains=chains,
            begun=len(tokens),
            predicted=predicted,
            prompt_len=slot_init.prompt_len,
            noise=coupling(slot_init.sampling),
            tenant=slot_init.tenant,
        )

    def propose(self, plan: Plan) -> list[Draft]:
        """Return one draft per row, in target ids, best first, at most plan.max_nodes[b] tokens and
        plan.max_depth[b] deep; empty if nothing reaches the least probability. Scores are estimated
        probabilities.

        Updates the links of the rows that may draft; cost grows with the tokens since the last
        call. Raises EngineError for a slot that is not open.
        """
        drafts = []
        for slot, nodes, depth in zip(
            plan.slots.tolist(), plan.max_nodes.tolist(), plan.max_depth.tolist(), strict=True
        ):
            text = self._texts[slot]
            if nodes and depth:
                text.update()
                text.drafts += 1
                min_prob = max(self._min_prob, plan.min_prob)
                paths = _Paths(text, min_prob, depth, self._usual(text))
                drafts.append(paths.draft(text.places(), nodes))
            else:
                drafts.append(NO_DRAFT)
        return drafts

    def _usual(self, text: _Text) -> Usual:
        """Return a function that estimates the next token of a text from table and cache
        together.
        """

        def usual(tokens: Sequence[int]) -> dict[int, float]:
            table = self._table.levels(tokens) if self._table is not None else ()
            return interpolated(table, self.counts.levels(tokens, text.tenant))

        return usual

    def use(self, table: NgramTable) -> None:
        """Draft by this table from the next call on."""
        self._table = table

    def on_device_draft(self, plan: Plan) -> None:
        """Return None: there is no draft model."""

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Return True only without draft tokens: drafting needs the text of the running round."""
        return not plan.max_nodes.any()

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Do nothing: the emitted tokens are read from the text when the row may draft."""

    def end(self, slot: int) -> None:
        """Discard the sequence, after the cache has counted the end of its answer (COUNTED). Does
        nothing for a slot that is not open.
        """
        text = self._texts.pop(slot, None)
        if text is not None:
            text.update()
            first = max(text.begun, len(text.tokens) - COUNTED * text.drafts) - text.predicted
            answer = text.tokens[text.predicted :]
            if self.counts.learn(answer, first, text.tenant):
                self.counts.counted(np.array(answer, np.int32), first, text.tenant)

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: `drafter`, `native` and those of `shared_facts`."""
        facts = shared_facts(self._min_prob, self._table, self.counts.contexts)
        return {"drafter": self.traits.name, "native": False} | facts
