"""Reads EAGLE-3 heads from GGUF files, with llama.cpp's names (eagle3). `target_layers`, in older
files `extract_layers`, counts as DraftHead.features; `d2t` has target ids, not offsets.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.gguf.config import below, harmless, scaling_of
from forerun.checkpoints.gguf.header import DRAFT_IDS, GgufFile, declares
from forerun.checkpoints.gguf.parts import read_gguf
from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.naming import Order, each_head
from forerun.drafts.eagle_config import DraftHead
from forerun.drafts.eagle_folder import DraftFile, checked_head
from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.keys import Keys
from forerun.networks.rope import Rope

ARCHITECTURE = "eagle3"
_HEAD = "output.weight"
_NAMES = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    _HEAD: "lm_head.weight",
    DRAFT_IDS: "d2t",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in the file -> canonical names; `blk.0.` is `layers.0.`."""
_LAYER = re.compile(r"blk\.0\.(\w+)\.weight")
_OF_ROPE = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _InOrder(TensorFile):
    """A file of which some tensors have their rows in another order.

    orders  name -> the row of the file for each canonical row
    """

    file: GgufFile
    orders: Mapping[str, Order]

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[rows, bytes of a row] of a tensor in canonical order."""
        rows, order = self.file.rows(name), self.orders.get(name)
        return rows if order is None else rows[order]


def holds_head_file(path: Path) -> bool:
    """Return whether a path is that of an EAGLE-3 head's GGUF file; False if it cannot be read."""
    return declares(path, ARCHITECTURE)


def open_head_file(path: Path, target: Architecture) -> DraftFile:
    """Read an EAGLE-3 head for `target`. Raises ModelError, naming keys and tensors, if it is
    damaged, incomplete, for another target, or of an unsupported kind.
    """
    file = read_gguf(path)
    try:
        head = _describe(file, target)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    # The file has the halves of each head interleaved, as for Llama models.
    one = np.arange(head.head_size).reshape(-1, 2).T.ravel()
    heads = {"blk.0.attn_q.weight": head.heads, "blk.0.attn_k.weight": head.kv_heads}
    orders = {
        name: each_head(one, count)
        for name, count in heads.items()
        if name in file.tensors and file.tensors[name].shape[0] == count * head.head_size
    }
    turned = _InOrder(file.path, file.tensors, file.data, file, orders)
    files = {_canonical(name): (turned, name) for name in file.tensors if name != _OF_ROPE}
    return checked_head(path, head, target, files, absolute=True)


def _canonical(stored: str) -> str:
    match = _LAYER.fullmatch(stored)
    if match is not None and match[1] in _IN_LAYER:
        return f"layers.0.{_IN_LAYER[match[1]]}.weight"
    return _NAMES.get(stored, stored)


def _describe(file: GgufFile, target: Architecture) -> DraftHead:
    """Return the head that metadata and tensors describe."""
    prefix, shapes = f"{ARCHITECTURE}.", {n: each.shape for n, each in file.tensors.items()}
    keys = Keys(below(file.metadata, prefix), prefix)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    size = keys.integer("attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        keys.require(name, size)
    keys.require("block_count", 1)
    if keys.flag("norm_before_fc", False):
        raise keys.unfit("norm_before_fc", True, "false; name the folder that it was made from")
    if size < 2 or size % 2:
        raise keys.unfit("attention.key_length", size, "even")
    context = keys.integer("context_length", target.context)
    vocab = keys.integer("vocab_size", target.vocab)
    drafted = shapes.get(_HEAD) or shapes.get(DRAFT_IDS) or (vocab,)
    head = DraftHead(
        algorithm="eagle3",
        target_hidden=keys.integer("target_hidden_size", target.hidden),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_size=size,
        ffn=keys.integer("feed_forward_length"),
        vocab=drafted[0],
        target_vocab=vocab,
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        rope=Rope(keys.real("rope.freq_base", 10000.0), scaling_of(keys, context, file)),
        context=context,
        features=keys.layers("target_layers" if keys.has("target_layers") else "extract_layers"),
        normed_residual=keys.flag("norm_before_residual", False),
        trained_head=_HEAD in shapes,
    )
    keys.refuse_the_rest(harmless)
    return head
