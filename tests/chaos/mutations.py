"""Structured damage: JSON values and safetensors headers, changed but well formed; and bytes."""

import copy
import json
import struct
from collections.abc import Iterator
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.0, -0.0,
    1e-30, 1e308, -1e308, float("nan"), float("inf"), 0.5, "", "x", "\0", "é", "../../etc/passwd",
    "{{ 7 * 7 }}", "A" * 5000, [], {}, [[]], [None], {"": {}}, [0] * 300, {"rope_type": "yarn"},
)  # fmt: skip


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in inside:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def mutated(value: Any, random, most: int = 3) -> Any:
    """A copy with one to `most` changes: replaced, removed, repeated, renamed, wrapped, moved."""
    value = copy.deepcopy(value)
    for _ in range(random.randint(1, most)):
        paths = list(places(value))
        if not paths:
            return value
        path = random.choice(paths)
        holder, key = at(value, path[:-1]), path[-1]
        how = random.choice(("replace", "replace", "scale", "remove", "wrap", "move", "rename"))
        old = holder[key]
        if how == "replace":
            holder[key] = copy.deepcopy(random.choice(HOSTILE))
        elif how == "scale" and isinstance(old, int | float):
            holder[key] = random.choice((old + 1, old - 1, old * 2, -old, float(old), str(old)))
        elif how == "scale" and isinstance(old, str):
            holder[key] = random.choice((old * 2, old[:-1], old.upper(), old + "\0"))
        elif how == "remove":
            del holder[key]
        elif how == "wrap":
            holder[key] = random.choice(([old], {"x": old}, [old, old]))
        elif how == "move":
            holder[key] = copy.deepcopy(at(value, random.choice(paths)))
        elif how == "rename" and isinstance(holder, dict):
            holder[random.choice((f"{key}x", str(key).upper(), ""))] = holder.pop(key)
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
    return value


def safetensors_parts(content: bytes) -> tuple[dict, bytes]:
    """Header and data of a file."""
    size = struct.unpack_from("<Q", content)[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def safetensors_whole(header: Any, data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def damaged(content: bytes, random) -> bytes:
    """Bytes cut, repeated, zeroed or flipped."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data))
        how = random.choice(("flip", "cut", "zero", "insert"))
        if how == "flip":
            data[at] ^= 1 << random.randrange(8)
        elif how == "cut" and len(data) > 40:
            del data[at : at + random.choice((1, 4, 8, 100))]
        elif how == "zero":
            data[at : at + 8] = b"\0" * len(data[at : at + 8])
        else:
            data[at:at] = random.choice((b"\xff" * 8, b"\0" * 8, b"\x01", content[:16]))
    return bytes(data)
