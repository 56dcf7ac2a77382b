"""A device that decodes in rounds, on a clock of its own: what an H100 does, without one.

It drives a real policy and a real drafter as an engine does. A round costs by rows x deepest row;
the next one begins before it is looked at where the drafter allows that, and then takes the longer
of device and host, else their sum; a size that was not declared is captured when it is first met.
Nothing reads a clock; everything random is seeded.
"""

from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from operator import lt

import numpy as np

from forerun.control.policy import Decision
from forerun.draft_shape import DraftShape
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.native_ngram import CpuNgramDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.none import NoDrafter
from forerun.engine.step import step_report
from forerun.executors.feature_ring import HostFeatureRing
from forerun.interface.draft_model import Candidates, DraftModelTraits, FeatureNeeds
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import HostFeatures
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.networks.cache_layer import CacheLayer
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NO_DRAFT, batch

ROUND, NODE, PROMPT_TOKEN = 1.2, 0.005, 0.01
"""Milliseconds of a round, of rows x nodes of the deepest row, and of a prompt's token."""
LEVEL, ROW_LEVEL = 0.15, 0.0008
"""Of a level that is grown in the round, and of each row of it."""
HOST, ROW_HOST, LOOK, ROW_LOOK = 0.5, 0.01, 0.1, 0.01
"""Of the host in every step, and of looking for draft tokens in the text."""
PASS, READ, KEEP, CAPTURE = 0.4, PROMPT_TOKEN / 16, 0.004, 70.0
"""Of a draft model's pass outside of a round and of each token it reads there, of features that a
plain round keeps, and of a capture."""
DEPTHS = (1, 3)
"""Draft tokens of rounds that are declared."""
PROMPT, LENGTH = 48, 160
LIMITS = ExecutorLimits(16, 4096, 64, 4096, 4096, 512)


class Head:
    """A draft head's passes outside of rounds are counted, and what they read; what it says matters
    to no row.
    """

    def __init__(self):
        self.passes = self.read = 0
        self.traits = DraftModelTraits(
            name="head",
            cache=(CacheLayer(1, 1),),
            target_ids=np.arange(8, dtype=np.int32),
            max_nodes=4096,
            features=FeatureNeeds("last"),
        )

    def extend(self, work, features):
        self.passes += 1
        # What became permanent in this step was read in the round, but of prompts.
        self.read += len(work.tokens) if isinstance(features, HostFeatures) else 0
        return self._candidates(len(work.scored), work.candidates)

    def expand(self, level):
        self.passes += 1
        return self._candidates(len(level.tokens), level.candidates)

    def describe(self):
        return {}

    def _candidates(self, count, wanted):
        return Candidates(np.ones((count, wanted), np.int32), np.zeros((count, wanted), np.float32))

    def select(self, nodes):
        """Features of a round."""
        return HiddenStates(len(nodes))

    def store(self):
        return RING


RING = HostFeatureRing(LIMITS.slots, 1)


@dataclass(frozen=True)
class HiddenStates:
    count: int

    def select(self, nodes):
        return HiddenStates(len(nodes))

    def store(self):
        return RING


@dataclass
class Row:
    kv_len: int
    end: int
    text: TokenText


