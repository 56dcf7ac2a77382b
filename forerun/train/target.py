"""The target as training sees it: whole sequences at once, with features.

The decoder is serving's (executors/torch/decoder/decoder.py), with matrix products over whole
sequences and another `attend`: serving steps over pages, here every token of a chat is known. Bits
may differ, which training does not mind.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.errors import ModelError
from forerun.executors.torch.attention.attention import apart
from forerun.executors.torch.decoder.decoder import Decoder
from forerun.executors.torch.decoder.elementwise import softcapped
from forerun.executors.torch.decoder.layers import WholeLinear
from forerun.executors.torch.triton.kernels import kernels_for, parts_of
from forerun.networks.layer_spec import AttentionSpec

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(layer, queries [B,A,T,E], keys [B,G,T,E], values [B,G,T,E], sinks) -> context [B,A,T,E]; as
attention.AttendApart, values may be narrower than keys.
"""


def embeddings(checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's embedding and output rows, each float32[V,H] on the CPU; one tensor if
    tied. Raises ModelError if a tensor is missing.
    """
    embed = torch.from_numpy(checkpoint.tensor("model.embed_tokens.weight").copy())
    if checkpoint.architecture.tied_head:
        return embed, embed
    return embed, torch.from_numpy(checkpoint.tensor("lm_head.weight").copy())


class DenseTarget:
    """A target's weights on `device` in `dtype`, and one causal pass over them.

    embed, head  its embedding and output rows, each [V,H]; one tensor where tied
    """

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
        self.arch = checkpoint.architecture
        if self.arch.recurrent is not None:
            raise ModelError(
                "no draft model is trained beside a model with recurrent states yet; what drafts "
                "for it untrained is --speculative-algorithm NGRAM"
            )
        if len(self.arch.cache_shapes) > 1 or any(
            s.reads is not None for s in self.arch.layer_specs
        ):
            raise ModelError(
                "no draft model is trained beside a model whose layers differ in keys and values "
                "yet, or share them; what drafts for it untrained is --speculative-algorithm NGRAM"
            )
        self.device, self.dtype = device, dtype
        there = torch.device(device)
        kernels = kernels_for(there)
        parts = parts_of(kernels)
        self._decoder = Decoder(checkpoint, there, dtype, WholeLinear, parts)
        assert isinstance(self._decoder.head, WholeLinear)
        self.embed, self.head = self._decoder.embedding, self._decoder.head.weight

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, features: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the residual stream [B,T,H] after the last layer, and those entering the layers
        `features`, in that order.

        tokens     int64[B,T]
        positions  int64[T] or [B,T]
        attend     called per layer with rotated queries, keys, values
        features   as transformers' hidden_states; L = after the last layer

        The caller switches gradients off.
        """
        shape = tokens.shape

        def attend_rows(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
        ) -> Tensor:
            q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in (queries, keys, values))
            return attend(layer, q, k, v, sinks).transpose(1, 2).flatten(0, 1)

        rotary = self._decoder.rotary(positions.expand(shape).flatten())
        last, streams = self._decoder.forward(
            tokens.flatten(), rotary, apart(attend_rows), features
        )
        return last.unflatten(0, shape), [stream.unflatten(0, shape) for stream in streams]

    @torch.no_grad()
    def run(self, tokens: Tensor, features: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Run one causal pass over tokens int64[B,T], padded at the end. Returns features [B,T,F*H]
        side by side, and last [B,T,H] after the final norm. Without gradients.

        features  feature i is the residual stream entering layer i (transformers' hidden_states[i])
        """
        positions = torch.arange(tokens.shape[1], device=self.device)
        last, streams = self.forward(tokens, positions, self.causal, features)
        return torch.cat(streams, -1), self.final_norm(last)

    def causal(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Return the attention of whole sequences to themselves by the layer's spec, window, soft
        cap and sinks included: context [B,A,T,E]. Parameters as of Attend.
        """
        spec, length = self.arch.layer_specs[layer].attention, queries.shape[-2]
        windowed = spec.window is not None and spec.window < length
        if spec.softcap is None and not windowed and sinks is None:
            return scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=True,
                scale=spec.scale,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
        place = torch.arange(length, device=queries.device)
        bias = self.mask(spec, place[:, None], place)
        return masked_attention(queries, keys, values, bias, spec, sinks)

    def mask(self, spec: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
        """Return the bias for scores of queries with keys, in the target's dtype: 0, or minus
        infinity if one does not see the other (causality, window).

        query  int64[...,T,1] positions
        key    int64[S] positions, broadcast against `query`
        """
        hidden = key > query
        if spec.window is not None:
            hidden = hidden | (key <= query - spec.window)
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return bias.masked_fill_(hidden, -torch.inf)

    def final_norm(self, x: Tensor) -> Tensor:
        """Return the head's input, [...,H], from the stream [...,H] after the last layer."""
        return self._decoder.final_norm(x.flatten(0, -2)).view(x.shape)

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """Return float32[n,V] logits of normed hidden states [n,H], without gradients."""
        return self._decoder.read(last).float()

    @torch.no_grad()
    def choices(self, last: Tensor) -> Tensor:
        """Return int64[...], the argmax over the full vocabulary at each normed hidden state
        [...,H], a chunk of rows at a time, without gradients.
        """
        flat = last.reshape(-1, last.shape[-1])
        chunk = max(1, (1 << 26) // len(self.head))
        parts = [(part @ self.head.T).argmax(-1) for part in flat.split(chunk)]
        return torch.cat(parts).view(last.shape[:-1])


def masked_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the context [B,A,T,E] of queries [B,A,T,E] over keys and values [B,G,S,E], in the
    values' dtype.

    bias   added to the scores, [T,S] or what broadcasts to [B,A,T,S]: see DenseTarget.mask
    sinks  float32[A] or what broadcasts to [A,T]: a score of each query that carries no value
    """
    shared = queries.shape[1] // keys.shape[1]
    if spec.softcap is None and sinks is None:
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, scale=spec.scale, enable_gqa=shared > 1
        )
    keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
    scores = (queries @ keys.transpose(-1, -2)).float() * spec.scale
    scores = softcapped(scores, spec.softcap) + bias
    if sinks is not None:
        own = sinks.view(len(sinks), -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
