"""Draft models of the toy executor, in NumPy: one with a cache of its own, and one that proposes
blocks. What is asked of them and of the others is in test_contract.py.
"""

import numpy as np

from forerun.control.policy import FixedPolicy
from forerun.draft_shape import DraftShape
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.none import NoDrafter
from forerun.engine.thread import Engine, EngineOptions
from forerun.executors.toy import ToyExecutor
from forerun.interface.draft_model import BlockCandidates, Candidates, DraftModelTraits
from forerun.interface.grammars import NoGrammars
from forerun.networks.cache_layer import CacheLayer
from tests.drafters.served import Cell
from tests.engine.toys import TOKENIZER, VOCAB, best, limits, logits

DEPTH = 3


class ToySelf:
    """The toy once more: an entry is a token, and what it says hangs on all of them."""

    def __init__(self, shape):
        ids = np.arange(VOCAB, dtype=np.int32)
        self.traits = DraftModelTraits("toy self", (CacheLayer(1, 1),), ids, shape.max_nodes)
        self.entries = np.full((shape.pages, shape.page_size), -1, np.int32)
        self.roots = np.zeros(shape.slots, np.int32)
        self.paths = {}

    def extend(self, extension, features):
        assert features is None
        for row, slot in enumerate(extension.slots):
            part = slice(extension.start[row], extension.start[row + 1])
            where = self._places(extension, row, extension.kv_len[row] + part.stop - part.start)
            self.entries[tuple(at[extension.kv_len[row] :] for at in where)] = extension.tokens[
                part
            ]
            self.roots[slot] = extension.next_tokens[part][-1]
        return self._candidates(
            [self._text(extension, row, int(extension.kv_len[row]) + self._length(extension, row))
             for row in np.searchsorted(extension.start, extension.scored, side="right") - 1]
        )  # fmt: skip

    def expand(self, level):
        texts = []
        for row in range(len(level.slots)):
            text = self._text(level, row, int(level.kv_len[row]))
            for node in range(level.start[row], level.start[row + 1]):
                above = self.paths[int(level.parents[node])] if level.parents[node] >= 0 else []
                self.paths[level.first + node] = [*above, int(level.tokens[node])]
                texts.append(text + self.paths[level.first + node])
        return self._candidates(texts)

    def _length(self, work, row):
        return int(work.start[row + 1] - work.start[row])

    def _places(self, work, row, length):
        position, size = np.arange(length), self.entries.shape[1]
        return work.pages[row, position // size], position % size

    def _text(self, work, row, length):
        entries = self.entries[self._places(work, row, length)]
        assert (entries >= 0).all(), "an entry is missing"
        return [*entries.tolist(), int(self.roots[work.slots[row]])]

    def _candidates(self, texts):
        log_probs = np.array([logits(text) for text in texts], np.float32).reshape(-1, VOCAB)
        log_probs -= np.log(np.exp(log_probs).sum(1, keepdims=True))
        ids = np.argsort(-log_probs, kind="stable", axis=1)
        return Candidates(ids.astype(np.int32), np.take_along_axis(log_probs, ids, 1))

    def describe(self):
        return {}


class ToyBlock(ToySelf):
    """Proposes a block at once: what the toy would say greedily, and at each depth what is near."""

    def __init__(self, shape):
        super().__init__(shape)
        traits = self.traits
        self.traits = DraftModelTraits(
            "toy block", traits.cache, traits.target_ids, traits.max_nodes, block_size=DEPTH
        )

    def block(self, block):
        levels = []
        for row in range(len(block.slots)):
            text = self._text(block, row, int(block.kv_len[row]))
            assert text[-1] == block.roots[row]
            for _ in range(block.depth):
                levels.append(self._candidates([text]))
                text.append(best(text))
        shape = len(block.slots), block.depth, VOCAB
        return BlockCandidates(
            np.stack([each.ids for each in levels]).reshape(shape),
            np.stack([each.log_probs for each in levels]).reshape(shape),
        )


class _Copies(ToyExecutor):
    """A toy that copies a draft model's pages, too."""

    def __init__(self, shape, model):
        super().__init__(shape)
        while hasattr(model, "_model"):
            model = model._model
        self._entries = [] if model is None else [model.entries]

    def copy_page(self, source, target):
        for entries in self._entries:
            entries[target] = entries[source]
        return super().copy_page(source, target)


class ToyCell(Cell):
    """As a Cell, on the toy."""

    vocab = VOCAB

    def __init__(self, name):
        self.depth = DEPTH
        self._kind = {"itself": ToySelf, "block": ToyBlock}[name]
        self._limits = limits(pages=400, page_size=2, max_nodes=30)

    def model(self):
        return self._kind(self._limits)

    def alike(self):
        return (ToyExecutor,)

    def engine(self, model, shape=None):
        """Page tables of any size; longer prompts take more than one step to read."""
        drafter, policy = NoDrafter(), FixedPolicy(0, 0)
        if shape is not None:
            nodes, depth, width = shape
            drafter = ModelDrafter(model, self._limits, DraftShape(width=width, depth=depth))
            policy = FixedPolicy(nodes, depth)
        executor, options = _Copies(self._limits, model), EngineOptions()
        return Engine(executor, drafter, policy, TOKENIZER, NoGrammars(), options)
