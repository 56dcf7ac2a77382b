"""A draft whose numbers overflow drafts nothing: the server says so, and texts are the target's."""

import pytest
from safetensors.torch import load_file, save_file

from forerun import LLM
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.drafts.eagle_config import head_for
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.train.export import export_head
from tests.drafters.served import on_xla
from tests.models import tiny

PROMPT = "the quick brown fox jumps over"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a head for it whose weights are finite and whose products are not."""
    root = tmp_path_factory.mktemp("overflow")
    hf = tiny.model("llama", num_hidden_layers=6, max_position_embeddings=512)
    model = tiny.save_folder(hf, root / "target")
    arch = FolderCheckpoint(model).architecture
    export_head(EagleHead(head_for(arch, arch.vocab)), None, root / "draft")
    file = root / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"] = tensors["fc.weight"].sign() * 3e38
    save_file(tensors, file)
    return str(model), str(root / "draft")


@pytest.fixture
def uncompiled(compiled, quickly):
    """Programs are compiled when they come up, and quickly."""
    with on_xla(compiled):
        yield


def answer(model, **options):
    sizes = {"kv_tokens": 512, "max_sequences": 2, "policy": "fixed"}
    with LLM(model, **sizes, **options) as llm:
        (done,) = llm.generate(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)
        return done.tokens, done.stats, llm.loaded.engine.fault


@pytest.mark.parametrize("executor", ["cpu", "torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_head_that_overflows_is_a_fault_of_speculation(folders, request, executor):
    if executor == "jax":
        request.getfixturevalue("uncompiled")
    model, draft = folders
    how = {"executor": executor} | ({} if executor == "cpu" else {"dtype": "float32"})
    plain, _, fault = answer(model, speculative_algorithm="OFF", **how)
    assert fault is None
    head = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": draft}
    tokens, stats, fault = answer(model, **how, **head)
    assert tokens == plain and stats.draft_tokens == 0
    assert fault is not None and fault.startswith("speculation is off: ")
    assert "eagle3" in fault and "not finite" in fault
