"""Phi-3's texts that are longer than its original context, from folders and GGUF files."""

import numpy as np
import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.executors.cpu import CpuExecutor, native
from forerun.executors.torch import TorchExecutor
from tests.models import tiny
from tests.parity.driver import limits, logits_in_chunks


def opened(kind, hf, path, context):
    if kind == "gguf":
        return GgufCheckpoint(tiny.write_gguf(hf, path / "x.gguf"), context)
    return FolderCheckpoint(tiny.save_folder(hf, path / "x"), context)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize(("context", "length"), [(None, 64), (256, 200)])
def test_logits_are_those_of_transformers(tmp_path, kind, context, length, partial):
    """Of a head that is rotated in part only that part is scaled, as in transformers."""
    rope = tiny.longrope(int(8 * partial))
    hf = tiny.model("phi3", rope=rope, partial=None if partial == 1.0 else partial)
    checkpoint = opened(kind, hf, tmp_path, context)
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, length).astype(np.int32)
    with torch.no_grad():
        expected = hf(torch.from_numpy(tokens).long()[None]).logits[0].numpy()
    room = limits(tiny.VOCAB, context=checkpoint.architecture.context, max_scored=256)
    executors = [TorchExecutor(checkpoint, room)]
    if native.available() is None:
        executors.append(CpuExecutor(checkpoint, room, 2))
    for executor in executors:
        logits = logits_in_chunks(executor, tokens).numpy()
        assert np.abs(logits - expected).max() < 1e-4
