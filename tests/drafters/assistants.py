"""Gemma 4's assistants beside random targets: as published, and passes by transformers."""

from functools import lru_cache

import gguf
import numpy as np
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.models import tiny


def _modes(config):
    """Which layers keep keys and values for others, and which read others'. transformers 5.23
    refuses an assistant, all of whose layers read a target's, and keeps nothing of a target whose
    layers all have their own.
    """
    kinds, layers = config.layer_types, config.num_hidden_layers
    own = layers - config.num_kv_shared_layers
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    return [
        "reuse" if layer >= own else "store" if last[kinds[layer]] == layer else None
        for layer in range(layers)
    ]


Gemma4TextConfig.kv_sharing_modes = property(_modes)

KINDS = ["sliding_attention"] * 3 + ["full_attention"]
CLUSTERS, SCORED = 10, 4


def beside(hf, seed=3, ordered=False, hidden=32, **changes):
    """A random assistant for `hf`, whose windows are a little shorter than the target's."""
    sizes = hf.config.per_layer_config
    whole = sizes[hf.config.layer_types.index("full_attention")]
    local = sizes[hf.config.layer_types.index("sliding_attention")]
    text = Gemma4TextConfig(
        **{
            "vocab_size": tiny.VOCAB,
            "hidden_size": hidden,
            "intermediate_size": 48,
            "num_hidden_layers": len(KINDS),
            "num_attention_heads": 4,
            "num_key_value_heads": local.num_key_value_heads,
            "head_dim": local.head_dim,
            "global_head_dim": whole.head_dim,
            "num_global_key_value_heads": whole.num_key_value_heads,
            "attention_k_eq_v": hf.config.attention_k_eq_v,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": len(KINDS),
            "layer_types": KINDS,
            "sliding_window": 20,
            "rope_parameters": hf.config.rope_parameters,
            "max_position_embeddings": hf.config.max_position_embeddings,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            **changes,
        }
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=hf.config.hidden_size,
        use_ordered_embeddings=ordered,
        num_centroids=CLUSTERS,
        centroid_intermediate_top_k=SCORED,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Gemma4AssistantForCausalLM(config).eval()
        with torch.no_grad():
            for name, weight in made.named_parameters():
                spread = 0.2 if weight.dim() == 1 else 0.8 / weight.shape[-1] ** 0.5
                weight.normal_(float("norm" in name), spread)
                if "q_norm" in name:  # Scores that are not sharp: they would magnify roundings.
                    weight.mul_(0.25)
            for name, buffer in made.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.7, 1.2)
                if name.endswith("token_ordering"):
                    buffer.copy_(torch.randperm(tiny.VOCAB))
    return made


def right_for(hf, every=1):
    """An assistant for a target that looks at the last token alone (kinds.blind): it proposes what
    the target says, but never a token that is no multiple of `every`.
    """
    width = hf.config.hidden_size
    made = beside(hf, hidden=width)
    with torch.no_grad():
        made.model.norm.weight.fill_(1.0)
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        made.pre_projection.weight.copy_(torch.eye(width, 2 * width))
        made.lm_head.weight.copy_(hf.lm_head.weight)
        made.lm_head.weight[torch.arange(tiny.VOCAB) % every > 0] = 0
    return made


@lru_cache(64)
@torch.no_grad()
def _run(hf, text):
    """The target's keys and values of a text, and its last hidden state after the final norm."""
    outputs = hf.model(torch.tensor([text]), use_cache=False, return_shared_kv_states=True)
    return outputs.shared_kv_states, outputs.last_hidden_state[:, -1:]


def dense(hf, made, text, drafted, moving=0):
    """Logits [n,V] of what follows `text` and then each of `drafted`, by transformers' own code, as
    its SinglePositionMultiTokenCandidateGenerator calls it. moving: positions that each step is
    further on, in truth none.
    """
    return torch.stack(
        [
            _step(hf, made, tuple(text), tuple(drafted[:n]), moving)[0]
            for n in range(len(drafted) + 1)
        ]
    )


@lru_cache(256)
@torch.no_grad()
def _step(hf, made, text, drafted, moving):
    """Logits [V] behind the last of `drafted`, and the next hidden state."""
    states, hidden = _run(hf, text[:-1])
    if drafted:
        hidden = _step(hf, made, text, drafted[:-1], moving)[1]
    token = torch.tensor([[[*text, *drafted][-1]]])
    draft = made(
        inputs_embeds=torch.cat([hf.model.embed_tokens(token), hidden], -1),
        position_ids=torch.tensor([[len(text) - 1 + moving * len(drafted)]]),
        shared_kv_states=dict(states),
    )
    return draft.logits[0, 0], draft.last_hidden_state


def in_gguf(made, path, kind="F32", **changes):
    """An assistant's file as llama.cpp's converter writes it. changes: metadata without prefix."""
    config, text = made.config, made.config.text_config
    sizes = [text.per_layer_config[layer] for layer in range(text.num_hidden_layers)]
    windows = [name == "sliding_attention" for name in text.layer_types]
    ropes = text.rope_parameters
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    values = {
        "block_count": text.num_hidden_layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "embedding_length_out": config.backbone_hidden_size,
        "embedding_length_per_layer_input": 0,
        "nextn_predict_layers": text.num_hidden_layers,
        "feed_forward_length": text.intermediate_size,
        "vocab_size": text.vocab_size,
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": [size.num_key_value_heads for size in sizes],
        "attention.shared_kv_layers": text.num_kv_shared_layers,
        "attention.sliding_window": text.sliding_window,
        "attention.sliding_window_pattern": windows,
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }
    for end, size in (("", sizes[windows.index(False)]), ("_swa", sizes[windows.index(True)])):
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            values[name + end] = size.head_dim
    for name, value in (values | changes).items():
        key = f"gemma4-assistant.{name}"
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    half = sizes[windows.index(False)].head_dim // 2
    divisors = np.full(half, 1e30, np.float32)
    divisors[: int(half * ropes["full_attention"]["partial_rotary_factor"])] = 1
    writer.add_tensor("rope_freqs.weight", divisors)
    quant = gguf.GGMLQuantizationType[kind]
    for name, weight in made.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = weight.float().numpy()
        own = name.startswith("model.")
        stored = tiny.gguf_name(name, "gemma4") if own else f"nextn.{name}"
        if array.ndim == 1:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(array, quant), raw_dtype=quant)
    return tiny.written(writer, path)
