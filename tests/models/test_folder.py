import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.folder import (
    FolderCheckpoint,
    bos_id,
    chat_template,
    eos_ids,
    special_tokens,
)
from forerun.errors import ModelError
from forerun.hub.catalog import open_model
from forerun.networks.arch import FAMILIES
from forerun.text.chat import ChatTemplate
from forerun.text.template import Template
from tests.covering import some_of, values
from tests.models import tiny
from tests.worlds.checkpoints import holds, rewrite

IDS = torch.arange(100)[None]


@pytest.fixture
def folder(tmp_path):
    return tiny.save_folder(tiny.model("llama"), tmp_path / "tiny")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("shards", "tied", "family"),
    some_of([(*how, family) for how in ((1, False), (3, True)) for family in FAMILIES], values),
)
def test_weights_and_logits_are_those_of_transformers(family, shards, tied, tmp_path):
    hf = tiny.model(family, tie_word_embeddings=tied)
    checkpoint: Checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path, shards))
    assert len(list(tmp_path.glob("*.safetensors"))) >= shards
    holds(checkpoint, hf)
    assert torch.equal(tiny.reference(checkpoint, anew=True)(IDS).logits, hf(IDS).logits)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")]
)
def test_storage_types(dtype, kind, tmp_path):
    hf = tiny.model("qwen2")
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path, dtype=dtype))
    for name, weight in hf.state_dict().items():
        expected = weight.to(dtype).float().numpy()
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)
        packed = checkpoint.packed(name)
        if weight.dim() == 1:
            assert packed is None
        else:
            assert (packed.kind, packed.columns) == (kind, weight.shape[1])
            assert packed.rows.shape == (weight.shape[0], weight.shape[1] * dtype.itemsize)
            raw = weight.to(dtype).view(torch.uint8).numpy()
            np.testing.assert_array_equal(packed.rows, raw)


def test_unknown_name_is_a_key_error(folder):
    checkpoint = FolderCheckpoint(folder)
    for ask in (checkpoint.tensor, checkpoint.shape, checkpoint.packed):
        with pytest.raises(KeyError):
            ask("nothing")


def test_every_wrong_tensor_is_named(folder):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mystery"] = np.zeros(3, np.float32)
        tensors[f"model.layers.{'9' * 5000}.mlp.up_proj.weight"] = np.zeros(3, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]

    rewrite(folder, spoil)
    with pytest.raises(ModelError) as caught:
        FolderCheckpoint(folder)
    message = str(caught.value)
    assert "missing model.norm.weight" in message
    assert "unexpected model.layers.0.mystery" in message
    assert "lm_head.weight is [319, 64], not [320, 64]" in message


def test_long_lists_of_wrong_tensors_are_cut(folder):
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[1:]])
    with pytest.raises(ModelError, match=r"and \d+ more") as caught:
        FolderCheckpoint(folder)
    assert len(str(caught.value)) < 2000


def test_old_rotary_tables_are_left_out(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    assert name not in FolderCheckpoint(folder).names()


def test_a_copy_of_a_tied_head_is_left_out_and_another_head_counts(tmp_path):
    folder = tiny.save_folder(tiny.model("llama", tie_word_embeddings=True), tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    assert "lm_head.weight" not in FolderCheckpoint(folder).names()
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    own = FolderCheckpoint(folder)
    np.testing.assert_array_equal(own.tensor("lm_head.weight"), embedding + 1)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(tiny.reference(own, anew=True)(IDS).logits, hf(IDS).logits)
    half = {"lm_head.weight": embedding.astype(np.float16).astype(np.float32)}
    rewrite(folder, lambda tensors: tensors.update(half))
    assert "lm_head.weight" in FolderCheckpoint(folder).names()


def test_what_says_nothing_of_the_model_is_no_hindrance(folder):
    """What modelling code writes beside the weights, and tensors without numbers."""
    said = {"auto_map": {"AutoModel": "modeling.Model"}, "loss_type": "ForCausalLMLoss"}
    edit(folder / "config.json", **said, attn_implementation="flash_attention_2")
    table = "model.layers.0.self_attn.rotary_emb"
    more = {f"{table}.cos_cached": np.ones((8, 4)), f"{table}.sin_cached": np.ones((8, 4))}
    more = {name: array.astype(np.float32) for name, array in more.items()}
    before = FolderCheckpoint(folder).names()
    rewrite(folder, lambda tensors: tensors.update(more | {"gone": np.zeros((0, 4), np.float32)}))
    assert FolderCheckpoint(folder).names() == before
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros(0, np.float32)}))
    with pytest.raises(ModelError, match=r"missing model\.norm\.weight"):
        FolderCheckpoint(folder)


