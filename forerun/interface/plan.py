"""What crosses between the engine and an executor: small NumPy ints in, one packed copy out."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from forerun.interface.features import Features
from forerun.interface.next_draft import NextDrafts
from forerun.speculative.sampling import Sampling
from forerun.types import Bools, Ints

_NO_NODES: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class SlotInit:
    """What an executor must know of a sequence when it takes a slot.

    tokens      int32[T] all tokens decided so far (prompt, and output after a preemption);
                the sampler's history, which prefix-cache hits never show in a plan
    prompt_len  how many of them are the prompt: output position n = index - prompt_len
    """

    slot: int
    tokens: Ints
    prompt_len: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Budget:
    """What every row may draft in the next step, and why, in words for people. Nothing: the step
    is exactly a plain one.

    nodes   draft tokens at most
    depth   longest path of draft tokens
    min_prob  draft tokens less likely than this would not be verified
    model_depth  of that, how deep a draft model may go that drafts one tree with free drafters; 0:
            only these are asked
    known   by row, how many tokens its grammar knows, for which there is room too; () = none
    most_rows  only the first so many rows may draft; 0 = all
    """

    nodes: int
    depth: int
    reason: str
    min_prob: float = 0.0
    model_depth: int = 0
    known: tuple[int, ...] = ()
    most_rows: int = 0

    def by_row(self, rows: int) -> list["Budget"]:
        """The same for each row, with room for what its grammar knows."""
        budgets = [self] * rows
        if self.most_rows:
            budgets[self.most_rows :] = [replace(self, nodes=0)] * (rows - self.most_rows)
        for row, count in enumerate(self.known):
            if count > min(self.nodes, self.depth):
                nodes, depth = max(self.nodes, count), max(self.depth, count)
                reason = f"{self.reason}; {count} tokens known from the grammar"
                budgets[row] = replace(self, nodes=nodes, depth=depth, reason=reason)
        return budgets


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does. Row b advances the sequence in slot slots[b].

    slots       int32[B]
    kv_len      int32[B]    tokens whose keys and values are already in pages
    known       B x int32[.] tokens to run whatever happens: a prompt chunk, or the last token
    samples     bool[B]     False for a chunk that stops short of the known tokens' end:
                            its row emits nothing
    max_nodes   int32[B]    draft tokens the row may carry (0 = plain decoding)
    max_depth   int32[B]    longest path of draft tokens
    page_table  int32[B,W]  page of position p is page_table[b, p // page_size]; -1 = none;
                            reserved for kv_len + len(known) + max_depth positions
    constrained bool[B]     a grammar holds the row
    min_prob    draft tokens less likely than this are not worth proposing: none would be verified
    model_depth int32[B]    of max_depth, how deep a draft model may go that drafts one tree with
                            free drafters; 0 = only these are asked, None = max_depth
    """

    slots: Ints
    kv_len: Ints
    known: tuple[Ints, ...]
    samples: Bools
    max_nodes: Ints
    max_depth: Ints
    page_table: Ints
    constrained: Bools
    min_prob: float = 0.0
    model_depth: Ints | None = None

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return len(self.slots)

    @property
    def some_constrained(self) -> bool:
        """Whether a grammar holds some row."""
        return True in self.constrained.tolist()


