"""The contract between a model drafter (host) and a draft model (arrays, on some device).

A draft model is any network that proposes: a head that reads the target's features, a second
small decoder, the target's own prediction layers, a drafter that proposes a block in one pass.
It declares what it needs (`DraftModelTraits`) and has three verbs. Its cache uses the target's
page table: position p of a sequence is where the target's is.

After n decided tokens t_0 .. t_{n-1}, of which the last was not yet run by the target, the target
has n - 1 positions in its pages. `extend` brings the draft's cache to the same n - 1 positions;
t_{n-1} is the *root* of the next tree. What a model must remember of the root (a hidden state, its
keys and values) it keeps by slot.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from forerun.errors import EngineError
from forerun.interface.features import Features
from forerun.models.cache_layer import CacheLayer
from forerun.types import Floats, Ints

CANDIDATES = 64
"""Candidates by probability that noise may reorder: what lies below is hardly ever the choice."""


@dataclass(frozen=True, slots=True)
class FeatureNeeds:
    """Which hidden states of the target a draft model reads.

    kind    none; last: the last hidden state, after the target's final norm; aux:
            aux hidden states, the residual streams inside of the target
    layers  of aux: transformers' hidden_states indices. 0 = the embeddings, i = what enters layer
            i, L = what leaves the last layer, before the final norm
    """

    kind: Literal["none", "last", "aux"] = "none"
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DraftModelTraits:
    """What a draft model is; fixed for its life.

    name        shown in statistics
    cache       what each of its layers keeps of a position; empty = no cache of its own
    target_ids  int32[Vd] target id of every draft id
    max_nodes   draft nodes, and tokens of an extension, of one pass at most
    features    what it reads of the target
    block_size  0: it proposes level by level (`expand`); else a block of at most so many draft
                tokens at once (`block`)
    runs_roots  it keeps keys and values of a row's root by slot, made when it is extended
    """

    name: str
    cache: tuple[CacheLayer, ...]
    target_ids: Ints
    max_nodes: int
    features: FeatureNeeds = field(default_factory=FeatureNeeds)
    block_size: int = 0
    runs_roots: bool = False

    @property
    def vocab(self) -> int:
        """Vd, the number of draft ids: the length of `target_ids`."""
        return len(self.target_ids)


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens that became permanent in R rows.

    tokens       int32[n]    the target's ids; row r's stand at positions kv_len[r], kv_len[r]+1, ..
    next_tokens  int32[n]    the decided token after each; a row's last is its root
    start        int32[R+1]  row r owns tokens start[r]:start[r+1], at least one
    kv_len       int32[R]    cached draft positions the row sees
    slots        int32[R]
    pages        int32[R,W]  as Plan.page_table
    scored       int32[s]    tokens for whose next_tokens the candidates are wanted; the last of a
                             row can always be asked for
    candidates   how many of them: the likeliest
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
    """Draft tokens to run: a level of the trees of R rows.

    tokens      int32[n]    the target's ids; node n stands for this token
    parents     int32[n]    draft node above; -1 = the row's root
    start       int32[R+1]  row r owns nodes start[r]:start[r+1]
    kv_len      int32[R]    cached draft positions the row sees
    slots       int32[R]
    pages       int32[R,W]  as Plan.page_table
    first       draft node number of node 0; a level with first 0 forgets all earlier draft nodes
    candidates  how many are wanted for each node: the likeliest
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
    """Rows below whose roots a block shall be proposed.

    roots       int32[R]    the decided token that the target has not run yet
    kv_len      int32[R]    cached draft positions the row sees; the root's own position
    slots       int32[R]
    pages       int32[R,W]  as Plan.page_table
    depth       draft tokens of the block, at most the traits' block_size
    candidates  how many are wanted at each depth: the likeliest
    """

    roots: Ints
    kv_len: Ints
    slots: Ints
    pages: Ints
    depth: int
    candidates: int

    def part(self, begin: int, end: int) -> "DraftBlock":
        """The block of rows `begin` to before `end` alone, same depth and candidates; its arrays
        are views.

        Used where rows do not all fit into one pass.
        """
        rows = slice(begin, end)
        mine = self.roots[rows], self.kv_len[rows], self.slots[rows], self.pages[rows]
        return DraftBlock(*mine, self.depth, self.candidates)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of s nodes, best first: all that leaves a device.

    ids        int32[s,k]    draft ids; k is what was asked or more, or all there are
    log_probs  float32[s,k]  in nats, at temperature 1
    """

    ids: Ints
    log_probs: Floats


@dataclass(frozen=True, slots=True)
class BlockCandidates:
    """The likeliest tokens at each depth of R blocks, best first.

    ids        int32[R,depth,k]    draft ids, k as in Candidates
    log_probs  float32[R,depth,k]  in nats, at temperature 1: marginals, whatever stands above
    """

    ids: Ints
    log_probs: Floats


def no_candidates(scored: int) -> Candidates:
    """The answer of a block drafter to `DraftModel.extend`: Candidates of shape [0,0].

    scored  how many tokens' candidates the extension asked for

    Raises EngineError where that is not 0: a block drafter proposes through `block` only.
    """
    if scored:
        raise EngineError("a block drafter has no candidates of single nodes")
    return Candidates(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))


class DraftModel(Protocol):
    """A draft model where its arrays live."""

    traits: DraftModelTraits

    def extend(self, extension: Extension, features: Features | None) -> Candidates:
        """Run tokens that became permanent: append their entries to the draft's cache, and keep by
        slot what the model needs of each row's root.

        extension  n tokens of R rows
        features   n rows, one per token; None exactly where `traits.features.kind` is "none"

        Returns Candidates [s,k] of the tokens in `extension.scored`, s = 0 where the model proposes
        blocks. Raises EngineError, and changes nothing, where a shape, slot, page or position is
        not sound, or where there are more than `traits.max_nodes` tokens.
        """
        ...

    def expand(self, level: DraftLevel) -> Candidates:
        """Run one level of draft tokens and return Candidates [n,k] for each, at least
        `level.candidates` per node or all there are.

        Their keys and values last until the next level with `first` 0; nothing permanent changes.
        Raises EngineError where `level` is not sound, or the model proposes blocks.
        """
        ...

    def block(self, block: DraftBlock) -> BlockCandidates:
        """Propose a block below each of R roots in one pass: BlockCandidates [R,depth,k].

        Changes nothing permanent. Raises EngineError where `block` is not sound, or the model
        proposes level by level.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info as JSON values, such as kind, dtype and bytes of weights. Changes
        nothing.
        """
        ...
