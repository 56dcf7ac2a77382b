"""A network that drafts level by level next to its target: the DraftModel interface implemented
with compiled programs. Rounds follow and draft by themselves (drafting.py). The passes here are for
the other cases: prompts, rows that the host decided, sequences that catch up, and trees below
these.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from forerun.executors.draft_checks import (
    check_borrows,
    check_extension,
    check_level,
    check_pages,
    own_features,
    roots_of,
)
from forerun.executors.draft_model import Declared, DraftModelBase, DraftNodes, with_roots
from forerun.executors.jax.drafts.draft_network import DraftNetwork
from forerun.executors.jax.drafts.draft_passes import (
    DEPTHS,
    FEW,
    blank,
    expand_shapes,
    extend_shapes,
)
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.network.weights import Params
from forerun.executors.jax.program.features import JaxFeatures
from forerun.executors.jax.program.functions import Key
from forerun.executors.jax.rounds.batches import Bucket, Row, dispatches
from forerun.interface.draft_model import (
    CANDIDATES,
    Candidates,
    DraftExtension,
    DraftLevel,
)
from forerun.interface.features import Features
from forerun.types import AnyArray, Ints


class _Chains(NamedTuple):
    """The nodes of an extension: those of its tokens or, with roots, one more per row, or roots
    alone.

    kv_len  int32[R] positions before them
    tokens  int32[n] target ids
    start   int32[R+1] row r has tokens start[r]:start[r+1]
    stream  int32[n] rows of the streams that they read; zeros if they read none
    scored  int32[s] nodes to return candidates for
    """

    kv_len: Ints
    tokens: Ints
    start: Ints
    stream: Ints
    scored: Ints

    @classmethod
    def of(cls, extension: DraftExtension, stream: Ints) -> "_Chains":
        """Return the chains for a network that reads features, with the next token of each."""
        tokens = extension.next_tokens
        return cls(extension.kv_len, tokens, extension.start, stream, extension.scored)

    @classmethod
    def of_roots(cls, extension: DraftExtension, stream: Ints) -> "_Chains":
        """Return the chains for a network that reads the target's pages: roots alone. Raises
        EngineError for one without a token before it.
        """
        roots = roots_of(extension)
        check_borrows(roots.kv_len)
        tokens, stream = extension.next_tokens[roots.last], stream[roots.last]
        return cls(roots.kv_len, tokens, roots.start, stream, roots.scored)


class JaxLevelModel(DraftModelBase):
    """DraftModel on XLA, on the devices and in the dtype of its target. Raises MemoryPlanError if
    it does not fit.

    load   called after the memory check: returns params["draft"], on the devices
    """

    def __init__(
        self,
        executor: JaxExecutor,
        network: DraftNetwork,
        declared: Declared,
        load: Callable[[], Params],
    ) -> None:
        self.traits, self.facts = declared
        self._executor, self._limits, self._sizes = executor, executor.limits, network.sizes
        self.facts |= executor.attach(network, load)
        self._nodes = DraftNodes(self._limits.max_nodes)

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run the n tokens that became permanent through the draft network, and write its pages.

        features  one row per token; None for a network that reads tokens alone

        Returns candidates [s,k] for the scored tokens; waits for these. Raises EngineError if the
        extension or its features are invalid.
        """
        check_extension(extension, self._limits)
        check_pages(extension, self._limits)
        chains = self._chains(extension, features)
        programs, buckets = self._executor.programs, self._executor.buckets
        buckets = buckets.narrowest if self._sizes.borrows else buckets.widest
        for size, rows in dispatches(chains.start, buckets):
            programs.run(Key("extend", size), self._extend(extension, chains, size, rows))
        return self._candidates(chains.scored, extension.candidates)

    def _extend(
        self, extension: DraftExtension, chains: _Chains, size: Bucket, lines: list[Row]
    ) -> AnyArray:
        """Run one dispatch of `extend`. Returns packed candidates."""
        whole, views = blank(extend_shapes(size, self._executor.tables))
        for line, (row, nodes) in enumerate(lines):
            count, first = len(nodes), int(chains.start[row])
            views["kv_len"][line] = chains.kv_len[row] + nodes[0] - first
            if nodes[-1] + 1 == chains.start[row + 1]:
                views["root"][line] = self._limits.max_nodes + extension.slots[row]
            views["tokens"][line, :count] = chains.tokens[nodes]
            views["stream"][line, :count] = chains.stream[nodes]
            views["read"][line, :count] = nodes
            views["real"][line, :count] = 1
        own = [row for row, _ in lines]
        views["tables"][: len(own)] = self._executor.page_tables(extension.pages[own])
        return whole

    def _chains(self, extension: DraftExtension, features: Features | None) -> _Chains:
        """Return the chains with the rows of the streams of their features, if any are read."""
        if self._sizes.runs_root:
            tokens, start, scored, _ = with_roots(extension)
            return _Chains(extension.kv_len, tokens, start, np.zeros_like(tokens), scored)
        about = len(extension.tokens), self.traits.name, JaxFeatures
        stream = own_features(features, *about).streams
        if not self._sizes.borrows:
            return _Chains.of(extension, stream)
        chains = _Chains.of_roots(extension, stream)
        if (windows := self._executor.windows) is not None:
            windows.read_all(extension.slots.tolist(), extension.pages, chains.kv_len.tolist())
        return chains

    def expand(self, level: DraftLevel) -> Candidates:
        """Run one level of n draft tokens, at most `level_nodes` of a row in one dispatch. Returns
        candidates [n,k]; waits for them. Raises EngineError if the level is invalid.
        """
        count = len(level.tokens)
        check_level(level, self._limits)
        if self._sizes.borrows:
            check_borrows(level.kv_len)
        self._nodes.add(level)
        paths = [self._nodes.path(number) for number in level.parents.tolist()]
        deepest = max(map(len, paths))
        depth = next((size for size in DEPTHS if size >= deepest), deepest)
        lines: list[Row] = []
        nodes = self._executor.level_nodes
        for row, (begin, end) in enumerate(zip(level.start[:-1], level.start[1:], strict=True)):
            whole = np.arange(begin, end, dtype=np.int32)
            lines += [(row, whole[at : at + nodes]) for at in range(0, len(whole), nodes)]
        most = self._executor.buckets.rows[-1]
        for begin in range(0, len(lines), most):
            chunk = lines[begin : begin + most]
            rows = next(size for size in self._executor.buckets.rows if size >= len(chunk))
            size = Bucket(rows, nodes)
            whole = self._expand(level, paths, size, depth, chunk)
            self._executor.programs.run(Key("expand", size, levels=depth), whole)
        return self._candidates(np.arange(count, dtype=np.int32), level.candidates, level.first)

    def _expand(
        self, level: DraftLevel, paths: list[Ints], size: Bucket, depth: int, lines: list[Row]
    ) -> AnyArray:
        """Run one dispatch of `expand`. Returns packed candidates."""
        whole, views = blank(expand_shapes(size, self._executor.tables, depth))
        own = [row for row, _ in lines]
        views["tables"][: len(own)] = self._executor.page_tables(level.pages[own])
        for line, (row, nodes) in enumerate(lines):
            root = self._limits.max_nodes + int(level.slots[row])
            views["kv_len"][line], views["root"][line] = level.kv_len[row], root
            for at, node in enumerate(nodes.tolist()):
                path, parent = paths[node], int(level.parents[node])
                views["tokens"][line, at] = level.tokens[node]
                views["above"][line, at] = root if parent < 0 else parent
                views["number"][line, at] = level.first + node
                views["depth"][line, at] = len(path)
                views["path"][line, at, : len(path)] = path
        return whole

    def _candidates(self, nodes: Ints, candidates: int, first: int = 0) -> Candidates:
        """Return candidates for nodes of the last pass, whose numbers begin at `first`."""
        vocab = self._sizes.vocab
        count = min(vocab, CANDIDATES if candidates <= CANDIDATES else vocab)
        key = Key("candidates", Bucket(FEW, count))
        found = self._executor.programs.parts(key, np.asarray(nodes + first, np.int32))
        whole = np.concatenate(found, 1) if found else np.zeros((2, 0, count), np.int32)
        width = min(candidates, vocab)
        ids, log_probs = whole[0, :, :width], whole[1].view(np.float32)[:, :width]
        return Candidates(np.ascontiguousarray(ids), np.ascontiguousarray(log_probs))
