"""Pair scores of block drafters: how the previous token x changes the logits of the next one, and
the confidence of each draft token.

DSpark (arXiv 2607.05147) adds a low-rank bias W2 v to the logits of a place k of the block, whose
hidden state after the final norm is h, where v is

    vanilla  W1[x]
    gated    sigmoid(G [h; W1[x]] + g) * W1[x]
    rnn      tanh(o), where f, c, o = J [s; W1[x]; h] + j, and s of the next place is
             sigmoid(f) * s + (1 - sigmoid(f)) * tanh(c); 0 at the first place

The confidence of a place is sigmoid(P [h; W1[x]] + p), or of h alone. Every branch of a tree has
candidates of its own without another pass: the tables stay in their file, and each node reads one
row of W1, and one row of W2 per candidate. Tokens that are not candidates of a place keep their
share of its probability: their bias counts as 0.

DFlash2's selector adds S[b] v to the logit of each of the `top_k` most probable tokens b of a
place, where v = A[x] * (P h), and no other token is a candidate.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from forerun.drafts.block_folder import BlockFile
from forerun.interface.draft_model import CANDIDATES, Children, DraftBlock
from forerun.types import Floats, Ints

_TABLES = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_CODEBOOKS = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
_NO_STATE = np.zeros(0, np.float32)


class _Linear(NamedTuple):
    weight: Floats
    bias: Floats


class PairScores:
    """The tables and matrices of a drafter that has any (BlockHead.pair or .confidence)."""

    def __init__(self, draft: BlockFile) -> None:
        head = self.head = draft.head
        self._draft, selects = draft, head.pair == "selector"
        self._before, self._after = _CODEBOOKS if selects else _TABLES
        names = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
        name = names.get(head.pair)
        self.joint = None if name is None else self._linear(name)
        if selects:
            weight = draft.tensor("candidate_selector.hidden_projection.weight")
            self.joint = _Linear(weight, np.zeros(head.rank, np.float32))
        self.confidence = self._linear("confidence_head.proj") if head.confidence else None

    def _linear(self, name: str) -> _Linear:
        return _Linear(self._draft.tensor(f"{name}.weight"), self._draft.tensor(f"{name}.bias"))

    def tables(self) -> tuple[Floats, Floats]:
        """Return W1 and W2, or A and S, float32[V,r] and float32[Vd,r]; r = 0 if they are not
        read.
        """
        if not self.reads_above:
            counts = self.head.target_vocab, self.head.vocab
            return np.zeros((counts[0], 0), np.float32), np.zeros((counts[1], 0), np.float32)
        return self._draft.tensor(self._before), self._draft.tensor(self._after)

    @staticmethod
    def count(block: DraftBlock) -> int:
        """Return how many candidates of a place are scored, at least CANDIDATES, since the previous
        token may promote others than the most probable ones.
        """
        return max(block.candidates, CANDIDATES)

    @property
    def reads_above(self) -> bool:
        """Whether W1, or A, is read."""
        return bool(self.head.pair) or self.head.confidence > self.head.hidden

    def before(self, token: int) -> Floats:
        """Return float32[r], a target id's row of W1, or of A; empty if it is not read."""
        if not self.reads_above:
            return _NO_STATE
        row: Floats = self._draft.some_rows(self._before, np.array([token]))[0]
        return row

    def after(self, ids: Ints) -> Floats:
        """Return float32[k,r], rows of W2, or of S, of draft ids int32[k]."""
        return self._draft.some_rows(self._after, ids)

    def of(self, roots: Ints, ids: Ints, log_probs: Floats, hidden: Floats) -> "BlockPairs":
        """Return the scores of R blocks.

        roots           int32[R]
        ids, log_probs  [R,depth,K] candidates before the bias of the previous token, best first
        hidden          float32[R,depth,H] after the final norm
        """
        return BlockPairs(self, roots, ids, log_probs, hidden)


