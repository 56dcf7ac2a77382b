"""A device that decodes in rounds, on a clock of its own: what an H100 does, without one.

It drives a real policy and a real drafter as an engine does. A round costs by rows x deepest row;
the next one begins before it is looked at where the drafter allows that, and then takes the longer
of device and host, else their sum; a size that was not declared is captured when it is first met.
Nothing reads a clock; everything random is seeded.
"""

from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import lt

import numpy as np

from forerun.control.policy import Decision
from forerun.draft_shape import DraftShape
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.none import NoDrafter
from forerun.engine.step import step_report
from forerun.executors.feature_ring import HostFeatureRing
from forerun.interface.draft_model import Candidates, DraftModelTraits, FeatureNeeds
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import HostFeatures
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.models.cache_layer import CacheLayer
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
    to nobody.
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
        return Left(len(nodes))

    def keep(self):
        return RING


RING = HostFeatureRing(LIMITS.slots, 1)


@dataclass(frozen=True)
class Left:
    count: int

    def select(self, nodes):
        return Left(len(nodes))

    def keep(self):
        return RING


@dataclass
class Row:
    kv_len: int
    end: int
    fresh: bool = True
    text: list[int] = field(default_factory=list)


class Device:
    """`rows` streams of answers, `length` tokens in the mean, that follow each other; new ones come
    an eighth at a time.

    ms, tokens  so far
    captures    of sizes that were not declared
    verified    draft tokens by step
    """

    length = LENGTH

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
        slots = sorted(self.running)
        old = [slot for slot in slots if slot not in new]
        order = [*old, *new]  # As in service: who is new comes last.
        slots = order
        plan, decision = self._plan(slots, old)
        carried = self._carries(plan, new)
        proposed, drafts, host = self._drafts(plan, decision, carried)
        wanted = self.drafter.draft_request(plan)
        sizes = np.array(list(map(len, drafts)), np.int32)
        said = [self._said(slot, draft, text) for slot, draft in zip(slots, drafts, strict=True)]
        outcome = self._outcome(plan, said, sizes, wanted)
        deepest, levels = int(sizes.max()), wanted.levels if wanted else 0
        device = self._round(len(slots), deepest, levels) + PROMPT_TOKEN * PROMPT * len(new)
        host += HOST + ROW_HOST * len(slots)
        trees = batch(plan.known, drafts)
        begun = self._passes()
        self.drafter.observe(plan, trees, outcome)
        drafting = host - HOST - ROW_HOST * len(slots) + self._passes() - begun
        host += self._passes() - begun
        ms = max(device, host) if carried else device + host
        stages = {"draft": drafting, "verify": 0.0, "mask": 0.0}
        report = step_report(plan, outcome, stages, ms)
        told = {"reason": decision.reason, "proposed": proposed}
        self.policy.observe(replace(report, carried=carried, **told))
        self.ms, self.tokens = self.ms + ms, self.tokens + sum(map(len, said))
        self.verified.append(int(sizes.sum()))
        self._before = plan, wanted
        for slot, tokens in zip(slots, said, strict=True):
            row = self.running[slot]
            row.kv_len += len(plan.known[slots.index(slot)]) + len(tokens) - 1
            row.text += tokens
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
            self.running[slot] = Row(0, PROMPT + length, text=known.tolist())
            self.drafter.begin(SlotInit(slot, known, len(known), Sampling(temperature=0.0)))
        return free

    def _plan(self, slots, old):
        kv_len = np.array([self.running[slot].kv_len for slot in slots], np.int32)
        plain = np.zeros(len(slots), np.int32)
        nodes, depth, model = plain.copy(), plain.copy(), plain.copy()
        least, decision = 0.0, Decision("", ())
        if old:
            places = [slots.index(slot) for slot in old]
            arrays = np.array(old, np.int32), kv_len[places]
            decision = self.policy.decide(*arrays)
            given = decision.rows
            nodes[places] = [budget.nodes for budget in given]
            depth[places] = [budget.depth for budget in given]
            model[places] = [budget.model_depth for budget in given]
            least = min((b.min_prob for b in given if b.nodes), default=0.0)
        known = [
            np.array(self.running[slot].text[-1 if slot in old else -PROMPT :], np.int32)
            for slot in slots
        ]
        plan = Plan(
            slots=np.array(slots, np.int32),
            kv_len=kv_len,
            known=tuple(known),
            samples=np.ones(len(slots), np.bool_),
            max_nodes=nodes,
            max_depth=depth,
            page_table=np.zeros((len(slots), 1), np.int32),
            constrained=np.zeros(len(slots), np.bool_),
            min_prob=least,
            model_depth=model,
        )
        return plan, decision

    def _carries(self, plan, new):
        if new or self._before is None:
            return False
        before, wanted = self._before
        if max(map(len, before.known)) > 1 or not {*plan.slots} <= {*before.slots}:
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
        if carried:  # It came of the step before, on the device: nobody chose among it.
            return [], proposed, 0.0
        drafts = decision.select(proposed) if decision.select else proposed
        return proposed, drafts, self._passes() - begun + self._look(plan)

    def _round(self, rows, deepest, levels):
        size = 1 << (rows - 1).bit_length(), deepest, levels
        if 0 < deepest <= max(DEPTHS):  # It runs as the next larger one that is declared.
            deepest = max(levels, min(depth for depth in DEPTHS if depth >= deepest))
        declared = {deepest, levels} <= {0, *DEPTHS} and (deepest in (0, levels) or not levels)
        capturing = not declared and size not in self._sizes
        self._sizes.add(size)
        self.captures += capturing
        ms = ROUND + NODE * rows * (1 + deepest) + levels * (LEVEL + ROW_LEVEL * rows)
        return ms + CAPTURE * capturing

    def _outcome(self, plan, said, sizes, wanted):
        counts = np.array(list(map(len, said)), np.int32)
        tokens = np.full((len(said), counts.max()), -1, np.int32)
        for row, each in enumerate(said):
            tokens[row, : len(each)] = each
        starts = np.cumsum([0, *(len(k) + n for k, n in zip(plan.known, sizes, strict=True))])
        roots = starts[:-1] + [len(known) - 1 for known in plan.known]
        paths = [root + 1 + np.arange(n - 1) for root, n in zip(roots, counts, strict=True)]
        accepted = np.concatenate(paths).astype(np.int32)
        fine = np.ones(len(said), np.bool_)
        return Outcome(
            counts, tokens, sizes, fine, accepted=accepted,
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

    def _said(self, slot, draft, text):
        first, later = text
        chances = [first] + [later] * len(draft)
        right = map(lt, self.random.random(len(draft)).tolist(), chances)
        return [1] * (1 + sum(takewhile(bool, right)))

    def _grown(self, plan, wanted):
        if wanted is None:
            return None
        shape = plan.rows, wanted.levels
        parents = np.tile(np.arange(-1, wanted.levels - 1, dtype=np.int32), (plan.rows, 1))
        asked = set(wanted.slots.tolist())
        rows = np.array([slot in asked for slot in plan.slots.tolist()])
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
    what comes next in it.
    """

    def _drafter(self):
        self.motifs: dict[int, list[int]] = {}
        return NgramDrafter(LIMITS.slots)

    def _prompt(self):
        motif = self.random.integers(0, 256, 12)
        return np.tile(motif, PROMPT // 12).astype(np.int32)

    def _said(self, slot, draft, text):
        (repeats,) = text
        row = self.running[slot]
        motif, place = row.text[:12], len(row.text)
        truth = [
            motif[(place + i) % 12]
            if self.random.random() < repeats
            else int(self.random.integers(256, 512))
            for i in range(9)
        ]
        said, node = [], -1
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        for token in truth:
            said.append(token)
            under = [i for i, p in enumerate(parents) if p == node and tokens[i] == token]
            if not under:
                break
            node = under[0]
        return said

    def _look(self, plan):
        return LOOK + ROW_LOOK * plan.rows
