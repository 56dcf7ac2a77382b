"""The executor interface: the engine decides what runs and when, the executor holds all arrays
(weights, caches, logits).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from forerun.checkpoints.adapter import LoraAdapter
from forerun.draft_shape import DraftShape
from forerun.errors import ConfigError
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.networks.arch import Architecture
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints

MOST_PATH = 64
"""Most draft tokens on one path."""


def window_pages_of(length: int, window: int, page_size: int) -> int:
    """Return the most window pages that a sequence of `length` tokens holds, in addition to those
    of a step's nodes.

    window     positions that a sliding-window layer sees
    page_size  tokens per page
    """
    whole = ceil((window + MOST_PATH) / page_size) + 3
    return min(ceil((length + MOST_PATH) / page_size) + 1, whole)


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """The sizes an executor was built for; only `Executor.warm_up` may lower them.

    page_size     tokens per page
    pages         pages in the pool
    slots         sequences at once
    max_nodes     nodes in one step over all rows (the step's token budget)
    context       longest sequence, in tokens
    vocab         V
    max_scored    most nodes in one step that choose a token: one per row that samples, and its
                  draft tokens; None = max_nodes
    row_nodes     most nodes of one row: entry i is for a step of i + 1 rows; () = limited only by
                  max_nodes
    checkpoints   recurrent states stored at ends of pages, in addition to one per slot, for a
                  model with such layers; see `Executor.reusable_prefix_len`
    window        positions that sliding-window layers see
    window_pages  pages in the pool of sliding-window layers, which free a page once it is more
                  than `window` positions before a sequence's next one; 0 = they keep all pages
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
    window: int = 0
    window_pages: int = 0

    def windows_fit(self, lengths: Iterable[int]) -> bool:
        """Return whether the window pages suffice for sequences of these lengths (tokens) and the
        nodes of one step.
        """
        held = (window_pages_of(length, self.window, self.page_size) for length in lengths)
        step = ceil(self.max_nodes / self.page_size)
        return not self.window_pages or sum(held) + step <= self.window_pages

    def check(self, arch: Architecture) -> None:
        """Raise ConfigError if `vocab` differs from the model's, or `context` exceeds what the
        model was made for.
        """
        if self.vocab != arch.vocab:
            raise ConfigError(f"the limits' vocabulary is {self.vocab}, the model's {arch.vocab}")
        if self.context > arch.context:
            raise ConfigError(f"context is {self.context}, the model was made for {arch.context}")

    @property
    def scored_nodes(self) -> int:
        """`max_scored` as a number: max_nodes if it is None."""
        return min(self.max_scored or self.max_nodes, self.max_nodes)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional abilities of an executor.

    needs_masks_before_forward  the round itself decides constrained rows, so `begin` needs their
                 masks; else masks are computed while the round runs and passed to `finish`
    overlap      a round can begin from a running one (`Executor.begin_after`)
    first_steps  how many steps of a size are slower than later ones, because something is
                 compiled, captured or paged in
    padded       a step computes as many nodes of every row as the row with most nodes has
    unwritten    a step may read pages that were never written: its results are meaningless but its
                 time is typical, so start-up can time steps of long contexts
    timed        most nodes of a step that start-up times, where larger ones are compiled later
    drafts       a round can draft for the next one, as `Plan.on_device_draft` requests
    """

    needs_masks_before_forward: bool = False
    overlap: bool = False
    first_steps: int = 2
    padded: bool = False
    unwritten: bool = False
    timed: int = 1 << 30
    drafts: bool = False


class PageContents(Protocol):
    """Reads, writes and copies the contents of pages between steps. A round that has begun may
    still run: it reads the contents from before.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, summed over the target and every draft model."""
        ...

    def read_page(self, page: int) -> bytes:
        """Return the contents of a full page: keys and values, and what draft models store by page.
        Raises EngineError if there is no such page.
        """
        ...

    def write_page(self, page: int, content: bytes | memoryview) -> None:
        """Write into a page what `read_page` returned, in this executor or one of the same weights,
        drafts and page size. Raises EngineError if the page or the content is invalid.
        """
        ...

    def copy_page(self, source: int, target: int) -> bool:
        """Copy the contents of page `source` to page `target`, for a new sequence that continues in
        the middle of the page. Returns False, and copies nothing, if sequences can continue at page
        boundaries only.
        """
        ...


class WindowContents(Protocol):
    """Reads and writes, between steps, the keys and values that sliding-window layers hold for a
    page. They are freed once the page is behind every window.
    """

    @property
    def window_page_bytes(self) -> int:
        """Bytes of these keys and values per page."""
        ...

    def needed(self, pages: int) -> range:
        """Return the page numbers, within a sequence, that a text needs window contents of to
        continue after its first `pages` pages.
        """
        ...

    def has_window(self, page: int) -> bool:
        """Return whether the window contents of this page are in memory."""
        ...

    def reusable_prefix_len(self, pages: Ints) -> int:
        """Return the tokens of the longest prefix that a new sequence can reuse, of a text whose
        first pages are int32[n].
        """
        ...

    def read_window(self, page: int) -> bytes | None:
        """Return the window contents of a full page; None if they were freed."""
        ...

    def write_window(self, page: int, content: bytes | memoryview) -> bool:
        """Store what `read_window` returned, in this executor or one of the same weights and page
        size, so that a text can continue after this page. May free contents that no sequence reads.
        Returns False if there is no room. Raises EngineError if the page or the content is invalid.
        """
        ...


class StateContents(Protocol):
    """Reads and writes, between steps, the recurrent states stored at ends of pages
    (`Executor.reusable_prefix_len`).
    """

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, summed over all layers."""
        ...

    def state_lengths(self, tokens: Ints, salt: bytes = b"") -> list[int]:
        """Return the lengths, ascending, of the prefixes of `tokens` int32[T] with this salt whose
        states are stored.
        """
        ...

    def read_state(self, tokens: Ints, salt: bytes = b"") -> bytes | None:
        """Return the state after `tokens` int32[T] with this salt; None if it is not stored."""
        ...

    def write_state(self, tokens: Ints, content: bytes | memoryview, salt: bytes = b"") -> bool:
        """Store what `read_state` returned, in this executor or one of the same weights, in place
        of the least recently used state. Returns False if there is room for none. Raises
        EngineError if the content is invalid.
        """
        ...


class Executor(Protocol):
    """Runs a target model. One thread calls it: `open`, then `begin` and `finish` for every step of
    the sequence, then `close`.

    Same sequence, same bits: a row's result must not depend on the other rows, on the draft tokens
    beside its path, or on how its known tokens were cut into chunks.

    pages            reads, writes and copies page contents; None = unsupported
    state_contents   reads and writes recurrent states, which a text needs in addition to pages to
                     continue; None if no layer has any
    window_contents  reads and writes what sliding-window layers hold; None if no layer frees pages

    Rounds finish in the order in which they began, and at most two are begun and unfinished. A
    round that begins from a running one advances the same sequences, or some of them, and the slots
    of both stay open until both are finished.
    """

    limits: ExecutorLimits
    name: str
    capabilities: Capabilities
    pages: PageContents | None = None
    state_contents: StateContents | None = None
    window_contents: WindowContents | None = None

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to slot `slot_init.slot`: sampling parameters and token history.

        Changes only that slot. Raises EngineError if the slot is already open or a token is outside
        the vocabulary.
        """
        ...

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return how many of `tokens` int32[T], which fill the cached `pages` int32[n] of this
        salt, a new sequence can skip.

        All of them if every layer keeps keys and values. Recurrent states, and what layers with a
        window read, exist for some prefixes only: then the length of the longest such prefix, a
        multiple of the page size. Valid until the next `begin` or `finish`.
        """
        return len(tokens)

    def copy_page(self, source: int, target: int) -> bool:
        """Copy a page, see PageContents.copy_page; returns False without `pages`. Call while no
        round runs.
        """
        return self.pages is not None and self.pages.copy_page(source, target)

    def close(self, slot: int) -> None:
        """Discard a slot's sequence; its pages belong to the engine alone from now on. Does nothing
        if the slot is closed.
        """
        ...

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> Round:
        """Start to score every node of every tree in one forward pass; a device may still run it
        after the call.

        trees  what to verify
        masks  of grammars, by node of `trees`: see `Capabilities.needs_masks_before_forward`

        Writes no page, except for known tokens (they become permanent whatever is accepted) and
        where the round decides by itself. Raises EngineError, and begins nothing, if the plan is
        too large or a position has no page.
        """
        ...

    def begin_after(self, running: Round, plan: Plan, ends: Ints) -> Round | None:
        """Begin a round from a running one whose outcome is not read yet. Needs
        `Capabilities.overlap`.

        plan  every row is a row of `running`, samples, has no grammar, and starts with the one
              token decided last; its draft tokens are those that `running` drafts. The host knows
              only bounds: `kv_len` is its upper bound, `known` is ignored
        ends  int32[B] most positions that the sequence may ever take; pages are reserved for kv_len
              + 1 + max_depth positions, or up to `ends`

        Returns None, and begins nothing, if no round can begin from `running`: the engine plans the
        step again once that is finished. Raises EngineError as `begin`.
        """
        return None

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Wait for a round. Accept one path per tree plus one token of the target's own, write the
        accepted keys and values into pages, extend the slots' histories, discard the rest, and
        return the step's one packed copy.

        Sets the round's outcome, and completes its plan and trees. Raises EngineError if the round
        failed, or the one that it began from.
        """
        ...

    def warm_up(self, draft: DraftShape, progress: Callable[[str, int, int], None]) -> None:
        """Compile and capture every step that such drafts need. Called before the first request,
        and again after every call that invalidates it (adding a draft model). All slots are closed.

        draft     the largest drafts that steps will verify; width and depth of what a draft head
                  grows within steps, 0 if none does
        progress  called with (what is prepared, how many are done, how many in total)

        May lower `limits`. Executors that compile nothing return at once.
        """
        return

    def warm_up_rest(self) -> None:
        """Start compiling, in the background, what `warm_up` left to the first step that needs it.
        Returns at once; does nothing if nothing is left. For servers.
        """
        return

    def release_scratch(self) -> None:
        """Free buffers that grow to the largest step so far. Called between steps, after start-up
        has timed larger steps than most requests need.
        """
        return

    def adapt(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Load LoRA adapters, which run on top of the weights for slots that name one by its index
        here (`SlotInit.adapter`). Called at most once, before the first slot is opened. Raises
        ConfigError if the executor supports none, or not these.
        """
        raise ConfigError(
            f"lora-modules: the executor {self.name} runs no adapters; use cpu or torch on one "
            "device, or merge them into the weights."
        )

    def watch(self, failed: Callable[[str], None]) -> None:
        """Register a listener for the end of service: `failed` is called with one sentence, from
        any thread, also between steps, when no step can run any more (a process that shares the
        model has ended).

        An executor in one process never calls it.
        """
        return

    def describe(self) -> dict[str, object]:
        """Return facts for /server_info as JSON values: device, dtype, bytes of weights, caches and
        scratch.
        """
        ...

    def shutdown(self) -> None:
        """Release threads, processes and memory. May be called twice; no other call may follow."""
        return
