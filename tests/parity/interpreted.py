"""Triton kernels on the CPU: imports their modules so that Triton's interpreter runs them.

The interpreter is chosen when a kernel is defined, by Triton's own TRITON_INTERPRET.
"""

import importlib
import inspect
import os
import sys
from contextlib import contextmanager
from math import prod

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these kernels for real", allow_module_level=True)


@contextmanager
def _interpreting():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]


def load(name: str):
    """The module forerun.executors.torch.NAME, interpreted."""
    with _interpreting():
        return importlib.import_module(f"forerun.executors.torch.{name}")


def _mended(interpreter, float32) -> None:
    """Triton 3.6 beside NumPy 2.4: arrays of one number are no ints; bfloat16 in products, and made
    of integers; rounding to float8 loses the carry into the exponent (127.9 becomes 64), to
    bfloat16 it is cut off.
    """
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    convert, cast = interpreter._convert_float, interpreter.InterpreterBuilder.cast_impl

    def of_integers(self, source, kind):
        if kind.scalar.is_bf16() and source.dtype.scalar.is_int():
            source = cast(self, source, float32)
        return cast(self, source, kind)

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    def widened(handle):
        if not handle.dtype.is_bf16():
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, float32)

    def product(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    def converted(values, source, target, rounding):
        if not source.is_fp32() or not (target.is_fp8e4nv() or target.is_bf16()):
            return convert(values, source, target, rounding)
        bits = np.ascontiguousarray(values)
        wide = torch.from_numpy(bits.view(np.float32) if bits.dtype != np.float32 else bits)
        if target.is_bf16():
            return wide.to(torch.bfloat16).view(torch.uint16).numpy()
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = converted
    interpreter.InterpreterBuilder.cast_impl = of_integers
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = product


def _quickened(interpreter, core) -> None:
    """Triton 3.6 does again in every call of a function what it has done for the launch (replacing
    the language's functions), and makes the same types again and again: half of the time.
    """
    patch_lang, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    block_init, apply = core.block_type.__init__, interpreter.ReduceOps.apply_impl
    integers = {*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES}
    languages = interpreter.tl, interpreter.tl.core
    patched, of_function, np_dtypes, blocks = set(), {}, {}, {}

    def patched_once(fn):
        """What a launch replaced is in place until its end."""
        if fn not in of_function:
            named = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
            of_function[fn] = {n for n, lang in enumerate(languages) if lang in named}
        if patched and of_function[fn] <= patched:
            return None
        scope = patch_lang(fn)
        if not patched:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(of_function[fn])
        return scope

    def np_dtype_of(dtype):
        kind = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        if kind.name not in np_dtypes:
            np_dtypes[kind.name] = np_dtype(kind)
        return np_dtypes[kind.name]

    def sized(block, element, shape):
        """As block_type.__init__, which checks and names a shape."""
        sizes = tuple(shape.values if isinstance(shape, core.tuple) else shape)
        plain = all(type(size) is int for size in sizes)
        known = blocks.get((element.name, sizes)) if plain else None
        if known is None:
            block_init(block, element, shape)
            sizes = tuple(block.shape.values)
            known = vars(block) | {"of_tensors": numbers_of(sizes)}
            blocks[element.name, sizes] = known
        vars(block).update(known, element_ty=element)

    def numbers_of(sizes):
        return core.constexpr(prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def shaped(tensor, handle, kind):
        """As tensor.__init__, whose shape and number of elements are those of its type."""
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = kind.of_tensors if kind.is_block() else scalar

    scalar = numbers_of(())

    def reduced(reduce, given):
        if reduce.combine_fn is not interpreter.tl.standard._xor_combine:
            return apply(reduce, given)
        numbers = given[0].handle.data
        result = np.bitwise_xor.reduce(numbers, axis=reduce.axis, keepdims=reduce.keep_dims)
        return reduce.to_tensor(result, given[0].dtype)

    interpreter._patch_lang = patched_once
    interpreter._get_np_dtype = np_dtype_of
    core.tensor.__init__, core.block_type.__init__ = shaped, sized
    core.dtype.is_int = lambda kind: kind.name in integers
    interpreter.ReduceOps.apply_impl = reduced
    # What it finds is reported in Triton's debug mode alone, which the interpreter has not.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


# Triton's own library is made of kernels too: it must be imported anew, to be interpreted. All
# but what is compiled, which cannot be.
for imported in [n for n in sys.modules if n.split(".")[0] == "triton" and "._C" not in n]:
    del sys.modules[imported]
with _interpreting():
    why = "triton is not installed; `pip install --no-deps triton==3.6.0` lets this run"
    triton = pytest.importorskip("triton", reason=why, exc_type=ImportError)
    importlib.import_module("triton.experimental.gluon")
    _interpreter = importlib.import_module("triton.runtime.interpreter")
    _mended(_interpreter, triton.language.float32)
    _quickened(_interpreter, triton.language.core)
