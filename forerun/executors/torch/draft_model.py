"""A draft head in torch, beside its target: the class that was trained, over pages and trees.

Nothing here asks for the same bits in any batch: a draft that differs in its last bit costs at
most an acceptance, never the text.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.errors import EngineError, ModelError
from forerun.executors.torch.attention import KeyBlock, RowKeys, attend, blocks_of
from forerun.executors.torch.captured.drafting import Drafting, HeadArrays
from forerun.executors.torch.eagle import EagleHead
from forerun.executors.torch.executor import TorchExecutor, check_fits
from forerun.executors.torch.kv import KvShape, PagedCache, Slots
from forerun.executors.torch.layers import rotation
from forerun.interface.draft_model import Children, DraftForward, DraftRequest, GrownDrafts
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_folder import DraftFile
from forerun.types import AnyArray, Floats, Ints

_NOBODY: Ints = np.zeros(0, np.int32)


class TorchDraftModel:
    """DraftModel in torch, on the device and in the dtype of its target.

    Raises ModelError for a head without an embedding of its width, MemoryPlanError where it does
    not fit.
    """

    def __init__(self, executor: TorchExecutor, checkpoint: Checkpoint, draft: DraftFile) -> None:
        head, limits = draft.head, executor.limits
        self.max_nodes, self.vocab = limits.max_nodes, head.vocab
        self._executor, self._about, self._limits = executor, head, limits
        device, dtype = executor.device, executor.dtype
        shape = KvShape(1, head.kv_heads, head.head_size)
        self._bytes = {
            "draft_weight": head.parameters * dtype.itemsize,
            "draft_cache": shape.bytes(limits, dtype),
        }
        check_fits(self._bytes, device)
        self._embedding = self._own_embedding(draft)
        self._head = _loaded(executor, checkpoint, draft)
        self._cache = PagedCache(shape, limits, device, dtype)
        frequencies = head.rope.frequencies(head.head_size)
        self._frequencies = torch.from_numpy(frequencies).to(device)
        # What the next draft step receives: see HeadArrays.
        self._outputs = torch.zeros(
            self.max_nodes + limits.slots + 1, head.hidden, device=device, dtype=dtype
        )
        # Of draft nodes: the node above, -1 = none, and how many nodes are above.
        self._above = np.full(self.max_nodes, -1, np.int32)
        self._depth = np.zeros(self.max_nodes, np.int32)
        executor.request_aux_hidden_states(head.features)
        self._drafting: Drafting | None = None
        if executor.kernels is not None:
            drafting = Drafting(self._arrays(draft), executor.kernels, self.max_nodes)
            self._drafting = drafting if executor.draft_extend(drafting) else None

    def _arrays(self, draft: DraftFile) -> HeadArrays:
        return HeadArrays(
            module=self._head,
            cache=self._cache,
            outputs=self._outputs,
            turning=self._frequencies,
            ids=torch.from_numpy(draft.target_ids.astype(np.int32)).to(self._executor.device),
            embed=self._embed,
            enter=self._enter,
        )

    def features(self, nodes: Ints) -> Floats:
        """Copies of the target's features of `nodes`, on the host."""
        return self._executor.aux_hidden_states[self._index(nodes)].float().cpu().numpy()

    @torch.inference_mode()
    def extend(self, work: DraftForward) -> Children:
        """Run an extension and make its keys and values permanent."""
        self._check(work, range(len(self._executor.aux_hidden_states)))
        lengths = np.diff(work.start)
        depth = np.arange(len(work.tokens)) - np.repeat(work.start[:-1], lengths)
        position = (np.repeat(work.kv_len, lengths) + depth).astype(np.int32)
        nodes = np.arange(len(work.tokens), dtype=np.int32)
        places = [
            self._cache.slots(pages, position[begin:end])
            for pages, begin, end in zip(work.pages, work.start[:-1], work.start[1:], strict=True)
        ]
        if work.features is None:
            features = self._executor.aux_hidden_states[self._index(work.sources)]
        else:
            features = torch.from_numpy(work.features)
            features = features.to(self._executor.device, self._executor.dtype)
        chains = [[(self._cache.scratch(row), row)] for row in np.split(nodes, work.start[1:-1])]
        read, outputs = self._forward(work, self._enter(features), position, chains)
        self._cache.commit(nodes, np.concatenate(places))
        kept = self._index(self.max_nodes + work.slots)
        self._outputs[kept] = outputs[self._index(work.start[1:] - 1)]
        return self._children(read, work)

    @torch.inference_mode()
    def expand(self, work: DraftForward) -> Children:
        """Run own draft tokens."""
        self._check(work, range(-self._limits.slots, work.first))
        nodes = np.arange(len(work.tokens), dtype=np.int32)
        numbers = work.first + nodes
        self._above[numbers] = work.parents
        above = np.where(work.parents < 0, -1, self._depth[work.parents])
        self._depth[numbers] = above + 1
        position = np.repeat(work.kv_len, np.diff(work.start)) + self._depth[numbers]
        chains = [
            [(self._cache.scratch(self._path(work.first + node)), nodes[node : node + 1])
             for node in range(begin, end)]
            for begin, end in zip(work.start[:-1], work.start[1:], strict=True)
        ]  # fmt: skip
        kept = self.max_nodes - 1 - work.sources
        hidden = self._outputs[self._index(np.where(work.sources < 0, kept, work.sources))]
        read, outputs = self._forward(work, hidden, position, chains)
        self._outputs[work.first : work.first + len(nodes)] = outputs
        return self._children(read, work)

    def draft_request(self, draft_request: DraftRequest) -> None:
        """Heard where the target's steps are captured rounds."""
        if self._drafting is not None:
            self._drafting.draft_request = draft_request

    def grown(self) -> GrownDrafts | None:
        """What the last round did."""
        return self._drafting.grown if self._drafting is not None else None

    def following(self) -> Ints:
        """Those of the last round that was launched."""
        return self._drafting.extending if self._drafting is not None else _NOBODY

    def _forward(
        self,
        work: DraftForward,
        hidden: Tensor,
        position: Ints,
        chains: list[list[tuple[Slots, Ints]]],
    ) -> tuple[Tensor, Tensor]:
        """What the output head reads, and what a next step receives, both [n,H]."""
        cache = self._cache
        nodes = np.split(np.arange(len(work.tokens), dtype=np.int32), work.start[1:-1])
        rows = [
            RowKeys(row, cache.slots(pages, np.arange(int(length))), chain)
            for row, pages, length, chain in zip(
                nodes, work.pages, work.kv_len, chains, strict=True
            )
        ]
        blocks: list[KeyBlock] = blocks_of(rows, position, cache.null, hidden.device)

        def attend_pages(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # Turned by float32 angles, whatever the dtype.
            queries, keys = queries.to(values.dtype), keys.to(values.dtype)
            cache.write(0, keys, values, work.first)
            return attend(queries, *cache.of_layer(0), blocks)

        factor = self._about.rope.attention_factor
        cos, sin = rotation(self._index(position), self._frequencies, factor)
        embedded = self._embed(self._index(work.tokens))
        read, outputs = self._head(embedded, hidden, cos, sin, attend_pages)
        return read, outputs

    def _children(self, read: Tensor, work: DraftForward) -> Children:
        logits = self._head.logits(read[self._index(work.scored)]).float()
        best, ids = logits.topk(min(work.children, self.vocab), -1)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        return Children(ids.int().cpu().numpy(), log_probs.cpu().numpy())

    def _enter(self, features: Tensor) -> Tensor:
        if self._about.algorithm == "eagle1":
            features = self._executor.decoder.final_norm(features)
        return self._head.fuse(features)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        return self._executor.decoder.embed(tokens)

    def _own_embedding(self, draft: DraftFile) -> Tensor | None:
        """The head's embedding, where the target's is not as wide as the head."""
        head, name = draft.head, "embed_tokens.weight"
        if head.hidden == head.target_hidden:
            return None
        if name not in draft.files or not head.trained_head:
            raise ModelError(
                f"{draft.path}: a head of width {head.hidden} beside a target of width "
                f"{head.target_hidden} needs {name} and lm_head.weight of its own"
            )
        weights = torch.from_numpy(np.array(draft.tensor(name)))
        return weights.to(self._executor.device, self._executor.dtype)

    def _path(self, number: int) -> Ints:
        """Draft nodes from below the cached positions down to `number`."""
        path = [number]
        while self._above[path[-1]] >= 0:
            path.append(int(self._above[path[-1]]))
        return np.array(path[::-1], np.int32)

    def _index(self, values: AnyArray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._executor.device)

    def _check(self, work: DraftForward, sources: range) -> None:
        """Refuse numbers that lead outside of what there is: a device would not say which."""
        count, limits = len(work.tokens), self._limits
        bounds = {
            "tokens": (work.tokens, 0, self._about.target_vocab),
            "sources": (work.sources, sources.start, sources.stop),
            "parents": (work.parents, -1, work.first),
            "slots": (work.slots, 0, limits.slots),
            "kv_len": (work.kv_len, 0, work.pages.shape[1] * limits.page_size + 1),
            "scored": (work.scored, 0, count),
            "first": (np.array([work.first]), 0, self.max_nodes - count + 1),
        }
        for name, (values, low, high) in bounds.items():
            if np.any((values < low) | (values >= high)):
                raise EngineError(f"a draft step was refused: {name} is outside {low}..{high - 1}")

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self._about.algorithm,
            "vocab": self.vocab,
            "features": list(self._about.features),
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }


def _loaded(executor: TorchExecutor, checkpoint: Checkpoint, draft: DraftFile) -> EagleHead:
    """The trained class with the file's weights; the output head is the target's if not its own."""
    with torch.device("meta"):
        head = EagleHead(draft.head)
    weights = {}
    for name, _ in head.named_parameters():
        if name == "lm_head.weight" and not draft.head.trained_head:
            tied = checkpoint.architecture.tied_head
            rows = checkpoint.tensor("model.embed_tokens.weight" if tied else name)
            values = rows[draft.target_ids]
        else:
            values = draft.tensor(name)
        weights[name] = torch.from_numpy(np.array(values)).to(executor.device, executor.dtype)
    head.load_state_dict(weights, assign=True)
    if executor.kernels is not None:
        head.use(executor.kernels.parts)
    return head.requires_grad_(False)
