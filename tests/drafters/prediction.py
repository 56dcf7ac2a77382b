"""Prediction layers as published: random ones, their files under every naming, and passes over a
whole text, from transformers' own layer.
"""

import json
from functools import lru_cache

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.models import tiny

NAMINGS = {
    "deepseek": ("model.layers.2.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": (
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj",
        "final_layernorm",
    ),
    "qwen3-next": (
        "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc",
        "mtp.norm",
    ),
}  # fmt: skip
"""The layer's prefix, and what stands before it: norms of embedding and hidden state, the fuse, and
the norm after it."""


def random_layer(hf, seed):
    """A random prediction layer: its decoder layer, its three norms, its fuse."""
    torch.manual_seed(seed)
    made = LlamaDecoderLayer(hf.config, 0)
    width = hf.config.hidden_size
    with torch.no_grad():
        for weight in made.parameters():
            spread = 0.2 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, spread)
    norms = [1 + 0.2 * torch.randn(width) for _ in range(3)]
    return made, *norms, torch.randn(width, 2 * width) / width**0.5


def as_stored(made):
    """A layer's tensors as files have them: experts one by one."""
    tensors = {}
    for name, weight in made.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith("experts") or "proj" not in kind:
            tensors[name] = weight.detach().clone()
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, whole in enumerate(weight.detach()):
            for part, matrix in zip(parts, whole.chunk(len(parts)), strict=True):
                tensors[f"{prefix}.{expert}.{part}.weight"] = matrix.clone()
    return tensors


def prefix_of(hf, naming):
    """Of the names of the first layer; DeepSeek counts on behind the model's own."""
    return NAMINGS[naming][0].replace("layers.2.", f"layers.{hf.config.num_hidden_layers}.")


def with_layers(hf, layers, folder, naming, extra=None):
    """The model's folder with the layers under one of the namings."""
    tiny.save_folder(hf, folder)
    _, *names = NAMINGS[naming]
    before, number, _ = prefix_of(hf, naming).rsplit(".", 2)
    tensors = load_file(folder / "model.safetensors")
    for depth, (made, *own) in enumerate(layers):
        prefix = f"{before}.{int(number) + depth}."
        tensors |= {prefix + name: weight for name, weight in as_stored(made).items()}
        order = dict(zip(("embedding", "hidden", "final", "fuse"), own, strict=True))
        for kind, name in zip(("embedding", "hidden", "fuse", "final"), names, strict=True):
            stored = name if name.startswith("mtp.") else prefix + name
            tensors[f"{stored}.weight"] = order[kind].clone()
        if naming == "deepseek":  # Copies of what is shared, as its files have them.
            tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors |= extra or {}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    said = {"num_nextn_predict_layers": len(layers)}
    (folder / "config.json").write_text(json.dumps(config | said))
    return folder


def in_gguf(hf, layers, path, kind="F32", extra=None, **metadata):
    """A file of the model with the layers behind its own, as llama.cpp's converter writes them.

    extra  more tensors, by their names in the file, or None for one to leave out
    """
    count, family = hf.config.num_hidden_layers, hf.config.model_type
    changes = {"max_position_embeddings": hf.config.max_position_embeddings}
    if family in tiny.DELTAS:
        changes["layer_types"] = hf.config.layer_types + ["full_attention"] * len(layers)
    whole = tiny.model(family, num_hidden_layers=count + len(layers), **changes)
    state, behind = dict(hf.state_dict()), {}
    for depth, (made, embedding, hidden, final, fuse) in enumerate(layers, count):
        of_layer = made.state_dict().items()
        state |= {f"model.layers.{depth}.{name}": weight for name, weight in of_layer}
        own = {"enorm": embedding, "hnorm": hidden, "shared_head_norm": final, "eh_proj": fuse}
        behind |= {f"blk.{depth}.nextn.{n}.weight": w.numpy() for n, w in own.items()}
    whole.load_state_dict(state)
    name = tiny.GGUF_NAMES.get(family, family)
    said = {f"{name}.nextn_predict_layers": len(layers), **metadata}
    behind |= extra or {}
    behind = {stored: array for stored, array in behind.items() if array is not None}
    return tiny.write_gguf(whole, path, kind, metadata=said, extra=behind)


def alone(whole, path, kept=(), arch="llama"):
    """The file of a model with layers, without what is not theirs (mtp-*.gguf).

    kept  names of other tensors that stay
    arch  the architecture that it says
    """
    reader = gguf.GGUFReader(whole)
    named = [tensor.name for tensor in reader.tensors]
    own = {name.partition("nextn.")[0] for name in named if ".nextn." in name}
    writer = gguf.GGUFWriter(path, arch)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        if tensor.name in kept or tensor.name.startswith(tuple(own)):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    return tiny.written(writer, path)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@lru_cache(64)
@torch.no_grad()
def _hidden(hf, text):
    """The target's normed hidden states of a text, which several drafts hang below."""
    return hf.model(torch.tensor(text)[None]).last_hidden_state[0]


