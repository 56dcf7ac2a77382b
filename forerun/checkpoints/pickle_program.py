"""An interpreter for pickles, which are programs, that can only build values.

It runs only the instructions that lists of numbers and tables of tensors consist of, some thirty of
them (their meaning: CPython's pickletools). A name is a value like any other and is never imported;
three names may be called, with checked arguments, and their results are created here. Every other
name and instruction is rejected by name. Time and memory grow with the length of the program;
nothing is copied, compared or traversed.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forerun.errors import ModelError
from forerun.networks.keys import shown

KINDS = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "BoolStorage": "BOOL",
}
"""torch's names of storages -> safetensors' names of their number types."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}

_TENSOR = "torch._utils._rebuild_tensor_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"
_NAMES = {_TENSOR, _PARAMETER, _ORDERED, *(f"torch.{name}" for name in KINDS)}
_MOST_DIMENSIONS = 8
_LARGEST = 1 << 48
"""Largest size, stride or offset: their products stay exact and small."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage in the archive. key: its file's name. count: elements in it, of a kind of KINDS."""

    kind: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: `shape` numbers of a storage, at offset + index @ strides, counted in numbers. All
    of them are within the storage, and they are no more than it has.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """A name in _NAMES, which is not imported."""

    text: str


def run(program: bytes) -> Any:
    """Run a pickle and return its value: None, bool, int, float, str, View, and lists, tuples and
    dicts of them. A value may occur several times, and within itself. Raises ModelError naming
    anything else in the program, or if it is cut off or damaged.
    """
    machine = _Machine(program)
    try:
        while True:
            code = machine.byte()
            if code == _STOP:
                return machine.result()
            step = _STEPS.get(code)
            if step is None:
                name = _REFUSED.get(code, f"{code:#04x}")
                raise ModelError(f"instruction {name} at byte {machine.at - 1} is not allowed")
            step(machine)
    except (IndexError, struct.error) as error:
        raise ModelError("it is cut off, or reads from an empty stack") from error


