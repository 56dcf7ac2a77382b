"""An EAGLE draft head beside its target: the DraftModel contract on programs.

Rounds follow and draft by themselves (drafting.py). What is asked for here is the rest: prompts,
rows that the host decided, sequences that catch up, and what is grown below these.
"""

from typing import Any, NamedTuple

import numpy as np

from forerun.errors import EngineError
from forerun.executors.jax.batches import Size, sized
from forerun.executors.jax.draft_passes import (
    DEPTHS,
    FEW,
    blank,
    expand_shapes,
    extend_shapes,
)
from forerun.executors.jax.eagle import EagleHead, load_head
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.features import JaxFeatures
from forerun.executors.jax.functions import Key
from forerun.executors.jax.memory import check_fits
from forerun.interface.draft_model import (
    CANDIDATES,
    BlockCandidates,
    Candidates,
    DraftBlock,
    DraftLevel,
    DraftModelTraits,
    Extension,
    FeatureNeeds,
)
from forerun.interface.features import Features, KeptFeatures
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_folder import DraftFile
from forerun.types import AnyArray, Ints


class _Line(NamedTuple):
    """A row's part of one dispatch: its number in the pass, and its flat nodes."""

    row: int
    nodes: Ints


class JaxEagleModel:
    """DraftModel on XLA, on the devices and in the dtype of its target.

    Raises ModelError for a head without an embedding of its width, MemoryPlanError where it does
    not fit.
    """

    def __init__(self, executor: JaxExecutor, checkpoint: Checkpoint, draft: DraftFile) -> None:
        about, limits = draft.head, executor.limits
        last = about.algorithm == "eagle1"
        self.traits = DraftModelTraits(
            name=about.algorithm,
            cache=about.cache,
            target_ids=draft.target_ids,
            max_nodes=limits.max_nodes,
            features=FeatureNeeds("last") if last else FeatureNeeds("aux", about.features),
        )
        self._executor, self._about, self._limits = executor, about, limits
        head = EagleHead(about, executor.decoder)
        self._bytes = executor.draft_bytes(head)
        check_fits(self._bytes, *executor.place)
        executor.attach(head, load_head(head, checkpoint, draft, executor.dtype))
        # Of draft nodes: the node above, -1 = the root.
        self._above = np.full(limits.max_nodes, -1, np.int32)

    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Run the tokens after those that became permanent, beside these' features."""
        if features is None:
            raise EngineError("an EAGLE head was extended without the target's features")
        self._check(extension, len(extension.tokens), 1)
        self._check_pages(extension)
        place = self._streams(features, len(extension.tokens))
        programs, buckets = self._executor.programs, self._executor.buckets.widest
        start = extension.start
        rows = [
            (r, np.arange(start[r], start[r + 1], dtype=np.int32)) for r in range(len(start) - 1)
        ]
        short = [row for row in rows if len(row[1]) <= buckets.nodes[-1]]
        for size, some in sized(short, buckets) if short else ():
            lines = [_Line(*row) for row in some]
            programs.run(Key("extend", size), self._extend(extension, place, size, lines))
        for row, nodes in (row for row in rows if len(row[1]) > buckets.nodes[-1]):
            for begin in range(0, len(nodes), buckets.chunks[-1]):
                part = nodes[begin : begin + buckets.chunks[-1]]
                size = Size(1, next(n for n in buckets.chunks if n >= len(part)))
                line = [_Line(row, part)]
                programs.run(Key("extend", size), self._extend(extension, place, size, line))
        return self._candidates(extension.scored, extension.candidates)

    def _extend(
        self, extension: Extension, place: Ints, size: Size, lines: list[_Line]
    ) -> AnyArray:
        """One dispatch of `extend`, packed."""
        whole, views = blank(extend_shapes(size, self._executor.width))
        for line, (row, nodes) in enumerate(lines):
            count, first = len(nodes), int(extension.start[row])
            views["kv_len"][line] = extension.kv_len[row] + nodes[0] - first
            if nodes[-1] + 1 == extension.start[row + 1]:
                views["root"][line] = self._limits.max_nodes + extension.slots[row]
            views["tokens"][line, :count] = extension.next_tokens[nodes]
            views["stream"][line, :count] = place[nodes]
            views["read"][line, :count] = nodes
            views["real"][line, :count] = 1
            _put_table(views["table"][line], extension.pages[row])
        return whole

    def _streams(self, features: Features, count: int) -> Ints:
        """int32[n] the rows of the streams that hold them; what the host kept is loaded first."""
        if isinstance(features, JaxFeatures):
            place = np.asarray(features.place, np.int32)
        elif isinstance(features, KeptFeatures):
            place = self._executor.load(features.values)
        else:
            raise EngineError(f"features of {type(features).__name__} come from another executor")
        if len(place) != count:
            raise EngineError("an extension whose features are not one row per token")
        return place

    def expand(self, level: DraftLevel) -> Candidates:
        """Run draft tokens."""
        count = len(level.tokens)
        bounds = {
            "parents": (level.parents, -1, level.first),
            "first": (np.array([level.first]), 0, self._limits.max_nodes - count + 1),
        }
        self._check(level, count, 0, bounds)
        numbers = level.first + np.arange(count, dtype=np.int32)
        self._above[numbers] = level.parents
        paths = [self._path(number) for number in level.parents.tolist()]
        deepest = max(map(len, paths))
        depth = next((size for size in DEPTHS if size >= deepest), deepest)
        lines = []
        nodes = self._executor.level_nodes
        for row, (begin, end) in enumerate(zip(level.start[:-1], level.start[1:], strict=True)):
            whole = np.arange(begin, end, dtype=np.int32)
            lines += [_Line(row, whole[at : at + nodes]) for at in range(0, len(whole), nodes)]
        most = self._executor.buckets.rows[-1]
        for begin in range(0, len(lines), most):
            some = lines[begin : begin + most]
            rows = next(size for size in self._executor.buckets.rows if size >= len(some))
            size = Size(rows, nodes)
            whole = self._expand(level, paths, size, depth, some)
            self._executor.programs.run(Key("expand", size, levels=depth), whole)
        return self._candidates(np.arange(count, dtype=np.int32), level.candidates, level.first)

    def _expand(
        self, level: DraftLevel, paths: list[Ints], size: Size, depth: int, lines: list[_Line]
    ) -> AnyArray:
        """One dispatch of `expand`, packed."""
        whole, views = blank(expand_shapes(size, self._executor.width, depth))
        for line, (row, nodes) in enumerate(lines):
            root = self._limits.max_nodes + int(level.slots[row])
            views["kv_len"][line] = level.kv_len[row]
            _put_table(views["table"][line], level.pages[row])
            for at, node in enumerate(nodes.tolist()):
                path, parent = paths[node], int(level.parents[node])
                views["tokens"][line, at] = level.tokens[node]
                views["above"][line, at] = root if parent < 0 else parent
                views["number"][line, at] = level.first + node
                views["depth"][line, at] = len(path)
                views["path"][line, at, : len(path)] = path
        return whole

    def block(self, block: DraftBlock) -> BlockCandidates:
        """An EAGLE head proposes level by level. Raises EngineError."""
        raise EngineError("an EAGLE head proposes level by level, not a block")

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "algorithm": self._about.algorithm,
            "vocab": self.traits.vocab,
            "features": list(self._about.features),
            **self._bytes,
        }

    def _candidates(self, nodes: Ints, asked: int, first: int = 0) -> Candidates:
        """Of nodes of the last pass, whose numbers begin at `first`."""
        vocab = self.traits.vocab
        count = min(vocab, CANDIDATES if asked <= CANDIDATES else vocab)
        key = Key("candidates", Size(FEW, count))
        found = self._executor.programs.parts(key, np.asarray(nodes + first, np.int32))
        whole = np.concatenate(found, 1) if found else np.zeros((2, 0, count), np.int32)
        kept = min(asked, vocab)
        ids, log_probs = whole[0, :, :kept], whole[1].view(np.float32)[:, :kept]
        return Candidates(np.ascontiguousarray(ids), np.ascontiguousarray(log_probs))

    def _path(self, number: int) -> Ints:
        """Draft nodes from the first level down to `number`; none for the root."""
        path = []
        while number >= 0:
            path.append(number)
            number = int(self._above[number])
        return np.array(path[::-1], np.int32)

    def _check(
        self,
        work: Extension | DraftLevel,
        count: int,
        more: int,
        bounds: dict[str, tuple[AnyArray, int, int]] | None = None,
    ) -> None:
        """Raise EngineError for numbers that lead outside of what there is: a device would not say
        which.
        """
        limits, vocab = self._limits, self._about.target_vocab
        known = work.pages.shape[1] * limits.page_size + 1
        checked: dict[str, tuple[AnyArray, int, int]] = {
            "tokens": (work.tokens, 0, vocab),
            "slots": (work.slots, 0, limits.slots),
            "kv_len": (work.kv_len, 0, known),
            **(bounds or {}),
        }
        if isinstance(work, Extension):
            checked["next_tokens"] = (work.next_tokens, 0, vocab)
            checked["scored"] = (work.scored, 0, count)
            checked["the number of tokens"] = (np.array([count]), more, limits.max_nodes + 1)
        for name, (values, low, high) in checked.items():
            if np.any((values < low) | (values >= high)):
                raise EngineError(f"a draft step was refused: {name} is outside {low}..{high - 1}")

    def _check_pages(self, extension: Extension) -> None:
        """Raise EngineError where a token's position has no page."""
        size, lengths = self._limits.page_size, np.diff(extension.start)
        for pages, begin, length in zip(extension.pages, extension.kv_len, lengths, strict=True):
            needed = -(-int(begin + length) // size)
            if needed > len(pages) or np.any(pages[:needed] < 0):
                raise EngineError("a draft step was refused: a position has no page")


def _put_table(into: AnyArray, pages: Ints) -> None:
    width = min(len(pages), len(into))
    into[:width] = np.maximum(pages[:width], 0)
