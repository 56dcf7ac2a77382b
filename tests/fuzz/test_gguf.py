"""Damaged and hostile GGUF files: always ModelError, quickly, with little memory."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.gguf.header import read_header
from forerun.errors import ModelError
from forerun.hub.catalog import open_model
from tests.fuzz.bounded import FUZZ, bounded, flipped, touch
from tests.models import tiny

U32, STRING, ARRAY = 4, 8, 9


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A whole file and where its data begins."""
    hf = tiny.model("llama", hidden_size=32, head_dim=8, intermediate_size=32)
    path = tiny.write_gguf(hf, tmp_path_factory.mktemp("gguf") / "good.gguf", "Q8_0")
    begin = min(stored.start for stored in read_header(path).tensors.values())
    return path.read_bytes(), begin


def attempt(path, content):
    """Open the file and touch every tensor; the ModelError, if one was raised."""
    path.write_bytes(content)
    with bounded() as verdict:
        touch(GgufCheckpoint(path))
    return verdict.error


def test_the_whole_file_is_fine(good, tmp_path):
    assert attempt(tmp_path / "x.gguf", good[0]) is None
    assert open_model(str(tmp_path / "x.gguf")).tokenizer.vocab_size == tiny.VOCAB


def test_every_truncation_is_refused(good, tmp_path):
    content, begin = good
    cuts = [*range(64), *range(64, begin, 97), *range(begin, len(content), 4001)]
    for cut in [*cuts, len(content) - 1]:
        assert attempt(tmp_path / "x.gguf", content[:cut]) is not None, cut


@FUZZ
@given(data=st.data())
def test_flipped_bits(good, tmp_path, data):
    attempt(tmp_path / "x.gguf", data.draw(flipped(*good)))


@FUZZ
@given(data=st.data())
def test_splices(good, tmp_path, data):
    """Words that often mean a size or a type, put anywhere in the header."""
    content, begin = good
    word = data.draw(
        st.sampled_from([0, 1, 8, 9, 255, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1])
        | st.integers(0, (1 << 64) - 1)
    )
    raw = struct.pack("<Q", word)[: data.draw(st.sampled_from([1, 2, 4, 8]))]
    at = data.draw(st.integers(0, begin - 8))
    attempt(tmp_path / "x.gguf", content[:at] + raw + content[at + len(raw) :])


@settings(FUZZ, max_examples=40)
@given(data=st.data())
def test_flipped_bits_with_the_tokenizer(good, tmp_path, data):
    (tmp_path / "x.gguf").write_bytes(data.draw(flipped(*good, most=1)))
    with bounded(loops=90):
        tokenizer = open_model(str(tmp_path / "x.gguf")).tokenizer
        assert tokenizer.decode(tokenizer.encode("Hi").tolist()) is not None


@FUZZ
@given(content=st.binary(max_size=200))
def test_noise(tmp_path, content):
    assert attempt(tmp_path / "x.gguf", content) is not None
    assert attempt(tmp_path / "x.gguf", b"GGUF\x03\0\0\0" + content) is not None


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: bytes, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


PAD = b"\0" * 4096
HUGE = (1 << 64) - 1

