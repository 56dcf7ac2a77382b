"""A target model in the compiled core: opened, filled with weights, and closed."""

import ctypes
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from forerun.checkpoints.adapter import LoraAdapter
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.errors import ConfigError, EngineError, MemoryPlanError, ModelError
from forerun.executors.cpu import native
from forerun.executors.cpu.limits import check_runs
from forerun.executors.cpu.places import RopeTable, matrices, sizes_for
from forerun.executors.cpu.token_rows import TokenRows
from forerun.executors.cpu.weights import (
    CACHE_DTYPES,
    Packer,
    cache_bytes_per_token,
    cache_item,
    sentence,
)
from forerun.executors.feature_ring import HostFeatureRing, ring_size
from forerun.interface.executor import ExecutorLimits
from forerun.machine import physical_cores
from forerun.types import AnyArray, Floats, Ints

log = logging.getLogger("forerun.executors")

MOST_THREADS = 16
"""Default limit of threads. A step has some 250 barriers, which cost more with each thread."""


class CpuModel:
    """Weights, key/value cache and threads of a target, and the draft models that use its threads.

    handle  the core's; None after `shutdown`
    ring    features for a draft model; None = no draft model reads any
    cache_item  bytes of a number of keys and values (weights.cache_item)
    token_rows  as in StepBuffers
    by_page  [.,P,.] arrays of draft models that belong to pages, besides keys and values

    Parameters and errors are CpuExecutor's.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        threads: int | None,
        kernels: str,
        dtype: str,
        kv_dtype: str,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.handle: int | None = None
        arch = checkpoint.architecture
        check_runs(arch)
        if limits.vocab != arch.vocab:
            raise ModelError(
                f"the model has a vocabulary of {arch.vocab}, but its executor was planned for "
                f"{limits.vocab}"
            )
        self._limits, self._arch, self._recurrent = limits, arch, arch.recurrent is not None
        self.token_rows = TokenRows(checkpoint).address if arch.token_vector else None
        self._library = native.load()
        self.kernels = native.kernels(kernels)
        if self.kernels is None:
            names = ", ".join(each for each in native.KERNELS if native.kernels(each))
            raise ConfigError(f"CPU kernels {kernels!r} do not run on this machine; {names} do")
        if not kernels and (fault := native.amx_fault()):
            log.info("the processor's AMX is not used: %s", fault)
        self.threads = threads or min(physical_cores(), MOST_THREADS)
        self._drafts: list[int] = []
        self.ring: HostFeatureRing | None = None
        self.by_page: list[Floats] = []
        self._numbers = sentence(checkpoint, dtype)
        self.cache_item = cache_item(checkpoint, dtype, kv_dtype)
        packer = Packer(checkpoint, dtype=dtype)
        self._weight_bytes = packer.planned_bytes()
        self.handle = self._open()
        try:
            packer.load(self.handle, partial(progress, "loading weights"))
        except BaseException:
            self.shutdown()
            raise

    def _open(self) -> int:
        arch, limits = self._arch, self._limits
        sizes = sizes_for(
            arch,
            limits,
            arch.layers,
            threads=self.threads,
            cache_item=self.cache_item,
            cache_bytes=cache_bytes_per_token(arch.caches, self.cache_item),
            window=limits.window,
            window_pages=limits.window_pages,
            window_bytes=self._window_bytes,
            vectors=arch.token_vector,
        )
        model: int | None = self._library.forerun_open(
            ctypes.byref(sizes),
            ctypes.byref(RopeTable(arch.ropes)),
            self._weight_bytes,
            (self.kernels or "").encode(),
        )
        if model is None:
            raise MemoryPlanError(
                f"weights ({self._weight_bytes:,} bytes) and the cache of {limits.pages} pages x "
                f"{limits.page_size} tokens ({self.cache_bytes:,} bytes) do not fit: "
                f"{self._library.forerun_error().decode()}; lower kv-tokens"
            )
        return model

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, in pages and in the step's scratch."""
        limits, all_of_it = self._limits, cache_bytes_per_token(self._arch.caches, self.cache_item)
        places = limits.pages * limits.page_size + limits.max_nodes
        fewer = (limits.pages - limits.window_pages) * limits.page_size
        return all_of_it * places - self._window_bytes * fewer

    @property
    def _window_bytes(self) -> int:
        """Bytes of a position's keys and values in layers with window pages."""
        caches = self._arch.windowed_caches if self._limits.window_pages else ()
        return cache_bytes_per_token(caches, self.cache_item)

    def adopt(self, draft: int | None, features_width: int) -> None:
        """Take over a native draft model, to close it together with the target, and from now on
        store the features [M,features_width] of known and accepted tokens in `ring`.

        draft  its handle; None = there is only a reader of features
        """
        self._drafts += [] if draft is None else [draft]
        self.ring = HostFeatureRing(self._limits.slots, features_width) if features_width else None
        at = None if self.ring is None else self.ring.values.ctypes.data
        self._library.forerun_set_ring(self.handle, at, ring_size(1), features_width)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, summed over target and drafts."""
        own = sum(self._library.forerun_page_bytes(model, 0) for model in self._models())
        return int(own) + sum(array[:, 0].nbytes for array in self.by_page)

    def read_page(self, page: int) -> bytes:
        """Return the contents of a page, of target and drafts, except for window pages. Raises
        EngineError if there is no such page.
        """
        parts: list[AnyArray] = []
        for model in self._models():
            parts.append(np.empty(self._library.forerun_page_bytes(model, 0), np.uint8))
            self._copy_page(model, page, parts[-1], out=True)
        return b"".join([part.tobytes() for part in parts + [a[:, page] for a in self.by_page]])

    def write_page(self, page: int, content: bytes | memoryview) -> None:
        """Write what `read_page` returned into a page of target and drafts. Raises EngineError if
        its size is wrong or there is no such page.
        """
        if len(content) != self.page_bytes:
            raise EngineError(f"{len(content)} bytes are not a page of {self.page_bytes}")
        left = np.frombuffer(content, np.uint8)
        for model in self._models():
            own, left = np.split(left, [self._library.forerun_page_bytes(model, 0)])
            self._copy_page(model, page, own, out=False)
        for array in self.by_page:
            own, left = np.split(left, [array[:, page].nbytes])
            array[:, page] = own.view(array.dtype).reshape(array[:, page].shape)

    def copy_page(self, source: int, target: int) -> bool:
        """Copy page `source` to page `target`, in target and drafts. Returns False for a model with
        recurrent layers, or drafts that read other layers' states: these are stored at ends of
        pages only. Raises EngineError if there is no such page.
        """
        if self._recurrent or self.by_page:
            return False
        for model in self._models():
            content = np.empty(self._library.forerun_page_bytes(model, 0), np.uint8)
            self._copy_page(model, source, content, out=True)
            self._copy_page(model, target, content, out=False)
        return True

    @property
    def window_page_bytes(self) -> int:
        """Bytes of a window page."""
        return int(self._library.forerun_page_bytes(self._models()[0], 1))

    def read_window_page(self, page: int) -> bytes:
        """Return the target's keys and values in a window page. Raises EngineError if there is no
        such page.
        """
        content = np.empty(self.window_page_bytes, np.uint8)
        self._copy_page(self._models()[0], page, content, out=True, window=True)
        return content.tobytes()

    def write_window_page(self, page: int, content: bytes | memoryview) -> None:
        """Write what `read_window_page` returned into a window page. Raises EngineError if its size
        is wrong or there is no such page.
        """
        if len(content) != self.window_page_bytes:
            raise EngineError(
                f"{len(content)} bytes are not a window page of {self.window_page_bytes}"
            )
        own = np.frombuffer(content, np.uint8)
        self._copy_page(self._models()[0], page, own, out=False, window=True)

    def _copy_page(
        self, model: int, page: int, outside: AnyArray, *, out: bool, window: bool = False
    ) -> None:
        if self._library.forerun_copy_page(model, page, window, outside.ctypes.data, out):
            raise EngineError(f"a page was refused: {self._library.forerun_error().decode()}")

    def _models(self) -> tuple[int, ...]:
        """Return the target's handle and its drafts'. Raises EngineError after `shutdown`."""
        if self.handle is None:
            raise EngineError("the executor was shut down")
        return self.handle, *self._drafts

    def adapt(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Copy adapters into the core. Raises EngineError if it rejects one."""
        library, model = self._library, self._models()[0]
        places = {place.name: place for place in matrices(self._arch)}
        rank = max(adapter.rank for adapter in adapters)
        library.forerun_open_adapters(model, len(adapters), rank)
        for number, adapter in enumerate(adapters):
            for name, one in adapter.matrices.items():
                down, up = (np.ascontiguousarray(each, "<f4") for each in (one.down, one.up))
                where = model, number, places[name].layer, places[name].which
                values = down.ctypes.data, up.ctypes.data, len(down)
                library.forerun_set_adapter(*where, *values)

    def final_hidden_states(self, nodes: Ints) -> Floats:
        """Return float32[n,H], the hidden states of the last step's nodes int32[n] after the final
        norm. Raises EngineError after `shutdown`.
        """
        values = np.empty((len(nodes), self._arch.hidden), np.float32)
        arguments = self._models()[0], nodes.ctypes.data, len(nodes), values.ctypes.data
        self._library.forerun_final_hidden_states(*arguments)
        return values

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: `device`, `kernels`, `threads`, `dtype` of the weights,
        `weight_bytes`, `cache_bytes` and `cache_dtype` of keys and values.
        """
        return {
            "device": "cpu",
            "kernels": self.kernels,
            "threads": self.threads,
            "dtype": self._numbers,
            "weight_bytes": self._weight_bytes,
            "cache_bytes": self.cache_bytes,
            "cache_dtype": CACHE_DTYPES[self.cache_item],
        }

    def shutdown(self) -> None:
        """Free the model and its drafts. Idempotent."""
        handle, self.handle = self.handle, None
        if handle is not None:
            for model in (*self._drafts, handle):
                self._library.forerun_close(model)

    def __del__(self) -> None:
        if self.handle is not None:
            self.shutdown()
