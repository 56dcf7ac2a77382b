"""Decides the rows that the executor has not decided itself, with the reference implementation
(forerun/speculative), and computes log-probabilities for requests.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import isnan

import numpy as np

from forerun.interface.plan import Plan, Reports, Round, TokenLogprobs
from forerun.interface.slot_init import SlotInit
from forerun.speculative.accept import FEW, NOTHING, Path, accept_row, choose_among, choose_left
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
from forerun.types import Floats, Ints

Logits = Callable[[int], Floats]
"""Flat node -> logits float32[V]; called only for nodes in `HostSampler.scored`."""

ReportsOf = Callable[[int, list[tuple[int, int]]], Reports]
"""(number of alternatives, pairs of a flat node and the token that follows it) -> their
log-probabilities.
"""


def history_of(slot_init: SlotInit) -> History:
    """Return the sequence's decided tokens, as a view; penalties count these."""
    return History(slot_init.text.tokens, slot_init.prompt_len)


def path_of(
    trees: TreeBatch,
    row: int,
    sampling: Sampling,
    history: History,
    logits: Logits,
    masks: NodeMasks | None,
) -> Path:
    """Return the accepted path of one row, by forerun.speculative; empty if the root has no choice.

    history  the decided tokens of the row's sequence
    logits   called for nodes of the path only
    masks    of grammars, by flat node; None = no row is constrained
    """

    def choose_at(node: int, ancestors: tuple[int, ...]) -> int:
        position, allowed = history.output_len + len(ancestors), None
        if masks is not None and masks.row[node] >= 0:
            allowed = masks.bits[masks.row[node]]
        raw = logits(node)
        if (allowed is not None or not sampling.temperature_only) and not np.isfinite(raw.max()):
            return NOTHING  # `choose` would miss it under a mask or cut-off.
        if allowed is not None and sampling.temperature_only:
            tokens = np.flatnonzero(unpack(allowed, len(raw))).astype(np.int32)
            if sampling.temperature == 0 or len(tokens) <= FEW:
                return choose_among(raw, tokens, sampling, position)
        processed = process(raw, sampling, history, ancestors, allowed)
        chosen = choose_left(processed, sampling, position)
        drafted = list(children(trees, row, node)) if sampling.lossy else []
        if not drafted or chosen == NOTHING:
            return chosen
        return relaxed(processed, sampling, position, drafted, chosen)

    return accept_row(trees, row, choose_at)


def complete(
    round: Round,
    rows: list[tuple[int, SlotInit]],
    choice: Ints,
    finite: list[bool],
    logits: Logits,
    masks: NodeMasks | None,
    reports: ReportsOf | None,
) -> list[tuple[Reports, ...]]:
    """Decide the given rows of a round that have no choice at their root, and compute the
    log-probabilities of all given rows.

    rows     numbers of rows, with their slots' sequences
    choice, finite  as of HostSampler.finish and Outcome; completed in place
    logits   of flat nodes
    reports  computes log-probabilities; None: from the logits

    Returns Outcome.logprobs and Outcome.prompt_logprobs.
    """
    plan, trees, reports = round.plan, round.trees, reports or partial(reports_of, logits)
    logprobs: list[Reports] = [()] * plan.rows
    prompt_logprobs: list[Reports] = [()] * plan.rows
    for row, slot in rows:
        nodes, root = trees.nodes(row), trees.root(row)
        echo = reports(slot.sampling.prompt_logprobs or 0, echoed(plan, row, trees, slot))
        if any(isnan(entry.logprob) for entry in echo):
            choice[nodes.start : nodes.stop] = NOTHING
            finite[row] = False
            continue
        prompt_logprobs[row] = echo
        if not plan.samples[row]:
            continue
        if choice[root] < 0:
            path = path_of(trees, row, slot.sampling, history_of(slot), logits, masks)
            put_path(choice, root, path)
        if slot.sampling.logprobs is not None:
            chosen = [node for node in nodes if choice[node] >= 0]
            pairs = list(zip(chosen, choice[chosen].tolist(), strict=True))
            logprobs[row] = reports(slot.sampling.logprobs, pairs)
        finite[row] = bool(choice[root] >= 0)
    return [tuple(logprobs), tuple(prompt_logprobs)]


def put_path(choice: Ints, root: int, path: Path) -> None:
    """Write the path of a row with root `root`, a flat node, to choice int32[M], as of
    HostSampler.finish.
    """
    for node, token in zip((root, *path.nodes), path.tokens, strict=False):
        choice[node] = token


def echoed(plan: Plan, row: int, trees: TreeBatch, slot: SlotInit) -> list[tuple[int, int]]:
    """Return the pairs (known node, the decided token that follows it) of a row whose
    log-probabilities `prompt_logprobs` requests; none if the request does not.
    """
    if slot.sampling.prompt_logprobs is None:
        return []
    nodes = range(int(trees.start[row]), trees.root(row) + 1)
    following = slot.text.tokens[int(plan.kv_len[row]) + 1 :][: len(nodes)].tolist()
    return list(zip(nodes, following, strict=False))


def reports_of(
    logits: Logits,
    top: int,
    pairs: Iterable[tuple[int, int]],
    made: Callable[[int, int], TokenLogprobs | None] = lambda node, top: None,
) -> Reports:
    """Return the log-probabilities for pairs (flat node, token that follows it), with `top`
    alternatives each: from `made`(node, top) if it returns any, else from the raw logits.
    """
    return tuple(
        made(node, top) or report(logits(int(node)), int(token), top) for node, token in pairs
    )


def report(logits: Floats, token: int, top: int) -> TokenLogprobs:
    """Return raw log-probabilities, in nats, of `token` and of the `top` most probable tokens, from
    logits float32[V]; ties by lowest id; excluded tokens (-inf) are omitted.
    """
    normaliser = log_normaliser(logits)
    best = largest(logits, top) if top else ()
    return TokenLogprobs(
        token=token,
        logprob=float(logits[token]) - normaliser,
        top=tuple((int(other), float(logits[other]) - normaliser) for other in best),
    )


def report_in(line: Ints, token: int, top: int) -> TokenLogprobs:
    """Return the log-probabilities that a device computed for `token` and the `top` most probable
    tokens, without excluded ones (-inf).

    line  int32[1 + 2*k]: the token's log-probability as float32 bits, the ids of the k most
          probable tokens, best first, and their log-probabilities likewise
    """
    kept = (len(line) - 1) // 2
    values = line.view(np.float32).tolist()
    best = zip(line[1 : 1 + kept].tolist(), values[1 + kept :], strict=True)
    pairs = tuple(pair for pair in best if pair[1] > -np.inf)
    return TokenLogprobs(token=token, logprob=values[0], top=pairs[:top])
