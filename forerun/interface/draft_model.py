"""The interface between a model drafter (host) and a draft model (arrays on a device).

A draft model is any network that proposes tokens: a head that reads the target's features, a second
small decoder, the target's own prediction layers, a network that proposes a block in one pass.
It declares what it needs (`DraftModelTraits`) and has three verbs: `extend`, `expand`, `block`. Its
cache uses the target's page table: it holds position p of a sequence where the target holds it.

A sequence has n decided tokens t_0 .. t_{n-1}; the target has not run the last one yet, so it has
n - 1 positions in its pages. `extend` brings the draft's cache to the same n - 1 positions;
t_{n-1} is the *root* of the next tree. The model stores what it needs of the root (a hidden state,
its keys and values) by slot.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from forerun.errors import EngineError
from forerun.interface.features import Features
from forerun.networks.cache_layer import CacheLayer
from forerun.types import Floats, Ints

CANDIDATES = 64
"""Most probable candidates that noise may reorder: a less probable token is hardly ever chosen."""


@dataclass(frozen=True, slots=True)
class FeatureNeeds:
    """The hidden states of the target that a draft model reads.

    kind    none; last: the last hidden state, after the target's final norm; aux: aux hidden
            states, the residual streams inside the target
    layers  for aux: transformers' hidden_states indices. 0 = the embeddings, i = the input of layer
            i, L = the output of the last layer, before the final norm
    """

    kind: Literal["none", "last", "aux"] = "none"
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DraftModelTraits:
    """The fixed properties of a draft model.

    name        shown in statistics
    cache       what each of its layers caches per position; empty = it has no cache of its own
    target_ids  int32[Vd] target id of every draft id
    max_nodes   limit of draft nodes, and of tokens of an extension, in one pass
    features    which hidden states of the target it reads
    block_size  0: it proposes level by level (`expand`); else the most draft tokens it proposes at
                once (`block`)
    confident   it returns a confidence for its best token at each node
    runs_roots  `extend` also computes the root's keys and values and stores them by slot
    """

    name: str
    cache: tuple[CacheLayer, ...]
    target_ids: Ints
    max_nodes: int
    features: FeatureNeeds = field(default_factory=FeatureNeeds)
    block_size: int = 0
    confident: bool = False
    runs_roots: bool = False

    @property
    def vocab(self) -> int:
        """Vd, the number of draft ids: the length of `target_ids`."""
        return len(self.target_ids)


@dataclass(frozen=True, slots=True)
class DraftExtension:
    """Tokens that became permanent in R rows.

    tokens       int32[n]    target ids; those of row r begin at position kv_len[r]
    next_tokens  int32[n]    the decided token after each; the last one of a row is its root
    start        int32[R+1]  row r owns tokens start[r]:start[r+1], at least one
    kv_len       int32[R]    cached draft positions the row sees
    slots        int32[R]
    pages        int32[R,W]  as Plan.page_table
    scored       int32[s]    indices of tokens to return next-token candidates for; the last token
                             of a row is always allowed
    candidates   how many candidates to return for each, the most probable ones
    """

    tokens: Ints
    next_tokens: Ints
    start: Ints
    kv_len: Ints
    slots: Ints
    pages: Ints
    scored: Ints
    candidates: int

    @property
    def position(self) -> Ints:
        """int32[n]: each token's position in its own sequence, counted from the prompt's first
        token.
        """
        lengths = np.diff(self.start)
        begins = np.repeat(self.kv_len - self.start[:-1], lengths)
        return (begins + np.arange(len(self.tokens))).astype(np.int32)


@dataclass(frozen=True, slots=True)
class DraftLevel:
    """One level of draft tokens to run, in the trees of R rows.

    tokens      int32[n]    target ids, one per node
    parents     int32[n]    draft node above; -1 = the row's root
    start       int32[R+1]  row r owns nodes start[r]:start[r+1]
    kv_len      int32[R]    cached draft positions the row sees
    slots       int32[R]
    pages       int32[R,W]  as Plan.page_table
    first       draft node number of node 0; a level with first 0 discards all earlier draft nodes
    candidates  how many candidates to return for each node, the most probable ones
    """

    tokens: Ints
    parents: Ints
    start: Ints
    kv_len: Ints
    slots: Ints
    pages: Ints
    first: int
    candidates: int


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The roots of R rows, below each of which a draft model proposes a block.

    roots       int32[R]    the decided token that the target has not run yet
    kv_len      int32[R]    cached draft positions the row sees; also the root's own position
    slots       int32[R]
    pages       int32[R,W]  as Plan.page_table
    depth       draft tokens of the block, at most the traits' block_size
    candidates  how many candidates to return at each depth, the most probable ones
    """

    roots: Ints
    kv_len: Ints
    slots: Ints
    pages: Ints
    depth: int
    candidates: int

    def part(self, begin: int, end: int) -> "DraftBlock":
        """Return rows `begin` to `end` - 1 as a block of its own, for rows that do not fit into one
        pass. Its arrays are views.
        """
        rows = slice(begin, end)
        parts = self.roots[rows], self.kv_len[rows], self.slots[rows], self.pages[rows]
        return DraftBlock(*parts, self.depth, self.candidates)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most probable next tokens of s nodes, best first; nothing else is copied from the device.

    ids        int32[s,k]    draft ids; k is the requested number or more, or the whole vocabulary
    log_probs  float32[s,k]  in nats, at temperature 1
    """

    ids: Ints
    log_probs: Floats


@dataclass(frozen=True, slots=True)
class Children:
    """Candidates for the token after one path of draft tokens, best first, from a block drafter.

    ids, log_probs  int32[k], float32[k]  as in Candidates, of one node
    confidence      estimated probability that the best token is right; None = no estimate
    """

    ids: Ints
    log_probs: Floats
    confidence: float | None


class PairCandidates(Protocol):
    """Candidates of blocks in which a draft token depends on the tokens above it."""

    def below(self, row: int, path: tuple[int, ...]) -> Children:
        """Return the candidates for the token after the draft tokens `path` (target ids) below the
        root of row `row` of the block.
        """
        ...


@dataclass(frozen=True, slots=True)
class BlockCandidates:
    """The most probable tokens at each depth of R blocks, best first.

    ids        int32[R,depth,k]    draft ids, k as in Candidates
    log_probs  float32[R,depth,k]  marginals in nats, at temperature 1: independent of tokens above
    pairs      candidates that depend on the tokens above; None = the marginals are all there is
    """

    ids: Ints
    log_probs: Floats
    pairs: PairCandidates | None = None


def no_candidates(scored: int) -> Candidates:
    """Return Candidates of shape [0,0], the answer of a block drafter to `DraftModel.extend`.

    scored  number of tokens whose candidates the extension requests

    Raises EngineError if that is not 0: a block drafter proposes through `block` only.
    """
    if scored:
        raise EngineError("a block drafter has no candidates of single nodes")
    return Candidates(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))


class DraftModel(Protocol):
    """A draft model on the device that holds its arrays."""

    traits: DraftModelTraits

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run tokens that became permanent: append their entries to the draft's cache, and store by
        slot what the model needs of each row's root.

        extension  n tokens of R rows
        features   n rows, one per token; None exactly if `traits.features.kind` is "none"

        Returns Candidates [s,k] of the tokens in `extension.scored`; s = 0 if the model proposes
        blocks. Raises EngineError, and changes nothing, if a shape, slot, page or position is
        invalid or there are more than `traits.max_nodes` tokens.
        """
        ...

    def expand(self, level: DraftLevel) -> Candidates:
        """Run one level of draft tokens. Returns Candidates [n,k], at least `level.candidates` per
        node or the whole vocabulary.

        The nodes' keys and values last until the next level with `first` 0; nothing permanent
        changes. Raises EngineError if `level` is invalid or the model proposes blocks.
        """
        ...

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Propose a block below each of R roots in one pass. Returns BlockCandidates [R,depth,k].

        Changes nothing permanent. Raises EngineError if `block` is invalid or the model proposes
        level by level.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info as JSON values, such as kind, dtype and bytes of
        weights.
        """
        ...
