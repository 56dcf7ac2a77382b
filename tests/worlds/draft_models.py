"""Targets that mostly go by the last token, and draft models of every kind that do the same, so
that drafts are often right without any training: as folders.

folders = make(root)                        by the names in METHODS
config = configured(folders, method, page)
"""

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from forerun.checkpoints.folder import FolderCheckpoint
from tests.drafters.kinds import other_vocabulary
from tests.drafters.prediction import with_layers
from tests.models import tiny
from tests.parity.blocks import SELECTING, random_block
from tests.worlds.configs import small

PAIRED = {
    "DSpark": {"anchored": True, "pair": "vanilla", "confidence": 128},
    "DSpark, gated": {"pair": "gated", "causal": True},
    "DSpark, rnn": {"anchored": True, "pair": "rnn", "confidence": 64, "interleaved": True},
    "DFlash2": SELECTING["DFlash2"] | {"top_k": 48, "own_embedding": True},
}
"""Block drafters whose tokens depend on those above. What a target says next depends mostly on the
last token: DSpark's tables know it all, of the tokens that are in its map.
"""

CONFIDENT = "DSpark", "DSpark, rnn"

METHODS = {
    "NEXTN": {"speculative_algorithm": "NEXTN", "model": "one layer"},
    "NEXTN, by depth": {"speculative_algorithm": "NEXTN", "model": "three layers"},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", "draft": "first layers"},
    "STANDALONE, other vocabulary": {"speculative_algorithm": "STANDALONE", "draft": "poorer"},
    "STANDALONE, windows": {"speculative_algorithm": "STANDALONE", "draft": "windows"},
    "DFLASH": {"speculative_algorithm": "DFLASH", "draft": "both ways"},
    "DFLASH, causal": {"speculative_algorithm": "DFLASH", "draft": "causal"},
    **{name: {"speculative_algorithm": "DFLASH", "draft": name} for name in PAIRED},
    "NEXTN, states": {"speculative_algorithm": "NEXTN", "model": "nets"},
    "STANDALONE, states": {
        "speculative_algorithm": "STANDALONE", "model": "convolutions", "draft": "first layers"
    },
}  # fmt: skip
"""Draft and model name a folder that `make` makes."""

BLIND = "DFLASH", "STANDALONE, windows", "STANDALONE, states"
"""Random drafters that know only what the position's noise decides, nothing without it."""


def weak_model(family, **changes):
    """A model whose layers add little."""
    hf = tiny.model(family, **changes)
    for layer in hf.model.layers:
        weak(layer)
    return hf


def weak(layer):
    """Make what a layer adds small: the last token decides mostly, so drafts are often right."""
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")):
                weight.mul_(0.05)


def prediction_layer(hf, seed):
    torch.manual_seed(seed)
    made, width = LlamaDecoderLayer(hf.config, 0), hf.config.hidden_size
    with torch.no_grad():
        for weight in made.parameters():
            spread = 0.2 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, spread)
    weak(made)
    fuse = torch.cat([torch.eye(width), 0.1 * torch.randn(width, width) / width**0.5], 1)
    norms = torch.ones(width), torch.ones(width), hf.model.norm.weight.detach().clone()
    return made, *norms, fuse


def make(root):
    """Make all folders in `root` by name; return it."""
    hf = weak_model("llama")
    layers = [prediction_layer(hf, seed) for seed in (5, 6, 7)]
    with_layers(hf, layers[:1], root / "one layer", "deepseek")
    with_layers(hf, layers, root / "three layers", "deepseek")
    tiny.save_folder(hf, root / "target")
    first = tiny.model("llama", num_hidden_layers=1)
    first.load_state_dict(hf.state_dict(), strict=False)
    tiny.save_folder(first, root / "first layers")
    turned = np.roll(np.arange(tiny.VOCAB), 3)
    other_vocabulary(hf, root / "poorer", turned[turned < 290])
    tiny.save_folder(weak_model("gemma3_text"), root / "windows")
    tiny.save_folder(weak_model("lfm2"), root / "convolutions")
    nets = weak_model("qwen3_5_text", num_hidden_layers=4)
    last = type(nets.model.layers[-1])(nets.config, 3)
    last.load_state_dict(nets.model.layers[-1].state_dict())
    width = nets.config.hidden_size
    fuse = torch.cat([torch.eye(width), 0.1 * torch.randn(width, width) / width**0.5], 1)
    norms = torch.zeros(width), torch.zeros(width), nets.model.norm.weight.detach().clone()
    with_layers(nets, [(last, *norms, fuse)], root / "nets", "qwen3-next")
    arch = FolderCheckpoint(root / "target").architecture
    random_block(arch, root / "both ways", features=(1, 2))
    # From the root alone the first draft token is known as well as above.
    random_block(arch, root / "causal", features=(0, 1), causal=True, anchored=True)
    file = root / "causal" / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.05
    tensors["norm.weight"] = hf.model.norm.weight.detach().clone()
    save_file(tensors, file)
    for name, changes in PAIRED.items():
        markov(hf, random_block(arch, root / name, **changes | {"vocab": 64, "rank": 64}))
    return root


@torch.no_grad()
def markov(hf, draft):
    """Make the tables the target without layers, and all else of the drafter small; its map has
    the tokens that the target says most.
    """
    file, head = draft.path / "model.safetensors", hf.lm_head.weight
    tensors, wide = load_file(file), head.shape[1]
    above, eye = hf.model.norm(hf.model.embed_tokens.weight), torch.eye(wide)
    likely = (above @ head.T).softmax(-1)
    ids = (likely.sum(0) @ likely).topk(64).indices.sort().values
    tensors["d2t"] = ids - torch.arange(64)
    tensors["norm.weight"] *= 0.01
    after, where = head[ids], "markov_head."
    match draft.head.pair:
        case "gated":
            tensors["markov_head.gate_proj.bias"] = torch.full((wide,), 9.0)
        case "rnn":
            joint = torch.zeros_like(tensors["markov_head.joint_proj.weight"])
            joint[2 * wide :, wide : 2 * wide] = 0.01 * eye  # Where tanh(x) is x.
            tensors["markov_head.joint_proj.weight"], after = joint, 100.0 * after
            tensors["markov_head.joint_proj.bias"] = torch.zeros(3 * wide)
        case "selector":
            # What is read at a place is one number, everywhere the same.
            tensors["embed_tokens.weight"][:, 0] = 1000.0
            tensors["norm.weight"][1:] = 0.0
            first = wide**0.5 * tensors["norm.weight"][0]
            joint = torch.zeros(wide, wide)
            joint[:, 0] = 1.0 / first
            tensors["candidate_selector.hidden_projection.weight"] = joint
            tensors["candidate_selector.predecessor_codebook"] = above
            tensors["candidate_selector.successor_codebook"] = after
    if where + "markov_w1.weight" in tensors:
        tensors |= {f"{where}markov_w1.weight": above, f"{where}markov_w2.weight": after}
    save_file({name: each.contiguous() for name, each in tensors.items()}, file)


def configured(made, method, page, device="cpu", **changes):
    options = METHODS[method] | changes
    model, draft = made / options.pop("model", "target"), options.pop("draft", None)
    room = {"max_sequences": 5, "chunked_prefill_size": 128, "context": 192, "kv_tokens": 1536}
    chosen = room | {"device": device, "page_size": page} | options
    return small(model, draft=made / draft if draft else None, **chosen)
