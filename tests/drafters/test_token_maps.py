"""FR-Spec token maps with every kind of draft that takes one: the text is exact, nothing outside of
the map is ever drafted, and what is inside is accepted as without it.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from forerun.build.engine import open_target
from forerun.drafters.model_drafter import ModelDrafter
from forerun.errors import ModelError
from forerun.executors import cpu
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.models.draft_config import head_for
from forerun.models.folder import FolderCheckpoint
from forerun.options.config import EngineConfig
from forerun.train.export import export_head
from tests.drafters.served import SMALL
from tests.drafters.test_nextn import with_layers
from tests.drafters.test_standalone import counts, served
from tests.models import tiny

NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
EXECUTORS = [pytest.param("cpu", marks=NATIVE), pytest.param("torch", marks=pytest.mark.slow)]
METHODS = ("EAGLE", "NEXTN", "STANDALONE")
STEPS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target that looks at the last token alone, with a prediction layer, and an EAGLE-1 head;
    both do the same, so that what they propose is what the target says.
    """
    root, hf = tmp_path_factory.mktemp("maps"), tiny.model("llama", num_hidden_layers=6)
    layer, width = LlamaDecoderLayer(hf.config, 0), hf.config.hidden_size
    with torch.no_grad():
        hf.model.norm.weight.fill_(1.0)  # An EAGLE-1 head has no norm: a scale moves no argmax.
        for block in (*hf.model.layers, layer):
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    fuse = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    made = layer, *(torch.ones(width) for _ in range(3)), fuse.roll(width, 1)
    target = with_layers(hf, [made], root / "target", "mimo")  # Reads the hidden state first.
    arch = FolderCheckpoint(target).architecture
    about = replace(head_for(arch, arch.vocab), algorithm="eagle1", features=(arch.layers,))
    head = EagleHead(about)
    with torch.no_grad():
        for parameter in (head.layer.self_attn.o_proj.weight, head.layer.mlp.down_proj.weight):
            parameter.zero_()
        head.fc.weight.copy_(fuse)
    export_head(head, np.arange(arch.vocab, dtype=np.int32), root / "eagle")
    return {"target": target, "EAGLE": root / "eagle", "NEXTN": None, "STANDALONE": target}


def opened(folders, executor, method, token_map=None):
    draft = folders.get(method)
    config = EngineConfig(
        model=str(folders["target"]), executor=executor, **SMALL, threads=1,
        dtype="float32" if executor == "torch" else "auto",
        draft_on_error="stop", speculative_algorithm=method,
        speculative_draft_model_path=None if draft is None else str(draft),
        speculative_num_steps=None if method == "OFF" else STEPS,
        speculative_token_map=None if token_map is None else str(token_map),
    )  # fmt: skip
    return open_target(config)


@pytest.fixture(scope="module")
def plain(folders):
    """Texts without speculation, by executor and temperature."""
    found = {}

    def texts(executor, temperature):
        if (executor, temperature) not in found:
            target = opened(folders, executor, "OFF")
            try:
                done = served(target, temperature)
            finally:
                target.close()
            found[executor, temperature] = [item.tokens for item in done]
        return found[executor, temperature]

    return texts


@pytest.fixture
def drafted(monkeypatch):
    """All tokens that were drafted."""
    found, propose = set(), ModelDrafter.propose

    def noted(self, plan):
        drafts = propose(self, plan)
        found.update(token for draft in drafts for token in draft.tokens.tolist())
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", noted)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_map_bounds_what_is_drafted_and_nothing_else(
    folders, plain, drafted, tmp_path, executor, method
):
    texts = plain(executor, 0.0)
    said = {token for tokens in texts for token in tokens}
    share = {}
    for name, kept in (("all", sorted(said)), ("half", sorted(said)[::2])):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(kept))
        drafted.clear()
        target = opened(folders, executor, method, path)
        try:
            assert target.draft_model.traits.target_ids.tolist() == kept
            accepted, proposed = counts(served(target, 0.0), texts)
            assert drafted and drafted <= {*kept}
            share[name] = accepted / proposed
            warm, _ = counts(served(target, 0.8), plain(executor, 0.8))
            assert drafted <= {*kept} and warm > 0
        finally:
            target.close()
    assert share["all"] > 0.95
    assert 0 < share["half"] < share["all"] - 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_map_of_another_vocabulary_is_refused(folders, tmp_path, method):
    (tmp_path / "far.json").write_text(json.dumps([5, tiny.VOCAB]))
    with pytest.raises(ModelError, match=f"names id {tiny.VOCAB}, outside"):
        opened(folders, "torch", method, tmp_path / "far.json")
