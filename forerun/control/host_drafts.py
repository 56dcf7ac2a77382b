"""Calibrates the scores of draft tokens made on the host, and selects those to verify.

Used for grammars and draft models; the compiled core's n-gram drafter selects by itself.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from forerun.control.account import Account
from forerun.control.constants import DECAY, MIN_PROB
from forerun.control.policy import Lookahead
from forerun.control.report import StepReport
from forerun.speculative.tree import NO_DRAFT, Draft, DraftSource
from forerun.types import Ints

CERTAIN = 1.0
"""Score of a token that a grammar forces. A drafter's proposal is never certain."""
ALMOST = 0.999
"""Highest score that a drafter's proposal may have."""
_GRAMMARS = (DraftSource.GRAMMAR, DraftSource.TOKEN_PRIOR)


class LevelCounts(NamedTuple):
    """Counts of one draft's levels: `tried`, the levels below a right one, and `right`, those of
    them that had the right token.
    """

    tried: int
    right: int


class ScoreCalibration:
    """Calibrates a drafter's scores by the draft tokens that were right, verified or not, over the
    number that the scores predicted.

    calibrated       leave scores as they are: the drafter calibrates them itself
    expected, right  draft tokens that were expected to be right, and that were; decayed
    """

    def __init__(self, calibrated: bool = False) -> None:
        self._calibrated = calibrated
        self.expected = self.right = 1.0

    @property
    def share(self) -> float:
        """Factor of scores per level, 0 to 1."""
        return 1.0 if self._calibrated else min(1.0, self.right / self.expected)

    def calibrate(self, draft: Draft) -> Draft:
        """Return a copy of the draft in which the probability of each draft token, given its
        parent, is multiplied by `share`; those of tokens from grammars are unchanged.
        """
        share, given = self.share, draft.score.tolist()
        scores: list[float] = []
        nodes = zip(draft.parents.tolist(), given, draft.sources(), strict=True)
        for parent, score, source in nodes:
            above, given_above = (scores[parent], given[parent]) if parent >= 0 else (1.0, 1.0)
            chance = score / given_above if given_above > 0.0 else 0.0
            if source not in _GRAMMARS:
                chance = min(chance * share, ALMOST)
            scores.append(above * min(chance, 1.0))
        return Draft(draft.tokens, draft.parents, np.array(scores, np.float32), draft.source)

    def learn(self, draft: Draft, tokens: list[int]) -> LevelCounts | None:
        """Compare a draft with the emitted `tokens`, at least one, and update the calibration.
        Returns None if nothing was proposed.
        """
        expected, tried, right = compare(draft, tokens)
        if not tried:
            return None
        self.expected = DECAY * self.expected + expected
        self.right = DECAY * self.right + right
        return LevelCounts(tried, right)


