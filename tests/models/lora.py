"""Random LoRA adapters in peft's format, and what they do to a model's weights."""

import json
import re

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "r": 4,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "down_proj"],
    "fan_in_fan_out": False,
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "inference_mode": True,
    "qalora_group_size": 16,
}
EVERY = r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


def save_adapter(hf, folder, seed, modules=EVERY, rank=4, tensors=None, **config):
    """An adapter of the modules of a transformers model whose names match, in a folder."""
    random = np.random.default_rng(seed)
    stored = {}
    for name, module in hf.named_modules():
        if re.fullmatch(modules, name):
            out, into = module.weight.shape
            for half, shape in (("A", (rank, into)), ("B", (out, rank))):
                key = f"base_model.model.{name}.lora_{half}.weight"
                stored[key] = random.normal(0, 0.3, shape).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored | (tensors or {}), folder / "adapter_model.safetensors")
    said = CONFIG | {"r": rank} | config
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merged(hf, folder):
    """The tensors of a transformers model, with an adapter's product added: W + scale B A."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    weights = {name: value.numpy().copy() for name, value in hf.state_dict().items()}
    for key, down in stored.items():
        if ".lora_A." in key:
            up, name = stored[key.replace("lora_A", "lora_B")], key.split(".lora_A")[0]
            root = config["use_rslora"]
            module = name.removeprefix("base_model.model.")
            alpha = config["alpha_pattern"].get(module.split(".")[-1], config["lora_alpha"])
            scale = alpha / (len(down) ** 0.5 if root else len(down))
            weights[f"{module}.weight"] += np.float32(scale) * (up @ down)
    return weights
