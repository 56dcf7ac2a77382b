"""The target in training: whole sequences at once, with features.

The decoder is serving's (executors/torch/decoder/decoder.py), with matrix products over whole
sequences and another `attend`, since every token of a chat is known here and there is no paged
cache. Results may differ from serving's in rounding, which training tolerates.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.errors import ModelError
from forerun.executors.torch.attention.attention import apart
from forerun.executors.torch.decoder.decoder import Decoder
from forerun.executors.torch.decoder.elementwise import softcapped
from forerun.executors.torch.decoder.layers import TrainingLinear
from forerun.executors.torch.triton.kernels import kernels_for, parts_of
from forerun.networks.layer_spec import AttentionSpec


def embeddings(checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's embedding and output rows, each float32[V,H] on the CPU; the same tensor
    twice if they are tied. Raises ModelError if a tensor is missing.
    """
    embed = torch.from_numpy(checkpoint.tensor("model.embed_tokens.weight").copy())
    if checkpoint.architecture.tied_head:
        return embed, embed
    return embed, torch.from_numpy(checkpoint.tensor("lm_head.weight").copy())


class DenseTarget:
    """A target's weights on `device` in `dtype`, for one causal pass over whole sequences.

    embed, head  its embedding and output rows, each [V,H]; the same tensor if tied

    Raises ModelError for a target with recurrent states, or whose layers differ in the shape of
    their keys and values or share them.
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
        self._decoder = Decoder(checkpoint, there, dtype, TrainingLinear, parts)
        assert isinstance(self._decoder.head, TrainingLinear)
        self.embed, self.head = self._decoder.embedding, self._decoder.head.weight

    @torch.no_grad()
    def run(self, tokens: Tensor, features: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Run one causal pass over tokens int64[B,T], padded at the end. Returns the features,
        concatenated to [B,T,F*H], and last [B,T,H] after the final norm, without gradients.

        features  feature i is the residual stream entering layer i (transformers' hidden_states[i])
        """
        shape = tokens.shape

        def attend(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
        ) -> Tensor:
            q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in (queries, keys, values))
            spec = self.arch.layer_specs[layer].attention
            return _causal(spec, q, k, v, sinks).transpose(1, 2).flatten(0, 1)

        positions = torch.arange(shape[1], device=self.device).expand(shape)
        rotary = self._decoder.rotary(positions.flatten())
        last, streams = self._decoder.forward(tokens.flatten(), rotary, apart(attend), features)
        found = torch.cat([stream.unflatten(0, shape) for stream in streams], -1)
        return found, self._decoder.final_norm(last).unflatten(0, shape)

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """Return logits float32[n,V] of normalised hidden states [n,H], without gradients."""
        return self._decoder.read(last).float()

    @torch.no_grad()
    def choices(self, last: Tensor) -> Tensor:
        """Return int64[...], the argmax over the full vocabulary for normalised hidden states
        [...,H], computed in chunks of rows, without gradients.
        """
        flat = last.reshape(-1, last.shape[-1])
        chunk = max(1, (1 << 26) // len(self.head))
        parts = [(part @ self.head.T).argmax(-1) for part in flat.split(chunk)]
        return torch.cat(parts).view(last.shape[:-1])


def _causal(
    spec: AttentionSpec, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
) -> Tensor:
    """Return the attention output [B,A,T,E] of whole sequences: queries [B,A,T,E] over keys and
    values [B,G,T,E], in the values' dtype. As in attention.AttendApart, values may be narrower than
    keys.

    sinks  float32[A]: a score of each query that has no value
    """
    length, shared = queries.shape[-2], queries.shape[1] // keys.shape[1]
    window, bias = min(spec.window or length, length), None
    if spec.softcap is not None or window < length or sinks is not None:
        place = torch.arange(length, device=queries.device)
        hidden = (place > place[:, None]) | (place <= place[:, None] - window)
        bias = torch.zeros(hidden.shape, dtype=queries.dtype, device=queries.device)
        bias.masked_fill_(hidden, -torch.inf)
    if bias is None or (spec.softcap is None and sinks is None):
        return scaled_dot_product_attention(
            queries,
            keys,
            values,
            bias,
            is_causal=bias is None,
            scale=spec.scale,
            enable_gqa=shared > 1,
        )
    keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
    scores = (queries @ keys.transpose(-1, -2)).float() * spec.scale
    scores = softcapped(scores, spec.softcap) + bias
    if sinks is not None:
        own = sinks.view(len(sinks), 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], -1)
    weights = scores.softmax(-1)[..., :length]
    return weights.to(values.dtype) @ values
