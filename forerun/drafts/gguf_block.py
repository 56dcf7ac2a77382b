"""Reads block drafters from GGUF files, with llama.cpp's names (dflash): DFlash and JetSpec, and
DSpark with the vanilla rule and DFlash2, which only the tensors identify. `target_layers` counts as
BlockHead.features.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.checkpoints.gguf.config import below, harmless, scaling_of
from forerun.checkpoints.gguf.header import DRAFT_IDS, GgufFile, declares
from forerun.checkpoints.gguf.parts import read_gguf
from forerun.drafts.block_config import KERNEL_SIZE, BlockHead, PairRule
from forerun.drafts.block_folder import BlockFile, checked_block
from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.keys import Keys
from forerun.networks.rope import Rope

ARCHITECTURE = "dflash"
_MASK = "tokenizer.ggml.mask_token_id"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_W1, _CONFIDENCE = "markov_w1.weight", "conf_proj.weight"
_SELECTOR = "selector_hidden.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)(\.weight|)")
_NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    _EMBEDDING: "embed_tokens.weight",
    _HEAD: "lm_head.weight",
    DRAFT_IDS: "d2t",
    _W1: "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    _CONFIDENCE: "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    _SELECTOR: "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
"""Names in the file -> canonical names; `blk.N.` is `layers.N.`."""


def holds_block_file(path: Path) -> bool:
    """Return whether a path is that of a block drafter's GGUF file; False if it cannot be read."""
    return declares(path, ARCHITECTURE)


def open_block_file(path: Path, target: Architecture) -> BlockFile:
    """Read a block drafter for `target`. Raises ModelError, naming keys and tensors, if it is
    damaged, incomplete, for another target, or of an unsupported kind.
    """
    file = read_gguf(path)
    if (row := file.tensors.get(_CONFIDENCE)) is not None:  # Headers lose a shape's leading 1.
        file.tensors[_CONFIDENCE] = replace(row, shape=(1, *row.shape[-1:]))
    files = {_canonical(name): (file, name) for name in file.tensors}
    try:
        head = _describe(file, target)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return checked_block(path, head, target, files)


def _canonical(stored: str) -> str:
    match = _LAYER.fullmatch(stored)
    if match is not None and match[2] in _IN_LAYER:
        return f"layers.{match[1]}.{_IN_LAYER[match[2]]}{match[3]}"
    return _NAMES.get(stored, stored)


def _describe(file: GgufFile, target: Architecture) -> BlockHead:
    """Return the drafter that metadata and tensors describe."""
    prefix, shapes = f"{ARCHITECTURE}.", {n: each.shape for n, each in file.tensors.items()}
    keys = Keys(below(file.metadata, prefix), prefix)
    mask = file.metadata.get(_MASK)
    if type(mask) is not int:
        raise ModelError(f"{_MASK} is {mask!r}; it must be the mask's token id")
    if _W1 in shapes and not keys.has("sample_from_anchor"):
        raise ModelError(
            f"{prefix}sample_from_anchor is missing: with {_W1} the first token may be predicted "
            "at the anchor (true) or behind it (false)"
        )
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    size = keys.integer("attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        keys.require(name, size)
    keys.get("rope.dimension_sections")  # Of a token of text all positions are one.
    if keys.flag("has_confidence_head", _CONFIDENCE in shapes) != (_CONFIDENCE in shapes):
        raise keys.unfit("has_confidence_head", _CONFIDENCE not in shapes, "as the tensors say")
    pair, rank = _pair(keys, shapes)
    vocab = keys.integer("vocab_size", target.vocab)
    context = keys.integer("context_length", target.context)
    layers = keys.integer("block_count")
    drafted = shapes.get(_HEAD) or shapes.get(DRAFT_IDS) or (vocab,)
    head = BlockHead(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_size=size,
        ffn=keys.integer("feed_forward_length"),
        vocab=drafted[0],
        target_vocab=vocab,
        target_hidden=target.hidden,
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        rope=Rope(keys.real("rope.freq_base", 10000.0), scaling_of(keys, context, file)),
        context=context,
        features=keys.layers("target_layers"),
        places=keys.integer("block_size"),
        mask=mask,
        anchored=keys.flag("sample_from_anchor", False),
        causal=keys.flag("attention.causal", False),
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        own_embedding=_EMBEDDING in shapes,
        own_head=_HEAD in shapes,
        pair=pair,
        rank=rank,
        confidence=shapes[_CONFIDENCE][-1] if _CONFIDENCE in shapes else 0,
        top_k=_positive(keys, "selector_top_k") if pair == "selector" else 0,
        convolved=_convolved(keys, hidden) if pair == "selector" else 0,
        windows=_windows(keys, layers),
        embedding_scale=keys.real("embedding_scale") if keys.has("embedding_scale") else None,
        logit_scale=keys.real("logit_scale", 0.0) or 1.0,
        logit_cap=keys.real("final_logit_softcapping", 0.0),
    )
    if not 2 <= head.places <= 1024:
        raise keys.unfit("block_size", head.places, "2 to 1024")
    if context < 1:
        raise keys.unfit("context_length", context, "1 or more")
    keys.refuse_the_rest(harmless)
    return head


def _pair(keys: Keys, shapes: dict[str, tuple[int, ...]]) -> tuple[PairRule, int]:
    """Return how a token's scores depend on the one above, and the rank of its tables."""
    if _SELECTOR in shapes:
        return "selector", _positive(keys, "selector_rank")
    return ("vanilla", shapes[_W1][-1]) if _W1 in shapes else ("", 0)


def _convolved(keys: Keys, hidden: int) -> int:
    """Return the channels per kernel. Raises ModelError for another kind of convolution."""
    keys.require("conv_kernel_size", KERNEL_SIZE)
    if hidden % (group := _positive(keys, "conv_group_size")):
        raise keys.unfit("conv_group_size", group, f"a divisor of embedding_length {hidden}")
    return group


def _positive(keys: Keys, name: str) -> int:
    if (value := keys.integer(name)) < 1:
        raise keys.unfit(name, value, "1 or more")
    return value


def _windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window; () if none has any."""
    window = keys.integer("attention.sliding_window", 0)
    slides: Any = keys.get("attention.sliding_window_pattern", [False] * layers)
    named = isinstance(slides, list) and all(type(each) is bool for each in slides)
    if not named or len(slides) != layers or (window and True not in slides):
        raise keys.unfit(
            "attention.sliding_window_pattern", slides, f"{layers} times true or false"
        )
    if True not in slides:
        return ()
    if window < 1:
        raise keys.unfit("attention.sliding_window", window, "1 or more")
    return tuple(window if slide else None for slide in slides)
