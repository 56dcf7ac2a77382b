"""GGUF files in several parts are what they were in one."""

import gguf
import numpy as np
import pytest

from forerun.build.memory import bytes_on_disk
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.gguf.header import read_header
from forerun.checkpoints.gguf.parts import part_names, parts_of
from forerun.errors import ModelError
from forerun.hub.catalog import open_model
from tests.models import tiny


def write_parts(whole, folder, count=3, changes=None, left_out=()):
    """As llama-gguf-split does: all metadata in the first part, the tensors shared out.

    changes  by part, keys of `split` that say something else
    """
    reader, known = gguf.GGUFReader(whole), read_header(whole)
    tensors = [tensor for tensor in reader.tensors if tensor.name not in left_out]
    shares = [[], *(tensors[n :: count - 1] for n in range(count - 1))] if count > 1 else [tensors]
    paths = [folder / name for name in part_names(f"m-00001-of-{count:05}.gguf")]
    for number, (path, share) in enumerate(zip(paths, shares, strict=True)):
        writer = gguf.GGUFWriter(path, known.metadata["general.architecture"])
        for key, field in reader.fields.items() if number == 0 else ():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=sub)
        said = {"no": number, "count": count, "tensors.count": len(reader.tensors)}
        for key, value in (said | (changes or {}).get(number, {})).items():
            add = writer.add_int32 if key == "tensors.count" else writer.add_uint16
            add(f"split.{key}", value)
        for tensor in share:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        tiny.written(writer, path)
    return paths


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "whole.gguf"
    return tiny.write_gguf(tiny.model("llama"), path, "Q8_0")


@pytest.mark.parametrize("count", [2, 3])
def test_the_first_part_opens_all(whole, tmp_path, count):
    paths = write_parts(whole, tmp_path, count)
    one, parts = GgufCheckpoint(whole), GgufCheckpoint(paths[0])
    assert parts.architecture == one.architecture and parts.names() == one.names()
    for name in one.names():
        np.testing.assert_array_equal(parts.tensor(name), one.tensor(name))
        mine, other = parts.packed(name), one.packed(name)
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.kind == other.kind
            np.testing.assert_array_equal(mine.rows, other.rows)
    assert parts_of(paths[0]) == paths and parts_of(whole) == [whole]
    assert bytes_on_disk(paths[0]) == sum(path.stat().st_size for path in paths)
    model = open_model(str(paths[0]))
    assert model.tokenizer.encode("the fox").tolist()


def test_another_part_names_the_first(whole, tmp_path):
    paths = write_parts(whole, tmp_path)
    with pytest.raises(ModelError, match=r"not the first of 3 parts; name m-00001-of-00003\.gguf"):
        GgufCheckpoint(paths[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"no": 2}}, r"says that it is part 3 of 3, not 2 of 3"),
        ({2: {"count": 4}}, r"says that it is part 3 of 4, not 3 of 3"),
        ({0: {"count": 4}}, r"first of 4 parts; name them as llama-gguf-split"),
        ({0: {"tensors.count": 99}}, r"its parts have \d+ tensors, not 99"),
    ],
)
def test_parts_that_disagree_are_named(whole, tmp_path, changes, message):
    paths = write_parts(whole, tmp_path, changes=changes)
    with pytest.raises(ModelError, match=message):
        GgufCheckpoint(paths[0])


def test_what_is_missing_is_named(whole, tmp_path):
    paths = write_parts(whole, tmp_path)
    paths[2].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf is missing: it is part 3 of 3"):
        GgufCheckpoint(paths[0])
    paths[1].rename(paths[2])
    write_parts(whole, tmp_path, changes={2: {"no": 1}})
    with pytest.raises(ModelError, match=r"part 2 of 3, not 3 of 3"):
        GgufCheckpoint(paths[0])


def test_a_tensor_in_two_parts_is_refused(whole, tmp_path):
    paths = write_parts(whole, tmp_path)
    held = paths[1].read_bytes()
    paths[2].write_bytes(held)
    other = read_header(paths[1]).metadata
    assert other["split.no"] == 1
    at = held.index(b"split.no") + len(b"split.no") + 4
    paths[2].write_bytes(held[:at] + (2).to_bytes(2, "little") + held[at + 2 :])
    with pytest.raises(ModelError, match="repeats the tensor"):
        GgufCheckpoint(paths[0])


def test_names_of_parts():
    assert part_names("a/b-00002-of-00003.gguf") == [
        f"a/b-0000{n}-of-00003.gguf" for n in (1, 2, 3)
    ]
    for name in ("a.gguf", "a-1-of-2.gguf", "a-00001-of-00000.gguf", "a-00001-of-99999.gguf"):
        assert part_names(name) == [name]
