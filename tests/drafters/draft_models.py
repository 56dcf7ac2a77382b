"""Draft models that show what the contract is made for, some sixty lines each. (One that reads
tokens alone is served: executors/torch/drafts/decoder_model.py.)

FeatureBlock  proposes a block in one pass: its layers' context is made of the target's features
Told          any of them, but it says what it was told beforehand, or what it was told is wrong
"""

import numpy as np
import torch

from forerun.errors import EngineError
from forerun.executors.torch.decoder.layers import rotate, rotation
from forerun.executors.torch.drafts.draft_cache import DraftCache, check_extension
from forerun.executors.torch.features import on_device
from forerun.interface.draft_model import (
    BlockCandidates,
    Candidates,
    DraftModelTraits,
    FeatureNeeds,
)
from forerun.models.cache_layer import CacheLayer

CPU = torch.device("cpu")


def index(values):
    return torch.from_numpy(np.asarray(values, np.int64))


def ranked(logits):
    """All ids and their log-probabilities, best first."""
    log_probs, ids = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return ids.int().numpy(), log_probs.numpy()


class FeatureBlock:
    """A block at once, after DFlash: keys and values of position p are made of the target's
    features there; root and masks see all of them, and each other, or with `causal` those before
    them. It knows every so many-th token.
    """

    DEPTH, MASK, AUX, GROUPS, SIZE = 4, 1, (1, 2), 2, 16

    def __init__(self, executor, causal, every=1, layers=3):
        limits, hidden = executor.limits, executor.decoder.arch.hidden
        self.traits = DraftModelTraits(
            name="block",
            cache=(CacheLayer(self.GROUPS, self.SIZE),) * layers,
            target_ids=np.arange(0, limits.vocab, every, dtype=np.int32),
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("aux", self.AUX),
            block_size=self.DEPTH,
        )
        executor.request_aux_hidden_states(self.AUX)
        self._decoder, self._limits, self.causal = executor.decoder, limits, causal
        self._cache = DraftCache(self.traits.cache, limits, CPU, torch.float32)
        random = torch.Generator().manual_seed(3)
        wide = self.GROUPS * self.SIZE

        def matrix(rows, columns):
            return torch.randn(rows, columns, generator=random) / columns**0.5

        self.fuse = matrix(hidden, len(self.AUX) * hidden)
        self.layers = [
            (*(matrix(wide, hidden) for _ in "qkv"), matrix(hidden, wide)) for _ in range(layers)
        ]
        self.turning = torch.logspace(0, -3, self.SIZE // 2)

    def heads(self, matrix, x, position=None):
        """[n,G,E], turned by its position where one is given."""
        found = (x @ matrix.T).view(len(x), self.GROUPS, self.SIZE)
        if position is None:
            return found
        return rotate(found, *rotation(position, self.turning, 1.0))

    @torch.inference_mode()
    def extend(self, extension, features):
        check_extension(extension, self.traits, self._limits.vocab, self._limits)
        work = self._cache.extension(extension)
        context, position = on_device(features, CPU, torch.float32) @ self.fuse.T, work.position
        for layer, (q, k, v, _) in enumerate(self.layers):
            keys = self.heads(k, context, index(position))
            work.attend(layer, self.heads(q, context), keys, self.heads(v, context), None)
        self._cache.commit(extension)
        assert not len(extension.scored), "blocks have no candidates of single nodes"
        return Candidates(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))

    def expand(self, level):
        raise EngineError("a block drafter proposes at once")

    @torch.inference_mode()
    def block(self, block):
        work = self._cache.block(block, self.MASK, self.causal)
        x = self._decoder.embed(index(work.tokens))
        for layer, (q, k, v, o) in enumerate(self.layers):
            turned = (self.heads(matrix, x, index(work.position)) for matrix in (q, k))
            context = work.attend(layer, *turned, self.heads(v, x), None)
            x = x + context.flatten(1) @ o.T
        logits = self._decoder.logits(x)[:, index(self.traits.target_ids)]
        found = ranked(logits.view(len(block.roots), block.depth, -1))
        return BlockCandidates(*found)

    def describe(self):
        return {"block_size": self.DEPTH}


class Told:
    """Runs another draft model, and names one candidate each: the token that comes, plus `off`.

    texts  whole texts; the first that begins as a row does says how it goes on
    """

    def __init__(self, model, texts, off):
        self.traits, self._model = model.traits, model
        self._texts, self._off = [list(map(int, text)) for text in texts], off
        self._rows, self._depth = {}, np.zeros(model.traits.max_nodes, np.int32)

    def extend(self, extension, features):
        self._model.extend(extension, features)
        return Candidates(*self._says([(slot, 0) for slot in self._read(extension)]))

    def _read(self, extension):
        """The slots whose candidates are wanted, when all texts are as long as they are now."""
        for row, slot in enumerate(extension.slots.tolist()):
            part = slice(extension.start[row], extension.start[row + 1])
            kept, length = self._rows.get(slot, [])[:-1], int(extension.kv_len[row])
            if len(kept) != length:  # A new text, which begins in another's pages.
                kept = [-1] * length
            text = kept + extension.tokens[part].tolist()
            self._rows[slot] = [*text, int(extension.next_tokens[part][-1])]
        rows = np.searchsorted(extension.start, extension.scored, side="right") - 1
        return extension.slots[rows]

    def expand(self, level):
        self._model.expand(level)
        return Candidates(*self._says(self._below(level)))

    def _below(self, level):
        """Slot and depth of what may follow each of the level's nodes."""
        above = np.where(level.parents < 0, 0, self._depth[level.parents])
        self._depth[level.first : level.first + len(above)] = above + 1
        slots = np.repeat(level.slots, np.diff(level.start))
        return list(zip(slots, above + 1, strict=True))

    def block(self, block):
        self._model.block(block)
        asked = [(slot, depth) for slot in block.slots for depth in range(block.depth)]
        ids, log_probs = self._says(asked)
        return BlockCandidates(
            ids.reshape(-1, block.depth, 1), log_probs.reshape(-1, block.depth, 1)
        )

    def _says(self, asked):
        ids = [self._coming(self._rows[int(slot)], int(depth)) for slot, depth in asked]
        return np.array(ids, np.int32).reshape(-1, 1), np.zeros((len(ids), 1), np.float32)

    def _coming(self, text, depth):
        """The draft id nearest above the token `depth` + 1 behind `text`, plus `off`."""
        known = [(place, token) for place, token in enumerate(text) if token >= 0]
        for whole in self._texts:
            if len(whole) >= len(text) and all(whole[place] == token for place, token in known):
                coming = whole[min(len(text) + depth, len(whole) - 1)]
                found = np.searchsorted(self.traits.target_ids, coming) + self._off
                return int(found) % self.traits.vocab
        raise AssertionError(f"nobody told how {text} goes on")

    def describe(self):
        return self._model.describe()
