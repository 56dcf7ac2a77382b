"""The contents of pages as bytes, in the target's cache and in those of draft models."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.attention.kv import PagedCache, bytes_of, indices, put_bytes
from forerun.executors.torch.attention.window_cache import window_cache
from forerun.executors.torch.drafts.level_model import LevelModel
from forerun.executors.torch.executor import TorchExecutor


class TorchPages:
    """PageContents of an executor in one process, and of its draft models."""

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

    @torch.inference_mode()
    def read_page(self, page: int) -> bytes:
        """Return a page's contents, without those in window pages. Raises EngineError if it does
        not exist.
        """
        return bytes_of(self._parts(page))

    @torch.inference_mode()
    def write_page(self, page: int, content: bytes | memoryview) -> None:
        """Write a page's contents, as `read_page` returned them. Raises EngineError if it
        cannot.
        """
        if len(content) != self.page_bytes:
            raise EngineError(f"{len(content)} bytes are not a page of {self.page_bytes}")
        put_bytes(self._parts(page), content)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> bool:
        """Copy the contents of page `source` to page `target`. Returns False, without a copy, if
        layers are recurrent, have window pages, or read each other's states, since the states and
        windows exist only at page ends.
        """
        executor, size = self._executor, self._executor.limits.page_size
        by_page = any(isinstance(model, LevelModel) and model.states for model in executor.drafts)
        if executor.states is not None or by_page or executor.limits.window_pages:
            return False
        begin, end = (page * size + np.arange(size, dtype=np.int64) for page in (source, target))
        executor.move(begin, end)
        begins, ends = (indices(slots, executor.device) for slots in (begin, end))
        for model in executor.drafts:
            model.cache.paged.move(begins, ends)
        return True

    @torch.inference_mode()
    def read_window_page(self, page: int) -> bytes:
        """Return a window page's contents. Raises EngineError if it does not exist."""
        return bytes_of(self._window_parts(page))

    @torch.inference_mode()
    def write_window_page(self, page: int, content: bytes | memoryview) -> None:
        """Write a window page's contents, as `read_window_page` returned them. Raises EngineError
        if it cannot.
        """
        if len(content) != self.window_page_bytes:
            raise EngineError(
                f"{len(content)} bytes are not a window page of {self.window_page_bytes}"
            )
        put_bytes(self._window_parts(page), content)

    def _window_parts(self, page: int) -> Iterator[Tensor]:
        """Yield views of a window page's contents, always in the same order."""
        limits = self._executor.limits
        if not 0 <= page < limits.window_pages:
            raise EngineError(f"there is no window page {page} of {limits.window_pages}")
        size = limits.page_size
        return _of_cache(window_cache(self._executor.cache), page * size, size)

    def _parts(self, page: int) -> Iterator[Tensor]:
        """Yield views of a page's contents, always in the same order."""
        size, pages = self._executor.limits.page_size, self._executor.limits.pages
        if not 0 <= page < pages:
            raise EngineError(f"there is no page {page} of {pages}")
        caches = [self._executor.cache]
        for model in self._executor.drafts:
            caches.append(model.cache.paged)
        for cache in caches:
            yield from _of_cache(cache, page * size, size)
        for model in self._executor.drafts:
            if isinstance(model, LevelModel) and model.states is not None:
                yield model.outputs.narrow(0, model.states.pages + page, 1)


def _of_cache(cache: PagedCache, begin: int, count: int) -> Iterator[Tensor]:
    for part in cache.parts:
        yield part.numbers.narrow(3, begin, count)
        if part.scales is not None:
            yield part.scales.narrow(3, begin, count)
