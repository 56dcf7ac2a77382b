"""Pickled weights are read as plain tensors, and nothing else can be made of a pickle."""

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.checkpoints import pickled
from forerun.checkpoints.folder import FolderCheckpoint, files_by_tensor
from forerun.checkpoints.pickle_program import View, run
from forerun.checkpoints.shard import MAPS
from forerun.errors import ModelError
from tests.models import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "forerun" / "converted"


def saved(folder, value, **how):
    folder.mkdir(exist_ok=True)
    torch.save(value, folder / "pytorch_model.bin", **how)
    return folder


def held(folder):
    """All tensors of a folder as torch reads them from where they were put."""
    (file,) = {file.path for file in files_by_tensor(folder, MAPS).values()}
    return load_file(file)


def same(loaded, wanted):
    assert loaded.keys() == wanted.keys()
    for name, made in wanted.items():
        tensor = made.detach()
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8),
                           tensor.contiguous().reshape(-1).view(torch.uint8)), name  # fmt: skip


def table():
    """A tensor of every kind that occurs: all types, views, strides, shared storages."""
    torch.manual_seed(0)
    base = torch.randn(6, 10)
    return {
        "single": torch.randn(3, 4),
        "half": torch.randn(5).half(),
        "brain": torch.randn(7, 3).bfloat16(),
        "d2t": torch.arange(9),
        "narrow": torch.arange(4, dtype=torch.int32),
        "t2d": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "part": base[2:5],
        "column": base[:, 3],
        "turned": base.T,
        "inner": base[1:4, 2:8].T,
        "swapped": torch.randn(2, 3, 4).permute(2, 0, 1),
        "shared": base,
        "again": base,
        "parameter": torch.nn.Parameter(torch.randn(2, 2).bfloat16()),
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_kind_of_tensor_to_the_bit(tmp_path, protocol):
    wanted = table()
    same(held(saved(tmp_path / "m", wanted, pickle_protocol=protocol)), wanted)


def test_the_table_of_a_module_with_its_metadata(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)).bfloat16()
    state = module.state_dict()
    assert isinstance(state, OrderedDict) and state._metadata
    same(held(saved(tmp_path / "m", state)), dict(state))


def test_long_tensors_are_written_in_parts(tmp_path, monkeypatch):
    wanted = {"long": torch.randn(1000, 7), "turned": torch.randn(300, 50).T}
    torch.save(wanted, tmp_path / "x.bin")
    monkeypatch.setattr(pickled, "_CHUNK", 256)
    with (tmp_path / "x.safetensors").open("wb") as target:
        size = pickled.write_safetensors(tmp_path / "x.bin", target)
    assert size == (tmp_path / "x.safetensors").stat().st_size
    same(load_file(tmp_path / "x.safetensors"), wanted)


def test_it_is_converted_once_and_anew_when_the_file_is_another(tmp_path, cache):
    folder = saved(tmp_path / "m", {"a": torch.ones(3)})
    held(folder)
    (first,) = cache.glob("*.safetensors")
    about = first.stat()
    held(folder)
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (about.st_ino, about.st_mtime_ns)
    saved(folder, {"a": torch.zeros(4)})
    same(held(folder), {"a": torch.zeros(4)})
    (second,) = cache.glob("*.safetensors")
    assert second != first and not list(cache.glob("*.part"))


def test_safetensors_go_before_pickles(tmp_path, cache):
    folder = saved(tmp_path / "m", {"a": torch.ones(3)})
    save_file({"a": torch.zeros(3)}, folder / "model.safetensors")
    same(held(folder), {"a": torch.zeros(3)})
    assert not cache.exists()


def test_a_whole_model_in_parts_loads(tmp_path):
    whole = tiny.save_folder(tiny.model("llama"), tmp_path / "whole")
    tensors = load_file(whole / "model.safetensors")
    folder = tmp_path / "parts"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    loaded, wanted = FolderCheckpoint(folder), FolderCheckpoint(whole)
    assert sorted(loaded.names()) == sorted(wanted.names())
    for name in wanted.names():
        assert np.array_equal(loaded.tensor(name), wanted.tensor(name))
    index[names[0]] = "../outside.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=r"must name at most 1024 \.bin files beside it"):
        FolderCheckpoint(folder)


