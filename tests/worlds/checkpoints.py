"""Checkpoints of small random models, each made once; and what they hold, beside transformers."""

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.executors.torch import TorchExecutor
from tests.models import tiny
from tests.parity.driver import limits, logits_in_chunks

IDS = torch.arange(200)[None]


class Checkpoints:
    """By the arguments of tiny.model: folders, or files of a `kind` of numbers ("Q8_0")."""

    def __init__(self, factory, kind=None):
        self._factory, self._kind, self._made = factory, kind, {}

    def __call__(self, family="llama", kind="", **changes):
        kind = self._kind if kind == "" else kind
        key = repr((family, kind, sorted(changes.items())))
        if key not in self._made:
            hf = tiny.model(family, **{"max_position_embeddings": 512} | changes)
            folder = self._factory.mktemp(family)
            if kind:
                checkpoint = GgufCheckpoint(tiny.write_gguf(hf, folder / "model.gguf", kind))
            else:
                checkpoint = FolderCheckpoint(tiny.save_folder(hf, folder))
            self._made[key] = checkpoint
        return self._made[key]


def holds(checkpoint, hf, stored=lambda name, weight: weight):
    """Assert that a checkpoint has the tensors of a model of transformers, number by number.
    stored: what it holds of one, (name, weight) -> weight.
    """
    weights = tiny.weights(hf)
    assert set(checkpoint.names()) == set(weights)
    for name, weight in weights.items():
        expected = stored(name, weight)
        assert checkpoint.shape(name) == expected.shape
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)


def logits_are_those_of(hf, checkpoint):
    """Assert that a checkpoint's logits on torch are those of a model of transformers."""
    executor = TorchExecutor(checkpoint, limits(tiny.VOCAB, context=256))
    with torch.no_grad():
        expected = hf(IDS).logits[0]
    assert (logits_in_chunks(executor, IDS[0].numpy()) - expected).abs().max() < 1e-4


def expected_logits(checkpoint, tokens):
    """float32[T,V] of transformers on a checkpoint's own weights."""
    with torch.no_grad():
        return tiny.reference(checkpoint)(torch.as_tensor(np.asarray(tokens))[None].long()).logits[
            0
        ]


def rewrite(folder, change):
    """Apply `change` to the dictionary of tensors in model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