@torch.no_grad()
def dense(hf, layers, hidden_first, text, drafted, zeroed=False, raw=False):
    """Logits of what follows `text` and then each of `drafted`, which hangs below it, as the paper
    has them: row i of layer k reads row i of layer k - 1, the normed hidden state of the target for
    k = 1, and the token at i + k; the last row predicts. The last layer goes on with further rows,
    which read its own row before. Causal passes over all rows, from transformers' own layer.
    """
    how = hf, tuple(layers), hidden_first, zeroed, raw
    text, drafted = tuple(map(int, text)), tuple(map(int, drafted))
    return [_passed(how, text, drafted[:k])[-1] for k in range(len(drafted) + 1)]


@lru_cache(64)
def _passed(how, text, drafted):
    """What the pass behind the last of `drafted` read, its tokens, its outputs, and the logits of
    the last row: of a tree's paths the upper part is the same.
    """
    hf, layers, hidden_first, zeroed, raw = how
    k, rows = len(drafted), len(text) - 1
    read, tokens, states, _ = (
        _passed(how, text, drafted[:-1]) if k else (None, None, _hidden(hf, text)[:-1], None)
    )
    if k < len(layers):
        read, tokens = states, [*text, *drafted][k + 1 : k + 1 + rows]
    else:
        read, tokens = torch.cat([read, states[-1:]]), [*tokens, drafted[-1]]
    normed, carried = layer_rows(
        hf, layers[min(k, len(layers) - 1)], hidden_first, read, tokens, zeroed
    )
    return read, tokens, carried if raw else normed, hf.lm_head(normed[-1])


def layer_rows(hf, layer, hidden_first, states, tokens, zeroed):
    """Outputs of one layer's rows, which read a hidden state and a token each, and what they were
    before the final norm. zeroed: the first row reads no token.
    """
    made, embedding_norm, hidden_norm, final_norm, fuse = layer
    eps = hf.config.rms_norm_eps
    parts = [
        rms(embedded(hf, tokens, zeroed), embedding_norm, eps),
        rms(states, hidden_norm, eps),
    ]
    x = (torch.cat(parts[::-1] if hidden_first else parts, -1) @ fuse.T)[None]
    position = torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
    rotary = hf.model.rotary_emb(x, position)
    y = made(x, attention_mask=mask, position_ids=position, position_embeddings=rotary)
    y = (y[0] if isinstance(y, tuple) else y).view(len(tokens), -1)
    return rms(y, final_norm, eps), y


def embedded(hf, tokens, zeroed):
    """Embeddings [n,H], the first one zeros where `zeroed`."""
    embeddings = hf.model.embed_tokens(torch.tensor(tokens)).clone()
    if zeroed:
        embeddings[0] = 0
    return embeddings


def counting():
    """A target that says t + 1 after t, and three layers each of which knows that only from the
    outputs of the layer before it, the last also from its own.
    """
    hf = tiny.model("llama")
    half = hf.config.hidden_size // 2
    turn, vectors = turns(half)
    marks = [torch.linalg.qr(torch.randn(half, half, generator=seeded(n)))[0] for n in range(2)]
    zeros = torch.zeros(half, half)
    with torch.no_grad():
        for block in hf.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        hf.model.norm.weight.fill_(1.0)
        hf.model.embed_tokens.weight.copy_(torch.cat([vectors, 0 * vectors], 1))
        hf.lm_head.weight.copy_(torch.cat([vectors.roll(1, 0), 0 * vectors], 1))
    identity = torch.eye(half)
    # What a layer reads of the hidden state's two halves, and the mark that it leaves.
    reads = [(identity, -2 * marks[0].T), (zeros, marks[0].T), (zeros, marks[1].T)]
    leaves = [marks[0], marks[1], marks[1]]
    layers = []
    for read, mark in zip(reads, leaves, strict=True):
        token = turn @ torch.cat(read, 1)
        hidden = torch.cat([token, mark @ token])
        made = LlamaDecoderLayer(hf.config, 0)
        with torch.no_grad():
            made.self_attn.o_proj.weight.zero_()
            made.mlp.down_proj.weight.zero_()
        ones = [torch.ones(2 * half)] * 3
        layers.append((made, *ones, torch.cat([0 * hidden, hidden], 1)))
    return hf, layers


def seeded(number):
    return torch.Generator().manual_seed(number)


def turns(size):
    """An orthogonal matrix [size,size], and vectors [V,size], each of which it makes the next."""
    angles = torch.randperm(tiny.VOCAB // 2, generator=seeded(1))[: size // 2] + 1
    angles = 2 * torch.pi * angles / tiny.VOCAB
    turn = torch.zeros(size, size)
    pair = torch.arange(0, size, 2)
    turn[pair, pair] = turn[pair + 1, pair + 1] = angles.cos()
    turn[pair + 1, pair], turn[pair, pair + 1] = angles.sin(), -angles.sin()
    at = torch.arange(tiny.VOCAB)[:, None] * angles
    return turn, torch.stack([at.cos(), at.sin()], -1).flatten(1)
