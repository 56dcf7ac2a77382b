"""Random block drafters on disk, and one of their passes over a whole text, without a cache."""

import json
from dataclasses import replace

import gguf
import numpy as np
import torch

from forerun.drafts.block_config import BlockHead, default_block_features, expected_block_tensors
from forerun.drafts.block_folder import open_block
from forerun.drafts.opened_draft import OpenedDraft
from forerun.train.export import export_block
from tests.models import tiny

VARIANTS = {
    "both ways": {},
    "causal": {"causal": True, "layers": 1},
    "from the root": {"anchored": True, "layers": 3, "features": (1, 4)},
    "own head and map": {"own_head": True, "vocab": 96, "qk_norm": False},
    "a map, the target's rows": {"vocab": 300, "causal": True},
    "own mask": {"own_mask": True, "own_embedding": True, "features": (2,)},
}
PAIRED = {
    "DSpark": {"anchored": True, "pair": "vanilla", "rank": 4, "confidence": 68},
    "DSpark, gated": {"pair": "gated", "rank": 4, "vocab": 96, "own_head": True},
    "DSpark, rnn": {
        "anchored": True, "pair": "rnn", "rank": 4, "confidence": 64, "interleaved": True,
    },
}  # fmt: skip
"""Whose tokens depend on those above, beside a target of width 64."""
SELECTING = {
    "DFlash2": {
        "pair": "selector", "rank": 4, "top_k": 16, "convolved": 16, "windows": (7, 7),
        "logit_scale": 0.5, "logit_cap": 3.0, "embedding_scale": 2.0,
    },
    "DFlash2, causal": {
        "pair": "selector", "rank": 8, "top_k": 5, "convolved": 32, "causal": True,
        "windows": (9, None), "vocab": 96, "own_head": True,
    },
}  # fmt: skip
"""DFlash2's: the same, of `top_k` candidates."""
PAIRED |= SELECTING


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
        centre = 1.0 if "norm" in name or "base_kernel" in name else 0.0
        tensors[name] = torch.randn(shape, generator=random) * wide + centre
    ids = np.sort(np.random.default_rng(seed).permutation(arch.vocab)[: head.vocab])
    tensors.pop("d2t", None)
    export_block(head, tensors, ids.astype(np.int32), folder, arch.layers)
    if head.algorithm == "dspark":
        as_dspark(head, folder)
    if head.algorithm == "dflash2":
        as_dflash2(head, folder)
    draft = open_block(folder, arch)
    assert draft.head == head
    return draft


GGUF_NAMES = {
    "fc.": "fc.", "hidden_norm.": "enc.output_norm.", "norm.": "output_norm.",
    "embed_tokens.": "token_embd.", "lm_head.": "output.", "markov_head.": "",
    "confidence_head.proj.": "conf_proj.", "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.", "self_attn.o_proj.": "attn_output.",
    "self_attn.q_norm.": "attn_q_norm.", "self_attn.k_norm.": "attn_k_norm.",
    **{f"self_attn.{part}_proj.": f"attn_{part}." for part in "qkv"},
    **{f"mlp.{part}_proj.": f"ffn_{part}." for part in ("gate", "up", "down")},
    "attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base",
    "attention_conv.kernel_projection.": "attn_conv_proj.",
    "mlp_conv.kernel_projection.": "ffn_conv_proj.",
    "candidate_selector.hidden_projection.": "selector_hidden.",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}  # fmt: skip


