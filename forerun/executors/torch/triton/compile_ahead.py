"""Compiles our Triton kernels before the first launch, several in parallel."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from forerun.executors.torch.triton import (
    triton_attention,
    triton_choice,
    triton_draft,
    triton_experts,
    triton_few_bits,
    triton_future,
    triton_layers,
    triton_merge,
    triton_round,
    triton_shaping,
    triton_states,
)
from forerun.machine import cores

MODULES = (
    *(triton_attention, triton_choice, triton_shaping, triton_draft, triton_future, triton_layers),
    *(triton_experts, triton_few_bits, triton_merge, triton_round, triton_states),
)


class _Ahead(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compiles kernels ahead of use and stores them in the kernels' own caches."""

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> Any:
        future = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(future)
        return future


def compile_ahead(work: Callable[[], None], progress: Callable[[int, int], None]) -> None:
    """Compile every binary that `work` would launch, one per core; its other operations run, on
    zeros in place of kernels' results. Triton releases the GIL in its compiler's passes and the
    assembler. progress: called with (binaries done, binaries in all). Raises the compiler's
    exceptions.
    """
    with ThreadPoolExecutor(cores()) as pool, _Ahead(pool) as mode:
        with _compiled_only(), _Zeros():  # type: ignore[no-untyped-call]
            work()
        made = mode.raw_futures
        for done, _ in enumerate(as_completed(made), 1):
            progress(done, len(made))


class _Zeros(TorchDispatchMode):
    """Fills empty tensors with zeros, which are valid tokens, places and slots."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name and isinstance(made, torch.Tensor):
            made.zero_()
        return made


@contextmanager
def _compiled_only() -> Iterator[None]:
    """Return a context manager in which launches of our kernels only compile them."""
    with ExitStack() as stack:
        # Some modules have kernels from others.
        for kernel in {
            value
            for module in MODULES
            for value in vars(module).values()
            if isinstance(value, KernelInterface)
        }:
            kernel.run = _compiling(kernel.run)
            stack.callback(delattr, kernel, "run")
        yield


def _compiling(run: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(*args, grid=grid, warmup=True, **kwargs)

    return compiled
