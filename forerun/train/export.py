"""Writes a trained head as a folder that servers load, in SGLang's format.

The folder has no output head, because it equals rows of the target's, which Forerun takes from
there when it loads the draft; it has one only if training started from a draft with its own. A
trained block drafter is written in z-lab's format.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.drafts.block_config import BlockHead
from forerun.drafts.eagle_config import DraftHead
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.networks.rope import LinearScaling, Llama3, Rope, Yarn
from forerun.types import Ints


def export_head(head: EagleHead, target_ids: Ints, folder: Path) -> None:
    """Write a trained head as config.json and model.safetensors (bfloat16) to `folder`.

    target_ids  int32[Vd] ascending; stored as offsets d2t and membership t2d

    An EAGLE-1 head gets the tensor names of EAGLE's repository. Raises OSError if the folder cannot
    be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = head.head
    tensors = {name: p.detach().cpu() for name, p in head.named_parameters()}
    first = about.algorithm == "eagle1"
    if first or not about.trained_head:
        del tensors["lm_head.weight"]
    if first:  # SGLang's class always has a bias: random if it is not in the file.
        tensors.setdefault("fc.bias", torch.zeros(about.hidden))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    if about.vocab != about.target_vocab:
        offsets = target_ids.astype(np.int64) - np.arange(about.vocab)
        member = np.zeros(about.target_vocab, np.bool_)
        member[target_ids] = True
        tensors["d2t"] = torch.from_numpy(offsets)
        tensors["t2d"] = torch.from_numpy(member)
    if not first:
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    config = _eagle1(about) if first else _sglang(about)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _layer(about: DraftHead) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": about.hidden,
        "intermediate_size": about.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": about.heads,
        "num_key_value_heads": about.kv_heads,
        "head_dim": about.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": about.norm_eps,
        "max_position_embeddings": about.context,
        "vocab_size": about.target_vocab,
        **rope_keys(about.rope),
    }


def rope_keys(rope: Rope) -> dict[str, Any]:
    """Return the keys of RoPE in a config.json of transformers: rope_theta, and rope_scaling if the
    rope is scaled.
    """
    scaling: dict[str, Any] | None = None
    match rope.scaling:
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3(factor, low, high, original):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case Yarn():
            scaling = {
                "rope_type": "yarn",
                "factor": rope.scaling.factor,
                "original_max_position_embeddings": rope.scaling.original_context,
                "attention_factor": rope.scaling.attention_factor,
                "beta_fast": rope.scaling.fast,
                "beta_slow": rope.scaling.slow,
            }
    return {"rope_theta": rope.theta} | ({"rope_scaling": scaling} if scaling else {})


def _eagle1(about: DraftHead) -> dict[str, Any]:
    """Return the keys of an EAGLE-1 config.json. SGLang takes the first name in `architectures`
    that it knows, vLLM the Eagle one and the second.
    """
    return {
        "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
        **_layer(about),
        "bias": True,
        "tie_word_embeddings": False,
    }


def _sglang(about: DraftHead) -> dict[str, Any]:
    """Return the keys of an EAGLE-3 config.json; feature ids count layer outputs."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(about),
        "draft_vocab_size": about.vocab,
        "target_hidden_size": about.target_hidden,
        "num_aux_hidden_states": len(about.features),
        "norm_output": about.normed_feedback,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in about.features],
            "use_aux_hidden_state": True,
            "norm_before_fc": about.feature_norm == "joint",
        },
        "fc_norm": about.feature_norm == "each",
    }
    if about.normed_residual:
        config["norm_before_residual"] = True
    return config


def export_block(
    head: BlockHead, tensors: dict[str, Tensor], target_ids: Ints, folder: Path, layers: int
) -> None:
    """Write a block drafter as config.json and model.safetensors (bfloat16) to `folder`.

    tensors     canonical name -> weight, without the vocabulary map
    target_ids  int32[Vd] ascending; stored as offsets d2t
    layers      L of the target

    Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: t.detach().cpu().to(torch.bfloat16) for name, t in tensors.items()}
    if head.vocab != head.target_vocab:
        offsets = target_ids.astype(np.int64) - np.arange(head.vocab)
        stored["d2t"] = torch.from_numpy(offsets)
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(head, layers), indent=2) + "\n")


def _config(head: BlockHead, layers: int) -> dict[str, Any]:
    """Return the keys of a block drafter's config.json; feature ids count layer outputs."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3" if head.qk_norm else "llama",
        "attention_bias": False,
        "block_size": head.places,
        "dflash_config": {
            "causal": head.causal,
            "mask_token_id": head.mask,
            "target_layer_ids": [i - 1 for i in head.features],
        },
        "dtype": "bfloat16",
        "head_dim": head.head_size,
        "hidden_act": "silu",
        "hidden_size": head.hidden,
        "intermediate_size": head.ffn,
        "layer_types": ["full_attention"] * head.layers,
        "max_position_embeddings": head.context,
        "num_attention_heads": head.heads,
        "num_hidden_layers": head.layers,
        "num_key_value_heads": head.kv_heads,
        "num_target_layers": layers,
        "rms_norm_eps": head.norm_eps,
        **rope_keys(head.rope),
        "vocab_size": head.target_vocab,
    }
    dspark = head.algorithm == "dspark"
    if head.anchored or dspark:
        config["sample_from_anchor"] = head.anchored
    if dspark:
        config["architectures"] = ["DSparkDraftModel"]
        config["dflash_config"] |= {
            "projector_type": "dspark",
            "markov_rank": head.rank,
            "markov_head_type": head.pair,
            "enable_confidence_head": head.confidence > 0,
            "confidence_head_with_markov": head.confidence > head.hidden,
        }
    if head.vocab != head.target_vocab:
        config["draft_vocab_size"] = head.vocab
    return config
