"""Draft models around another one, which follow the text of every row.

Recorded       keeps its candidates, to be compared with passes over the whole text
Oracle         proposes tokens of given texts, or wrong ones
PartialOracle  the same for blocks, right for none, some or all of their tokens in turn
"""

from dataclasses import replace

import numpy as np

from forerun.interface.draft_model import BlockCandidates, Candidates, Children


class Intercepted:
    """Passes everything on; `intercept` may change the candidates."""

    def __init__(self, model):
        self.traits, self._model = model.traits, model
        self._rows, self._paths = {}, {}

    def intercept(self, rows, ids, log_probs):
        """Return ids and log_probs [s,k] of candidates below `rows`: (text, draft tokens below it).

        A text is the row's, -1 where another filled its pages; draft tokens of a block are None.
        """
        return ids, log_probs

    def extend(self, extension, features):
        candidates = self._model.extend(extension, features)
        rows = [(self._rows[slot], ()) for slot in self._read(extension)]
        return Candidates(*self.intercept(rows, candidates.ids, candidates.log_probs))

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
        return extension.slots[rows].tolist()

    def expand(self, level):
        candidates, rows = self._model.expand(level), []
        slots = np.repeat(level.slots, np.diff(level.start)).tolist()
        for node, above in enumerate(level.parents.tolist()):
            path = (*(self._paths[above] if above >= 0 else ()), int(level.tokens[node]))
            self._paths[level.first + node] = path
            rows.append((self._rows[slots[node]], path))
        return Candidates(*self.intercept(rows, candidates.ids, candidates.log_probs))

    def block(self, block):
        candidates, depths = self._model.block(block), range(block.depth)
        if candidates.pairs is not None:
            rows = [self._rows[slot] for slot in block.slots.tolist()]
            return replace(candidates, pairs=_InterceptedPairs(self, rows, candidates.pairs))
        rows = [(self._rows[s], (None,) * depth) for s in block.slots.tolist() for depth in depths]
        flat = len(rows), candidates.ids.shape[-1]
        ids, log_probs = candidates.ids.reshape(flat), candidates.log_probs.reshape(flat)
        parts = self.intercept(rows, ids, log_probs)
        return BlockCandidates(*(part.reshape(len(block.slots), block.depth, -1) for part in parts))

    def describe(self):
        return self._model.describe()


class _InterceptedPairs:
    """Pairs of rows' texts, intercepted node by node."""

    def __init__(self, model, rows, pairs):
        self._model, self._rows, self._pairs = model, rows, pairs

    def below(self, row, path):
        candidates = self._pairs.below(row, path)
        rows = [(self._rows[row], path)]
        ids, values = self._model.intercept(rows, candidates.ids[None], candidates.log_probs[None])
        return Children(ids[0], values[0], candidates.confidence)


class Recorded(Intercepted):
    """proposals: (text, draft tokens below it, float32[Vd] by draft id) of all candidates."""

    def __init__(self, model):
        super().__init__(model)
        self.proposals = []

    def intercept(self, rows, ids, log_probs):
        for (text, path), line, values in zip(rows, ids, log_probs, strict=True):
            assert (np.diff(values) <= 0).all(), "the likeliest come first"
            dense = np.full(self.traits.vocab, -np.inf, np.float32)
            dense[line] = values
            self.proposals.append((tuple(text), path, dense))
        return ids, log_probs

    def _all(self, work):
        return replace(work, candidates=self.traits.vocab)

    def extend(self, extension, features):
        return super().extend(self._all(extension), features)

    def expand(self, level):
        return super().expand(self._all(level))

    def block(self, block):
        return super().block(self._all(block))


class Oracle(Intercepted):
    """Names one candidate each: the token that comes, plus what its text is off.

    texts  whole texts; the first that begins as a row does says how it goes on
    off    of every text, or of each
    """

    def __init__(self, model, texts, off=0):
        super().__init__(model)
        self._texts, self._off = [list(map(int, text)) for text in texts], off

    def intercept(self, rows, ids, log_probs):
        said = [self._coming(text, len(path)) for text, path in rows]
        return np.array(said, np.int32).reshape(-1, 1), np.zeros((len(said), 1), np.float32)

    def _coming(self, text, depth):
        """The draft id nearest above the token `depth` + 1 behind `text`, plus `off`."""
        for which in beginning_with(self._texts, text):
            whole = self._texts[which]
            coming = whole[min(len(text) + depth, len(whole) - 1)]
            off = self._off[which] if isinstance(self._off, list) else self._off
            return int(np.searchsorted(self.traits.target_ids, coming) + off) % self.traits.vocab
        raise AssertionError(f"no text begins with {text}")


def beginning_with(texts, text):
    """Which of `texts` begin with `text`, of which -1 may be anything."""
    known = [(place, token) for place, token in enumerate(text) if token >= 0]
    return [
        which
        for which, whole in enumerate(texts)
        if len(whole) >= len(text) and all(whole[place] == token for place, token in known)
    ]


class PartialOracle(Oracle):
    """Is right for as many tokens of each block as its turn says: all, none, one, two, ..."""

    turns = right = 0

    def block(self, block):
        self.right = (block.depth + self.turns) % (block.depth + 1)
        self.turns += 1
        return super().block(block)

    def intercept(self, rows, ids, log_probs):
        ids, values = super().intercept(rows, ids, log_probs)
        wrong = [[len(path) >= self.right] for _, path in rows]
        return (ids + np.array(wrong)) % self.traits.vocab, values
