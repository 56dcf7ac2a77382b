"""Training-time test: unroll the head over its own outputs, as serving will (EAGLE-3, 3.2).

Row q of a sequence holds feature f_q and stands, at step s, for position q + s: it reads the
token after that position and predicts the one after that. Step 0 starts from true features;
step s >= 1 from the row's own output of step s - 1. Attention at step s: the true history, i.e.
the step-0 keys of rows 0..q, then the row's own keys of steps 1..s. No row sees another row's
later keys. This is what serving computes: true history, own guesses after it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.eagle import EagleHead
from forerun.executors.torch.layers import rotation


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens, padded at the end.

    tokens    int64[B,T]
    wanted    bool[B,T]   token is part of an answer: the loss counts predictions of these;
                          on the CPU always, so that choosing rows never waits for a device
    features  [B,T,F*H]   the target's hidden states at the head's feature layers
    last      [B,T,H]     the target's hidden state after its final norm
    choice    int64[B,T]  the target's argmax over the full vocabulary for the next token
    """

    tokens: Tensor
    wanted: Tensor
    features: Tensor
    last: Tensor
    choice: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """The draft vocabulary: target_ids int64[Vd] ascending; head [V,H] the target's output rows."""

    target_ids: Tensor
    rows: Tensor
    draft_ids: Tensor
    """int64[V]: draft id of a target id, or -1."""

    @staticmethod
    def of(target_ids: Tensor, head: Tensor) -> "Vocabulary":
        """From the chosen ids and the target's head [V,H]."""
        draft_ids = torch.full((len(head),), -1, dtype=torch.int64, device=head.device)
        draft_ids[target_ids] = torch.arange(len(target_ids), device=head.device)
        return Vocabulary(target_ids, head[target_ids].contiguous(), draft_ids)


def unrolled(head: EagleHead, batch: Batch, embed: Tensor, steps: int) -> list[Tensor]:
    """What the output head reads at each step: `steps` tensors [B,T,H].

    embed [V,H] is the target's embedding. Rows whose token lies beyond the sequence read the
    last token again; they are never wanted.
    """
    length = batch.tokens.shape[1]
    frequencies = torch.from_numpy(head.head.rope.frequencies(head.head.head_size))
    frequencies = frequencies.to(batch.tokens.device)
    rows = torch.arange(length, device=batch.tokens.device)
    history = _History(length, batch.tokens.device)
    hidden = head.fuse(batch.features)
    reads = []
    for step in range(steps):
        tokens = batch.tokens[:, (rows + 1 + step).clamp(max=length - 1)]
        cos, sin = rotation(rows + step, frequencies, head.head.rope.attention_factor)
        cos, sin = cos.to(hidden.dtype), sin.to(hidden.dtype)
        embedded = F.embedding(tokens, embed).to(hidden.dtype)
        read, hidden = head(embedded, hidden, cos, sin, history.attend)
        reads.append(read)
    return reads


