"""Writes a checkpoint's dequantised weights as a transformers folder, for peers without GGUF."""

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file


def write_folder(model: Any, folder: Path) -> None:
    """config.json, model.safetensors (float32), tokenizer and chat template of a Llama-family
    checkpoint, once.
    """
    if (folder / "chat_template.jinja").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    arch = model.architecture
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": arch.vocab,
        "hidden_size": arch.hidden,
        "intermediate_size": arch.ffn,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_size,
        "max_position_embeddings": arch.context,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": arch.tied_head,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    checkpoint = model.checkpoint
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.tokenizer.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(model.chat_template)
