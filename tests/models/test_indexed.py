"""DeepSeek-V3.2 and GLM-5 as far as their indexers have no choice, against transformers."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forerun.build.target import _warn_of_omissions
from forerun.checkpoints.folder import INDEXERS, FolderCheckpoint
from forerun.errors import ModelError
from forerun.networks.config_json import architecture_from
from tests.drafters.prediction import as_stored
from tests.models import tiny
from tests.worlds.checkpoints import logits_are_those_of

CLASSES = {
    "deepseek_v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM),
}
NUMBERS = tiny.config("deepseek_v3").to_dict()
NUMBERS = {key: NUMBERS[key] for key in (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank"),
    *("num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_group", "topk_group", "n_routed_experts", "num_experts_per_tok", "num_hidden_layers"),
    *("moe_intermediate_size", "first_k_dense_replace", "routed_scaling_factor"),
)}  # fmt: skip
NUMBERS |= {"index_n_heads": 2, "index_head_dim": 16, "max_position_embeddings": 512}


def made(name, **changes):
    config, model = CLASSES[name]
    hf = model(config(**NUMBERS | changes)).eval()
    torch.manual_seed(0)
    tiny.randomised(hf, "deepseek_v3")
    return hf


@pytest.mark.parametrize("name", CLASSES)
def test_up_to_what_is_chosen_it_is_dense(tmp_path, name):
    hf = made(name, index_topk=256)
    hf.save_pretrained(tmp_path)
    source = FolderCheckpoint(tmp_path)
    assert source.towers == INDEXERS
    assert (source.architecture.family, source.architecture.context) == ("deepseek_v3", 256)
    logits_are_those_of(hf, source)
    model = SimpleNamespace(path=tmp_path, architecture=source.architecture, checkpoint=source)
    with pytest.warns(UserWarning, match="indexers not loaded; texts end at 256 tokens"):
        _warn_of_omissions(model)


def test_published_keys_and_prediction_layers(tmp_path):
    """Its layer has an indexer, too; positions stretch from where the files say."""
    hf = made("deepseek_v32", index_topk=128)
    hf.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = json.loads(path.read_text())
    for key in ("rope_parameters", "mlp_layer_types", "layer_types"):
        config.pop(key, None)
    config |= {"rope_scaling": yarn, "rope_theta": 1e4, "scoring_func": "sigmoid", "ep_size": 1}
    config |= {"topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1}
    arch = architecture_from(config, tmp_path)
    assert (arch.context, arch.rope.scaling.original_context) == (128, 64)
    assert [hasattr(each.feed_forward, "top_k") for each in arch.layer_specs] == [False, True, True]
    for changes, named in (
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architectures"),
        ({"index_topk": 0}, "context"),
        ({"index_bias": 3}, "index_bias"),
    ):
        with pytest.raises(ModelError, match=named):
            architecture_from(config | changes, tmp_path)
    width, prefix = NUMBERS["hidden_size"], "model.layers.3."
    tensors = {prefix + name: each for name, each in as_stored(hf.model.layers[-1]).items()}
    tensors |= {f"{prefix}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm")}
    tensors[f"{prefix}shared_head.norm.weight"] = torch.ones(width)
    tensors[f"{prefix}eh_proj.weight"] = torch.ones(width, 2 * width)
    assert any("indexer" in name for name in tensors)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {n: t.contiguous() for n, t in tensors.items()}, file)
    source = FolderCheckpoint(tmp_path)
    assert len(source.prediction_files) and not any("indexer" in n for n in source.prediction_files)