class HostDrafts:
    """Selects among the proposals of drafters and grammars those that bring more tokens than their
    time would bring elsewhere.

    nodes       most draft tokens of a row
    calibrated  see ScoreCalibration
    """

    def __init__(self, account: Account, nodes: int, calibrated: bool) -> None:
        self.calibration, self._account, self._nodes = ScoreCalibration(calibrated), account, nodes

    def known(
        self,
        lookahead: Lookahead,
        slots: Ints,
        kv_len: list[int],
        forced_only: bool,
        with_draft_model: bool,
    ) -> list[int]:
        """Return, for each of B rows, how many of the tokens that its grammar predicts are worth
        verifying in the coming step.

        lookahead    predicts tokens by grammars
        slots        int32[B]
        kv_len       B counts of cached positions
        forced_only  count only tokens that a grammar forces
        with_draft_model  whether a draft model takes part in the step
        """
        marginal_cost, count = CERTAIN, len(kv_len)
        if not forced_only:
            max_nodes = count * (1 + self._nodes)
            marginal_cost = self._account.costs.min_marginal_cost(count, max_nodes, sum(kv_len))
        rows = lookahead.predicted(slots, min(CERTAIN, max(MIN_PROB, marginal_cost)))
        owners = [row for row, scores in enumerate(rows) for _ in scores]
        scores = [score for row in rows for score in row]
        selected, _ = self.select_nodes(scores, owners, kv_len, with_draft_model)
        counts = Counter(owners[index] for index in selected)
        return [counts[row] for row in range(count)]

    def select(self, kv_len: list[int], with_draft_model: bool, drafts: list[Draft]) -> list[Draft]:
        """Cut each path after the last node that is expected to bring more than it costs, in a
        step with or without a draft model.
        """
        drafts = [self.calibration.calibrate(draft) if len(draft) else draft for draft in drafts]
        return cut(drafts, self.select_nodes(*scored(drafts), kv_len, with_draft_model)[0])

    def learn(self, drafts: Sequence[Draft], tokens: list[list[int]]) -> list[LevelCounts]:
        """Update the calibration with the tokens that each row emitted after its draft. Returns the
        counts of each row that had draft tokens and emitted something.
        """
        rows = zip(drafts, tokens, strict=bool(drafts))
        counts = [self.calibration.learn(draft, emitted) for draft, emitted in rows if emitted]
        return [each for each in counts if each is not None]

    def select_nodes(
        self, scores: list[float], owners: list[int], kv_len: list[int], with_draft_model: bool
    ) -> tuple[Sequence[int], float]:
        """Return the indices of the draft tokens to verify, and what they gain in tokens beyond
        what their time would bring elsewhere.

        scores  probabilities of being right
        owners  the row of each
        with_draft_model  whether a draft model takes part in the step

        Maximises the gain among the best-first prefixes that lose no more than `max_loss` if every
        token that is not certain is wrong. If a draft model took part and a plain step may be lost,
        at least its best token is selected. Uses lists: NumPy's calls, cold after a forward pass,
        take longer than the step can gain.
        """
        costs, max_loss = self._account.costs, self._account.balance(with_draft_model).max_loss
        rows, cached, padded = len(kv_len), sum(kv_len), costs.measured.padded
        layers = ranked(scores, owners, padded)
        value = self._account.step_value(rows, cached, with_draft_model)
        best, best_gain, tokens, certain_longest, nodes = 0, 0.0, 0.0, 1.0, rows
        for number, layer in enumerate(layers, 1):
            nodes += rows if padded else 1
            tokens += sum(scores[index] for index in layer)
            time = costs.relative_cost(rows, nodes, cached, optimistic=True)
            longest = costs.worst_case(rows, nodes, cached)
            if min(scores[index] for index in layer) >= CERTAIN:
                certain_longest = longest
            if longest - certain_longest > max_loss:
                break
            if (gain := tokens - value * (time - 1.0)) > best_gain:
                best, best_gain = number, gain
        # If a draft model ran, verify at least its best token: a wrong cost is then corrected.
        best = max(best, int(with_draft_model and bool(layers) and max_loss >= 1.0))
        return [index for layer in layers[:best] for index in layer], best_gain

    def gain_without_model(self, report: StepReport) -> float:
        """Return the expected gain, in tokens of all rows beyond what their time would bring
        elsewhere, of a step's proposals without those of the draft model, after selection.
        """
        costs, rows, nodes = self._account.costs, report.rows, report.nodes
        cached = report.cached * rows // nodes
        if not report.used_draft_model and report.draft_tokens == [*map(len, report.proposed)]:
            # All of it was selected by cost: that need not be done again.
            nodes = rows * (1 + max(report.draft_tokens)) if costs.measured.padded else nodes
            time = costs.relative_cost(rows, nodes, cached, optimistic=True)
            value = self._account.step_value(rows, cached, False)
            return sum(scored(report.proposed)[0]) - value * (time - 1.0)
        free = [draft if draft.free is None else draft.free for draft in report.proposed]
        return self.select_nodes(*scored(free), [cached // rows] * rows, False)[1]


def compare(draft: Draft, tokens: list[int]) -> tuple[float, int, int]:
    """Return (draft tokens predicted right, levels tried, levels right) along the path of `tokens`.
    At every node on the path the drafter's tokens below it count once, together; a grammar's tokens
    are followed, but say nothing about the drafter.
    """
    if not len(draft):
        return 0.0, 0, 0
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(draft.parents.tolist()):
        children.setdefault(parent, []).append(index)
    scores, tokens_of, sources = draft.score.tolist(), draft.tokens.tolist(), draft.sources()
    expected, tried, right = 0.0, 0, 0
    node, score = -1, 1.0
    for token in tokens:
        proposed = [n for n in children.get(node, ()) if sources[n] not in _GRAMMARS]
        following = [n for n in children.get(node, ()) if tokens_of[n] == token]
        if proposed:
            tried += 1
            expected += min(1.0, sum(scores[n] for n in proposed) / max(score, 1e-6))
            right += any(n in proposed for n in following)
        if not following:
            break
        node, score = following[0], scores[following[0]]
    return expected, tried, right


def scored(drafts: Sequence[Draft]) -> tuple[list[float], list[int]]:
    """Return the scores of all draft tokens, and the row of each."""
    scores = [score for draft in drafts for score in draft.score.tolist()]
    return scores, [row for row, draft in enumerate(drafts) for _ in range(len(draft))]


def ranked(scores: list[float], owners: list[int], together: bool) -> list[list[int]]:
    """Return layers of draft tokens, by index, best first, in which they are to be selected. Of
    equal scores the earlier comes first, so that parents stay before their children.

    owners    the row of each
    together  one layer has the best of every row, the next the second of every row, ...: each row
              takes as long as the longest; else each layer has one token
    """
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    if not together:
        return [[index] for index in order]
    layers: list[list[int]] = []
    ranks = dict.fromkeys(owners, 0)
    for index in order:
        rank = ranks[owners[index]]
        ranks[owners[index]] += 1
        if rank == len(layers):
            layers.append([])
        layers[rank].append(index)
    return layers


def cut(drafts: Sequence[Draft], selected: Sequence[int]) -> list[Draft]:
    """Return the drafts with only the tokens `selected`, by number over all of them. The parent of
    each must be included.
    """
    keep, end, remaining = np.zeros(sum(map(len, drafts)), np.bool_), 0, list[Draft]()
    keep[list(selected)] = True
    for draft in drafts:
        mask, end = keep[end : end + len(draft)], end + len(draft)
        flags = mask.tolist()
        if True in flags and False in flags:
            place = np.array([*accumulate(flags), 0], np.int32) - np.int32(1)
            part = (
                draft.tokens[mask],
                place[draft.parents[mask]],
                draft.score[mask],
            )
            remaining.append(Draft(*part, draft.source_of(mask)))
        else:
            remaining.append(draft if True in flags else NO_DRAFT)
    return remaining
