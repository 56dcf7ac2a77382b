"""Random block drafters on disk, and one of their passes over a whole text, without a cache."""

from dataclasses import replace

import numpy as np
import torch

from forerun.drafts.block_config import BlockHead, default_block_features, expected_block_tensors
from forerun.drafts.block_folder import open_block
from forerun.train.export import export_block

VARIANTS = {
    "both ways": {},
    "causal": {"causal": True, "layers": 1},
    "from the root": {"anchored": True, "layers": 3, "features": (1, 4)},
    "own head and map": {"own_head": True, "vocab": 96, "qk_norm": False},
    "a map, the target's rows": {"vocab": 300, "causal": True},
    "own mask": {"own_mask": True, "own_embedding": True, "features": (2,)},
}


def block_head(arch, **changes):
    """A drafter beside a target, of other sizes than its layers have."""
    head = BlockHead(
        layers=2,
        hidden=arch.hidden,
        heads=6,
        kv_heads=2,
        head_size=8,
        ffn=40,
        vocab=arch.vocab,
        target_vocab=arch.vocab,
        target_hidden=arch.hidden,
        norm_eps=1e-5,
        rope=arch.rope,
        context=arch.context,
        features=default_block_features(arch.layers, 2),
        places=5,
        mask=300,
    )
    return replace(head, **changes)


def random_block(arch, folder, seed=1, **changes):
    """The drafter's file, of random numbers that bfloat16 can hold."""
    head = block_head(arch, **changes)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_block_tensors(head).items():
        wide = 0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        centre = 1.0 if "norm" in name else 0.0
        tensors[name] = torch.randn(shape, generator=random) * wide + centre
    ids = np.sort(np.random.default_rng(seed).permutation(arch.vocab)[: head.vocab])
    tensors.pop("d2t", None)
    export_block(head, tensors, ids.astype(np.int32), folder, arch.layers)
    draft = open_block(folder, arch)
    assert draft.head == head
    return draft


def _normed(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(heads, position, head):
    """By complex numbers, which no other implementation here uses."""
    half = head.head_size // 2
    angle = torch.outer(position.double(), torch.from_numpy(head.rope.frequencies(head.head_size)))
    unit = torch.polar(torch.ones_like(angle), angle)[:, None]
    spun = torch.complex(heads[..., :half].double(), heads[..., half:].double()) * unit
    return torch.cat([spun.real, spun.imag], -1).float()


@torch.no_grad()
def streams(hf, text):
    """The residual streams [T,H] in transformers by index; its last one is normed, ours is not."""
    last = []
    hook = hf.model.layers[-1].register_forward_hook(
        lambda _, __, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    states = hf.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    return [state[0] for state in (*states[:-1], *last)]


@torch.no_grad()
def dense_block(draft, hf, text, hidden_states):
    """Log-probabilities [depth,Vd] below the last token of `text`, from the target's residual
    streams [T,H] by index, whatever stands in them from the last token on.
    """
    head, length = draft.head, len(text) - 1
    w = {n: torch.from_numpy(np.array(draft.tensor(n))) for n in expected_block_tensors(head)
         if n != "d2t"}  # fmt: skip
    features = torch.cat([hidden_states[index][:length] for index in head.features], -1)
    context = _normed(features @ w["fc.weight"].T, w["hidden_norm.weight"], head.norm_eps)
    embedding = w.get("embed_tokens.weight", hf.get_input_embeddings().weight)
    x = torch.stack([embedding[text[-1]], *[embedding[head.mask]] * (head.places - 1)])
    if head.own_mask:
        x[1:] = w["mask_embedding"]
    before, here = torch.arange(length), length + torch.arange(head.places)
    hidden = torch.zeros(head.places, length + head.places, dtype=torch.bool)
    if head.causal:
        hidden = torch.ones_like(hidden).triu(length + 1)

    def heads(name, rows):
        return (rows @ w[name].T).unflatten(-1, (-1, head.head_size))

    for layer in range(head.layers):
        prefix = f"layers.{layer}."
        normed = _normed(x, w[prefix + "input_layernorm.weight"], head.norm_eps)
        every = torch.cat([context, normed])
        q, k, v = (
            heads(f"{prefix}self_attn.{part}_proj.weight", rows)
            for part, rows in (("q", normed), ("k", every), ("v", every))
        )
        if head.qk_norm:
            q = _normed(q, w[prefix + "self_attn.q_norm.weight"], head.norm_eps)
            k = _normed(k, w[prefix + "self_attn.k_norm.weight"], head.norm_eps)
        q, k = _turned(q, here, head), _turned(k, torch.cat([before, here]), head)
        k, v = (part.repeat_interleave(head.heads // head.kv_heads, 1) for part in (k, v))
        scores = torch.einsum("qae,kae->aqk", q, k) / head.head_size**0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = torch.einsum("aqk,kae->qae", weights, v).flatten(1)
        x = x + mixed @ w[prefix + "self_attn.o_proj.weight"].T
        normed = _normed(x, w[prefix + "post_attention_layernorm.weight"], head.norm_eps)
        gate, up = (normed @ w[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w[prefix + "mlp.down_proj.weight"].T
    read = _normed(x, w["norm.weight"], head.norm_eps)[0 if head.anchored else 1 :]
    output = w.get("lm_head.weight", hf.get_output_embeddings().weight[draft.target_ids])
    return (read @ output.T).log_softmax(-1)