def test_large_indices_and_headers_are_read(folder):
    """Kimi K2's index has 13.5 MB, headers of files with many small scales more than 2 MB."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, metadata={"note": "x" * (3 << 20)})
    before = FolderCheckpoint(folder).names()
    path.rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    text = json.dumps(index | {"metadata": "x" * (14 << 20)})
    (folder / "model.safetensors.index.json").write_text(text)
    assert FolderCheckpoint(folder).names() == before


def test_added_tokens_beyond_the_embeddings_are_none(folder):
    """Gemma 3 1B's tokenizer has an image token that only its larger siblings have."""
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": id, "content": f"<image {id}>", "special": id > 320} for id in (320, 321)]
    spec["added_tokens"] += [token | flags for token in added]
    spec["model"]["vocab"]["<image 320>"] = 320
    path.write_text(json.dumps(spec))
    edit(folder / "tokenizer_config.json", eos_token="<image 321>")
    tokenizer = open_model(str(folder)).tokenizer
    assert tokenizer.vocab_size == 320 and tokenizer.eos_ids == (2,)
    for specials in (False, True):
        ids = tokenizer.encode("a <image 321> <image 320>", specials=specials)
        assert max(ids) < 320 and tokenizer.decode(ids) == "a <image 321> <image 320>"


def test_pickles_of_other_names_are_refused_and_what_is_none_is_said(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read as a torch archive"):
        FolderCheckpoint(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.pt")
    with pytest.raises(ModelError, match=r"neither.*model\.pt is a pickle"):
        FolderCheckpoint(folder)


def test_folders_that_are_no_models(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        FolderCheckpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json$"):
        FolderCheckpoint(folder)
    (folder / "x.gguf").touch()
    with pytest.raises(ModelError, match=r"x\.gguf"):
        FolderCheckpoint(folder)
    (folder / "adapter_config.json").touch()
    with pytest.raises(ModelError, match="adapter"):
        FolderCheckpoint(folder)


@pytest.fixture
def sharded(tmp_path):
    return tiny.save_folder(tiny.model("llama"), tmp_path / "sharded", shards=3)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("../model.safetensors", r"\.\./model"),
        ("/etc/model.safetensors", "/etc"),
        ("a\\model.safetensors", "beside it"),
        ("pytorch_model.bin", r"pytorch_model\.bin"),
        ("absent.safetensors", r"absent\.safetensors cannot be read"),
        (7, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_index_must_name_files_beside_it(file, named, sharded):
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit(sharded / INDEX, weight_map=index | {"model.norm.weight": file})
    with pytest.raises(ModelError, match=named):
        FolderCheckpoint(sharded)


def test_the_files_count_where_the_index_says_otherwise(sharded, caplog):
    """Published models lack tensors that their index names, such as a prediction layer's (Qwen3.8
    merges), or have some that it does not (ModelOpt's exports): they were refused.
    """
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    others = sorted(set(index.values()) - {index["model.norm.weight"]})
    names = FolderCheckpoint(sharded).names()
    for changed in (
        index | {"mtp.fc.weight": others[0]},
        {name: file for name, file in index.items() if name != "model.norm.weight"},
    ):
        caplog.clear()
        edit(sharded / INDEX, weight_map=changed)
        assert FolderCheckpoint(sharded).names() == names
        (name,) = changed.keys() ^ index.keys()
        assert f"and its files disagree on {name}." in caplog.text
    edit(sharded / INDEX, weight_map=index)
    file = sharded / index["model.norm.weight"]
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"missing model\.norm\.weight"):
        FolderCheckpoint(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    shutil.copy(sharded / index["model.norm.weight"], sharded / "model-9.safetensors")
    edit(sharded / INDEX, weight_map=index | {"model.extra": "model-9.safetensors"})
    with pytest.raises(ModelError, match="repeats tensors"):
        FolderCheckpoint(sharded)


def test_ends_of_text(folder):
    config = {"eos_token_id": [7, 9]}
    edit(folder / "generation_config.json", eos_token_id=9)
    assert eos_ids(folder, config, 320) == (9, 7)
    (folder / "generation_config.json").unlink()
    assert eos_ids(folder, config, 320) == (7, 9)
    assert eos_ids(folder, {}, 320) == ()
    for bad in ("2", 320, -1, True, 1.0):
        with pytest.raises(ModelError, match="eos_token_id"):
            eos_ids(folder, {"eos_token_id": bad}, 320)


def test_begin_of_text(folder):
    assert bos_id(folder, {"bos_token_id": 1}, 320) == 1
    assert bos_id(folder, {}, 320) is None


def test_special_tokens_are_those_of_tokenizer_config_then_of_the_map(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    assert special_tokens(folder) == {}
    as_object = {"content": "<e>", "lstrip": False}
    edit(folder / "tokenizer_config.json", bos_token=None, eos_token=as_object, pad_token="")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<m>", "unk_token": "<u>"}')
    special = {"bos_token": None, "eos_token": "<e>", "pad_token": None, "unk_token": "<u>"}
    assert special_tokens(folder) == special
    edit(folder / "tokenizer_config.json", eos_token=7)
    with pytest.raises(ModelError, match="eos_token 7 is not a token's text"):
        special_tokens(folder)


@pytest.mark.parametrize("end", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_a_fine_tune_ends_where_its_tokenizer_config_says(folder, end):
    """Its config.json still has the base's end, its template the names of tokenizer_config."""
    edit(folder / "config.json", eos_token_id=0, bos_token_id=0)
    (folder / "generation_config.json").unlink()
    template = "{{ bos_token }}|{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    settings = folder / "tokenizer_config.json"
    edit(settings, eos_token=end, bos_token="<|im_start|>", chat_template=template)
    model = open_model(str(folder))
    ours = model.tokenizer
    turn, begin = ours.added["<|im_end|>"].id, ours.added["<|im_start|>"].id
    assert ours.eos_ids == (0, turn) and ours.bos_id == begin
    chat = ChatTemplate(model.chat_template, ours)
    messages = [{"role": "user", "content": "x"}]
    assert chat.render(messages) == "<|im_start|>|x<|im_end|>"
    chat.close()
    edit(settings, bos_token=None)
    ours = open_model(str(folder)).tokenizer
    assert ours.bos_id is None and "bos_token" not in ours.names
    edit(settings, eos_token="<no token>")
    ours = open_model(str(folder)).tokenizer
    assert ours.eos_ids == (0,) and ours.names["eos_token"] == "<no token>"


@pytest.mark.parametrize(
    ("default", "tools"),
    [("D", "T"), ("\n D\n", "\n  T \n"), ("{{ '{% if' }}", "{% set x = 1 %}\n{{ x }}\n\n")],
)
def test_a_template_for_tools_is_used_where_tools_are_offered(folder, default, tools):
    """By name in tokenizer_config.json, or in a file of its own; the text is what Jinja makes of
    that template alone.
    """

    def rendered(source, offered):
        return Template(source).render({"tools": offered})

    named = {"tool_use": tools, "default": default}
    several = [{"name": name, "template": template} for name, template in named.items()]
    settings = folder / "tokenizer_config.json"
    edit(settings, chat_template=several)
    templates = [chat_template(folder)]
    (folder / "chat_template.jinja").write_text(default)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    templates.append(chat_template(folder))
    for source in templates:
        assert rendered(source, None) == rendered(source, []) == rendered(default, None)
        assert rendered(source, [1]) == rendered(tools, [1])


def test_chat_templates(folder):
    assert chat_template(folder) == tiny.CHAT_TEMPLATE
    for name in ("default", "tool_use"):
        one = [{"name": name, "template": "D"}, {"name": "rag", "template": "R"}]
        edit(folder / "tokenizer_config.json", chat_template=one)
        assert chat_template(folder) == "D"
    edit(folder / "tokenizer_config.json", chat_template=7)
    with pytest.raises(ModelError, match="chat_template"):
        chat_template(folder)
    (folder / "chat_template.jinja").write_text("J")
    assert chat_template(folder) == "J"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert chat_template(folder) is None
    (folder / "chat_template.json").write_text('{"chat_template": "P"}')
    assert chat_template(folder) == "P"


def test_the_language_model_of_a_multimodal_checkpoint_runs_alone(tmp_path):

    text = tiny.config("gemma3_text", tie_word_embeddings=True)
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        image_size=32, patch_size=16,
    )  # fmt: skip
    whole = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    whole.save_pretrained(tmp_path)
    checkpoint = FolderCheckpoint(tmp_path)
    assert checkpoint.architecture.family == "gemma3_text"
    ours = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    theirs = whole.model.language_model.state_dict()
    assert ours.keys() == {f"model.{name}" for name in theirs}
    for name, weight in theirs.items():
        np.testing.assert_array_equal(ours[f"model.{name}"], weight.numpy())
    rewrite(
        tmp_path, lambda tensors: tensors.update({"model.norm.weight": np.ones(64, np.float32)})
    )
    with pytest.raises(ModelError, match=r"both model\.norm\.weight"):
        FolderCheckpoint(tmp_path)


def test_missing_experts_are_named_as_the_file_has_them(tmp_path):
    tiny.save_folder(tiny.model("mixtral"), tmp_path)
    rewrite(
        tmp_path, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight")
    )
    with pytest.raises(
        ModelError, match=r"missing model\.layers\.1\.block_sparse_moe.experts\.3\.w2"
    ):
        FolderCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("part", "rows", "named"),
    [
        ("qkv_proj", 127, r"qkv_proj\.weight is \[127, 64\], not \[128, 64\]"),
        ("q_proj", 64, r"unexpected model\.layers\.0\.self_attn\.q_proj"),
    ],
)
def test_a_fused_matrix_of_another_height_and_two_layouts_are_named(tmp_path, part, rows, named):
    tiny.save_folder(tiny.model("phi3"), tmp_path)
    weight = {f"model.layers.0.self_attn.{part}.weight": np.ones((rows, 64), np.float32)}
    rewrite(tmp_path, lambda tensors: tensors.update(weight))
    with pytest.raises(ModelError, match=named):
        FolderCheckpoint(tmp_path)


@pytest.mark.parametrize("family", ["gpt_oss", "phi3", "glm4_moe", "deepseek_v3"])
def test_pieces_in_16_bits_are_cut_as_stored(family, tmp_path):
    hf = tiny.model(family)
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path, dtype=torch.bfloat16))
    rounded = type(hf)(hf.config)
    rounded.load_state_dict(hf.state_dict())
    for name, weight in tiny.weights(rounded.bfloat16()).items():
        np.testing.assert_array_equal(checkpoint.tensor(name), weight)
        packed = checkpoint.packed(name)
        if packed is not None and packed.kind == "BF16":
            numbers = torch.from_numpy(np.array(packed.rows, order="C")).view(torch.bfloat16)
            np.testing.assert_array_equal(numbers.float().numpy(), weight)