class Calls:
    """Unpickling it calls something."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def refusal(
    folder,
    read=lambda folder: pickled.write_safetensors(folder / "pytorch_model.bin", io.BytesIO()),
):
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert not (folder / "ran").exists(), "code ran"
    text = str(caught.value)
    assert "pytorch_model.bin" in text and len(text) < 600 and "\n" not in text
    return text


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda folder: Calls(os.system, f"touch {folder}/ran"), "posix.system"),
        (lambda folder: Calls(Path.touch, folder / "ran"), "__builtin__.getattr"),
        (lambda folder: Calls(eval, f"open('{folder}/ran', 'w')"), "eval"),
        (lambda folder: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (lambda folder: torch.zeros(2, dtype=torch.float64), "torch.DoubleStorage"),
        (lambda folder: torch.zeros(2, dtype=torch.complex64), "torch.ComplexFloatStorage"),
        (lambda folder: torch.zeros(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (lambda folder: np.zeros(3), "numpy"),
        (lambda folder: 7, "'a' is a int, not a tensor"),
        (lambda folder: {"b": torch.zeros(2)}, "'a' is a dict, not a tensor"),
        (lambda folder: None, "'a' is a NoneType, not a tensor"),
        (lambda folder: torch.zeros(0, 3), "without numbers"),
        (lambda folder: torch.zeros(1).expand(1 << 20), "does not lie in its storage of 1"),
        (lambda folder: {1, 2}, "set"),
        (lambda folder: b"bytes", "codecs.encode"),
    ],
)
def test_what_else_it_holds_is_refused_by_name(tmp_path, value, named):
    folder = tmp_path / "m"
    assert named in refusal(saved(folder, {"a": value(folder), "b": torch.ones(2)}))


@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(3)], {}, {("a", 1): torch.ones(2)}])
def test_what_is_no_table_by_name_is_refused(tmp_path, value):
    assert "table" in refusal(saved(tmp_path / "m", value)) or "key" in refusal(tmp_path / "m")


def test_the_format_before_archives_is_refused(tmp_path):
    folder = saved(tmp_path / "m", {"a": torch.ones(3)}, _use_new_zipfile_serialization=False)
    assert "torch before 1.6" in refusal(folder)


STORAGE = ("storage", "FloatStorage", "0", "cpu", 4)


def program(*, storage=STORAGE, offset=0, shape=(4,), strides=(1,), flags=b"\x89", more=b""):
    """A table {"a": tensor} as torch 2 writes it, with what it says of the tensor."""
    _, kind, key, place, count = storage

    def text(word):
        return b"X" + len(word).to_bytes(4, "little") + word.encode()

    def number(value):
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    stored = b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text(place)
    stored += number(count) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + number(offset) + numbers(shape)
    tensor += numbers(strides) + flags + hooks + more + b"tR"
    return b"\x80\x02}" + text("a") + tensor + b"s."


def archive(folder, pkl, parts=(("data/0", bytes(range(16))),), change=None):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as made:
        made.writestr("archive/data.pkl", pkl)
        for name, content in parts:
            made.writestr(f"archive/{name}", content)
        if change is not None:
            change(made)
    return folder


def test_the_program_that_the_following_tests_change_is_good(tmp_path):
    wanted = {"a": torch.frombuffer(bytearray(range(16)), dtype=torch.float32)}
    same(held(archive(tmp_path / "m", program())), wanted)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"offset": 1}, "does not lie in its storage"),
        ({"offset": -1}, "-1 is not a size"),
        ({"shape": (5,)}, "does not lie"),
        ({"shape": (1 << 62,)}, "is not a size"),
        ({"shape": (1 << 40, 1 << 40), "strides": (0, 0)}, "does not lie"),
        ({"shape": (2, 2), "strides": (3, 1)}, "does not lie"),
        ({"shape": (2,), "strides": (-1,)}, "-1 is not a size"),
        ({"shape": (2, 2), "strides": (1,)}, "1 strides"),
        ({"shape": (5,), "strides": (0,)}, "does not lie"),
        ({"shape": (1,) * 9, "strides": (1,) * 9}, "at most eight"),
        ({"storage": ("storage", "FloatStorage", "0", "cpu", 5)}, "must take 20 bytes, it is 16"),
        ({"storage": ("storage", "FloatStorage", "0", "cpu", 1 << 40)}, "must take"),
        ({"storage": ("storage", "FloatStorage", "0", "cpu", 1 << 60)}, "is not a size"),
        ({"storage": ("storage", "FloatStorage", "1", "cpu", 4)}, "not there"),
        ({"storage": ("storage", "FloatStorage", "../data.pkl", "cpu", 4)}, "not there"),
        ({"storage": ("storage", "LongStorage", "0", "cpu", 4)}, "must take 32 bytes"),
        ({"flags": b"N"}, "something other than a storage"),
        ({"more": b"}X\x03\x00\x00\x00neg\x88s"}, "has fields"),
    ],
)
def test_what_does_not_lie_in_its_storage_is_refused(tmp_path, change, named):
    assert named in refusal(archive(tmp_path / "m", program(**change)))


def test_storages_that_overlap_are_refused(tmp_path):
    """Two entries of the archive's table that point to the same bytes."""

    def twice(made):
        entry = made.infolist()[-1]
        copy = zipfile.ZipInfo("archive/data/1")
        for field in ("header_offset", "file_size", "compress_size", "CRC"):
            setattr(copy, field, getattr(entry, field))
        made.filelist.append(copy)
        made.NameToInfo[copy.filename] = copy

    folder = archive(tmp_path / "m", program(), change=twice)
    assert "overlap" in refusal(folder)