def in_gguf(draft, path, metadata=None, extra=None):
    """A drafter's file as llama.cpp's converter writes it.

    metadata  keys to set or, with None, to leave out; extra  more tensors
    """
    head, writer = draft.head, gguf.GGUFWriter(path, "dflash")
    writer.add_block_count(head.layers)
    writer.add_context_length(head.context)
    writer.add_embedding_length(head.hidden)
    writer.add_feed_forward_length(head.ffn)
    writer.add_head_count(head.heads)
    writer.add_head_count_kv(head.kv_heads)
    writer.add_key_length(head.head_size)
    writer.add_value_length(head.head_size)
    writer.add_layer_norm_rms_eps(head.norm_eps)
    writer.add_rope_freq_base(head.rope.theta)
    known = {
        "dflash.block_size": head.places,
        "dflash.target_layers": list(head.features),
        "dflash.sample_from_anchor": head.anchored,
        "dflash.attention.causal": head.causal,
        "dflash.has_confidence_head": head.confidence > 0,
        "dflash.rope.dimension_sections": [head.head_size // 2, 0, 0, 0],  # Beside Qwen3.5.
        "tokenizer.ggml.mask_token_id": head.mask,
    }
    if head.algorithm == "dflash2":
        known |= {"dflash.conv_kernel_size": 2, "dflash.conv_group_size": head.convolved}
        known |= {"dflash.selector_rank": head.rank, "dflash.selector_top_k": head.top_k}
        known |= {"dflash.embedding_scale": head.embedding_scale}
        known |= {"dflash.logit_scale": head.logit_scale}
        known |= {"dflash.final_logit_softcapping": head.logit_cap}
    for key, value in (known | (metadata or {})).items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    arrays = {name: tensor.numpy() for name, tensor in in_file(draft).items()} | (extra or {})
    if head.vocab != head.target_vocab:
        arrays["d2t"] = draft.target_ids.astype(np.int64) - np.arange(head.vocab)
    for name, array in arrays.items():
        prefix, layer, rest = "", "", name
        if name.startswith("layers."):
            prefix, layer, rest = name.split(".", 2)
            prefix = "blk."
        begin = next((each for each in GGUF_NAMES if rest.startswith(each)), "")
        stored = GGUF_NAMES.get(begin, "") + rest.removeprefix(begin)
        writer.add_tensor(f"{prefix}{layer}{'.' * bool(layer)}{stored}", array)
    return tiny.written(writer, path)


def as_dspark(head, folder):
    """Make an exported drafter one of LiquidAI's, or of SpecForge's."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["num_target_layers"] = config.pop("num_target_layers")
    more = {"markov_rank": head.rank, "markov_head_type": head.pair}
    more["enable_confidence_head"] = head.confidence > 0
    more["confidence_head_with_markov"] = head.confidence > head.hidden
    if head.interleaved:
        config |= {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False, **more}
    else:
        config["architectures"] = ["DSparkDraftModel"]
        config["dflash_config"] |= {"projector_type": "dspark", **more}
        config["sample_from_anchor"] = head.anchored
    path.write_text(json.dumps(config))


def as_dflash2(head, folder):
    """Make an exported drafter one of z-lab's."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {
        "block_size": config.pop("block_size"),
        "conv_kernel_size": 2,
        "conv_group_size": head.convolved,
        "selector_rank": head.rank,
        "selector_top_k": head.top_k,
    }
    kinds = ["full_attention" if each is None else "sliding_attention" for each in head.windows]
    config |= {"layer_types": kinds, "sliding_window": head.windows[0]}
    config["is_causal"] = config["dflash_config"].pop("causal")
    scales = {
        "input_embedding_scale": head.embedding_scale,
        "output_multiplier": head.logit_scale,
        "final_logit_softcapping": head.logit_cap or None,
    }
    config["dflash_config"] |= scales
    path.write_text(json.dumps(config))


