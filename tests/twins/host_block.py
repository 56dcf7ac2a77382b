"""A block drafter in NumPy, one row and one place at a time: the oracle of faster ones.

Keys and values of the target's features lie under the target's page ids, in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.errors import EngineError
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftLevel,
    DraftModelTraits,
    Extension,
    FeatureNeeds,
    no_candidates,
)
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import Features
from forerun.models.block_config import expected_block_tensors
from forerun.models.block_folder import BlockFile
from forerun.models.checkpoint import Checkpoint
from forerun.types import AnyArray, Floats, Ints


@dataclass(frozen=True, slots=True)
class BorrowedRows:
    """What a drafter takes of its target where it has none of its own, float32[V,H] each."""

    embedding: Floats
    head: Floats

    @staticmethod
    def of(checkpoint: Checkpoint) -> "BorrowedRows":
        """A target's; one array where it ties them."""
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        tied = checkpoint.architecture.tied_head
        return BorrowedRows(embedding, embedding if tied else checkpoint.tensor("lm_head.weight"))


class HostBlockModel:
    """DraftModel in NumPy.

    read  a features handle -> float32[n,F*H] on the host
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        draft: BlockFile,
        rows: BorrowedRows,
        read: Callable[[Features], Floats],
    ) -> None:
        head = draft.head
        self.traits = DraftModelTraits(
            name=head.algorithm,
            cache=head.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("aux", head.features),
            block_size=head.depth,
        )
        self._about, self._limits, self._read = head, limits, read
        names = [name for name in expected_block_tensors(head) if name != "d2t"]
        self._weights = {name: np.array(draft.tensor(name)) for name in names}
        own = self._weights.get
        embedding, output = own("embed_tokens.weight"), own("lm_head.weight")
        self._embedding = rows.embedding if embedding is None else embedding
        self._head = rows.head[draft.target_ids] if output is None else output
        places = limits.pages * limits.page_size
        shape = (head.layers, 2, places, head.kv_heads, head.head_size)
        self._kept = np.zeros(shape, np.float32)
        self._frequencies = head.rope.frequencies(head.head_size)

    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Keep keys and values of the features of what became permanent."""
        if features is None:
            raise EngineError("a block drafter was extended without the target's features")
        streams = self._read(features)
        if len(streams) != len(extension.tokens):
            raise EngineError("an extension whose features are not one row per token")
        context = self._norm("hidden_norm", streams @ self._weights["fc.weight"].T)
        position, lengths = extension.position, np.diff(extension.start)
        row = np.repeat(np.arange(len(lengths)), lengths)
        places = np.concatenate([
            self._places(extension.pages[index], position[row == index])
            for index in range(len(lengths))
        ])  # fmt: skip
        for layer in range(self._about.layers):
            keys, values = self._keys_values(layer, context, position)
            self._kept[layer, 0, places], self._kept[layer, 1, places] = keys, values
        return no_candidates(len(extension.scored))

    def expand(self, level: DraftLevel) -> Candidates:
        """A block drafter proposes at once. Raises EngineError."""
        raise EngineError("a block drafter proposes a block, not level by level")

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Propose, row by row."""
        logits = np.stack([
            self._row(int(root), self._places(pages, np.arange(length)), block.depth)
            for root, length, pages in zip(block.roots, block.kv_len, block.pages, strict=True)
        ])  # fmt: skip
        count = min(block.candidates, self.traits.vocab)
        order = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
        top = logits.max(-1, keepdims=True)
        total = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
        found = np.take_along_axis(logits, order, -1) - total
        if not np.isfinite(found).all():
            raise EngineError("a block drafter's logits are not finite")
        return BlockCandidates(order.astype(np.int32), found.astype(np.float32))

    def _row(self, root: int, cached: AnyArray, depth: int) -> Floats:
        """Logits [depth,Vd] of one block behind the cached places."""
        about, first = self._about, 0 if self._about.anchored else 1
        count = first + depth if about.causal else about.places
        x = self._embedding[np.array([root] + [max(about.mask, 0)] * (count - 1))]
        if about.own_mask:
            x[1:] = self._weights["mask_embedding"]
        position = len(cached) + np.arange(count, dtype=np.int32)
        for layer in range(about.layers):
            x = x + self._attention(layer, x, position, cached)
            x = x + self._feed_forward(layer, x)
        read = self._norm("norm", x)[first : first + depth]
        logits: Floats = read @ self._head.T
        return logits

    def _attention(self, layer: int, x: Floats, position: Ints, cached: AnyArray) -> Floats:
        about = self._about
        normed = self._norm(f"layers.{layer}.input_layernorm", x)
        queries = self._heads(layer, "q", normed, position)
        own = self._keys_values(layer, normed, position)
        keys, values = (
            np.concatenate([self._kept[layer, which, cached], mine])
            for which, mine in enumerate(own)
        )
        out = np.zeros_like(queries)
        group = about.heads // about.kv_heads
        for place in range(len(x)):
            seen = len(cached) + (place + 1 if about.causal else len(x))
            for head in range(about.heads):
                scores = keys[:seen, head // group] @ queries[place, head]
                scores *= about.head_size**-0.5
                weights = np.exp(scores - scores.max())
                out[place, head] = weights @ values[:seen, head // group] / weights.sum()
        mixed: Floats = out.reshape(len(x), -1) @ self._matrix(layer, "self_attn.o_proj").T
        return mixed

    def _feed_forward(self, layer: int, x: Floats) -> Floats:
        normed = self._norm(f"layers.{layer}.post_attention_layernorm", x)
        gate, up = (normed @ self._matrix(layer, f"mlp.{part}_proj").T for part in ("gate", "up"))
        fed: Floats = (gate / (1 + np.exp(-gate)) * up) @ self._matrix(layer, "mlp.down_proj").T
        return fed

    def _keys_values(self, layer: int, x: Floats, position: Ints) -> tuple[Floats, Floats]:
        """Each [n,G,E], keys rotated."""
        values = x @ self._matrix(layer, "self_attn.v_proj").T
        shape = (len(x), -1, self._about.head_size)
        return self._heads(layer, "k", x, position), values.reshape(shape)

    def _heads(self, layer: int, part: str, x: Floats, position: Ints) -> Floats:
        """Queries or keys [n,heads,E], normed where the drafter does so, rotated."""
        found = x @ self._matrix(layer, f"self_attn.{part}_proj").T
        heads = found.reshape(len(x), -1, self._about.head_size)
        if self._about.qk_norm:
            heads = self._norm(f"layers.{layer}.self_attn.{part}_norm", heads)
        angles = (position[:, None] * self._frequencies)[:, None]
        factor = self._about.rope.attention_factor
        cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
        first, second = np.split(heads, 2, -1)
        made = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        return made.astype(np.float32)

    def _norm(self, name: str, x: Floats) -> Floats:
        scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + self._about.norm_eps)
        normed: Floats = scaled * self._weights[f"{name}.weight"]
        return normed

    def _matrix(self, layer: int, name: str) -> Floats:
        return self._weights[f"layers.{layer}.{name}.weight"]

    def _places(self, pages: Ints, position: AnyArray) -> AnyArray:
        """int[n] where positions of a row lie. Raises EngineError where one has no page."""
        page, size = pages[position // self._limits.page_size], self._limits.page_size
        if np.any((page < 0) | (page >= self._limits.pages)):
            raise EngineError("a draft step was refused: a position has no page")
        places: AnyArray = page.astype(np.int64) * size + position % size
        return places

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self._about.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self._about.features),
            "block_size": self._about.places,
            "causal": self._about.causal,
            "draft_weight_bytes": sum(weights.nbytes for weights in self._weights.values()),
            "draft_cache_bytes": self._kept.nbytes,
        }
