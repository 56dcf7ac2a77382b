"""Training-time test: unroll the head over its own outputs, as serving will (EAGLE-3, 3.2).

Row q of a sequence holds feature f_q and stands, at step s, for position q + s: it reads the
token after that position and predicts the one after that. Step 0 starts from true features;
step s >= 1 from the row's own output of step s - 1. Attention at step s: the true history, i.e.
the step-0 keys of rows 0..q, then the row's own keys of steps 1..s. No row sees another row's
later keys. This is what serving computes: true history, own guesses after it.

Only rows that the loss asks about ("asking" rows) run the whole layer; the others, most of a
prompt, give keys and values at step 0 and nothing else.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.torch.eagle import EagleHead
from forerun.executors.torch.layers import rotation


@dataclass(frozen=True)
class Asking:
    """Which rows of B sequences of T tokens ask, and how they lie in a grid for attention.

    rows    int64[R]    flat indices b*T + q, ascending
    grid    int64[B,M]  which asking row; where a sequence has fewer than M, any
    places  int64[R]    flat indices b*M + i of the rows in the grid
    steps   for each step, int64[n] which asking rows predict a wanted token
    """

    rows: Tensor
    grid: Tensor
    places: Tensor
    steps: tuple[Tensor, ...]

    @staticmethod
    def of(wanted: Tensor, steps: int, device: Any = "cpu") -> "Asking":
        """Row q asks at step s where token q + s + 2 is wanted (bool[B,T], on the CPU)."""
        asks = [_ahead(wanted, step + 2) for step in range(steps)]
        live = torch.stack(asks).any(0) if asks else torch.zeros_like(wanted)
        rows = live.flatten().nonzero().squeeze(1)
        counts = live.sum(1)
        most = int(counts.max()) if len(counts) else 0
        column = torch.arange(most)
        filled = column < counts[:, None]
        grid = torch.where(filled, (counts.cumsum(0) - counts)[:, None] + column, 0)
        places = filled.flatten().nonzero().squeeze(1)
        scored = tuple(ask.flatten()[rows].nonzero().squeeze(1) for ask in asks)

        def there(index: Tensor) -> Tensor:
            return index.to(device, non_blocking=True)

        return Asking(there(rows), there(grid), there(places), tuple(there(s) for s in scored))


def _ahead(wanted: Tensor, ahead: int) -> Tensor:
    """bool[B,T]: is token q + ahead wanted."""
    shifted = torch.zeros_like(wanted)
    shifted[:, : max(wanted.shape[1] - ahead, 0)] = wanted[:, ahead:]
    return shifted


def unrolled(
    head: EagleHead, tokens: Tensor, features: Tensor, embed: Tensor, asking: Asking
) -> list[Tensor]:
    """What the output head reads of the asking rows at each step: tensors [R,H].

    tokens int64[B,T], features [B,T,F*H], embed [V,H] the target's embedding. Rows whose token
    lies beyond the sequence read the last token again; they are never wanted.
    """
    batch, length = tokens.shape
    frequencies = torch.from_numpy(head.head.rope.frequencies(head.head.head_size))
    frequencies = frequencies.to(tokens.device)
    history = _History(batch, asking)
    every = torch.arange(batch * length, device=tokens.device)
    hidden = head.fuse(features.flatten(0, 1))
    reads = []
    for step in range(len(asking.steps)):
        rows = asking.rows if step else every
        position = rows % length
        ahead = (position + 1 + step).clamp(max=length - 1)
        cos, sin = rotation(position + step, frequencies, head.head.rope.attention_factor)
        cos, sin = cos.to(hidden.dtype), sin.to(hidden.dtype)
        embedded = F.embedding(tokens.flatten()[rows - position + ahead], embed)
        embedded = embedded.to(hidden.dtype)
        only = None if step else asking.rows
        read, hidden = head(embedded, hidden, cos, sin, history.attend, only)
        reads.append(read)
    return reads


class _History:
    """Keys and values of earlier steps, and the attention over them."""

    def __init__(self, batch: int, asking: Asking) -> None:
        self._batch, self._asking = batch, asking
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._future = torch.empty(0)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R,A,E] queries over step 0's causal keys [B*T,G,E] and the same row's later keys."""
        lay = self._gridded if self._keys else self._whole
        self._keys.append(lay(keys).transpose(1, 2))
        self._values.append(lay(values).transpose(1, 2))
        if len(self._keys) == 1:
            self._future = self._beyond(self._keys[0].shape[2])
        group = queries.shape[1] // keys.shape[1]
        q = self._gridded(queries * queries.shape[-1] ** -0.5)
        q = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)
        own = [torch.stack(k[1:], 2) if k[1:] else None for k in (self._keys, self._values)]
        context = _Attend.apply(q, self._keys[0], self._values[0], *own, self._future)
        found = context.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return found.index_select(0, self._asking.places)

    def _whole(self, rows: Tensor) -> Tensor:
        """[B*T, ...] -> [B,T, ...]."""
        return rows.unflatten(0, (self._batch, -1))

    def _gridded(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [B,M, ...]."""
        grid = self._asking.grid
        return rows.index_select(0, grid.flatten()).unflatten(0, grid.shape)

    def _beyond(self, length: int) -> Tensor:
        """bool[B,1,1,M,T]: true history that a row of the grid must not see."""
        asking = self._asking
        position = (asking.rows % length)[asking.grid]
        column = torch.arange(length, device=position.device)
        return (column > position[..., None])[:, None, None]


class _Attend(torch.autograd.Function):
    """Attention of a grid of rows over true history and their own later keys, in one softmax.

    By hand because the scores are the largest arrays of a step: they are worked on in place.
    q [B,G,g,M,E] scaled, g = A/G; keys, values [B,G,T,E]; own keys and values [B,G,S,M,E] or
    None; future bool[B,1,1,M,T]. Returns [B,G,g,M,E].
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
