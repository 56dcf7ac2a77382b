"""Damaged and hostile safetensors files: always ModelError, quickly, with little memory."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load_file

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.shard import read_shard
from tests.fuzz.bounded import FUZZ, bounded, flipped, touch
from tests.models import tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder, the bytes of its model.safetensors and where their data begins."""
    hf = tiny.model("llama", hidden_size=32, head_dim=8, intermediate_size=32)
    folder = tiny.save_folder(hf, tmp_path_factory.mktemp("folder"))
    content = (folder / "model.safetensors").read_bytes()
    return folder, content, 8 + struct.unpack_from("<Q", content)[0]


@pytest.fixture(scope="module")
def folder(whole):
    return whole[0]


@pytest.fixture(scope="module")
def good(whole):
    return whole[1:]


def attempt(folder, content):
    """Open the folder with these bytes as its weights; the ModelError, if one was raised."""
    (folder / "model.safetensors").write_bytes(content)
    with bounded() as verdict:
        touch(FolderCheckpoint(folder))
    return verdict.error


def test_the_whole_file_is_fine(good, folder):
    assert attempt(folder, good[0]) is None


def test_every_truncation_is_refused(good, folder):
    content, begin = good
    cuts = [*range(0, begin, 13), *range(begin, len(content), 2003), len(content) - 1]
    for cut in cuts:
        assert attempt(folder, content[:cut]) is not None, cut


def test_trailing_bytes_are_refused(good, folder):
    assert attempt(folder, good[0] + b"\0") is not None


@FUZZ
@given(data=st.data())
def test_flipped_bits(good, folder, data):
    attempt(folder, data.draw(flipped(*good)))


SIZES = st.integers(-2, 70) | st.sampled_from([1 << 31, 1 << 63, 10**30, True, None, 1.0, "8"])
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F8_E4M3", "", 3, None]),
        "shape": st.lists(SIZES, max_size=4) | SIZES,
        "data_offsets": st.lists(SIZES, min_size=1, max_size=3) | st.just([0, 64]),
    }
)


def packed(table, data=b""):
    head = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(head)) + head + data


@FUZZ
@given(table=st.dictionaries(st.text(max_size=4), ENTRY, max_size=3), size=st.integers(0, 70))
def test_no_laxer_than_the_library(table, size, tmp_path):
    """Where we accept a header, the safetensors library reads the same tensors."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(packed(table, b"\0" * size))
    with bounded() as verdict:
        file = read_shard(path)
    if verdict.error is None and not any(e["dtype"] == "BF16" for e in table.values()):
        try:
            theirs = load_file(path)
        except SafetensorError as error:
            pytest.fail(f"the library refuses: {error}")
        assert {n: a.shape for n, a in theirs.items()} == {
            n: stored.shape for n, stored in file.tensors.items()
        }


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE = {
    "empty": (b"", "is empty: fetch it again"),
    "seven bytes": (b"1234567", "damaged"),
    "huge header": (struct.pack("<Q", 1 << 63) + b"{}", "damaged"),
    "header of 3 MB": (packed(b" " * (3 << 20)), "damaged"),
    "header of 65 MB": (packed(b" " * (65 << 20)), r"header of 68157440 bytes; 67108864 at most"),
    "deep nesting": (packed(b"[" * 1_000_000), "damaged"),
    "not an object": (packed(b"[1,2]"), "damaged"),
    "utf-16": (packed("{}".encode("utf-16")), "damaged"),
    "not json": (packed(b"{"), "damaged"),
    "number as entry": (packed({"a": 1}), "damaged"),
    "key missing": (packed({"a": {"dtype": "F32", "shape": []}}), "data_offsets"),
    "unreadable type": (packed({"a": entry([1], 0, 1, "F8_E4M3")}, b"0"), "F8_E4M3"),
    "absurd shape": (packed({"a": entry([1 << 40, 1 << 40], 0, 4)}, b"0000"), "overflow"),
    "more dimensions than sense": (
        packed({"a": entry([1] * 10**5, 0, 4)}, b"0000"),
        "100000 dimensions",
    ),
    "negative": (packed({"a": entry([-1, -1], 0, 4)}, b"0000"), "damaged"),
    "true as a size": (packed({"a": entry([True], 0, 4)}, b"0000"), "damaged"),
    "backwards": (packed({"a": entry([1], 4, 0)}, b"0000"), "offset"),
    "beyond the file": (packed({"a": entry([1 << 20], 0, 1 << 22)}, b"0000"), "damaged"),
    "overlap": (packed({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"0" * 16), "offset"),
    "hole": (packed({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"0" * 12), "offset"),
    "name twice": (
        packed(b'{"a":' + b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', b"0000"),
        "damaged",
    ),
    "a long name": (packed({"n" * 10**6: 1}), "damaged"),
}


@pytest.mark.parametrize(("content", "named"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers(content, named, folder):
    error = attempt(folder, content)
    assert error is not None
    assert named in str(error)


def test_unaligned_data_is_read_all_the_same(good, folder, tmp_path):
    """Headers are padded by the library but need not be."""
    content, begin = good
    table = content[8:begin].rstrip()
    for pad in range(4):
        head = table + b" " * pad
        shifted = struct.pack("<Q", len(head)) + head + content[begin:]
        assert attempt(folder, shifted) is None
        assert FolderCheckpoint(folder).tensor("model.norm.weight").flags.aligned
