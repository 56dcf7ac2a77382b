"""The executor's handful of verbs. The engine owns time, the executor owns arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import CarriedPlan, Outcome, Plan, SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints

Scores = Any
"""Opaque: an executor's node scores, between `verify` and `commit` of one step."""

Accepted = Any
"""Opaque: which path of each tree was kept, between `accept` and `commit`."""


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What an executor was built for; fixed for its life.

    page_size     tokens per page
    pages         pages in the pool
    slots         sequences at once
    max_nodes     nodes in one step over all rows (the step's token budget)
    context       longest sequence, tokens
    vocab         V
    max_scored    nodes in one step whose logits choose a token: one per row that samples, and its
                  draft tokens. No step has more; None: as many as nodes
    row_nodes     by rows of a step, beginning with one: nodes of one of them at most, where every
                  row takes as much as the largest; () = as many as there is room for
    """

    page_size: int
    pages: int
    slots: int
    max_nodes: int
    context: int
    vocab: int
    max_scored: int | None = None
    row_nodes: tuple[int, ...] = ()

    @property
    def scored_nodes(self) -> int:
        """`max_scored` as a number."""
        return min(self.max_scored or self.max_nodes, self.max_nodes)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The largest drafts that steps will verify.

    nodes   draft tokens of a row
    width   children per node, and
    levels  depth, of what a draft head grows within steps; 0 where none does
    """

    nodes: int = 0
    width: int = 0
    levels: int = 0


class Executor(Protocol):
    """Runs a target model. One thread calls it; verbs come in the order of `engine.step`.

    Same sequence, same bits: a row's result must not depend on the other rows, on the
    draft tokens beside its path, or on how its known tokens were cut into chunks.
    """

    limits: ExecutorLimits
    name: str

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. The slot must be closed. Changes only that slot."""
        ...

    def close(self, slot: int) -> None:
        """Forget a slot's sequence; its pages now belong to the engine alone."""
        ...

    def verify(
        self, plan: Plan, trees: TreeBatch, draft_request: DraftRequest | None = None
    ) -> Scores:
        """Score every node of every tree in one forward pass. Writes no page, except where known
        tokens belong: they become permanent whatever is accepted.

        draft_request  what the step shall do for the draft model; `Outcome.drafts` says what of it
                       was done, which may be nothing
        """
        ...

    def accept(
        self, plan: Plan, trees: TreeBatch, scores: Scores, masks: NodeMasks | None
    ) -> Accepted:
        """Keep one root-to-node path per tree plus one token of the target's own."""
        ...

    def commit(self, plan: Plan, trees: TreeBatch, scores: Scores, accepted: Accepted) -> Outcome:
        """Write the kept keys and values into pages, extend the slots' history, forget the
        rest, and return the step's one packed copy.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info: device, dtype, bytes of weights, caches and scratch."""
        ...

    def shutdown(self) -> None:
        """Release threads and memory. Idempotent."""
        ...


@runtime_checkable
class PreparedExecutor(Executor, Protocol):
    """An executor that is slow until it has compiled and captured what steps will run."""

    def warm_up(self, draft: DraftShape, progress: Callable[[str, int, int], None]) -> None:
        """Compile and capture all that service may run, before the first request, when nothing more
        is asked of the executor that would void it (features, overlap). All slots are closed.
        `limits` says afterwards what steps may be. progress(what, done, total).
        """
        ...


@runtime_checkable
class MaskingExecutor(Executor, Protocol):
    """An executor that decides rows under a grammar within the step itself, where their masks are
    known when it begins.
    """

    def verify_masked(
        self,
        plan: Plan,
        trees: TreeBatch,
        masks: NodeMasks | None,
        draft_request: DraftRequest | None = None,
    ) -> Scores:
        """`verify`, of a step of which some rows are held by grammars. `accept` of these scores
        needs no masks.
        """
        ...


@runtime_checkable
class OverlapExecutor(Executor, Protocol):
    """An executor whose device can go on with the next step before anybody looks at this one.

    A carried step is begun by `carry` instead of `verify`, while the one before it runs; it
    advances the same sequences, or some of them, and the slots of both stay open until both are
    over. Then `accept` and `commit` are called for the first, with what `verify` gave, and for the
    second, with `trees` and the plan completed. No more than two steps run at a time.
    """

    def keep_state(self) -> bool:
        """Keep on the device, from now on, what a next step needs. False where that cannot be."""
        ...

    def carries(self, scores: Scores) -> bool:
        """Whether the step that was begun last may be carried on from: the device decides all of
        it, and nothing else is to be read of it.
        """
        ...

    def drafting(self, scores: Scores) -> Ints:
        """int32[.] slots for which a step does what its draft request asks. Waits for nothing."""
        ...

    def carry(self, plan: CarriedPlan, draft_request: DraftRequest | None = None) -> Scores | None:
        """Begin a carried plan. None, and nothing has changed, where it must be planned anew when
        the running step has been looked at.
        """
        ...

    def trees(self, scores: Scores) -> TreeBatch:
        """What a carried step ran. Waits until it is over."""
        ...
