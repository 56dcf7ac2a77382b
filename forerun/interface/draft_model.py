"""The contract between the head drafter (host) and a draft head (arrays, on some device)."""

from dataclasses import dataclass
from typing import Any, Protocol

from forerun.types import Bools, Floats, Ints

CANDIDATES = 64
"""Children by probability that noise may reorder: what lies below is hardly ever the choice."""


@dataclass(frozen=True, slots=True)
class DraftForward:
    """Nodes that hang below their rows' cached positions, for one pass of a draft head.

    An *extension* reads the target's true features: a row's nodes are a chain, node n reads the
    features of node sources[n] of the target's last step (or, where `features` is given, row n
    of that, kept from an earlier step), and all become permanent. Otherwise
    the nodes are the head's own draft tokens: node n reads the output of draft node sources[n] or,
    where that is negative, what slot -1 - sources[n] kept of its last extension.

    tokens   int32[n]    the target's ids; node n stands for this token
    sources  int32[n]
    parents  int32[n]    draft node above, -1 = only cached positions; -1 in extensions
    start    int32[R+1]  row r owns nodes start[r]:start[r+1]
    kv_len   int32[R]    cached draft positions the row sees
    slots    int32[R]
    pages    int32[R,W]  as Plan.page_table
    first    draft node number of node 0; a pass with first 0 forgets all earlier draft nodes
    scored   int32[s]    nodes whose children are wanted
    children how many of them: the likeliest
    features float32[n,F*H] as `DraftModel.features` gave them, or None
    """

    tokens: Ints
    sources: Ints
    parents: Ints
    start: Ints
    kv_len: Ints
    slots: Ints
    pages: Ints
    first: int
    scored: Ints
    children: int
    features: Floats | None = None


@dataclass(frozen=True, slots=True)
class Children:
    """The likeliest children of the scored nodes, best first: all that leaves a device.

    ids        int32[s,k]    draft ids; k = what was asked, or all there are
    log_probs  float32[s,k]  in nats, at temperature 1
    """

    ids: Ints
    log_probs: Floats


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What the target's next step shall do for the head, if it can do that by itself.

    slots   int32[.] of sequences that the head has followed so far: it goes on following them
    width   children per node, and nodes expanded per level
    levels  of draft tokens, at least one
    """

    slots: Ints
    width: int
    levels: int


@dataclass(frozen=True, slots=True)
class GrownDrafts:
    """What came of a wish. K = forerun.speculative.draft_tree.full_size(width, levels).

    rows    bool[B]      rows of the step that were extended by all that became permanent, as
                         `DraftModel.extend` would, and below whose new end a tree was grown
    width, levels        of the trees; they are full
    tokens  int32[B,K]   target ids; a tree's nodes in the order of
                         forerun.speculative.draft_tree.Growth
    parents int32[B,K]   as in Draft
    value   float32[B,K] as in Growth, the noise of sampling included; -inf = no such node
    """

    rows: Bools
    width: int
    levels: int
    tokens: Ints
    parents: Ints
    value: Floats


class DraftModel(Protocol):
    """A draft head where its arrays live. Its cache uses the target's page table."""

    max_nodes: int
    vocab: int

    def features(self, nodes: Ints) -> Floats:
        """float32[n,F*H] of nodes int32[n] of the target's last step, to be kept for later."""
        ...

    def extend(self, work: DraftForward) -> Children:
        """Run an extension: its keys and values become permanent, and each row's last output is
        kept by slot. Raises EngineError, and changes nothing, where `work` is not sound.
        """
        ...

    def expand(self, work: DraftForward) -> Children:
        """Run own draft tokens. Raises EngineError where `work` is not sound."""
        ...

    def draft_request(self, draft_request: DraftRequest) -> None:
        """Called before a step of the target, after all passes for its draft tokens. It counts for
        that step only; a device may leave it unheard.
        """
        ...

    def grown(self) -> GrownDrafts | None:
        """What the target's last step did of the wish before it; None = nothing."""
        ...

    def following(self) -> Ints:
        """int32[.] slots for which the target's running step does what was wished; none are, where
        no step runs on after `Executor.verify`.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        ...
