"""The torch executor on a CUDA device, unoptimised: the same model as on the CPU."""

import numpy as np
import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.executors.torch import TorchExecutor
from tests.models import tiny
from tests.parity.driver import Driver, Row, chain_draft, limits, logits_in_chunks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same model on the CPU and on the device, float32."""
    hf = tiny.model("qwen3", max_position_embeddings=512)
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp("model")))
    return [TorchExecutor(checkpoint, limits(tiny.VOCAB), device) for device in ("cpu", "cuda")]


def test_logits_equal_those_of_the_cpu(pair):
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, 300)
    found = [logits_in_chunks(executor, tokens, (150, 150)) for executor in pair]
    assert (found[0] - found[1]).abs().max() < 1e-3  # TF32 is off unless the user turns it on.


def test_trees_are_accepted_and_committed(pair):
    prompt = np.random.default_rng(1).integers(0, tiny.VOCAB, 30).tolist()
    texts = []
    for executor in pair:
        with Driver(executor) as driver:
            driver.open(0, prompt)
            for _ in range(8):
                driver.step([Row(0)])
            texts.append(driver.sequences[0].tokens[30:])
    with Driver(pair[1]) as driver:
        driver.open(0, prompt)
        assert driver.step([Row(0, draft=chain_draft(texts[1][:4]))]).emitted(0) == texts[1][:5]
        assert driver.step([Row(0)]).emitted(0) == texts[1][5:6]
    assert texts[0] == texts[1]
