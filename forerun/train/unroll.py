"""Training-time test: unrolls the head over its own outputs, as serving does (EAGLE-3, section
3.2).

Row q of a sequence has feature f_q and represents, at step s, position q + s: it reads the next
token and predicts the one after that. Step 0 starts from the target's features; step s >= 1 from
the row's own output of step s - 1. The attention at step s covers the true history, i.e. the step-0
keys of rows 0..q, then the row's own keys of steps 1..s, and no other row's later keys. This is
what serving computes: true history followed by the sequence's own draft tokens.

Only rows whose prediction is in the loss run the whole layer; the others, most of a prompt, only
provide keys and values at step 0. With `thin` below 1 only that share of the rows continues to each
further step, because the first draft token matters most and the cost of a step is proportional to
its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forerun.executors.torch.decoder.elementwise import rotation
from forerun.executors.torch.drafts.draft_layer import TrainedHeads
from forerun.networks.rope import Rope


class Turned(Protocol):
    """The part of a head's description that unrolling needs."""

    @property
    def head_size(self) -> int:
        """E, the size of its attention heads."""
        ...

    @property
    def rope(self) -> Rope:
        """The rope of its queries and keys."""
        ...


class Unrollable(Protocol):
    """A network that reads its own outputs: an EAGLE head, an MTP layer."""

    @property
    def head(self) -> Turned:
        """The network's description."""
        ...

    @property
    def lm_head(self) -> nn.Linear:
        """The linear layer [Vd,H] that computes draft logits from the first result of
        `__call__`.
        """
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """Return the hidden state [...,H] that step 0 reads, from the target's features
        [...,F*H].
        """
        ...

    def __call__(self, *rows: Any) -> Any:
        """Run one draft step as EagleHead.forward does."""
        ...


@dataclass(frozen=True, slots=True)
class Unrolling:
    """The number of steps to unroll, and their weights.

    decay  factor of the loss weight from one step to the next
    thin   share of rows, drawn at random, that continues to each further step
    """

    steps: int = 3
    decay: float = 0.8
    thin: float = 1.0


@dataclass(frozen=True)
class Turn:
    """The rows that run at one step, and their layout in a grid for attention.

    rows    int64[R]    flat indices b*T + q, ascending
    before  int64[R]    their indices among the rows of the previous step (step 0: among all)
    grid    int64[B,M]  their indices in `rows`; arbitrary where a sequence has fewer than M
    places  int64[R]    their flat indices b*M + i in the grid
    scored  int64[n]    indices of those that predict an answer token
    """

    rows: Tensor
    before: Tensor
    grid: Tensor
    places: Tensor
    scored: Tensor


def turns(
    loss_mask: Tensor, plan: Unrolling, seed: int = 0, device: torch.device | str = "cpu"
) -> list[Turn]:
    """Return the rows that run at each step, one Turn per step, on `device`.

    loss_mask  bool[B,T] on the CPU: tokens of answers
    seed    draws the rows that continue, if plan.thin < 1

    Row q predicts at step s if token q + s + 2 is part of an answer, and continues as long as it
    will predict at a later step.
    """
    drawn = torch.rand(loss_mask.shape, generator=torch.Generator().manual_seed(seed))
    asks = [_ahead(loss_mask, s + 2) & (drawn < plan.thin**s) for s in range(plan.steps)]
    found = []
    before = torch.arange(loss_mask.numel())
    for step, ask in enumerate(asks):
        live = torch.stack(asks[step:]).any(0)
        rows = live.flatten().nonzero().squeeze(1)
        counts = live.sum(1)
        column = torch.arange(int(counts.max()))
        filled = column < counts[:, None]
        grid = torch.where(filled, (counts.cumsum(0) - counts)[:, None] + column, 0)
        places = filled.flatten().nonzero().squeeze(1)
        scored = ask.flatten()[rows].nonzero().squeeze(1)
        indices = (rows, torch.searchsorted(before, rows), grid, places, scored)
        found.append(Turn(*(index.to(device, non_blocking=True) for index in indices)))
        before = rows
    return found


def _ahead(loss_mask: Tensor, ahead: int) -> Tensor:
    """Return bool[B,T]: whether token q + ahead belongs to an answer."""
    shifted = torch.zeros_like(loss_mask)
    shifted[:, : max(loss_mask.shape[1] - ahead, 0)] = loss_mask[:, ahead:]
    return shifted


def unrolled(
    head: Unrollable, tokens: Tensor, hidden: Tensor, embed: Tensor, steps: list[Turn]
) -> list[Tensor]:
    """Return the output head's input for each step's rows: one tensor [R,H] per step, with
    gradients.

    tokens  int64[B,T]
    hidden  [B*T,H] the hidden states that step 0 reads: `head.fuse` of the target's features
    embed   [V,H] the target's embedding

    Rows whose token is beyond the sequence read the last token again; their results are never used.
    """
    batch, length = tokens.shape
    frequencies = torch.from_numpy(head.head.rope.frequencies(head.head.head_size))
    frequencies = frequencies.to(tokens.device)
    history = _History(batch)
    reads = []
    for step, turn in enumerate(steps):
        rows = turn.rows if step else torch.arange(batch * length, device=tokens.device)
        position = rows % length
        ahead = (position + 1 + step).clamp(max=length - 1)
        cos, sin = rotation(position + step, frequencies, head.head.rope.attention_factor)
        cos, sin = cos.to(hidden.dtype), sin.to(hidden.dtype)
        next_tokens = tokens.flatten()[rows - position + ahead]
        if step:
            hidden = hidden.index_select(0, turn.before)
        only = None if step else turn.rows
        history.turn = turn
        read, hidden = head(next_tokens, embed, hidden, (cos, sin), history.attend, only)
        reads.append(read)
    return reads


