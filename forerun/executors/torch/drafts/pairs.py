"""How the token above changes a block drafter's scores, on the device, for captured rounds: what
executors/pair_scores.py computes on the host, for all nodes of a level at once. Launches only.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.pair_scores import PairScores
from forerun.types import Floats


@dataclass(frozen=True, slots=True)
class Below:
    """What may follow n nodes of a level in each of R rows.

    scores      float32[R,n,K] of the level's candidates
    others      float32[R] of all other tokens together; -inf: none may follow
    confidence  float32[R,n] in the best of them; None: it is not said
    state       float32[R,n,r] for the nodes below; None: there is none
    """

    scores: Tensor
    others: Tensor
    confidence: Tensor | None
    state: Tensor | None


class TorchPairs:
    """A drafter's tables, in `dtype`, and its matrices.

    rank   r
    top_k  candidates of each place, the best; 0 = the whole map
    """

    def __init__(self, scores: PairScores, device: torch.device, dtype: torch.dtype) -> None:
        head = self.head = scores.head
        self.rank, self.top_k = head.rank, head.top_k
        self.confident = head.confidence > 0

        def there(values: Floats) -> Tensor:
            return torch.from_numpy(np.array(values)).to(device)

        self._before, self._after = (there(part).to(dtype) for part in scores.tables())
        self._joint, self._sure = (
            None if each is None else (there(each.weight), there(each.bias))
            for each in (scores.joint, scores.confidence)
        )

    def of(self, which: Tensor, log_probs: Tensor, hidden: Tensor) -> "LevelPairs":
        """Return what is known of R blocks.

        which      int64[R,levels,K] candidates, draft ids, best first
        log_probs  float32[R,levels,K] without what stands above
        hidden     [R,levels,H] after the final norm
        """
        return LevelPairs(self, which, log_probs, hidden.float())

    def rows_above(self, tokens: Tensor) -> Tensor:
        """Return float32[R,n,r], the rows of tokens int[R,n] that stand above."""
        return F.embedding(tokens, self._before).float()

    def rows_of(self, which: Tensor) -> Tensor:
        """Return [R,K,r], the rows of candidates int64[R,K]."""
        return F.embedding(which, self._after)

    def joint(self, hidden: Tensor) -> Tensor | None:
        """Return what hidden float32[.,H] adds to the joint product; None without one."""
        if self._joint is None:
            return None
        weight, bias = self._joint
        begin = 2 * self.rank if self.head.pair == "rnn" else 0
        return F.linear(hidden, weight[:, begin : begin + self.head.hidden], bias)

    def sure(self, hidden: Tensor, above: Tensor) -> Tensor | None:
        """Return float32[R,n], the confidence at places hidden float32[R,1,H] below tokens whose
        rows are above float32[R,n,r].
        """
        if self._sure is None:
            return None
        (weight, bias), wide = self._sure, self.head.hidden
        logit = F.linear(hidden, weight[:, :wide], bias)
        if weight.shape[1] > wide:
            logit = logit + F.linear(above, weight[:, wide:])
        return logit.expand(*above.shape[:2], 1)[..., 0].sigmoid()

    def bias_rows(
        self, joint: Tensor | None, above: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return v float32[R,n,r] (pair_scores.py), and the state below.

        joint  float32[R,1,.] of the place; above, state  float32[R,n,r]
        """
        if joint is None or self._joint is None:
            return above, None
        weight = self._joint[0]
        match self.head.pair:
            case "selector":
                return joint * above, None
            case "gated":
                gate = joint + F.linear(above, weight[:, self.head.hidden :])
                return gate.sigmoid() * above, None
        state = torch.zeros_like(above) if state is None else state
        whole = joint + F.linear(torch.cat([state, above], -1), weight[:, : 2 * self.rank])
        forget, candidate, output = whole.split(self.rank, -1)
        forget = forget.sigmoid()
        return output.tanh(), forget * state + (1 - forget) * candidate.tanh()


class LevelPairs:
    """Pairs of the blocks of one pass. Arguments as of TorchPairs.of."""

    def __init__(self, pairs: TorchPairs, which: Tensor, log_probs: Tensor, hidden: Tensor) -> None:
        self._pairs, self._log_probs, self._hidden = pairs, log_probs, hidden
        self._which, self._joint = which, pairs.joint(hidden)
        outside = (1.0 - log_probs.exp().sum(-1)).clamp_min(0.0) * (not pairs.top_k)
        self._others = outside.log().T.contiguous()

    def below(self, level: int, tokens: Tensor, state: Tensor | None) -> Below:
        """Return what may follow tokens int[R,n] above places of that level.

        state  of the nodes above the tokens, [R,n,r]; None at level 0
        """
        pairs, place = self._pairs, slice(level, level + 1)
        hidden, above = self._hidden[:, place], pairs.rows_above(tokens)
        joint = None if self._joint is None else self._joint[:, place]
        v, state = pairs.bias_rows(joint, above, state)
        rows = pairs.rows_of(self._which[:, level])
        bias = torch.bmm(v.to(rows.dtype), rows.mT).float()
        scores = self._log_probs[:, place] + bias
        return Below(scores, self._others[level], pairs.sure(hidden, above), state)
