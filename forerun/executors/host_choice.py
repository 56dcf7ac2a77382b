"""The target's own choices in one row, by the specification, and the reports a request asked for.

The arithmetic is forerun/speculative; an executor's quicker ways to the same choice come first.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from forerun.interface.plan import Reports, TokenLogprobs
from forerun.speculative.accept import NOTHING, Path, accept_row, choose, choose_among
from forerun.speculative.sampling import (
    History,
    Sampling,
    largest,
    log_normaliser,
    process,
    unpack,
)
from forerun.speculative.thresholds import children, relaxed
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Floats, Words

Logits = Callable[[int], Floats]
"""Flat node -> float32[V]; asked for nodes named by `HostSampler.scored` only."""

ChooseFast = Callable[[Floats, Sampling, int], int | None]
"""(logits float32[V], sampling, output position) -> what `choose(process(...), ...)` would give,
or None to have it computed here. Asked only where nothing but the temperature shapes the choice."""

ReportsOf = Callable[[int, list[tuple[int, int]]], Reports]
"""(alternatives of each, pairs of a flat node and the token that follows it) -> reports."""

FEW = 2048
"""Tokens that a grammar allows, up to which noise for these alone is the quickest."""
EXCLUDED = np.float32(-1e30)
"""A logit that is never chosen, yet finite."""


class HostChoice:
    """Walks one row's tree along the target's choices.

    choose_fast  an executor's own quicker way to the same choice
    """

    def __init__(self, choose_fast: ChooseFast | None) -> None:
        self._choose_fast = choose_fast

    def path(
        self,
        trees: TreeBatch,
        row: int,
        sampling: Sampling,
        history: History,
        logits: Logits,
        masks: NodeMasks | None,
    ) -> Path:
        """What of a row's tree is accepted, and the target's own token."""

        def choose_at(node: int, ancestors: tuple[int, ...]) -> int:
            position, allowed = history.output_len + len(ancestors), None
            if masks is not None and masks.row[node] >= 0:
                allowed = masks.bits[masks.row[node]]
            raw = logits(node)
            if sampling.plain:
                token = self._choose_plain(raw, allowed, sampling, position)
                if token is not None:
                    return token
            if (allowed is not None or not sampling.plain) and not np.isfinite(raw.max()):
                return NOTHING  # `choose` sees that too, unless a mask or a cut-off hides it.
            processed = process(raw, sampling, history, ancestors, allowed)
            chosen = choose(processed, sampling, position)
            drafted = list(children(trees, row, node)) if sampling.lossy else []
            if not drafted or chosen == NOTHING:
                return chosen
            return relaxed(processed, sampling, position, drafted, chosen)

        return accept_row(trees, row, choose_at)

    def reports(self, logits: Logits) -> ReportsOf:
        """From logits."""
        return partial(reports_of, logits)

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


def reports_of(logits: Logits, top: int, pairs: Iterable[tuple[int, int]]) -> Reports:
    """Reports of (flat node, token that follows it) pairs."""
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
