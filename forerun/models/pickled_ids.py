"""A published list of token ids (freq_N.pt), read without executing anything.

Such a file is a zip archive around one pickle of a list of integers. Pickles are programs; this
reader knows the handful of instructions that such a list consists of, each of which only puts
numbers on a stack, and refuses every other: none of those that name, build or call anything.
"""

import struct
import zipfile
import zlib
from pathlib import Path

from forerun.errors import ModelError

_MOST_IDS, _MOST_BYTES = 1 << 24, 1 << 26
_NUMBERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
"""BININT1, BININT2, BININT: bytes of the number. The last is signed."""
_SKIPPED = {0x80: 1, ord("q"): 1, ord("r"): 4, 0x94: 0, 0x95: 8}
"""PROTO, BINPUT, LONG_BINPUT, MEMOIZE, FRAME: what says nothing about a flat list, and the bytes
behind it."""
_LIST, _MARK, _LONG, _APPEND, _APPENDS, _STOP = (
    ord("]"),
    ord("("),
    0x8A,
    ord("a"),
    ord("e"),
    ord("."),
)
_DAMAGE = (
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
"""What zipfile raises for archives that are damaged or use what it does not know."""


def read_pickled_ids(path: Path) -> list[int]:
    """The ids. Raises ModelError for a file that holds anything but a list of integers."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [item for item in archive.infolist() if item.filename.endswith("/data.pkl")]
            if len(inside) != 1 or inside[0].file_size > _MOST_BYTES:
                raise ModelError("it holds no list that torch saved")
            with archive.open(inside[0]) as stored:
                program = stored.read(_MOST_BYTES + 1)
    except _DAMAGE as error:
        raise ModelError(f"{path} cannot be read as a torch archive: {error}") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    try:
        return _ids(program)
    except (ModelError, IndexError) as error:
        raise ModelError(f"{path} is no plain list of token ids: {error}") from error


def _ids(program: bytes) -> list[int]:
    """The list that `program` puts together. Raises ModelError; IndexError where it is cut off."""
    ids: list[int] = []
    waiting: list[int] = []
    opened, at = False, 0
    while True:
        code, at = program[at], at + 1
        if code in _SKIPPED:
            at += _SKIPPED[code]
        elif code == _LIST and not opened:
            opened = True
        elif code in _NUMBERS or code == _LONG:
            size = _NUMBERS.get(code) or program[at]
            at += code == _LONG
            if at + size > len(program):
                raise ModelError("it is cut off")
            signed = code in (_LONG, ord("J"))
            waiting.append(int.from_bytes(program[at : at + size], "little", signed=signed))
            at += size
        elif code in (_APPEND, _APPENDS):
            ids += waiting
            waiting = []
            if len(ids) > _MOST_IDS:
                raise ModelError("it is longer than any vocabulary")
        elif code == _STOP and opened and not waiting:
            return ids
        elif code != _MARK:
            raise ModelError(f"instruction {code:#04x} at byte {at - 1} is not one of a list's")