class BlockPairs:
    """Pair scores of the blocks of one pass. Arguments as of PairScores.of."""

    def __init__(
        self, scores: PairScores, roots: Ints, ids: Ints, log_probs: Floats, hidden: Floats
    ) -> None:
        self._scores, self._roots, self._ids, self._log_probs = scores, roots, ids, log_probs
        head = scores.head
        rank = head.rank
        self._joint = self._confidence = None
        if scores.joint is not None:
            begin = 2 * rank if head.pair == "rnn" else 0
            self._joint = hidden @ scores.joint.weight[:, begin : begin + head.hidden].T
            self._joint += scores.joint.bias
        if scores.confidence is not None:
            self._confidence = hidden @ scores.confidence.weight[0, : head.hidden]
            self._confidence += scores.confidence.bias
        self._states: dict[tuple[int, tuple[int, ...]], Floats] = {}
        self._rows: dict[tuple[int, int], Floats] = {}
        self._bias: Callable[[int, tuple[int, ...], Floats], Floats] | None = {
            "vanilla": self._vanilla,
            "gated": self._gated,
            "rnn": self._recurrent,
            "selector": self._selecting,
        }.get(head.pair)

    def below(self, row: int, path: tuple[int, ...]) -> Children:
        """Implement PairCandidates.below."""
        level = len(path)
        above = self._scores.before(path[-1] if path else int(self._roots[row]))
        most = self._scores.head.top_k or None
        ids, log_probs = self._ids[row, level, :most], self._log_probs[row, level, :most]
        if self._bias is not None:
            bias = self._after(row, level) @ self._bias(row, path, above)
            raised = log_probs + bias
            top = float(raised.max())
            rest = 0.0 if most else max(1.0 - float(np.exp(log_probs).sum()), 0.0)
            outside = rest * np.exp(-top)
            raised -= np.float32(top + np.log(outside + np.exp(raised - top).sum()))
            order = np.argsort(-raised, kind="stable")
            ids, log_probs = ids[order], raised[order]
        return Children(ids, log_probs, self._confident(row, level, above))

    def _confident(self, row: int, level: int, above: Floats) -> float | None:
        if self._confidence is None or self._scores.confidence is None:
            return None
        logit = float(self._confidence[row, level])
        if self._scores.head.confidence > self._scores.head.hidden:
            logit += float(self._scores.confidence.weight[0, self._scores.head.hidden :] @ above)
        return 0.5 * (1.0 + math.tanh(0.5 * logit))

    def _after(self, row: int, level: int) -> Floats:
        """Return float32[K,r], the rows of a place's candidates."""
        if (row, level) not in self._rows:
            ids = self._ids[row, level, : self._scores.head.top_k or None]
            self._rows[row, level] = self._scores.after(ids)
        return self._rows[row, level]

    def _vanilla(self, row: int, path: tuple[int, ...], above: Floats) -> Floats:
        return above

    def _gated(self, row: int, path: tuple[int, ...], above: Floats) -> Floats:
        assert self._joint is not None and self._scores.joint is not None
        from_above = self._scores.joint.weight[:, self._scores.head.hidden :] @ above
        gated: Floats = _sigmoid(self._joint[row, len(path)] + from_above) * above
        return gated

    def _selecting(self, row: int, path: tuple[int, ...], above: Floats) -> Floats:
        assert self._joint is not None
        wanted: Floats = self._joint[row, len(path)] * above
        return wanted

    def _recurrent(self, row: int, path: tuple[int, ...], above: Floats) -> Floats:
        """Return v of the rnn rule; also keeps the state below `path`, which the places below
        read.
        """
        assert self._joint is not None and self._scores.joint is not None
        rank, weight = self._scores.head.rank, self._scores.joint.weight
        state = self._states[row, path[:-1]] if path else np.zeros(rank, np.float32)
        joint = self._joint[row, len(path)] + weight[:, : 2 * rank] @ np.append(state, above)
        forget, candidate, output = (
            _sigmoid(joint[:rank]),
            joint[rank : 2 * rank],
            joint[2 * rank :],
        )
        self._states[row, path] = forget * state + (1 - forget) * np.tanh(candidate)
        shown: Floats = np.tanh(output)
        return shown


def pair_scores(draft: BlockFile) -> PairScores | None:
    """Return the PairScores of a drafter; None if its tokens do not depend on the previous ones."""
    return PairScores(draft) if draft.head.algorithm != "dflash" else None


def _sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + e^-x), without overflow."""
    found: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return found