class _Machine:
    """Stack, marks and memo of a running program; each method is an instruction or part of one."""

    def __init__(self, program: bytes) -> None:
        self.at = 0
        self._program = program
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def byte(self) -> int:
        """Read the next byte."""
        self.at += 1
        return self._program[self.at - 1]

    def number(self, layout: str) -> Any:
        """Read the next number, as `struct` lays it out."""
        (value,) = struct.unpack_from(layout, self._program, self.at)
        self.at += struct.calcsize(layout)
        return value

    def bytes(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        self.at += count
        if self.at > len(self._program):
            raise IndexError
        return self._program[self.at - count : self.at]

    def text(self, count: int) -> None:
        """Push a string of `count` bytes."""
        try:
            self.push(self.bytes(count).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ModelError("a string is not UTF-8") from error

    def line(self) -> str:
        """Read up to the next line break."""
        end = self._program.find(b"\n", self.at)
        return self.bytes(end + 1 - self.at if end >= 0 else len(self._program))[:-1].decode(
            "utf-8", "replace"
        )

    def push(self, value: Any) -> None:
        """Push a value onto the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Pop the top of the stack."""
        return self._stack.pop()

    def mark(self) -> None:
        """Begin a group, which `group` ends."""
        self._below.append(self._stack)
        self._stack = []

    def group(self) -> list[Any]:
        """Return the values pushed since the last mark."""
        values, self._stack = self._stack, self._below.pop()
        return values

    def keep(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        self._memo[index] = self._stack[-1]

    def keep_next(self) -> None:
        """Store the top of the stack in the memo, under the next free number."""
        self.keep(len(self._memo))

    def recall(self, index: int) -> None:
        """Push a value of the memo."""
        if index not in self._memo:
            raise IndexError
        self.push(self._memo[index])

    def tuple(self, count: int) -> None:
        """Push a tuple of the last `count` values."""
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def name(self, module: str, name: str) -> None:
        """Push a name, which must be one of _NAMES."""
        text = f"{module}.{name}"
        if text not in _NAMES:
            raise ModelError(f"it names {shown(text)}, which a table of tensors does not need")
        self.push(_Name(text))

    def stacked_name(self) -> None:
        """Push the name whose module and attribute are on the stack."""
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ModelError("a name is not a string")
        self.name(module, name)

    def extend(self, values: list[Any]) -> None:
        """Append to the list below."""
        if not isinstance(self._stack[-1], list):
            raise ModelError("it appends to something that is not a list")
        self._stack[-1].extend(values)

    def update(self, pairs: list[Any]) -> None:
        """Set alternating keys and values in the dict below."""
        target, keys = self._stack[-1], pairs[::2]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ModelError("it sets items of something that is not a table")
        if not all(type(key) is str for key in keys):
            raise ModelError("a key is not a string")
        target.update(zip(keys, pairs[1::2], strict=True))

    def call(self) -> None:
        """Call a name that may be called, with the arguments on the stack."""
        arguments, function = self.pop(), self.pop()
        constructor = _CALLS.get(function.text) if isinstance(function, _Name) else None
        if constructor is None or type(arguments) is not tuple:
            raise ModelError("it calls a function that a table of tensors does not need")
        self.push(constructor(arguments))

    def state(self) -> None:
        """Drop the attributes of a table of tensors: `_metadata`, which is not needed."""
        state, target = self.pop(), self._stack[-1]
        if type(target) is not dict or type(state) is not dict or state.keys() != {"_metadata"}:
            raise ModelError("it sets attributes of something that is not a table of tensors")

    def storage(self) -> None:
        """Push the storage for a persistent id."""
        match self.pop():
            case ("storage", _Name(text=text), str(key), str(), int(count)) if (
                text.removeprefix("torch.") in KINDS
            ):
                self.push(Storage(KINDS[text.removeprefix("torch.")], key, _size(count)))
            case _:
                raise ModelError("a reference to a storage is malformed")

    def result(self) -> Any:
        """Return the program's result."""
        if self._below or len(self._stack) != 1:
            raise ModelError("it does not end with one value")
        return self.pop()


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        what = value if type(value) is int else f"a {type(value).__name__}"
        raise ModelError(f"{what} is not a size")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > _MOST_DIMENSIONS:
        raise ModelError("a shape or its strides are not at most eight numbers")
    return tuple(_size(item) for item in value)


def _view(arguments: tuple[Any, ...]) -> View:
    """Return a View of storage, offset, shape, strides, requires_grad, hooks and possibly further
    attributes of a tensor, which must be empty: a flag there may mean that numbers are negated when
    they are read. Raises ModelError if one is set, or the view reaches beyond its storage.
    """
    match arguments:
        case (Storage() as storage, offset, shape, strides, bool(), dict(), *more):
            pass
        case _:
            raise ModelError("a tensor is made from something other than a storage")
    if more not in ([], [None], [{}]):
        raise ModelError("a tensor has fields that are not supported")
    view = View(storage, _size(offset), _sizes(shape), _sizes(strides))
    if len(view.shape) != len(view.strides):
        raise ModelError(f"a tensor of shape {list(view.shape)} has {len(view.strides)} strides")
    last = sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True))
    numbers = math.prod(view.shape)
    if numbers and (view.offset + last >= storage.count or numbers > storage.count):
        raise ModelError(
            f"a tensor of shape {list(view.shape)} at {view.offset} with strides "
            f"{list(view.strides)} does not lie in its storage of {storage.count} numbers"
        )
    return view


def _parameter(arguments: tuple[Any, ...]) -> View:
    match arguments:
        case (View() as view, bool(), dict()):
            return view
    raise ModelError("a parameter is made from something other than a tensor")


def _ordered(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise ModelError("an OrderedDict is made of something")
    return {}


_CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    _TENSOR: _view,
    _PARAMETER: _parameter,
    _ORDERED: _ordered,
}

_STOP = ord(".")
_STEPS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: _protocol(m.byte()),
    0x95: lambda m: m.number("<Q"),  # FRAME: bytes that could be read at once
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.byte()),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    0x8A: lambda m: m.push(int.from_bytes(m.bytes(m.byte()), "little", signed=True)),
    ord("G"): lambda m: m.push(m.number(">d")),
    ord("X"): lambda m: m.text(m.number("<I")),
    0x8C: lambda m: m.text(m.byte()),
    ord(")"): lambda m: m.tuple(0),
    0x85: lambda m: m.tuple(1),
    0x86: lambda m: m.tuple(2),
    0x87: lambda m: m.tuple(3),
    ord("t"): lambda m: m.push(tuple(m.group())),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.extend([m.pop()]),
    ord("e"): lambda m: m.extend(m.group()),
    ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: m.update([m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: m.update(m.group()),
    ord("q"): lambda m: m.keep(m.byte()),
    ord("r"): lambda m: m.keep(m.number("<I")),
    0x94: _Machine.keep_next,
    ord("h"): lambda m: m.recall(m.byte()),
    ord("j"): lambda m: m.recall(m.number("<I")),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: _Machine.stacked_name,
    ord("R"): _Machine.call,
    ord("b"): _Machine.state,
    ord("Q"): _Machine.storage,
}
"""Instructions by their byte."""

_REFUSED = {
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    ord("P"): "PERSID",
    0x8B: "LONG4",
    0x8F: "EMPTY_SET",
    0x91: "FROZENSET",
    ord("B"): "BINBYTES",
    ord("C"): "SHORT_BINBYTES",
    0x96: "BYTEARRAY8",
    0x97: "NEXT_BUFFER",
}
"""Names, for the error, of instructions that other pickles have."""


def _protocol(number: int) -> None:
    if not 2 <= number <= 5:
        raise ModelError(f"its pickle protocol is {number}; 2 to 5 are read")
