"""Training's target is serving's decoder: features, logits and attention of every family."""

import numpy as np
import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ConfigError, ModelError
from forerun.executors.torch import TorchExecutor
from forerun.networks.arch import FAMILIES
from forerun.train.batches import online_reader
from forerun.train.target import DenseTarget
from tests.models import tiny
from tests.models.tiny import CONVOLUTIONS, DELTAS
from tests.parity.driver import Driver, Row, limits

UNTAUGHT = {*DELTAS, *CONVOLUTIONS, "gemma4_text"}
"""Families beside which no draft is trained."""
TOKENS = np.random.default_rng(0).integers(0, tiny.VOCAB, (2, 70))


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in UNTAUGHT])
def checkpoint(request, tmp_path_factory):
    changes = {"sliding_window": 30} if request.param == "mistral" else {}
    hf = tiny.model(request.param, **changes)
    return FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp(request.param)))


def test_features_and_logits_are_those_of_transformers(checkpoint):
    target = DenseTarget(checkpoint, "cpu", torch.float32)
    with torch.no_grad():
        reference = tiny.reference(checkpoint)
        output = reference(torch.from_numpy(TOKENS), output_hidden_states=True)
    features, last = target.run(torch.from_numpy(TOKENS), (0, 1))
    for ours, theirs in zip(features.split(64, -1), output.hidden_states, strict=False):
        assert (ours - theirs).abs().max() < 1e-4
    logits = target.logits(last.flatten(0, 1)).view(2, 70, -1)
    assert (logits - output.logits).abs().max() < 1e-4
    assert torch.equal(target.choices(last), logits.argmax(-1))


@pytest.mark.parametrize(
    ("family", "why"), [("qwen3_next", "recurrent states"), ("gemma4_text", "keys and values")]
)
def test_what_nothing_is_trained_beside(tmp_path, family, why):
    source = FolderCheckpoint(tiny.save_folder(tiny.model(family), tmp_path))
    with pytest.raises(ModelError, match=why):
        DenseTarget(source, "cpu", torch.float32)


def test_features_are_those_that_serving_hands_out(checkpoint):
    layers = (1, checkpoint.architecture.layers)
    dense = DenseTarget(checkpoint, "cpu", torch.float32)
    features, _ = dense.run(torch.from_numpy(TOKENS), layers)
    executor = TorchExecutor(checkpoint, limits(tiny.VOCAB, context=128))
    executor.request_aux_hidden_states(layers)
    with Driver(executor) as driver:
        for slot, tokens in enumerate(TOKENS):
            driver.open(slot, tokens)
        served = driver.step([Row(0), Row(1)]).outcome.features.tensor()
    assert (served - features.flatten(0, 1)).abs().max() < 1e-4


def test_a_capped_target_is_not_taught_from_on_the_fly(checkpoint):
    target = DenseTarget(checkpoint, "cpu", torch.float32)
    if target.arch.final_softcap is None:
        online_reader(None, target, (0,), target.head)
        return
    with pytest.raises(ConfigError, match="caps its logits"):
        online_reader(None, target, (0,), target.head)
