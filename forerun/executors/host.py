"""Acceptance on the host, for executors whose logits the host can read.

The arithmetic is forerun/spec; here it meets slots, rows and the reports a request asked for.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isnan

import numpy as np

from forerun.engine.plan import Opening, Outcome, Plan, TokenLogprobs
from forerun.errors import EngineError
from forerun.spec.accept import NOTHING, ChooseAt, accept_row, choose, choose_among
from forerun.spec.sampling import (
    History,
    Sampling,
    largest,
    log_normaliser,
    process,
    unpack,
)
from forerun.spec.tree import NodeMasks, TreeBatch
from forerun.types import AnyArray, Floats, Ints, Words

Logits = Callable[[int], Floats]
"""Flat node -> float32[V]; asked for nodes named by `HostSampler.scored` only."""

ChooseNode = Callable[[int, Sampling, int], int | None]
"""(flat node, sampling, output position) -> the choice that a device has made there already, or
None. Asked only where nothing but the temperature shapes the choice, and before any logits are."""

ChooseFast = Callable[[Floats, Sampling, int], int | None]
"""(logits float32[V], sampling, output position) -> what `choose(process(...), ...)` would give,
or None to have it computed here. Asked only where nothing but the temperature shapes the choice."""

FEW = 2048
"""Tokens that a grammar allows, up to which noise for these alone is the quickest."""
EXCLUDED = np.float32(-1e30)
"""A logit that is never chosen, yet finite."""

Reports = tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PlainNodes:
    """Nodes whose choice hangs on the temperature alone; an executor may make it on its device.

    nodes         int32[n] flat, ascending
    seeds         uint64[n] of their requests
    positions     int32[n] output position that each decides
    temperatures  float32[n]; 0 = greedy
    """

    nodes: Ints
    seeds: AnyArray
    positions: Ints
    temperatures: Floats


@dataclass(frozen=True, slots=True)
class HostRow:
    """What `accept` decided for one row.

    path    int32[.] flat nodes that become permanent: the known chain, then accepted guesses
    tokens  emitted tokens; empty for a row that failed or does not sample
    finite, logprobs, prompt_logprobs   as in Outcome
    """

    path: Ints
    tokens: tuple[int, ...] = ()
    finite: bool = True
    logprobs: Reports = ()
    prompt_logprobs: Reports = ()


@dataclass(frozen=True, slots=True)
class HostAccepted:
    """What `accept` decided, row by row."""

    rows: tuple[HostRow, ...]

    @property
    def paths(self) -> tuple[Ints, ...]:
        """B x int32[.] flat nodes that become permanent, downwards."""
        return tuple(row.path for row in self.rows)


class HostSampler:
    """The sampler's state per slot, and acceptance by forerun.spec.

    choose_node, choose_fast  an executor's own quicker ways to the same choice
    """

    def __init__(
        self,
        slots: int,
        vocab: int,
        choose_node: ChooseNode | None = None,
        choose_fast: ChooseFast | None = None,
    ) -> None:
        self._open: list[tuple[Sampling, History] | None] = [None] * slots
        self._vocab = vocab
        self._choose_node, self._choose_fast = choose_node, choose_fast

    def open(self, opening: Opening) -> None:
        """Bind a sequence to its slot.

        Raises EngineError where the slot is taken or a token is outside the vocabulary.
        """
        if self._open[opening.slot] is not None:
            raise EngineError(f"slot {opening.slot} is already open; close it first")
        if not np.all((opening.tokens >= 0) & (opening.tokens < self._vocab)):
            raise EngineError(f"slot {opening.slot}: a token is outside 0..{self._vocab - 1}")
        history = History(opening.tokens, opening.prompt_len)
        self._open[opening.slot] = (opening.sampling, history)

    def close(self, slot: int) -> None:
        """Forget the slot's sequence, if it has one."""
        self._open[slot] = None

    def scored(self, plan: Plan, trees: TreeBatch) -> Ints:
        """Flat nodes, ascending, whose logits `accept` may ask for."""
        needed: list[AnyArray] = [np.zeros(0, np.int32)]
        for row in range(plan.rows):
            sampling, _ = self._slot(plan, row)
            nodes, root = trees.nodes(row), trees.root(row)
            echo = sampling.prompt_logprobs is not None
            first = nodes.start if echo else root
            # A row that does not sample carries no guess; echo still reads its whole chain.
            stop = nodes.stop if plan.samples[row] or echo else root
            needed.append(np.arange(first, stop))
        return np.concatenate(needed).astype(np.int32)

    def plain(self, plan: Plan, trees: TreeBatch) -> PlainNodes:
        """The nodes, of rows that sample, that neither a parameter nor a grammar touches."""
        nodes: list[AnyArray] = [np.zeros(0, np.int32)]
        positions: list[AnyArray] = [np.zeros(0, np.int32)]
        seeds, temperatures, counts = [], [], []
        for row in range(plan.rows):
            sampling, history = self._slot(plan, row)
            if not (plan.samples[row] and sampling.plain) or plan.constrained[row]:
                continue
            root, stop = trees.root(row), int(trees.start[row + 1])
            nodes.append(np.arange(root, stop))
            positions.append(history.output_len + trees.depth[root:stop] - trees.depth[root])
            seeds.append(sampling.seed & 0xFFFFFFFFFFFFFFFF)
            temperatures.append(sampling.temperature)
            counts.append(stop - root)
        return PlainNodes(
            nodes=np.concatenate(nodes).astype(np.int32),
            seeds=np.repeat(np.array(seeds, np.uint64), counts),
            positions=np.concatenate(positions).astype(np.int32),
            temperatures=np.repeat(np.array(temperatures, np.float32), counts),
        )

    def accept(
        self, plan: Plan, trees: TreeBatch, logits: Logits, masks: NodeMasks | None
    ) -> HostAccepted:
        """Decide every row. Changes nothing: `outcome` makes it permanent.

        A row whose root has NaN or +inf among its logits, or whose grammar mask there allows
        nothing, emits nothing and has `finite` False; other rows are untouched. The same
        trouble at a guess ends the path before that guess, as if it had not been guessed.
        Stop tokens do not cut a path; the engine does.
        """
        return HostAccepted(
            tuple(self._accept(plan, row, trees, logits, masks) for row in range(plan.rows))
        )

    def outcome(self, plan: Plan, trees: TreeBatch, accepted: HostAccepted) -> Outcome:
        """Append the emitted tokens to the slots' histories and pack the step's result."""
        rows = accepted.rows
        counts = [len(row.tokens) for row in rows]
        packed = np.full((len(rows), max(counts, default=0)), -1, np.int32)
        for index, row in enumerate(rows):
            packed[index, : len(row.tokens)] = row.tokens
            self._slot(plan, index)[1].append(row.tokens)
        return Outcome(
            n_tokens=np.array(counts, np.int32),
            tokens=packed,
            n_guesses=(np.diff(trees.start) - trees.known).astype(np.int32),
            finite=np.array([row.finite for row in rows], np.bool_),
            logprobs=tuple(row.logprobs for row in rows),
            prompt_logprobs=tuple(row.prompt_logprobs for row in rows),
        )

    def _slot(self, plan: Plan, row: int) -> tuple[Sampling, History]:
        slot = int(plan.slots[row])
        found = self._open[slot]
        if found is None:
            raise EngineError(f"row {row} plans slot {slot}, which is not open")
        return found

    def _accept(
        self, plan: Plan, row: int, trees: TreeBatch, logits: Logits, masks: NodeMasks | None
    ) -> HostRow:
        sampling, history = self._slot(plan, row)
        decided = int(plan.kv_len[row]) + len(plan.known[row])
        if plan.samples[row] and decided != len(history):
            raise EngineError(
                f"row {row} samples after {decided} tokens, but slot {plan.slots[row]} holds "
                f"{len(history)}"
            )
        root = trees.root(row)
        chain = np.arange(trees.start[row], root + 1, dtype=np.int32)
        following = history.tokens[decided - len(chain) + 1 :]
        echoed = _reports(sampling.prompt_logprobs, zip(chain, following, strict=False), logits)
        if any(isnan(entry.logprob) for entry in echoed):
            return HostRow(chain, finite=False)
        if not plan.samples[row]:
            return HostRow(chain, prompt_logprobs=echoed)
        path = accept_row(trees, row, self._chooser(sampling, history, logits, masks))
        pairs = zip((root, *path.nodes), path.tokens, strict=False)
        reports = _reports(sampling.logprobs, pairs, logits)
        kept = np.append(chain, np.array(path.nodes, np.int32)) if path.nodes else chain
        return HostRow(kept, path.tokens, len(path.tokens) > 0, reports, echoed)

    def _chooser(
        self, sampling: Sampling, history: History, logits: Logits, masks: NodeMasks | None
    ) -> ChooseAt:
        def choose_at(node: int, ancestors: tuple[int, ...]) -> int:
            position, allowed = history.output_len + len(ancestors), None
            if masks is not None and masks.row[node] >= 0:
                allowed = masks.bits[masks.row[node]]
            if sampling.plain and allowed is None and self._choose_node is not None:
                made = self._choose_node(node, sampling, position)
                if made is not None:
                    return made
            raw = logits(node)
            if sampling.plain:
                token = self._choose_plain(raw, allowed, sampling, position)
                if token is not None:
                    return token
            if (allowed is not None or not sampling.plain) and not np.isfinite(raw.max()):
                return NOTHING  # `choose` sees that too, unless a mask or a cut-off hides it.
            processed = process(raw, sampling, history, ancestors, allowed)
            return choose(processed, sampling, position)

        return choose_at

    def _choose_plain(
        self, raw: Floats, mask: Words | None, sampling: Sampling, position: int
    ) -> int | None:
        """The choice where the temperature and a mask alone shape it; None = ask the spec."""
        fast = self._choose_fast
        if mask is None:
            return fast(raw, sampling, position) if fast else None
        if not np.isfinite(raw.max()):
            return NOTHING
        allowed = unpack(mask, len(raw))
        tokens = np.flatnonzero(allowed).astype(np.int32)
        if sampling.temperature == 0 or len(tokens) <= FEW:
            return choose_among(raw, tokens, sampling, position)
        token = fast(np.where(allowed, raw, EXCLUDED), sampling, position) if fast else None
        return token if token is not None and allowed[token] else None


def _reports(top: int | None, pairs: Iterable[tuple[int, int]], logits: Logits) -> Reports:
    """Reports of (flat node, token that follows it) pairs, where they are asked for."""
    if top is None:
        return ()
    return tuple(report(logits(int(node)), int(token), top) for node, token in pairs)


def report(logits: Floats, token: int, top: int) -> TokenLogprobs:
    """Raw log-probabilities, in nats, of `token` and of the `top` best, ties by lowest id."""
    normaliser = log_normaliser(logits)
    best = largest(logits, top) if top else ()
    return TokenLogprobs(
        token=token,
        logprob=float(logits[token]) - normaliser,
        top=tuple((int(other), float(logits[other]) - normaliser) for other in best),
    )
