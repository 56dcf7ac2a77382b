"""Parts of a checkpoint: together they are the whole, and nothing else of it is read."""

import numpy as np
import pytest

from forerun.build.shapes import SHAPES
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.tensor_parallel import (
    Cut,
    RankCheckpoint,
    TensorParallel,
    axis_of,
    check_divides,
    cut_of,
)
from forerun.errors import ConfigError
from forerun.networks.arch import FAMILIES
from tests.models import tiny

AXIS = {Cut.ROWS: 0, Cut.COLUMNS: -1, Cut.KV_HEADS: 0}


def parts_of(whole, size):
    return [RankCheckpoint(whole, TensorParallel(rank, size)) for rank in range(size)]


def joined(whole, parts, name):
    """The whole tensor of its parts."""
    cut, tensors = cut_of(name), [part.tensor(name) for part in parts]
    if cut is Cut.WHOLE:
        return tensors[-1]
    if cut is Cut.ONCE:
        return np.sum(tensors, 0)
    if cut in (Cut.PARTS, Cut.COLUMN_PARTS):
        return placed(whole, parts, name)
    if cut is Cut.KV_HEADS and len(parts) > whole.architecture.kv_heads:
        tensors = tensors[:: len(parts) // whole.architecture.kv_heads]
    return np.concatenate(tensors, AXIS[cut])


def placed(whole, parts, name):
    """Pieces put where each rank says that they are."""
    made = np.full(whole.shape(name), np.nan, np.float32)
    for part in parts:
        pieces = part.tp.pieces(name, whole.shape(name), whole.architecture)
        axis, tensor = axis_of(name), part.tensor(name)
        ends = np.cumsum([piece[axis].stop - piece[axis].start for piece in pieces])
        for piece, numbers in zip(pieces, np.split(tensor, ends[:-1], axis), strict=True):
            assert np.isnan(made[piece]).all(), "a number is in two parts"
            made[piece] = numbers
    return made


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("olmo2", "olmo3", "minimax_m2")]
)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_make_up_the_whole(tmp_path, family, size):
    whole = FolderCheckpoint(tiny.save_folder(tiny.model(family), tmp_path))
    try:
        check_divides(whole.architecture, TensorParallel(0, size))
    except ConfigError as error:
        pytest.skip(str(error))
    parts = parts_of(whole, size)
    for name in whole.names():
        np.testing.assert_array_equal(joined(whole, parts, name), whole.tensor(name), name)
        assert [part.shape(name) for part in parts] == [p.tensor(name).shape for p in parts]
        for part in parts:
            packed = part.packed(name)
            if packed is not None and cut_of(name) is not Cut.ONCE:
                np.testing.assert_array_equal(packed.floats(), part.tensor(name))


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_1", "BF16"])
@pytest.mark.parametrize("size", [2, 4])
def test_blocks_are_not_cut(tmp_path, storage, size):
    """Rows of 64 numbers in blocks of 32: halves end where blocks do, quarters do not."""
    path = tmp_path / "model.gguf"
    tiny.write_gguf(tiny.model("llama"), path, storage)
    whole = GgufCheckpoint(path)
    parts, name = parts_of(whole, size), "model.layers.0.self_attn.o_proj.weight"
    np.testing.assert_array_equal(joined(whole, parts, name), whole.tensor(name))
    ends = storage == "BF16" or size == 2
    assert all((part.packed(name) is not None) == ends for part in parts)


@pytest.mark.parametrize("storage", ["Q8_0", "F32"])
def test_value_heads_in_turns_are_cut_with_their_key_heads(tmp_path, storage):
    """Three value heads to a key head, as GGUF files of Qwen3.5 have them; a rank's own stand in
    turns too. Of 32 numbers each, so that blocks end where heads do.
    """
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 32}
    path = tmp_path / "model.gguf"
    tiny.write_gguf(tiny.model("qwen3_5_text", **heads), path, storage)
    whole = GgufCheckpoint(path)
    net, parts = whole.architecture.recurrent, parts_of(whole, 2)
    own = parts[1].architecture.recurrent
    assert net.tiled and own.tiled and (own.key_heads, own.value_heads) == (1, 3)
    for name in whole.names():
        np.testing.assert_array_equal(joined(whole, parts, name), whole.tensor(name), name)
        for part in parts:
            packed = part.packed(name)
            if packed is not None:
                np.testing.assert_array_equal(packed.floats(), part.tensor(name))
    name = "model.layers.0.linear_attn.out_proj.weight"
    assert storage == "F32" or all(part.packed(name) is not None for part in parts)
    values = parts[1].tensor("model.layers.0.linear_attn.v_proj.weight").reshape(3, 32, -1)
    every = whole.tensor("model.layers.0.linear_attn.v_proj.weight").reshape(6, 32, -1)
    np.testing.assert_array_equal(values, every[1::2])


def bytes_read(patch):
    """Return a list that gets the bytes of every piece that is cut from a file meanwhile."""
    seen, rows_of = [], TensorFile.rows

    class Watched(np.ndarray):
        def __getitem__(self, index):
            value = super().__getitem__(index)
            seen.append(value.nbytes)
            return value

    patch.setattr(TensorFile, "rows", lambda file, name: rows_of(file, name).view(Watched))
    return seen


def test_a_rank_reads_its_part_alone(tmp_path, monkeypatch):
    """Bytes that are read of the file: a half, and what every rank needs."""
    whole = FolderCheckpoint(tiny.save_folder(tiny.model("llama"), tmp_path))
    seen = bytes_read(monkeypatch)
    part = RankCheckpoint(whole, TensorParallel(1, 2))
    for name in part.names():
        packed = part.packed(name)
        if packed is not None:
            assert packed.rows.nbytes == packed.rows.size
    matrices = [name for name in whole.names() if whole.packed(name) is not None]
    assert 2 * sum(seen) == sum(whole.packed(name).rows.nbytes for name in matrices)


def test_a_tokens_part_may_be_one_longer():
    spans = [TensorParallel(rank, 4).span(323) for rank in range(4)]
    assert [s.stop - s.start for s in spans] == [80, 81, 81, 81]
    assert [s.start for s in spans[1:]] == [s.stop for s in spans[:-1]]


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("smollm2-135m", 2, "its 9 attention heads do not divide by that; .* by 1 or 3.$"),
        ("llama-3.1-8b", 3, "its 32 attention heads .* by 1 or 2 or 4 or 8 or 16 or 32.$"),
        ("qwen3-32b", 128, "its 64 attention heads"),
    ],
)
def test_a_model_that_cannot_be_shared_says_by_how_many_it_could(name, size, message):
    with pytest.raises(ConfigError, match=f"tp-size is {size}, but {message}"):
        check_divides(SHAPES[name], TensorParallel(0, size))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "llama-3.2-1b"])
def test_parts_are_counted_without_a_file(name):
    """Of two ranks each has half of what is cut, and all that is not: norms alone here."""
    arch = SHAPES[name]
    norms = arch.layers * (2 * arch.hidden + 2 * arch.head_size * (arch.family == "qwen3"))
    norms += arch.hidden
    for rank in range(2):
        assert TensorParallel(rank, 2).parameters(arch) == (arch.parameters - norms) // 2 + norms
