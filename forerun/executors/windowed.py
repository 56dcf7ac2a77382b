"""Windowed: a mixin for executors with window pages, which assigns window pages before each
step.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import Executor, PageContents
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints


class Windowed(Executor):
    """Frees window pages behind windows. A mixin: it precedes the executor's own class among the
    bases of one whose limits have window pages.
    """

    windows: WindowPages

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. Raises EngineError if a page that it reads was freed."""
        self.windows.open(slot_init)
        super().open(slot_init)  # type: ignore[safe-super]

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return the number of the cached tokens int32[n] after which a sequence can continue: the
        greatest whose window still has its pages.
        """
        return 0 if pages is None else self.windows.reusable_prefix_len(pages)

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self.windows.close(slot)
        super().close(slot)  # type: ignore[safe-super]

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> Any:
        """Begin a step once all that it reads and writes has a window page."""
        self.windows.begin(plan, trees)
        return super().begin(plan, trees, masks)  # type: ignore[safe-super]

    def begin_after(self, running: Round, plan: Plan, ends: Ints) -> Any:
        """Begin a round on the results of the running one; returns None also if the bounds of the
        sequences' lengths are too far apart.
        """
        if not self.windows.begin_after(plan, ends):
            return None
        return super().begin_after(running, plan, ends)

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Wait for a round, and record its sequences' lengths."""
        outcome = super().finish(round, masks)  # type: ignore[safe-super]
        self.windows.finish(round.plan, outcome)
        return outcome


class WindowPageContents(PageContents, Protocol):
    """Copies the contents of pages, and of window pages by their own numbers."""

    @property
    def window_page_bytes(self) -> int:
        """Bytes of a window page."""
        ...

    def read_window_page(self, page: int) -> bytes:
        """Return the contents of a window page as bytes. Raises EngineError if it does not
        exist.
        """
        ...

    def write_window_page(self, page: int, content: bytes | memoryview) -> None:
        """Write the contents of a window page, as `read_window_page` returned them. Raises
        EngineError if it cannot.
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
        """Implement PageContents.write_page; the page has no window page afterwards."""
        self.windows.forget(page)
        self.contents.write_page(page, content)

    def copy_page(self, source: int, target: int) -> bool:
        """Return False, because only page ends have window pages."""
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