class Device:
    """`rows` streams of answers, `length` tokens in the mean, that follow each other; new ones come
    an eighth at a time.

    ms, tokens  so far
    captures    of sizes that were not declared
    verified    draft tokens by step
    """

    length = LENGTH
    round_ms, node_ms, host_ms = ROUND, NODE, HOST

    def __init__(self, policy, rows, seed=0):
        self.policy, self.rows = policy, rows
        self.random = np.random.default_rng(seed)
        self.running: dict[int, Row] = {}
        self.ms = self.tokens = 0.0
        self.captures, self.verified = 0, []
        self._sizes, self._before = set(), None
        self.drafter = self._drafter()

    def run(self, steps, *text):
        """Tokens per millisecond of so many steps."""
        ms, tokens = self.ms, self.tokens
        for _ in range(steps):
            self._step(text)
        return (self.tokens - tokens) / (self.ms - ms)

    def _step(self, text):
        new = self._arrivals()
        old = sorted(self.running)
        if new:
            fresh = {*new}
            old = [slot for slot in old if slot not in fresh]
        slots = [*old, *new]  # As in service: new ones come last.
        plan, decision = self._plan(slots, len(old))
        carried = self._carries(plan, slots, new)
        proposed, drafts, host = self._drafts(plan, decision, carried)
        wanted = self.drafter.on_device_draft(plan)
        counted = list(map(len, drafts))
        emitted = self._emitted(slots, drafts, counted, text)
        outcome = self._outcome(plan, emitted, counted, wanted)
        deepest, levels = max(counted), wanted.levels if wanted else 0
        device = self._round(len(slots), deepest, levels) + PROMPT_TOKEN * PROMPT * len(new)
        own = self.host_ms + ROW_HOST * len(slots)
        begun = self._passes()
        for slot, tokens in zip(slots, emitted, strict=True):
            self.running[slot].text.append(tokens)
        self.drafter.observe(plan, self._trees(plan, drafts), outcome)
        drafting = host + self._passes() - begun
        host = own + drafting
        ms = max(device, host) if carried else device + host
        stages = {"draft": drafting, "verify": 0.0, "mask": 0.0}
        report = step_report(plan, outcome, stages, ms)
        report.carried, report.reason, report.proposed = carried, decision.reason, proposed
        self.policy.observe(report)
        self.ms, self.tokens = self.ms + ms, self.tokens + sum(map(len, emitted))
        self.verified.append(sum(counted))
        self._before = plan, slots, bool(new), wanted
        for slot, known, tokens in zip(slots, plan.known_counts, emitted, strict=True):
            row = self.running[slot]
            row.kv_len += known + len(tokens) - 1
            if row.kv_len >= row.end:
                del self.running[slot]
                self.drafter.end(slot)

    def _arrivals(self):
        free = [slot for slot in range(self.rows) if slot not in self.running]
        if len(free) < max(1, self.rows // 8):
            return []
        for slot in free:
            length = int(self.random.integers(self.length // 2, 3 * self.length // 2))
            known = self._prompt()
            text = TokenText(known)
            self.running[slot] = Row(0, PROMPT + length, text)
            self.drafter.begin(SlotInit(slot, text, len(known), Sampling(temperature=0.0)))
        return free

    def _plan(self, slots, old):
        """And what was decided for the first `old` of the slots; the others are new."""
        rows = [self.running[slot] for slot in slots]
        kv_len, array = np.array([row.kv_len for row in rows], np.int32), np.array(slots, np.int32)
        least, decision, given = 0.0, Decision("", ()), ()
        if old:
            decision = self.policy.decide(array[:old], kv_len[:old])
            given = decision.rows
            least = min((b.min_prob for b in given if b.nodes), default=0.0)
        nodes, depth, model = np.zeros((3, len(slots)), np.int32)
        if any(budget.nodes for budget in given):
            allowed = [(budget.nodes, budget.depth, budget.model_depth) for budget in given]
            nodes[:old], depth[:old], model[:old] = zip(*allowed, strict=True)
        last = np.array([row.text.tokens[-1:] for row in rows[:old]], np.int32)
        known = [*last, *(row.text.tokens[-PROMPT:] for row in rows[old:])]
        plan = Plan(
            slots=array,
            kv_len=kv_len,
            known=tuple(known),
            samples=np.ones(len(slots), np.bool_),
            max_nodes=nodes,
            max_depth=depth,
            page_table=np.zeros((len(slots), 1), np.int32),
            constrained=np.zeros(len(slots), np.bool_),
            min_prob=least,
            model_depth=model,
            node_costs=decision.node_costs,
        )
        return plan, decision

    def _carries(self, plan, slots, new):
        if new or self._before is None:
            return False
        before, ran, had_new, wanted = self._before
        if had_new or not {*slots} <= {*ran}:
            return False  # Whose row has ended does not keep the others from going on.
        drafting = wanted.slots if wanted else np.zeros(0, np.int32)
        return self.drafter.can_overlap(plan, Round(before, drafting=drafting))

    def _drafts(self, plan, decision, carried):
        """What was proposed, and what of it is verified of each row, and milliseconds that the host
        and passes take for it.
        """
        if not plan.max_nodes.any():
            return [], [NO_DRAFT] * plan.rows, 0.0
        begun = self._passes()
        proposed = self.drafter.propose(plan)
        if carried:  # It came of the step before, on the device: nothing chose among it.
            return [], proposed, 0.0
        drafts = decision.select(proposed) if decision.select else proposed
        return proposed, drafts, self._passes() - begun + self._look(plan)

    def _trees(self, plan, drafts):
        """For drafters that read them."""

    def _round(self, rows, deepest, levels):
        size = 1 << (rows - 1).bit_length(), deepest, levels
        if 0 < deepest <= max(DEPTHS):  # It runs as the next larger one that is declared.
            deepest = max(levels, min(depth for depth in DEPTHS if depth >= deepest))
        declared = {deepest, levels} <= {0, *DEPTHS} and (deepest in (0, levels) or not levels)
        capturing = not declared and size not in self._sizes
        self._sizes.add(size)
        self.captures += capturing
        ms = (
            self.round_ms
            + self.node_ms * rows * (1 + deepest)
            + levels * (LEVEL + ROW_LEVEL * rows)
        )
        return ms + CAPTURE * capturing

    def _outcome(self, plan, emitted, sizes, wanted):
        counts, start, accepted = list(map(len, emitted)), 0, []
        for known, size, came in zip(plan.known_counts, sizes, counts, strict=True):
            accepted += range(start + known, start + known + came - 1)
            start += known + size
        longest = max(counts)
        tokens = [[*each, *[-1] * (longest - len(each))] for each in emitted]
        return Outcome(
            np.array(counts, np.int32), np.array(tokens, np.int32), np.array(sizes, np.int32),
            np.ones(len(emitted), np.bool_), accepted=np.array(accepted, np.int32),
            drafts=self._grown(plan, wanted), features=self._features(),
        )  # fmt: skip

    def _grown(self, plan, wanted):
        return None

    def _features(self):
        return None

    def _passes(self):
        return 0.0

    def _look(self, plan):
        return 0.0


class HeadDevice(Device):
    """Draft tokens of a head that is grown in rounds; text: how often the first of a row is right,
    and every further one.
    """

    def __init__(self, policy, rows, seed=0, depth=3):
        self.head, self.depth = Head(), depth
        super().__init__(policy, rows, seed)

    def _drafter(self):
        return ModelDrafter(self.head, LIMITS, DraftShape(self.depth, 1, self.depth))

    def _prompt(self):
        return np.ones(PROMPT, np.int32)

    def _emitted(self, slots, drafts, sizes, text):
        first, later = text
        drawn = iter(self.random.random(sum(sizes)).tolist())
        emitted = []
        for size in sizes:
            lucky = map(lt, islice(drawn, size), chain([first], repeat(later)))
            emitted.append([1] * (1 + [*lucky, False].index(False)))
        return emitted

    def _trees(self, plan, drafts):
        return batch(plan.known, drafts)

    def _grown(self, plan, wanted):
        if wanted is None:
            return None
        shape = plan.rows, wanted.levels
        parents = np.tile(np.arange(-1, wanted.levels - 1, dtype=np.int32), (plan.rows, 1))
        slots = {*wanted.slots.tolist()}
        rows = np.array([slot in slots for slot in plan.slots.tolist()])
        tokens, value = np.ones(shape, np.int32), np.full(shape, np.log(0.8), np.float32)
        return NextDrafts(rows, 1, wanted.levels, tokens, parents, value)

    def _features(self):
        return self.head

    def _passes(self):
        return PASS * self.head.passes + READ * self.head.read

    def _round(self, rows, deepest, levels):
        return super()._round(rows, deepest, levels) + KEEP * (levels == 0)


class PlainDevice(HeadDevice):
    """Speculation is off."""

    def _drafter(self):
        return NoDrafter()

    def _round(self, rows, deepest, levels):
        return Device._round(self, rows, deepest, levels)


class TextDevice(Device):
    """N-grams that are looked up in the text, which repeats a motif: text: how often a token is
    what comes next in it. selects: by the native drafter, which chooses what pays by itself.
    """

    def __init__(self, policy, rows, seed=0, selects=False):
        self.selects = selects
        super().__init__(policy, rows, seed)

    def _drafter(self):
        self.luck = chain.from_iterable(self.random.random(4096).tolist() for _ in count())
        return (CpuNgramDrafter if self.selects else NgramDrafter)(LIMITS.slots)

    def _prompt(self):
        motif = self.random.integers(0, 256, 12)
        return np.tile(motif, PROMPT // 12).astype(np.int32)

    def _emitted(self, slots, drafts, sizes, text):
        (repeats,) = text
        return [self._emitted_of(*each, repeats) for each in zip(slots, drafts, strict=True)]

    def _emitted_of(self, slot, draft, repeats):
        text, luck = self.running[slot].text.tokens, self.luck
        place, emitted, node = len(text), [], -1
        nodes = zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)
        below = dict(zip(nodes, range(len(draft)), strict=True))
        while node is not None:
            right = next(luck) < repeats
            token = int(text[place % 12]) if right else 256 + int(256 * next(luck))
            emitted.append(token)
            place, node = place + 1, below.get((node, token))
        return emitted

    def _look(self, plan):
        return LOOK + ROW_LOOK * plan.rows


class PaddedDevice(TextDevice):
    """Rows, and nodes of the longest, are made the next power of four, a node is dear, and no step
    begins early: XLA on a CPU. Of every fourth row alone the text repeats itself.
    """

    def _round(self, rows, deepest, levels):
        return 8.0 + 2.0 * _power(rows) * _power(1 + deepest)

    def _carries(self, plan, slots, new):
        return False

    def _emitted_of(self, slot, draft, repeats):
        return super()._emitted_of(slot, draft, 0.1 if slot % 4 else repeats)


def _power(nodes):
    return next(4**power for power in count() if 4**power >= nodes)


class QuickDevice(HeadDevice):
    """A small model on a fast device: a plain step takes what the host takes."""

    round_ms, node_ms, host_ms = 0.6, 0.002, 1.0