@dataclass(frozen=True, slots=True)
class CarriedPlan:
    """A step that takes up on the device where the running one leaves, before anybody has looked at
    that. Every row samples, begins with the one token that was decided last, and is held by no
    grammar; its draft tokens are what the running step drafts. Of all else the host knows bounds.

    slots       int32[B]
    most_kv     int32[B]    tokens that can be in pages, at most
    ends        int32[B]    positions that the sequence may take up in the end
    max_nodes, max_depth, page_table  as in Plan; pages are reserved for most_kv + 1 + max_depth
                            positions, or up to `ends`
    """

    slots: Ints
    most_kv: Ints
    ends: Ints
    max_nodes: Ints
    max_depth: Ints
    page_table: Ints

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return len(self.slots)

    def bounded(self) -> Plan:
        """A plan of the same rows, as far along as they can be: what it asks for is known already,
        tokens are not.
        """
        return Plan(
            slots=self.slots,
            kv_len=self.most_kv,
            known=(np.zeros(1, np.int32),) * self.rows,
            samples=np.ones(self.rows, np.bool_),
            max_nodes=self.max_nodes,
            max_depth=self.max_depth,
            page_table=self.page_table,
            constrained=np.zeros(self.rows, np.bool_),
        )

    def completed(self, before: Plan, outcome: "Outcome") -> Plan:
        """The plan, now that the outcome of the step before is known.

        A row that failed there goes on from where it was; nobody cares any more.
        """
        place = {slot: row for row, slot in enumerate(before.slots.tolist())}
        rows = [place[slot] for slot in self.slots.tolist()]
        emitted = outcome.output_tokens
        last = [emitted[row][-1:] or before.known[row][-1:] for row in rows]
        return Plan(
            slots=self.slots,
            kv_len=before.kv_len[rows] + outcome.n_tokens[rows],
            known=tuple(np.array(token, np.int32) for token in last),
            samples=np.ones(self.rows, np.bool_),
            max_nodes=self.max_nodes,
            max_depth=self.max_depth,
            page_table=self.page_table,
            constrained=np.zeros(self.rows, np.bool_),
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw model log-probabilities (before any sampling parameter) of one reported token.

    top is best first: (token, log-probability in nats); its length is what was asked.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Reports = tuple[TokenLogprobs, ...]
"""Of tokens that follow each other."""


@dataclass(frozen=True)
class Outcome:
    """What a step decided. The only thing copied from device to host.

    n_tokens        int32[B]   tokens emitted: 0 where the row does not sample, else accepted + 1
    tokens          int32[B,D] the accepted draft tokens, then the target's own token; -1 padded
    n_draft_tokens  int32[B]   draft tokens the row's tree carried
    finite          bool[B]    False where the target's logits were not finite: the row
                               emitted nothing and its request must end with an error
    logprobs        B lists, one entry per emitted token where asked, else empty
    prompt_logprobs B lists where asked, else empty: entry i is the log-probability of
                    known[i+1]. A row that does not sample has one more entry, for the decided
                    token after its chunk, so a prompt's chunks join up without a hole; for a
                    sampling row the emitted tokens' entries follow in `logprobs`
    accepted        int32[.]   flat nodes of the accepted draft tokens, row after row, downwards:
                    n_tokens[b] - 1 of row b, none where it emitted nothing
    drafts          what the step drafted for the next one, where that was asked for and done
    features        of the step's flat nodes, where a draft model reads any; valid until the
                    executor's next step
    """

    n_tokens: Ints
    tokens: Ints
    n_draft_tokens: Ints
    finite: Bools
    logprobs: tuple[Reports, ...] = field(default=())
    prompt_logprobs: tuple[Reports, ...] = field(default=())
    accepted: Ints = field(default_factory=lambda: _NO_NODES)
    drafts: NextDrafts | None = None
    features: Features | None = None

    @cached_property
    def output_tokens(self) -> list[list[int]]:
        """The emitted tokens of every row, unpadded."""
        counts = self.n_tokens.tolist()
        return [row[:count] for row, count in zip(self.tokens.tolist(), counts, strict=True)]

    def committed(self, plan: Plan) -> list[int]:
        """Per row, positions that became permanent: its known tokens plus accepted draft tokens."""
        counts = self.n_tokens.tolist()
        return [len(k) + max(count - 1, 0) for k, count in zip(plan.known, counts, strict=True)]

    def paths(self) -> list[Ints]:
        """Per row, int32[.] the flat nodes of its accepted draft tokens, downwards."""
        ends = np.maximum(self.n_tokens - 1, 0).cumsum()
        return np.split(self.accepted, ends[:-1])
