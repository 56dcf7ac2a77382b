"""The executor's handful of verbs. The engine owns time, the executor owns arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from forerun.draft_shape import DraftShape
from forerun.errors import EngineError
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints


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
    row_nodes     by rows of a step, beginning with one: nodes of one of them at most; () = as many
                  as there is room for
    checkpoints   recurrent states that are kept at ends of pages, beside one of each slot, of a
                  model that has such; see `Executor.resumable`
    """

    page_size: int
    pages: int
    slots: int
    max_nodes: int
    context: int
    vocab: int
    max_scored: int | None = None
    row_nodes: tuple[int, ...] = ()
    checkpoints: int = 0

    @property
    def scored_nodes(self) -> int:
        """Nodes in one step whose logits choose a token, as a number: max_nodes where `max_scored`
        is None.
        """
        return min(self.max_scored or self.max_nodes, self.max_nodes)


class NotYetError(EngineError):
    """Raised by `Executor.begin_after`, which has changed nothing: the plan is to be made anew when
    the running round is finished.
    """


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executor can do that not all of them can.

    masks_first  it decides rows under a grammar within the round: their masks are given to `begin`.
                 Else they are made while the round runs, and given to `finish`
    overlap      a round can go on from a running one (`Executor.begin_after`)
    first_steps  how many steps of a size take longer than the ones after them, because something is
                 compiled, captured or paged in
    padded       a step computes as many nodes of every row as the one with most has
    unwritten    a step may read pages that were never written: its results mean nothing, but it
                 takes the usual time, so steps behind long texts can be timed at the start
    """

    masks_first: bool = False
    overlap: bool = False
    first_steps: int = 2
    padded: bool = False
    unwritten: bool = False


class Executor(Protocol):
    """Runs a target model. One thread calls it: `open`, then `begin` and `finish` for every step
    that the sequence has a part in, then `close`.

    Same sequence, same bits: a row's result must not depend on the other rows, on the
    draft tokens beside its path, or on how its known tokens were cut into chunks.

    Rounds are finished in the order in which they were begun, each before the one after the next is
    begun. A round that goes on from a running one advances the same sequences, or some of them, and
    the slots of both stay open until both are finished.
    """

    limits: ExecutorLimits
    name: str
    capabilities: Capabilities

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to slot `slot_init.slot`: sampling parameters and token history.

        Changes only that slot. Raises EngineError where the slot is already open, or a token is
        outside the vocabulary.
        """
        ...

    def resumable(self, tokens: Ints, salt: bytes = b"") -> int:
        """How many of `tokens` int32[T], which fill cached pages of this salt, a sequence may go on
        behind: all, where keys and values are what a layer keeps of a text. A recurrent state is
        there for some beginnings only; of the longest of these the tokens, full pages of them.
        What it says is true until the next `begin` or `finish`.
        """
        return len(tokens)

    def close(self, slot: int) -> None:
        """Forget a slot's sequence; its pages now belong to the engine alone. A closed slot is no
        error.
        """
        ...

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> Round:
        """Score every node of every tree in one forward pass, on a device that may still be at it
        afterwards.

        trees  what to verify
        masks  of grammars, by node of `trees`: see `Capabilities.masks_first`

        Writes no page, except where known tokens belong (they become permanent whatever is
        accepted) and where the round decides by itself. Raises EngineError where the plan is too
        large or a position has no page; nothing has begun then.
        """
        ...

    def begin_after(self, running: Round, plan: Plan, ends: Ints) -> Round:
        """Begin a round that goes on from a running one, before anybody has looked at that: where
        `Capabilities.overlap`.

        plan  every row has one in `running`, samples, is held by no grammar, and begins with the
              one token that is decided last; its draft tokens are what `running` drafts. Of all
              else the host knows bounds: `kv_len` is the most it can be, `known` means nothing
        ends  int32[B] positions that the sequence may take up in the end; pages are reserved for
              kv_len + 1 + max_depth, or up to these

        Raises EngineError as `begin`, NotYetError where no round can go on from that one; nothing
        has begun then.
        """
        raise NotYetError(f"no round of {self.name} goes on from another")

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Wait for a round: keep one root-to-node path per tree plus one token of the target's own,
        write the kept keys and values into pages, extend the slots' histories, forget the rest, and
        return the step's one packed copy.

        Afterwards the round's plan and trees are complete, and its outcome is there. Raises
        EngineError where the round failed, or the one that it goes on from did.
        """
        ...

    def warm_up(self, draft: DraftShape, progress: Callable[[str, int, int], None]) -> None:
        """Compile and capture whatever steps with such drafts will run, before the first request,
        once nothing more is asked of the executor that would void it (a draft model). All slots are
        closed.

        draft     the largest drafts that steps will verify; width and depth of what a draft head
                  grows within steps, 0 where none does
        progress  called with (what is prepared, how many are done, how many in total)

        `limits` says afterwards what steps may be. Executors that compile nothing return at once.
        """
        return

    def watch(self, failed: Callable[[str], None]) -> None:
        """Register a listener for the end of service: `failed` is called with one sentence, from
        any thread, when no step can run any more (a process that shares the model is gone), also
        while no step runs.

        An executor in one process never calls it.
        """
        return

    def describe(self) -> dict[str, object]:
        """Facts for /server_info as JSON values: device, dtype, bytes of weights, caches and
        scratch.
        """
        ...

    def shutdown(self) -> None:
        """Release threads, processes and memory. May be called twice; nothing else may be called
        afterwards.
        """
        return