def test_storages_that_are_not_stored_as_they_are_are_refused(tmp_path):
    def packed(made):
        made.writestr("archive/data/1", bytes(4096), zipfile.ZIP_DEFLATED)

    assert "'data/1' is compressed" in refusal(archive(tmp_path / "m", program(), change=packed))


def test_other_byte_orders_and_damaged_numbers_are_refused(tmp_path):
    parts = (("data/0", bytes(range(16))), ("byteorder", b"big"))
    assert "little-endian" in refusal(archive(tmp_path / "m", program(), parts))
    folder = archive(tmp_path / "n", program())
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    path.write_bytes(content.replace(bytes(range(16)), bytes(range(1, 17))))
    assert "checksum" in refusal(folder)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00id\x85R.", "names 'os.system'"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names 'os.system'"),
        (b"(S'id'\nios\nsystem\n.", "instruction 0x53"),
        (b"\x80\x02(ios\nsystem\n.", "instruction INST"),
        (b"\x80\x02(cos\n", "cut off"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "instruction NEWOBJ"),
        (b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "made of something"),
        (b"\x80\x02ccollections\nOrderedDict\n]R.", "calls a function"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "calls a function"),
        (b"\x80\x02}}X\x01\x00\x00\x00a]sb.", "sets attributes"),
        (b"\x80\x02]}b.", "sets attributes"),
        (b"\x80\x02\x82\x01.", "instruction EXT1"),
        (b"\x80\x02Pid\n.", "instruction PERSID"),
        (b"\x80\x02K\x01Q.", "a reference to a storage is malformed"),
        (b"\x80\x02}]]s.", "a key is not a string"),
        (b"\x80\x02}K\x01K\x02s.", "a key is not a string"),
        (b"\x80\x02}(K\x01u.", "of something that is not a table"),
        (b"\x80\x02)K\x01a.", "is not a list"),
        (b"\x80\x02h\x05.", "cut off"),
        (b"\x80\x02K\x01r\xff\xff\xff\xffj\xfe\xff\xff\xff.", "cut off"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "cut off"),
        (b"\x80\x02\x8bX.", "instruction LONG4"),
        (b"\x80\x07.", "protocol is 7"),
        (b"\x80\x02.", "one value"),
        (b"\x80\x02K\x01K\x02.", "one value"),
        (b"\x80\x02(K\x01.", "one value"),
        (b"", "cut off"),
    ],
)
def test_programs_that_want_something_else(code, named):
    with pytest.raises(ModelError, match=named):
        run(code)


