"""Prediction layers in a target's files: what they are taken for, and what is wrong with them."""

import json
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.build.drafting import with_shipped
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.prediction_naming import FUSE
from forerun.client.llm import LLM
from forerun.drafts.gguf_prediction import open_in_gguf, open_layers_alone
from forerun.drafts.prediction_layers import open_prediction_layers
from forerun.errors import ConfigError, ModelError
from forerun.executors import cpu
from forerun.options.config import EngineConfig
from tests.drafters.kinds import Kind, Kinds
from tests.drafters.prediction import NAMINGS, alone, in_gguf, prefix_of, random_layer, with_layers
from tests.drafters.served import settings
from tests.models import tiny
from tests.worlds.configs import small


@pytest.fixture(scope="module")
def hf():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def layers(hf):
    return [random_layer(hf, 5 + depth) for depth in range(3)]


def configured(folder, method="NEXTN", **changes):
    return settings(Kind(method, folder), "torch", **changes)


def opened(folder):
    checkpoint = FolderCheckpoint(folder)
    declared = checkpoint.config["num_nextn_predict_layers"]
    return open_prediction_layers(checkpoint, checkpoint.prediction_files, declared)


def says(folder, **facts):
    """Change what the folder's configuration says."""
    config = json.loads((folder / "config.json").read_text()) | facts
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("executor", ["cpu", "torch"])
def test_a_model_itself_as_its_eagle_draft_means_its_layers(kinds, executor):
    """Where a checkpoint has them and no draft is named."""
    with closing(
        open_target(settings(Kind("EAGLE", kinds["right, NEXTN"].model), executor))
    ) as target:
        assert target.config.speculative_algorithm == "NEXTN"
        assert target.draft_model.describe()["layers"] == 1


def test_mimo_is_qwen2_with_prediction_layers(layers, tmp_path):
    """MiMo-7B's configuration, and the command line its documentation gives."""
    hf = tiny.model("qwen2")
    sizes = {"q": 64, "k": 32, "v": 32}
    biases = {f"model.mtp_layers.0.self_attn.{part}_proj.bias": torch.zeros(size)
              for part, size in sizes.items()}  # fmt: skip
    folder = with_layers(hf, layers[:1], tmp_path, "mimo", biases)
    says(folder, model_type="mimo", architectures=["MiMoForCausalLM"], attention_bias=True,
         use_mrope=False, auto_map={"AutoModel": "modeling.MiMoModel"})  # fmt: skip
    assert FolderCheckpoint(folder).architecture.family == "qwen2"
    shape = {"speculative_num_steps": 1, "speculative_eagle_topk": 1}
    target = open_target(configured(folder, "EAGLE", speculative_num_draft_tokens=2, **shape))
    assert target.config.speculative_algorithm == "NEXTN"
    assert target.draft_model.describe()["layers"] == 1
    target.close()
    says(folder, use_mrope=True)
    with pytest.raises(ModelError, match="use_mrope"):
        FolderCheckpoint(folder)


@pytest.mark.parametrize("naming", NAMINGS)
def test_what_is_missing_or_unknown_is_named(hf, layers, tmp_path, naming):
    """Of one layer, and of the last of three."""
    prefix, *names = NAMINGS[naming]
    lost = f"{names[-1] if naming == 'qwen3-next' else prefix + names[-1]}.weight"
    last = prefix.replace(prefix[-2], str(int(prefix[-2]) + 2))
    assert prefix == prefix_of(hf, naming)
    for count, first, gone in ((1, prefix, lost), (3, last, f"{last}mlp.up_proj.weight")):
        folder = with_layers(hf, layers[:count], tmp_path / str(count), naming)
        tensors = load_file(folder / "model.safetensors")
        del tensors[gone]
        tensors[f"{first}self_attn.k_norm.weight"] = torch.ones(16)
        tensors[f"{first}self_attn.o_proj.weight"] = torch.ones(3, 64)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelError) as caught:
            opened(folder) if count > 1 else open_target(configured(folder))
        for fault in (f"missing {gone}", f"unexpected {first}self_attn.k_norm.weight",
                      f"{first}self_attn.o_proj.weight is [3, 64], not [64, 64]"):  # fmt: skip
            assert fault in str(caught.value)
    # The target itself is whole.
    open_target(configured(tmp_path / "1", "OFF")).close()


