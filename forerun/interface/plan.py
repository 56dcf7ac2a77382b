"""The values that pass between the engine and an executor: a plan of small NumPy integer arrays, a
round while it runs, and the outcome, which is one copy from the device.
"""

from array import array
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from forerun.errors import EngineError
from forerun.interface.features import StepFeatures
from forerun.interface.next_draft import NextDrafts, OnDeviceDraftSpec
from forerun.speculative.tree import NO_TREES, NodeMasks, TreeBatch
from forerun.types import Bools, Floats, Ints

_NO_NODES: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """Break-even costs by which a drafter selects, and how many draft tokens are allowed.

    tokens  float64[N] expected tokens that 1, 2, ..., N draft tokens must bring at least
    padded  the counts are per row (each row takes as long as the longest); else over all rows
    """

    tokens: "array[float]"
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step. Row b advances the sequence in slot slots[b].

    slots       int32[B]
    kv_len      int32[B]    tokens whose keys and values are already in pages
    known       B x int32[.] tokens to run whatever is accepted: a prompt chunk, or the last token;
                int32[B,1] if no row has more than one
    samples     bool[B]     False for a chunk that stops before the end of the known tokens: its row
                            emits nothing
    max_nodes   int32[B]    draft tokens the row may carry (0 = plain decoding)
    max_depth   int32[B]    longest path of draft tokens
    page_table  int32[B,W]  page of position p is page_table[b, p // page_size]; -1 = none; reserved
                            for kv_len + len(known) + max_depth positions
    constrained bool[B]     the row has a grammar
    min_prob    least probability of a draft token worth proposing: less would not be verified
    node_costs  costs by which a drafter with selects_by_cost selects; None = it selects nothing
    model_depth int32[B]    how deep a draft model that shares a tree with other drafters may go, at
                            most max_depth; 0 = only the others propose, None = max_depth
    pass_prob   a draft model runs a further pass only below paths of at least this probability
    on_device_draft  what the step does for the draft model at its end, if the executor can; the
                result is `Outcome.drafts`, which may be None
    hidden      int32[B]    number of the row's last known tokens whose hidden states to return in
                `Round.hidden`; None = none
    """

    slots: Ints
    kv_len: Ints
    known: tuple[Ints, ...] | Ints
    samples: Bools
    max_nodes: Ints
    max_depth: Ints
    page_table: Ints
    constrained: Bools
    min_prob: float = 0.0
    node_costs: NodeCosts | None = None
    model_depth: Ints | None = None
    pass_prob: float = 0.0
    on_device_draft: OnDeviceDraftSpec | None = None
    hidden: Ints | None = None

    @property
    def rows(self) -> int:
        """B, the number of sequences that the step advances."""
        return len(self.slots)

    @property
    def known_counts(self) -> list[int]:
        """The number of known tokens of each of the B rows."""
        return [1] * self.rows if isinstance(self.known, np.ndarray) else list(map(len, self.known))

    @property
    def some_constrained(self) -> bool:
        """Whether at least one row has a grammar, so that masks are needed."""
        return True in self.constrained.tolist()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw model log-probabilities (before any sampling parameter) of one reported token.

    top is best first: (token, log-probability in nats), as many as requested.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Reports = tuple[TokenLogprobs, ...]
"""Log-probabilities of consecutive tokens."""


@dataclass(frozen=True)
class Outcome:
    """The decisions of a step, the only data copied from device to host.

    n_tokens        int32[B]   tokens emitted: 0 if the row does not sample, else accepted + 1
    tokens          int32[B,D] the accepted draft tokens, then the target's own token; -1 padded
    n_draft_tokens  int32[B]   draft tokens the row's tree carried
    finite          bool[B]    False if the target's logits were not finite: the row emitted nothing
                               and its request must end with an error
    logprobs        B lists, one entry per emitted token if requested, else empty
    prompt_logprobs B lists if requested, else empty: entry i is the log-probability of known[i+1].
                    A row that does not sample has one more entry, for the decided token after its
                    chunk, so a prompt's chunks join without a gap; the emitted tokens of a sampling
                    row have theirs in `logprobs`
    accepted        int32[.]   nodes of the round's trees: the accepted draft tokens, row after row,
                               from the root down: n_tokens[b] - 1 of row b, none if it emitted
                               nothing
    drafts          what the step drafted for the next one, if it did
    features        of the step's flat nodes, if a draft model reads any; valid until the executor's
                    next step
    """

    n_tokens: Ints
    tokens: Ints
    n_draft_tokens: Ints
    finite: Bools
    logprobs: tuple[Reports, ...] = field(default=())
    prompt_logprobs: tuple[Reports, ...] = field(default=())
    accepted: Ints = field(default_factory=lambda: _NO_NODES)
    drafts: NextDrafts | None = None
    features: StepFeatures | None = None

    @cached_property
    def output_tokens(self) -> list[list[int]]:
        """B lists of target ids: what each row emitted, unpadded."""
        rows = zip(self.tokens.tolist(), self.n_tokens.tolist(), strict=True)
        return [tokens[:count] for tokens, count in rows]

    def committed(self, plan: Plan) -> list[int]:
        """Return B counts of positions that became permanent: known plus accepted tokens."""
        rows = zip(plan.known_counts, self.n_tokens.tolist(), strict=True)
        return [known + emitted - 1 if emitted else known for known, emitted in rows]

    @cached_property
    def paths(self) -> list[Ints]:
        """B arrays int32[.]: flat nodes of each row's accepted draft tokens, from the root down."""
        paths, end = [], 0
        for count in self.n_tokens.tolist():
            begin, end = end, end + max(count - 1, 0)
            paths.append(self.accepted[begin:end])
        return paths

    def permanent(self, trees: TreeBatch, row: int) -> Ints:
        """Return int32[.] flat nodes of `row` that stay cached: all known, then the accepted
        ones.
        """
        known = np.arange(trees.start[row], trees.root(row) + 1, dtype=np.int32)
        return np.concatenate([known, self.paths[row]])


@dataclass(eq=False)
class Round:
    """A step that an executor has begun. Executors subclass it with fields of their own.

    plan       what it does. Complete from the start, except in a round that began from another:
               there once both are finished
    previous   the round that it began from, until the plan is complete
    trees      what it verifies; empty until it is finished, if it began from another
    masks      of grammars, as given to `begin`
    can_overlap  whether another round may begin from it: the device decides every row, and nothing
               else is to be read of it that the next round would overwrite
    drafting   int32[.] slots that it drafts for, as the plan requests
    outcome    None until it is finished
    hidden     float32[n,H] hidden states of the nodes of `hidden_nodes` (interface/hidden.py), once
               it is finished: after the final norm, as the head reads them; None = of none
    """

    plan: Plan
    trees: TreeBatch = NO_TREES
    masks: NodeMasks | None = None
    previous: "Round | None" = None
    can_overlap: bool = False
    drafting: Ints = field(default_factory=lambda: _NO_NODES)
    outcome: Outcome | None = None
    hidden: Floats | None = None

    def complete_plan(self) -> None:
        """Set true `kv_len` and `known` in the plan, once the round that this one began from is
        finished. A row that failed there keeps its last known token; its result is ignored. Raises
        EngineError if that round is not finished, or there is none.
        """
        if self.previous is None or self.previous.outcome is None:
            raise EngineError("the round that this one began from is not finished")
        before, outcome = self.previous.plan, self.previous.outcome
        place = {slot: row for row, slot in enumerate(before.slots.tolist())}
        rows = [place[slot] for slot in self.plan.slots.tolist()]
        emitted = outcome.output_tokens
        last = [emitted[row][-1:] or before.known[row][-1:] for row in rows]
        kv_len = before.kv_len[rows] + outcome.n_tokens[rows]
        self.plan = replace(self.plan, kv_len=kv_len, known=np.array(last, np.int32))
        self.previous = None