class _History:
    """Keys and values of earlier steps, and the attention of the current rows over them.

    batch  B, the number of texts in rows [B*T,...]
    turn   the current step; set before every `attend`, which appends that step's keys and values
    """

    turn: Turn

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._true: tuple[Tensor, Tensor] | None = None
        self._own: list[Tensor] = []

    def attend(self, _layer: int, heads: TrainedHeads) -> Tensor:
        """Return the attention output of queries [R,A,E] over step 0's causal keys [B*T,G,E] and
        the same row's later keys.
        """
        queries, keys, values = heads.turned()
        group = queries.shape[1] // keys.shape[1]
        q = self._gridded(queries * queries.shape[-1] ** -0.5)
        q = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)
        if self._true is None:
            true_keys, true_values = (
                x.unflatten(0, (self._batch, -1)).transpose(1, 2) for x in (keys, values)
            )
            self._true = true_keys, true_values
            own_keys = own_values = None
        else:
            carried = [pair.index_select(0, self.turn.before) for pair in self._own]
            self._own = [*carried, torch.stack((keys, values), 1)]
            every = self._gridded(torch.stack(self._own, 1))
            own_keys, own_values = every.permute(3, 0, 4, 2, 1, 5).unbind(0)
        future = self._beyond(self._true[0].shape[2])
        context = _attend(q, *self._true, own_keys, own_values, future)
        found = context.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return found.index_select(0, self.turn.places)

    def _gridded(self, rows: Tensor) -> Tensor:
        """Return rows [R, ...] arranged in the grid [B,M, ...]."""
        grid = self.turn.grid
        gridded: Tensor = rows.index_select(0, grid.flatten()).unflatten(0, grid.shape)
        return gridded

    def _beyond(self, length: int) -> Tensor:
        """Return bool[B,1,1,M,T]: the part of the history that a row of the grid must not attend
        to.
        """
        position = (self.turn.rows % length)[self.turn.grid]
        column = torch.arange(length, device=position.device)
        return (column > position[..., None])[:, None, None]


class _Attend(torch.autograd.Function):
    """Attention of a grid of rows over the true history and their own later keys, in one softmax.

    With a hand-written gradient, because the scores are the largest tensors of a step and are
    updated in place. q [B,G,g,M,E] scaled, g = A/G; keys, values [B,G,T,E]; own keys and values
    [B,G,S,M,E] or None; future bool[B,1,1,M,T]. Returns [B,G,g,M,E].
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, keys, values, own_keys, own_values, future = inputs
        wide = torch.promote_types(q.dtype, torch.float32)
        folded = q.flatten(2, 3)
        scores = (folded @ keys.transpose(-1, -2)).to(wide).unflatten(2, q.shape[2:4])
        scores.masked_fill_(future, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        if own_keys is not None:
            own = (q[..., None, :, :] * own_keys[:, :, None]).sum(-1).to(wide).transpose(-1, -2)
            top = torch.maximum(top, own.amax(-1, keepdim=True))
            own = (own - top).exp_()
        scores.sub_(top).exp_()
        total = scores.sum(-1, keepdim=True)
        if own_keys is not None:
            total += own.sum(-1, keepdim=True)
            own = own.div_(total).to(q.dtype)
        scores = scores.div_(total).to(q.dtype)
        context = (scores.flatten(2, 3) @ values).view_as(q)
        if own_keys is not None:
            context += (own.transpose(-1, -2)[..., None] * own_values[:, :, None]).sum(3)
            ctx.own = own, own_keys, own_values
        ctx.save_for_backward(q, keys, values, scores, context)
        return context

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, keys, values, scores, context = ctx.saved_tensors
        out = grads[0].contiguous()
        folded, folded_out = q.flatten(2, 3), out.flatten(2, 3)
        weights = scores.flatten(2, 3)
        delta = (out * context).sum(-1, keepdim=True)
        for_values = weights.transpose(-1, -2) @ folded_out
        slope = (folded_out @ values.transpose(-1, -2)).view_as(scores)
        slope = slope.sub_(delta).mul_(scores).flatten(2, 3)
        for_q = (slope @ keys).view_as(q)
        for_keys = slope.transpose(-1, -2) @ folded
        if not hasattr(ctx, "own"):
            return for_q, for_keys, for_values, None, None, None
        own, own_keys, own_values = ctx.own
        own = own.transpose(-1, -2)
        own_slope = (out[..., None, :, :] * own_values[:, :, None]).sum(-1)
        own_slope = (own_slope - delta.squeeze(-1)[..., None, :]).mul_(own)[..., None]
        for_q += (own_slope * own_keys[:, :, None]).sum(3)
        for_own_keys = (own_slope * q[..., None, :, :]).sum(2)
        for_own_values = (own[..., None] * out[..., None, :, :]).sum(2)
        return for_q, for_keys, for_values, for_own_keys, for_own_values, None


_attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], Tensor] = (
    _Attend.apply
)