def test_layers_in_gguf_are_read_strictly(tmp_path):
    """Two of them: copies of what they share are taken for that, and faults are named."""
    hf = tiny.model("llama")
    layers = [random_layer(hf, 5 + depth) for depth in range(2)]
    shared = {
        f"blk.{layer}.nextn.{name}.weight": hf.get_parameter(stored).detach().numpy()
        for layer in (2, 3)
        for name, stored in (
            ("embed_tokens", "model.embed_tokens.weight"),
            ("shared_head_head", "lm_head.weight"),
        )
    }
    whole = GgufCheckpoint(in_gguf(hf, layers, tmp_path / "whole.gguf", extra=shared))
    assert whole.architecture.layers == 2
    read = open_in_gguf(whole)
    assert read.count == 2 and not {"lm_head.weight", "model.embed_tokens.weight"} & {*read.files}
    assert np.array_equal(read.tensor(read.own(1, FUSE)), layers[1][-1].numpy())
    wrong = {
        "blk.3.nextn.hnorm.weight": None,
        "blk.2.nextn.enorm.weight": np.ones(3, np.float32),
        "blk.3.attn_q_norm.weight": np.ones(16, np.float32),
    }
    with pytest.raises(ModelError) as caught:
        open_in_gguf(GgufCheckpoint(in_gguf(hf, layers, tmp_path / "wrong.gguf", extra=wrong)))
    for fault in (
        "missing blk.3.nextn.hnorm.weight",
        "blk.2.nextn.enorm.weight is [3], not [64]",
        "unexpected blk.3.attn_q_norm.weight",
    ):
        assert fault in str(caught.value)
    other = shared | {"blk.3.nextn.shared_head_head.weight": np.ones((320, 64), np.float32)}
    with pytest.raises(ModelError, match=r"blk\.3\.nextn\.shared_head_head\.weight is another"):
        open_in_gguf(GgufCheckpoint(in_gguf(hf, layers, tmp_path / "other.gguf", extra=other)))


def counted(target, method, draft=None, executor="cpu"):
    """The ids of an answer, its accepted draft tokens, and what the start says."""
    options = {} if draft is None else {"speculative_draft_model_path": str(draft)}
    with LLM(
        str(target), executor=executor, speculative_algorithm=method, policy="fixed", context=64,
        max_sequences=1, threads=1, speculative_num_steps=1, **options,
    ) as llm:  # fmt: skip
        (answer,) = llm.generate("the quick brown", max_tokens=16, temperature=0, ignore_eos=True)
        return answer.tokens, llm.loaded.engine.stats().accepted, llm.loaded.info["drafting"]


@pytest.mark.parametrize("executor", ["cpu", "torch"])
def test_layers_in_a_gguf_file_of_their_own_draft_as_within_the_models(tmp_path, executor):
    """mtp-*.gguf beside the model or named, whatever else of the model a converter left in it."""
    hf = tiny.model("llama")
    whole = in_gguf(hf, [random_layer(hf, 5)], tmp_path / "whole.gguf")
    target = tiny.write_gguf(hf, tmp_path / "small-Q8_0.gguf")
    kept = ("token_embd.weight", "output_norm.weight")
    beside = alone(whole, tmp_path / "mtp-small-F32.gguf", kept)
    expected = counted(whole, "AUTO", executor=executor)
    assert "NEXTN" in expected[2]
    for draft in (None, beside):
        actual = counted(target, "AUTO", draft, executor)
        assert actual[:2] == expected[:2]
        assert "NEXTN" in actual[2] and f"AUTO: {beside} holds prediction layers" in actual[2]
    assert counted(target, "NEXTN", executor=executor)[:2] == expected[:2]


@pytest.mark.parametrize("executor", ["cpu", "torch"])
def test_a_right_layer_is_accepted_beside_n_grams_as_alone(kinds, executor):
    """A draft token in every step, each right: 16 tokens in 8 steps."""
    model = kinds["right, NEXTN"].model
    plain, _, _ = counted(model, "OFF", executor=executor)
    for method in ("NEXTN", "NEXTN+NGRAM"):
        answer, accepted, _ = counted(model, method, executor=executor)
        assert answer == plain and accepted >= 7


@pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
def test_auto_takes_layers_beside_recurrent_states(tmp_path):
    model = Kinds(tmp_path)["NEXTN of, qwen3_5_text"].model
    config = small(model, "auto", dtype="auto", policy="auto", kv_tokens=256, page_size=4)
    with closing(open_target(config)) as target:
        resolved = target.config
        assert (resolved.executor, resolved.speculative_algorithm) == ("cpu", "NEXTN+NGRAM")


@pytest.mark.parametrize("depths", [1, 2])
def test_auto_takes_layers_on_jax_where_it_drafts_with_them(hf, layers, tmp_path, depths):
    """With one, its own or beside it; of several with the first, if no deeper ones are asked."""
    whole = in_gguf(hf, layers[:depths], tmp_path / "whole.gguf")
    target = tiny.write_gguf(hf, tmp_path / "small.gguf")
    alone(whole, tmp_path / "mtp-small.gguf")
    for path, layered in ((whole, True), (target, False)):
        for steps, taken in ((None, depths == 1), (1, True)):
            for device, name in (("tpu", "NEXTN"), ("cpu", "NEXTN+NGRAM")):
                wanted = EngineConfig(
                    model=str(path), executor="jax", device=device, speculative_num_steps=steps
                )
                config = with_shipped(wanted, layered, GgufCheckpoint(path))
                assert config.speculative_algorithm == (name if taken else "AUTO")


