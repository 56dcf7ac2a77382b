"""DSpark's tables next to a block drafter in training: a bias by the previous token, with the
vanilla rule, and a confidence (explained in executors/pair_scores.py).
"""

from torch import Tensor, nn

from forerun.drafts.block_config import BlockHead
from forerun.executors.torch.drafts.block import BlockDrafter

_SPREAD = 0.1
"""Standard deviation of the initial rows of W1; W2 begins at 0, so that the drafter starts like one
without tables.
"""


class _Tables(nn.Module):
    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(head.target_vocab, head.rank)
        self.markov_w2 = nn.Linear(head.rank, head.vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=_SPREAD)
        nn.init.zeros_(self.markov_w2.weight)


class _Confidence(nn.Module):
    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.proj = nn.Linear(head.confidence, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class PairedDrafter(BlockDrafter):
    """A block drafter with tables and a confidence head, with the tensor names of draft files."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self.markov_head, self.confidence_head = _Tables(head), _Confidence(head)

    def above(self, tokens: Tensor) -> Tensor:
        """Return v [n,r] of the previous tokens, target ids int64[n]."""
        found: Tensor = self.markov_head.markov_w1(tokens)
        return found

    def unsure(self, states: Tensor, right: Tensor) -> Tensor:
        """Return the cross-entropy, summed over rows, of the predicted confidence that each draft
        token is right, a scalar. Its gradient reaches only the confidence head.

        states  [n,H+r] the output head's input followed by `above`
        right   bool[n] whether the draft token is right
        """
        logits = self.confidence_head.proj(states.detach()).flatten()
        labels = right.to(logits.dtype)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
