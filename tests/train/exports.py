"""Draft heads as other projects write them: what `forerun train` exports, in their words."""

import json

import torch
from safetensors.torch import load_file, save_file

from forerun.train.export import export_head


def export_like(head, ids, folder, dialect="sglang", full=False):
    """Export a head in a dialect, "sglang" or "speculators"; full: with its output head."""
    export_head(head, ids, folder)
    tensors = load_file(folder / "model.safetensors")
    if full:
        tensors["lm_head.weight"] = head.lm_head.weight.detach().to(torch.bfloat16)
    if dialect == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(speculators(head.head, config)))
    save_file(tensors, folder / "model.safetensors")


def speculators(about, flat):
    """Nested keys; feature ids in the "entering layer" sense."""
    same = ("draft_vocab_size", "target_hidden_size", "norm_output", "fc_norm")
    own = {"architectures", *same, "num_aux_hidden_states", "eagle_config", "norm_before_residual"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        **{key: flat[key] for key in same},
        "eagle_aux_hidden_state_layer_ids": list(about.features),
        "norm_before_residual": about.normed_residual,
        "norm_before_fc": about.feature_norm == "joint",
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {k: v for k, v in flat.items() if k not in own},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
    }