def test_values_that_hold_themselves_and_each_other_end():
    """A list in itself; two hundred tuples, each of the one before twice; a tuple 50,000 deep."""
    assert isinstance(run(b"\x80\x02]q\x00h\x00a."), list)
    assert isinstance(run(b"\x80\x02)q\x00" + b"h\x00\x86q\x00" * 200 + b"."), tuple)
    deep = b")" + b"\x85" * 50_000
    assert isinstance(run(b"\x80\x02" + deep + b"."), tuple)
    with pytest.raises(ModelError, match="a reference to a storage is malformed"):
        run(b"\x80\x02" + deep + b"Q.")
    with pytest.raises(ModelError, match="a tuple is not a size"):
        run(program().replace(b"tQ\x8a\x09" + bytes(9), b"tQ" + deep, 1))


def test_damage_anywhere_is_one_sentence_or_the_same_tensors(tmp_path):
    """A thousand damaged programs: an error of ours, or a value of the kinds that there are."""
    torch.save(table(), tmp_path / "good.bin")
    with zipfile.ZipFile(tmp_path / "good.bin") as made:
        whole = made.read("good/data.pkl")
    source, refused = random.Random(5), 0
    for end in range(0, len(whole), 7):
        with pytest.raises(ModelError):
            run(whole[:end])
    for _ in range(1000):
        spoilt = bytearray(whole)
        for _ in range(source.randint(1, 3)):
            spoilt[source.randrange(len(spoilt))] = source.randrange(256)
        try:
            value = run(bytes(spoilt))
        except ModelError:
            refused += 1
            continue
        assert isinstance(value, (dict, str, int, float, list, tuple, View, type(None)))
    assert refused > 500


def test_damaged_archives_are_one_sentence(tmp_path):
    """Whatever byte of the file is another."""
    torch.save({"a": torch.arange(5.0), "b": torch.arange(3)}, tmp_path / "x.bin")
    whole = (tmp_path / "x.bin").read_bytes()
    source, refused = random.Random(2), 0
    for _ in range(600):
        spoilt = bytearray(whole)
        spoilt[source.randrange(len(spoilt))] ^= 1 << source.randrange(8)
        (tmp_path / "y.bin").write_bytes(spoilt)
        try:
            pickled.write_safetensors(tmp_path / "y.bin", io.BytesIO())
        except ModelError:
            refused += 1
    assert refused > 100
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "y.bin").write_bytes(whole[:size])
        with pytest.raises(ModelError):
            pickled.write_safetensors(tmp_path / "y.bin", io.BytesIO())


def test_a_program_that_takes_too_much_is_ended(tmp_path, monkeypatch, cache):
    """Memory: tables of 64 bytes, one per byte of the program. Time: its process is killed."""
    bomb = b"\x80\x02(" + b"}" * (16 << 20) + b"t."
    text = refusal(archive(tmp_path / "m", bomb), files_by_tensor)
    assert "memory" in text
    monkeypatch.setattr("forerun.checkpoints.converted._SECONDS", 0.5)
    monkeypatch.setattr("forerun.checkpoints.converted._BYTES_PER_SECOND", 1 << 50)
    slow = b"\x80\x02]" + b"Na" * (10 << 20) + b"."
    text = refusal(archive(tmp_path / "n", slow), files_by_tensor)
    assert "0.5 seconds of processor time" in text
    assert not list(cache.glob("*.safetensors")) and not list(cache.glob("*.part"))


def test_nothing_of_pickles_module_is_needed_to_read():
    """The oracle: CPython's own reader makes the same of plain values."""
    value = {"a": [1, -2, 1 << 70, 2.5, None, True, "ü", (1, (2, 3), ())], "b": {"c": []}}
    for protocol in (2, 3, 4, 5):
        assert run(pickle.dumps(value, protocol)) == value
