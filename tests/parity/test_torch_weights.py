"""Weights go from the file to the device in pieces, in the dtype they are stored in."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.shapes import SHAPES, RandomCheckpoint
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.mapped import Packed
from forerun.errors import ModelError
from forerun.executors.torch.decoder import weights as module
from forerun.executors.torch.decoder.decoder import Decoder
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.weights import Weights, some_rows
from forerun.networks.arch import expected_tensors
from tests.models import tiny
from tests.parity.test_prefill_chunks import PeakBytes

CPU, META = torch.device("cpu"), torch.device("meta")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=["F32", "F16", "BF16", "Q8_0", "Q4_1", "folder BF16"])
def stored(request, tmp_path_factory):
    folder, hf = tmp_path_factory.mktemp("stored"), tiny.model("llama")
    if request.param.startswith("folder"):
        return FolderCheckpoint(tiny.save_folder(hf, folder, dtype=torch.bfloat16))
    return GgufCheckpoint(tiny.write_gguf(hf, folder / "x.gguf", request.param))


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_are_what_float32_in_one_piece_gives(stored, dtype, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 1000)  # A few rows.
    weights = Weights(stored, CPU, dtype, Linear)
    names = [name for name in stored.names() if len(stored.shape(name)) == 2]
    assert any(".q_proj." in name for name in names)  # Rows in another order in a GGUF file.
    for name in names:
        expected = torch.from_numpy(np.array(stored.tensor(name))).to(dtype)
        assert torch.equal(weights.matrix(name), expected), name
        some = np.array([3, 0, 31], np.int32)
        assert torch.equal(some_rows(stored, name, some, CPU, dtype), expected[some])
    joined = weights.linear(*(f"model.layers.0.self_attn.{part}_proj" for part in "qkv"))
    whole = [stored.tensor(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    x = torch.randn(3, 64).to(dtype)
    expected = torch.nn.functional.linear(x, torch.from_numpy(np.concatenate(whole)).to(dtype))
    torch.testing.assert_close(joined(x), expected)


def test_random_weights_are_repeated_where_they_stay():
    arch = SHAPES["tiny"]
    checkpoint = RandomCheckpoint(replace(arch, vocab=20_001))  # More than the block has.
    weights = Weights(checkpoint, CPU, torch.bfloat16, Linear)
    for name in ("model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"):
        expected = torch.from_numpy(np.array(checkpoint.tensor(name))).to(torch.bfloat16)
        assert torch.equal(weights.matrix(name), expected)


class Reader:
    """A large file that takes no memory: matrices of one row in bfloat16."""

    def __init__(self, arch):
        self.architecture, self.path = arch, "nowhere"
        self._shapes, self.read = expected_tensors(arch), 0

    def names(self):
        return tuple(self._shapes)

    def shape(self, name):
        return self._shapes[name]

    def tensor(self, name):
        assert len(self._shapes[name]) == 1, f"{name} is a matrix, and goes through float32"
        return np.ones(self._shapes[name], np.float32)

    def packed(self, name):
        rows, columns = self._shapes[name]
        self.read += 2 * rows * columns
        row = np.zeros(2 * columns, np.uint8)
        return Packed("BF16", np.broadcast_to(row, (rows, 2 * columns)), columns)


def test_the_host_holds_a_piece_and_not_the_model():
    """An 8B onto a device that takes no memory either; NumPy tells tracemalloc what it takes, and
    torch's tensors on the host are views of that.
    """
    reader = Reader(SHAPES["llama-3.1-8b"])
    reader.architecture = replace(
        reader.architecture, layer_specs=reader.architecture.layer_specs[:4]
    )
    tracemalloc.start()
    try:
        Decoder(reader, META, torch.bfloat16)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reader.read > 3e9
    assert most < 3 * module.PIECE


MIDDLE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}


@pytest.mark.parametrize("kind", ["folder BF16", "BF16", "Q8_0"])
@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_a_file_is_held_once_and_not_twice(kind, device, tmp_path, monkeypatch):
    """Bytes that NumPy and torch allocate from the opened file to the decoder, at most: on the CPU
    the model's own and some pieces, beside a device those pieces alone. Mapped files are the
    system's, which takes their pages back.
    """
    monkeypatch.setattr(module, "PIECE", 1 << 16)
    hf = tiny.model("llama", **MIDDLE)
    if kind.startswith("folder"):
        checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path, dtype=torch.bfloat16))
    else:
        checkpoint = GgufCheckpoint(tiny.write_gguf(hf, tmp_path / "x.gguf", kind))
    whole = 2 * checkpoint.architecture.parameters
    del hf
    tracemalloc.start()
    try:
        with PeakBytes() as held:
            Decoder(checkpoint, device, torch.bfloat16)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A query's or key's rows in a llama GGUF are put into order as stored: one matrix.
    assert most < 2 * 256 * 256 + (1 << 20)
    assert whole > 6 * (1 << 20)
    if device == CPU:
        assert 0.99 * whole < held.most < whole + (1 << 20)
    else:
        assert held.most - whole < 1 << 20, "what is on the device, and pieces on their way to it"


def test_what_is_not_finite_is_refused_with_the_option(tmp_path):
    hf = tiny.model("llama")
    with torch.no_grad():
        hf.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path))
    name = "model.layers.1.mlp.up_proj.weight"
    assert Weights(checkpoint, CPU, torch.float32, Linear).matrix(name).isnan().any()
    with pytest.raises(ModelError, match=f"{name} holds NaN"):
        Weights(checkpoint, CPU, torch.float32, Linear, finite=True).matrix(name)
