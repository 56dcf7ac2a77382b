"""What pages hold, in the target's cache and in those of draft models: as bytes."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.attention.kv import PagedCache, indices
from forerun.executors.torch.attention.window_cache import window_cache
from forerun.executors.torch.drafts.draft_cache import states_of
from forerun.executors.torch.executor import TorchExecutor


class TorchPages:
    """PageContents of an executor in one process, and of the models that draft with it."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(part.numel() * part.element_size() for part in self._parts(0))

    @property
    def window_page_bytes(self) -> int:
        """Bytes of a window page."""
        return sum(part.numel() * part.element_size() for part in self._window_parts(0))

    def read_page(self, page: int) -> bytes:
        """Return what a page holds, but for what is in window pages. Raises EngineError if it does
        not exist.
        """
        return self._read(self._parts(page))

    def write_page(self, page: int, content: bytes | memoryview) -> None:
        """Make a page hold what `read_page` returned. Raises EngineError if it cannot."""
        if len(content) != self.page_bytes:
            raise EngineError(f"{len(content)} bytes are not a page of {self.page_bytes}")
        self._write(self._parts(page), content)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> bool:
        """Make page `target` hold what `source` does. Returns False where layers are recurrent or
        give pages back, or read each other's states: these are there for ends of pages alone.
        """
        executor, size = self._executor, self._executor.limits.page_size
        recurrent = executor.states is not None or any(map(states_of, executor.drafts))
        if recurrent or executor.limits.window_pages:
            return False
        begin, end = (page * size + np.arange(size, dtype=np.int64) for page in (source, target))
        executor.move(begin, end)
        begins, ends = (indices(slots, executor.device) for slots in (begin, end))
        for model in executor.drafts:
            model.cache.paged.move(begins, ends)
        return True

    def read_window_page(self, page: int) -> bytes:
        """Return what a window page holds. Raises EngineError if it does not exist."""
        return self._read(self._window_parts(page))

    def write_window_page(self, page: int, content: bytes | memoryview) -> None:
        """Make a window page hold what `read_window_page` returned. Raises EngineError if it
        cannot.
        """
        if len(content) != self.window_page_bytes:
            raise EngineError(
                f"{len(content)} bytes are not a window page of {self.window_page_bytes}"
            )
        self._write(self._window_parts(page), content)

    @torch.inference_mode()
    def _read(self, parts: Iterator[Tensor]) -> bytes:
        flat = [part.contiguous().view(torch.uint8).flatten() for part in parts]
        return bytes(torch.cat(flat).cpu().numpy().tobytes())

    @torch.inference_mode()
    def _write(self, parts: Iterator[Tensor], content: bytes | memoryview) -> None:
        left = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).to(self._executor.device)
        for part in parts:
            own, left = left.tensor_split([part.numel() * part.element_size()])
            # Parts begin where those before them end, which is no multiple of every number's size.
            part.copy_(own.clone().view(part.dtype).view(part.shape))

    def _window_parts(self, page: int) -> Iterator[Tensor]:
        """Yield views of what belongs to a window page, in the same order for every one."""
        limits = self._executor.limits
        if not 0 <= page < limits.window_pages:
            raise EngineError(f"there is no window page {page} of {limits.window_pages}")
        size = limits.page_size
        return _of_cache(window_cache(self._executor.cache), page * size, size)

    def _parts(self, page: int) -> Iterator[Tensor]:
        """Yield views of what belongs to a page, in the same order for every page."""
        size, pages = self._executor.limits.page_size, self._executor.limits.pages
        if not 0 <= page < pages:
            raise EngineError(f"there is no page {page} of {pages}")
        caches = [self._executor.cache]
        for model in self._executor.drafts:
            caches.append(model.cache.paged)
        for cache in caches:
            yield from _of_cache(cache, page * size, size)
        for model in self._executor.drafts:
            if (states := states_of(model)) is not None:
                outputs: Tensor = model.outputs  # type: ignore[attr-defined]
                yield outputs.narrow(0, states.pages + page, 1)


def _of_cache(cache: PagedCache, begin: int, count: int) -> Iterator[Tensor]:
    for part in cache.parts:
        yield part.numbers.narrow(3, begin, count)
        if part.scales is not None:
            yield part.scales.narrow(3, begin, count)
