"""A trained block drafter -> a folder in z-lab's dialect, which servers load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.models.block_config import BlockHead
from forerun.train.export import rope_keys
from forerun.types import Ints


def export_block(
    head: BlockHead, tensors: dict[str, Tensor], target_ids: Ints, folder: Path, layers: int
) -> None:
    """Write a block drafter as config.json and model.safetensors (bfloat16) into `folder`.

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
    """Flat keys; feature ids in the "output of layer" sense."""
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
    if head.anchored:
        config["sample_from_anchor"] = True
    if head.vocab != head.target_vocab:
        config["draft_vocab_size"] = head.vocab
    return config