HOSTILE = {
    "empty": (b"", "is empty: fetch it again"),
    "another format": (b"PK\x03\x04" + PAD, "does not begin with"),
    "version 1": (header(version=1) + PAD, "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + PAD, "big-endian"),
    "tensor count": (header(tensors=HUGE) + PAD, "tensors"),
    "key count": (header(keys=1 << 40) + PAD, "metadata keys"),
    "key length": (header(keys=1) + struct.pack("<Q", HUGE) + PAD, "longer than"),
    "key not text": (header(keys=1) + text(b"\xff\xfe") + PAD, "utf-8"),
    "string length": (
        header(keys=1) + text(b"a") + struct.pack("<IQ", STRING, 1 << 40) + PAD,
        "longer than",
    ),
    "array length": (
        header(keys=1) + text(b"a") + struct.pack("<IIQ", ARRAY, U32, 1 << 60) + PAD,
        "items",
    ),
    "string array length": (
        header(keys=1) + text(b"a") + struct.pack("<IIQ", ARRAY, STRING, 1 << 33) + PAD,
        "items",
    ),
    "string in an array": (
        header(keys=1) + text(b"a") + struct.pack("<IIQQ", ARRAY, STRING, 2, HUGE) + PAD,
        "too long",
    ),
    "array of arrays": (
        header(keys=1) + text(b"a") + struct.pack("<IIQ", ARRAY, ARRAY, 100) * 100 + PAD,
        "array of arrays",
    ),
    "unknown type": (header(keys=1) + text(b"a") + struct.pack("<I", 77) + PAD, "type 77"),
    "key twice": (
        header(keys=2) + (text(b"a") + struct.pack("<II", U32, 7)) * 2 + PAD,
        "'a' appears twice",
    ),
    "dimensions": (header(tensors=1) + text(b"t") + struct.pack("<I", 10**9) + PAD, "dimensions"),
    "no dimensions": (header(tensors=1) + tensor(b"t", []) + PAD, "dimensions"),
    "empty tensor": (header(tensors=1) + tensor(b"t", [0, 8]) + PAD, "shape"),
    "beyond the file": (header(tensors=1) + tensor(b"t", [1 << 20, 1 << 20]) + PAD, "ends at"),
    "product that wraps": (
        header(tensors=1) + tensor(b"t", [1 << 32, 1 << 32, 1, 1]) + PAD,
        "ends at",
    ),
    "offset beyond": (header(tensors=1) + tensor(b"t", [8], 0, 1 << 62) + PAD, "ends at"),
    "offset that wraps": (header(tensors=1) + tensor(b"t", [8], 0, HUGE - 31) + PAD, "ends at"),
    "misaligned": (header(tensors=1) + tensor(b"t", [8], 0, 1) + PAD, "not aligned"),
    "overlap": (
        header(tensors=2) + tensor(b"t", [64]) + tensor(b"u", [64], 0, 32) + PAD,
        "overlap",
    ),
    "tensor twice": (
        header(tensors=2) + tensor(b"t", [8]) + tensor(b"t", [8], 0, 32) + PAD,
        "'t' appears twice",
    ),
    "half a block": (header(tensors=1) + tensor(b"t", [33], 8) + PAD, "cannot be Q8_0"),
    "unknown storage": (header(tensors=1) + tensor(b"t", [32], 999) + PAD, "type 999"),
    "long name": (header(tensors=1) + tensor(b"t" * 5000, [8]) + PAD, "longer than"),
}


@pytest.mark.parametrize(("content", "named"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers(content, named, tmp_path):
    error = attempt(tmp_path / "x.gguf", content)
    assert error is not None
    assert named in str(error)


@pytest.mark.parametrize(("count", "named"), [(3_000_000, "architecture"), (10**8, "items")])
def test_a_file_full_of_strings_is_refused_in_time(count, named, tmp_path):
    """As many empty strings as are read at all, eight times a loop's work each, and many more."""
    path = tmp_path / "x.gguf"
    start = header(keys=1) + text(b"a") + struct.pack("<IIQ", ARRAY, STRING, count)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + 8 * count)
    with bounded(loops=60, megabytes=None) as verdict:
        GgufCheckpoint(path)
    assert named in str(verdict.error)


def test_an_absurd_sparse_file_costs_nothing(tmp_path):
    path = tmp_path / "x.gguf"
    with path.open("wb") as file:
        file.write(header(tensors=1) + tensor(b"token_embd.weight", [1 << 20, 1 << 18]))
        file.truncate(1 << 41)
    with bounded() as verdict:
        GgufCheckpoint(path)
    assert verdict.error is not None


def test_folders_and_missing_files(tmp_path):
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelError, match="cannot be read"):
            GgufCheckpoint(path)