def _normed(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(heads, position, head):
    """By complex numbers, which no other implementation here uses."""
    half = head.head_size // 2
    if head.interleaved:
        heads = torch.cat([heads[..., ::2], heads[..., 1::2]], -1)
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
    return dense_logits(draft, hf, text, hidden_states)[0].log_softmax(-1)


def in_file(draft):
    """Weights by name, as the file has them."""
    return {
        name: torch.from_numpy(np.array(OpenedDraft.tensor(draft, name)))
        for name in expected_block_tensors(draft.head)
        if name != "d2t"
    }


@torch.no_grad()
def dense_logits(draft, hf, text, hidden_states):
    """Logits [depth,Vd], as dense_block has them, and what the output head reads [depth,H]."""
    head, length, w = draft.head, len(text) - 1, in_file(draft)
    features = torch.cat([hidden_states[index][:length] for index in head.features], -1)
    context = _normed(features @ w["fc.weight"].T, w["hidden_norm.weight"], head.norm_eps)
    embedding = w.get("embed_tokens.weight", hf.get_input_embeddings().weight)
    x = torch.stack([embedding[text[-1]], *[embedding[head.mask]] * (head.places - 1)])
    x = x * (head.embedding_scale or 1.0)
    if head.own_mask:
        x[1:] = w["mask_embedding"]
    before, here = torch.arange(length), length + torch.arange(head.places)
    hidden = torch.zeros(head.places, length + head.places, dtype=torch.bool)
    if head.causal:
        hidden = torch.ones_like(hidden).triu(length + 1)

    def heads(name, rows):
        return (rows @ w[name].T).unflatten(-1, (-1, head.head_size))

    def kernels(name, rows):
        """[places,2,2,H] of one side and the other."""
        dynamic = (rows @ w[f"{name}.kernel_projection.weight"].T).unflatten(-1, (2, 2, -1))
        return w[f"{name}.base_kernel"] + dynamic.repeat_interleave(head.convolved, -1)

    def around(name, normed, work):
        if not head.convolved:
            return work(normed)
        kernel, shift = kernels(name, normed), torch.diag(torch.ones(head.places - 1), -1)

        def turned(rows, side):
            return kernel[:, side, 0] * rows + kernel[:, side, 1] * (shift @ rows)

        return turned(work(turned(normed, 0)), 1)

    for layer in range(head.layers):
        prefix = f"layers.{layer}."

        def attended(normed, layer=layer, prefix=prefix):
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
            beyond = hidden
            if head.windows and head.windows[layer]:
                apart = here[:, None] - torch.cat([before, here])
                beyond = hidden | (apart.abs() >= head.windows[layer])
            weights = scores.masked_fill(beyond, -torch.inf).softmax(-1)
            mixed = torch.einsum("aqk,kae->qae", weights, v).flatten(1)
            return mixed @ w[prefix + "self_attn.o_proj.weight"].T

        def fed(normed, prefix=prefix):
            gate, up = (normed @ w[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            return (torch.nn.functional.silu(gate) * up) @ w[prefix + "mlp.down_proj.weight"].T

        normed = _normed(x, w[prefix + "input_layernorm.weight"], head.norm_eps)
        x = x + around(prefix + "attention_conv", normed, attended)
        normed = _normed(x, w[prefix + "post_attention_layernorm.weight"], head.norm_eps)
        x = x + around(prefix + "mlp_conv", normed, fed)
    read = _normed(x, w["norm.weight"], head.norm_eps)[0 if head.anchored else 1 :]
    output = w.get("lm_head.weight", hf.get_output_embeddings().weight[draft.target_ids])
    logits = read @ output.T * head.logit_scale
    return torch.tanh(logits / head.logit_cap) * head.logit_cap if head.logit_cap else logits, read


@torch.no_grad()
def dense_pairs(draft, hf, text, path, hidden_states):
    """Log-probabilities [len(path) + 1,Vd] below `text` and each of the draft tokens `path`, and
    confidences: of all tokens, by one whole product each.
    """
    head, w = draft.head, in_file(draft)
    logits, read = dense_logits(draft, hf, text, hidden_states)
    pairs, sure, state = [], [], torch.zeros(head.rank)
    for level, token in enumerate([text[-1], *path]):
        h, bias = read[level], 0.0
        if head.pair == "selector":
            before, after = (
                w[f"candidate_selector.{n}_codebook"] for n in ("predecessor", "successor")
            )
            path_row = before[token] * (w["candidate_selector.hidden_projection.weight"] @ h)
            kept = torch.full_like(logits[level], -torch.inf)
            kept[logits[level].topk(head.top_k).indices] = 0.0
            pairs.append((logits[level] + after @ path_row + kept).log_softmax(-1))
            continue
        if head.pair:
            v = above = w["markov_head.markov_w1.weight"][token]
        if head.pair == "gated":
            v = above * torch.sigmoid(_linear(w, "markov_head.gate_proj", h, above))
        if head.pair == "rnn":
            f, c, o = _linear(w, "markov_head.joint_proj", state, above, h).chunk(3)
            state = torch.sigmoid(f) * state + (1 - torch.sigmoid(f)) * torch.tanh(c)
            v = torch.tanh(o)
        if head.pair:
            bias = w["markov_head.markov_w2.weight"] @ v
        pairs.append((logits[level] + bias).log_softmax(-1))
        if head.confidence:
            inputs = (h, above) if head.confidence > head.hidden else (h,)
            sure.append(torch.sigmoid(_linear(w, "confidence_head.proj", *inputs)).item())
    return torch.stack(pairs), sure


def _linear(w, name, *inputs):
    return w[f"{name}.weight"] @ torch.cat(inputs) + w[f"{name}.bias"]