class _History:
    """Keys and values of earlier steps, and the attention over them."""

    def __init__(self, length: int, device: Any) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        self.future = future[None, None]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[B,T,A,E] queries over step 0's causal keys and the same row's later keys."""
        group = queries.shape[2] // keys.shape[2]
        self.keys.append(keys.repeat_interleave(group, 2).transpose(1, 2))
        self.values.append(values.repeat_interleave(group, 2).transpose(1, 2))
        q = queries.transpose(1, 2) * queries.shape[-1] ** -0.5
        causal = (q @ self.keys[0].transpose(-1, -2)).masked_fill(self.future, float("-inf"))
        own = [(q * k).sum(-1, keepdim=True) for k in self.keys[1:]]
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = torch.cat([causal, *own], -1).softmax(-1, dtype=wide).to(q.dtype)
        length = causal.shape[-1]
        context = weights[..., :length] @ self.values[0]
        for index, value in enumerate(self.values[1:]):
            context = context + weights[..., length + index, None] * value
        return context.transpose(1, 2)


class _FusedCrossEntropy(torch.autograd.Function):
    """Soft cross-entropy summed over rows, chunk by chunk, so that logits are never all alive.

    Forward also computes the gradient: with the output head frozen, only the rows it reads
    have one. Returns (loss sum, hits): hits[r] = the draft's argmax.
    """

    @staticmethod
    def forward(
        ctx: Any, read: Tensor, weight: Tensor, last: Tensor, rows: Tensor, counts: Tensor
    ) -> Any:
        """Read [R,H] grad; weight [Vd,H] draft head; last [R,H], rows [Vd,H] the teacher's;
        counts bool[R]: the row is in the loss.
        """
        total = read.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(read)
        best = torch.empty(len(read), dtype=torch.int64, device=read.device)
        chunk = max(1, (1 << 25) // len(weight))
        for begin in range(0, len(read), chunk):
            part = slice(begin, begin + chunk)
            teacher = (last[part] @ rows.T).float().softmax(-1)
            logs = (read[part] @ weight.T).float().log_softmax(-1)
            total -= (teacher * logs).sum(-1) @ counts[part].to(logs.dtype)
            best[part] = logs.argmax(-1)
            slope = (logs.exp_() - teacher) * counts[part, None]
            gradient[part] = slope.to(read.dtype) @ weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """D loss / d read."""
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None


@dataclass(frozen=True)
class StepScore:
    """One unrolled step over a batch: loss is a mean in nats; hits of `rows` wanted rows.

    loss and hits are on the device: reading them waits for it.
    """

    loss: Tensor
    hits: Tensor
    rows: int


def ttt_loss(
    head: EagleHead, batch: Batch, embed: Tensor, vocabulary: Vocabulary, steps: int, decay: float
) -> tuple[Tensor, list[StepScore]]:
    """Sum over steps of decay**s times the mean soft cross-entropy, and each step's score.

    The teacher is the target's distribution renormalised inside the draft vocabulary. Rows whose
    full-vocabulary argmax lies outside give no loss, but count as misses in the score: that is
    what serving sees.
    """
    total = batch.last.new_zeros((), dtype=torch.float32)
    scores = []
    for step, read in enumerate(unrolled(head, batch, embed, steps)):
        # Row q predicts the token at q + step + 2, whose teacher is the target at q + step + 1.
        end = batch.tokens.shape[1] - step - 2
        if end < 1:
            break
        rows = _rows(batch.wanted, step + 2).to(read.device, non_blocking=True)
        teachers = rows + step + 1
        choice = vocabulary.draft_ids[batch.choice.flatten()[teachers]]
        reachable = choice >= 0
        loss, best = _FusedCrossEntropy.apply(
            read.flatten(0, 1)[rows],
            head.lm_head.weight,
            batch.last.flatten(0, 1)[teachers],
            vocabulary.rows,
            reachable,
        )
        loss = loss / reachable.sum().clamp_min(1)
        hits = ((best == choice) & reachable).sum()
        scores.append(StepScore(loss.detach(), hits, len(rows)))
        total = total + decay**step * loss
    return total, scores


def _rows(wanted: Tensor, ahead: int) -> Tensor:
    """int64[R]: flat indices b*T + q of rows q whose token q + ahead is wanted."""
    shifted = torch.zeros_like(wanted)
    shifted[:, : wanted.shape[1] - ahead] = wanted[:, ahead:]
    return shifted.flatten().nonzero().squeeze(1)


def simulated_length(accuracies: list[float]) -> float:
    """Mean tokens per step of a chain whose depth-i guess agrees with probability accuracies[i].

    1 + sum over j of the product of the first j: the conditional acceptances of a chain on text
    that the target wrote itself.
    """
    length = product = 1.0
    for accuracy in accuracies:
        product *= accuracy
        length += product
    return length