def test_layers_of_another_model_are_named_or_left_out(tmp_path):
    hf = tiny.model("llama")
    target = tiny.write_gguf(hf, tmp_path / "small.gguf")
    whole = in_gguf(hf, [random_layer(hf, 5)], tmp_path / "whole.gguf")
    beside = alone(whole, tmp_path / "mtp-small.gguf", arch="qwen2")
    with pytest.raises(ModelError, match="holds prediction layers for qwen2; the target is llama"):
        open_layers_alone(beside, GgufCheckpoint(target))
    with pytest.warns(UserWarning, match="the draft beside the model is left out: .*qwen2"):
        assert "NGRAM" in counted(target, "AUTO")[2]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 9, "model"])
def test_a_file_beside_the_model_that_holds_no_layers_is_left_out_with_a_word(tmp_path, content):
    """Empty, cut, something else, a whole model of that name."""
    target = tiny.write_gguf(tiny.model("llama"), tmp_path / "small.gguf")
    beside = tmp_path / "mtp-small.gguf"
    beside.write_bytes(target.read_bytes() if content == "model" else content)
    with pytest.warns(UserWarning, match="the draft beside the model is left out: .*mtp-small"):
        assert "NGRAM" in counted(target, "AUTO")[2]


def test_layers_that_a_gguf_file_announces_and_lacks_leave_a_plain_model(tmp_path):
    hf, said = tiny.model("llama"), {"llama.nextn_predict_layers": 1, "llama.block_count": 3}
    path = tiny.write_gguf(hf, tmp_path / "bare.gguf", metadata=said)
    with pytest.raises(ModelError, match="announces 1 prediction layers, but has no"):
        open_target(configured(path))
    plain = configured(path, draft_on_error="disable")
    with pytest.warns(UserWarning, match="announces 1 prediction layers, but has no"):
        target = open_target(plain)
    assert not target.config.speculates
    target.close()


def test_without_layers_and_with_a_draft_besides(hf, layers, tmp_path):
    bare = tiny.save_folder(hf, tmp_path / "bare")
    folder = with_layers(hf, layers[:1], tmp_path / "layered", "mimo")
    with pytest.raises(ModelError, match="has no prediction layers"):
        open_target(configured(bare))
    with pytest.raises(ConfigError, match="leave speculative-draft-model-path out"):
        open_target(configured(folder, speculative_draft_model_path=str(bare)))
    stray = {"model.layers.2.input_layernorm.weight": torch.ones(64)}
    tensors = load_file(bare / "model.safetensors") | stray
    save_file(tensors, bare / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected model\.layers\.2\.input_layernorm"):
        FolderCheckpoint(bare)


def test_layers_that_are_announced_and_absent_leave_a_plain_model(hf, tmp_path):
    """Said once; asked to stop, it does."""
    folder = tiny.save_folder(hf, tmp_path / "bare")
    says(folder, num_nextn_predict_layers=1)
    with pytest.warns(match="announces 1 prediction layers, but has no") as raised:
        target = open_target(configured(folder, draft_on_error="disable"))
    target.close()
    assert len([each for each in raised if "announces" in str(each.message)]) == 1
    assert not target.config.speculates
    with pytest.raises(ModelError, match="announces 1"):
        open_target(configured(folder))


def test_layers_that_no_depth_reaches_are_left_out(kinds):
    kind = kinds["NEXTN by depth, mimo"]
    for steps, layers in ((2, 2), (4, 3)):
        target = open_target(settings(kind, "torch", speculative_num_steps=steps))
        assert target.draft_model.describe()["layers"] == layers
        assert len(target.draft_model.traits.cache) == layers
        target.close()


def test_numbers_counts_and_copies_that_contradict_each_other(hf, layers, tmp_path):
    folder = with_layers(hf, layers, tmp_path, "deepseek")
    whole = load_file(folder / "model.safetensors")
    other = {"model.layers.3.embed_tokens.weight": whole["lm_head.weight"].clone()}
    save_file(whole | other, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.3\.embed_tokens\.weight is another"):
        opened(folder)
    gap = {name: values for name, values in whole.items() if not name.startswith("model.layers.3.")}
    save_file(gap, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"have the numbers \[2, 4\]; they must count from 2 on"):
        opened(folder)
    save_file(whole, folder / "model.safetensors")
    says(folder, num_nextn_predict_layers=2)
    with pytest.raises(ModelError, match=r"promises 2 prediction layers .* those of 3"):
        opened(folder)
