"""Windowed: what an executor with window pages does before it does what others do."""

from dataclasses import dataclass
from typing import Any, Protocol

from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import Executor, PageContents
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints


class Windowed(Executor):
    """Gives back what lies behind windows. Stands before the executor's own class among the bases
    of one whose limits have window pages.
    """

    windows: WindowPages

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. Raises EngineError if a page that it reads was given
        back.
        """
        self.windows.open(slot_init)
        super().open(slot_init)  # type: ignore[safe-super]

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return how many of the cached tokens int32[n] a sequence may continue behind: the most
        whose window still has its pages.
        """
        return 0 if pages is None else self.windows.reusable_prefix_len(pages)

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self.windows.close(slot)
        super().close(slot)  # type: ignore[safe-super]

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> Any:
        """Begin a step once all that it reads and writes has its place."""
        self.windows.begin(plan, trees)
        return super().begin(plan, trees, masks)  # type: ignore[safe-super]

    def begin_after(self, running: Round, plan: Plan, ends: Ints) -> Any:
        """Begin a round on what the running one leaves; None also where the host knows too little
        of the sequences' lengths.
        """
        if not self.windows.begin_after(plan, ends):
            return None
        return super().begin_after(running, plan, ends)

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Wait for a round, and learn its sequences' lengths."""
        outcome = super().finish(round, masks)  # type: ignore[safe-super]
        self.windows.finish(round.plan, outcome)
        return outcome


class WindowPageContents(PageContents, Protocol):
    """Copies pages, and window pages by their own numbers."""

    @property
    def window_page_bytes(self) -> int:
        """Bytes of a window page."""
        ...

    def read_window_page(self, page: int) -> bytes:
        """Return what a window page holds. Raises EngineError if it does not exist."""
        ...

    def write_window_page(self, page: int, content: bytes | memoryview) -> None:
        """Make a window page hold what `read_window_page` returned. Raises EngineError if it
        cannot.
        """
        ...


@dataclass(frozen=True, slots=True)
class WindowedPages:
    """PageContents and WindowContents of an executor with these window pages."""

    contents: WindowPageContents
    windows: WindowPages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page without its window page."""
        return self.contents.page_bytes

    def read_page(self, page: int) -> bytes:
        """Implement PageContents.read_page."""
        return self.contents.read_page(page)

    def write_page(self, page: int, content: bytes | memoryview) -> None:
        """Implement PageContents.write_page: nothing is known of its window."""
        self.windows.forget(page)
        self.contents.write_page(page, content)

    def copy_page(self, source: int, target: int) -> bool:
        """Return False: windows are there for ends of pages alone."""
        return False

    @property
    def window_page_bytes(self) -> int:
        """Bytes of a window page."""
        return self.contents.window_page_bytes

    def needed(self, pages: int) -> range:
        """Implement WindowContents.needed."""
        return self.windows.needed(pages)

    def reusable_prefix_len(self, pages: Ints) -> int:
        """Implement WindowContents.reusable_prefix_len."""
        return self.windows.reusable_prefix_len(pages)

    def has_window(self, page: int) -> bool:
        """Implement WindowContents.has_window."""
        return bool(self.windows.of[page] >= 0)

    def read_window(self, page: int) -> bytes | None:
        """Implement WindowContents.read_window."""
        own = int(self.windows.of[page])
        return None if own < 0 else self.contents.read_window_page(own)

    def write_window(self, page: int, content: bytes | memoryview) -> bool:
        """Implement WindowContents.write_window."""
        if self.has_window(page):
            return True
        if (own := self.windows.restore(page)) is None:
            return False
        self.contents.write_window_page(own, content)
        return True
