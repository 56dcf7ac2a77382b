"""Block drafters on disk: every public dialect -> one BlockHead and canonical tensors.

z-lab writes Qwen3's flat keys and a `dflash_config`, JetSpec the same and `causal_head`, DeepSpec
all keys flat, speculators a nested configuration. Keys are honoured or refused; nothing is skipped:
a missing, unexpected or wrongly shaped tensor stops the load and is named.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forerun.checkpoints.checkpoint import shortened
from forerun.checkpoints.folder import files_by_tensor
from forerun.checkpoints.shard import MAPS
from forerun.drafts.block_config import BlockHead, expected_block_tensors
from forerun.drafts.eagle_folder import canonical, mapped_ids
from forerun.drafts.opened_draft import OpenedDraft
from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.config_json import architectures, harmless, read_json
from forerun.networks.keys import Keys
from forerun.networks.rope_config import rope_from
from forerun.types import Ints

_DFLASH, _DSPARK = ("DFlashDraftModel", "DFlashSpeculator"), ("Qwen3DSparkModel",)
_OTHERS = {
    "DFlash2DraftModel": "DFlash2's convolutions and candidate selector are not supported",
    "DominoDraftModel": "Domino's recurrent head is not supported",
    "Gemma4DSparkModel": "of DSpark drafters only those with Qwen3's layers are supported",
}
_SPECULATORS = ("dflash", "dspark")
_BOOKKEEPING = re.compile(
    r"auto_map | num_anchors | max_anchors | speculators_(model_type|version|config)"
    r" | embed_requires_grad | has_no_defaults_at_init | tie_word_embeddings | max_window_layers"
    r" | sliding_window(_non_causal)? | use_sliding_window | auf | projector_type | emb_dim"
    r" | gru_hidden_dim | pure_draft_prefix_len | lambda_base_\w+ | confidence_head_\w+"
    r" | enable_confidence_head | loss_\w+ | training_\w+",
    re.VERBOSE,
)
"""Keys of training, and keys whose effect the tensors or other keys decide."""


@dataclass(frozen=True, slots=True)
class BlockFile(OpenedDraft[BlockHead]):
    """An opened block drafter. kind: what it is, in a sentence's words."""

    kind: ClassVar[str] = "block drafter"

    def limited(self, token_map: Ints) -> "BlockFile":
        """Raise ModelError: a block drafter's map of draft ids is in its own files."""
        raise ModelError(
            f"{self.path} holds a block drafter, which takes no token map; leave "
            "speculative-token-map out"
        )


def holds_block(folder: Path) -> bool:
    """Return whether a draft's configuration names a block drafter. Raises ModelError if there is
    no configuration.
    """
    config = read_json(folder / "config.json")
    known = {*_DFLASH, *_DSPARK, *_OTHERS} & set(architectures(config))
    kind = config.get("speculators_model_type")
    return bool(known) or "dflash_config" in config or kind in _SPECULATORS


def open_block(folder: Path, target: Architecture) -> BlockFile:
    """Read a block drafter for `target`. Raises ModelError: damaged, incomplete, not for this
    target, or of a kind that is not built.
    """
    config = read_json(folder / "config.json")
    files = canonical(files_by_tensor(folder, MAPS), folder)
    shapes = {name: file.tensors[stored].shape for name, (file, stored) in files.items()}
    try:
        head = _describe(config, shapes, target)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    head.check_against(target, str(folder))
    _check_tensors(head, shapes, folder)
    ids = mapped_ids(head.vocab, head.target_vocab, files, folder)
    block_file = BlockFile(folder, head, ids, tuple(_warnings(head, target)), files)
    for name in expected_block_tensors(head):
        if name != "d2t":
            block_file.tensor(name)
    return block_file


def _describe(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], target: Architecture
) -> BlockHead:
    """Return the drafter that configuration and tensors describe."""
    for name in architectures(config):
        if name in _OTHERS:
            raise ModelError(f"config.json: {name} does not run here: {_OTHERS[name]}")
    keys = Keys(config, "config.json: ")
    keys.get("architectures")
    nested = keys.get("transformer_layer_config")
    sizes = Keys(nested, "config.json: transformer_layer_config.") if nested else keys
    settings = _Settings(keys, config.get("dflash_config") or {})
    speculators = keys.get("speculators_model_type") is not None
    if (
        settings.flag("shift_label", False)
        or settings.value("projector_type", "dflash") == "domino"
    ):
        raise ModelError("config.json: shifted labels and Domino's head are not supported")
    _refuse_scales(settings, keys)
    hidden = sizes.integer("hidden_size")
    ids = settings.features()
    dspark = bool(set(architectures(config)) & set(_DSPARK))
    vocab = sizes.integer("vocab_size", target.vocab)
    context = sizes.integer("max_position_embeddings", target.context)
    _refuse_bias(settings, shapes)
    head = BlockHead(
        layers=sizes.integer("num_hidden_layers"),
        hidden=hidden,
        heads=sizes.integer("num_attention_heads"),
        kv_heads=sizes.integer("num_key_value_heads"),
        head_size=sizes.integer("head_dim", hidden // max(sizes.integer("num_attention_heads"), 1)),
        ffn=sizes.integer("intermediate_size"),
        vocab=_vocab(keys, shapes, vocab),
        target_vocab=vocab,
        target_hidden=keys.integer("target_hidden_size", target.hidden),
        norm_eps=sizes.real("rms_norm_eps", 1e-6),
        rope=rope_from(sizes, context),
        context=context,
        features=tuple(i + (0 if speculators else 1) for i in ids),
        places=settings.integer("block_size", None if speculators or dspark else 16),
        mask=settings.integer("mask_token_id", -1 if "mask_embedding" in shapes else None),
        anchored=settings.flag("sample_from_anchor", dspark),
        causal=settings.causal(),
        qk_norm="layers.0.self_attn.q_norm.weight" in shapes,
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        own_mask="mask_embedding" in shapes,
        confidence=shapes.get("confidence_head.proj.weight", (1, 0))[-1],
    )
    _check_layers(keys, sizes, head, target)
    for part in (settings.inner, sizes, keys):
        part.refuse_the_rest(lambda n, v: harmless(n, v) or _BOOKKEEPING.fullmatch(n) is not None)
    return head


class _Settings:
    """The keys of dflash_config or beside it, looked up as the authors do."""

    def __init__(self, keys: Keys, inner: Any) -> None:
        if not isinstance(inner, dict):
            raise keys.unfit("dflash_config", inner, "an object")
        keys.get("dflash_config")
        self.keys, self.inner = keys, Keys(inner, f"{keys.prefix}dflash_config.")

    def _of(self, name: str) -> Keys:
        if self.inner.has(name):
            self.keys.get(name)
            return self.inner
        return self.keys

    def value(self, name: str, default: Any) -> Any:
        return self._of(name).get(name, default)

    def integer(self, name: str, default: int | None) -> int:
        return self._of(name).integer(name, default)

    def flag(self, name: str, default: bool) -> bool:
        return self._of(name).flag(name, default)

    def features(self) -> list[int]:
        """Return the layer ids, which are required: a wrong set of as many would load and draft
        badly.
        """
        layers = self.value("target_layer_ids", self.keys.get("aux_hidden_state_layer_ids"))
        if not isinstance(layers, list) or not layers or any(type(i) is not int for i in layers):
            raise self.keys.unfit("dflash_config.target_layer_ids", layers, "a list of layers")
        return layers

    def causal(self) -> bool:
        """Return the setting under its four spellings, of which none may contradict another."""
        values = {
            "dflash_config.causal_head": self.inner.get("causal_head"),
            "dflash_config.causal": self.inner.get("causal"),
            "is_causal": self.keys.get("is_causal"),
            "causal_head": self.keys.get("causal_head"),
        }
        given = {name: value for name, value in values.items() if value is not None}
        if len(set(given.values())) > 1 or any(type(value) is not bool for value in given.values()):
            raise ModelError(f"config.json: {given} must all be true or all be false")
        return bool(given) and next(iter(given.values()))


def _refuse_scales(settings: _Settings, keys: Keys) -> None:
    """Raise ModelError for multipliers of some targets, which no supported drafter has."""
    for name in ("output_multiplier", "input_embedding_scale"):
        if settings.value(name, 1.0) != 1.0:
            raise keys.unfit(name, settings.value(name, 1.0), "1 to run here")
    if settings.value("final_logit_softcapping", 0):
        raise keys.unfit(
            "final_logit_softcapping", settings.value("final_logit_softcapping", 0), "0"
        )


def _vocab(keys: Keys, shapes: dict[str, tuple[int, ...]], vocab: int) -> int:
    """Return Vd, by the output head's rows, else by the configuration."""
    stated = keys.integer("draft_vocab_size", vocab)
    return shapes["lm_head.weight"][0] if shapes.get("lm_head.weight") else stated


def _refuse_bias(settings: _Settings, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ModelError for DSpark's bias of the logits by the token before."""
    if settings.integer("markov_rank", 0) or "markov_head.markov_w1.weight" in shapes:
        raise ModelError("config.json: markov_rank: a bias by the previous token is not supported")


def _check_layers(keys: Keys, sizes: Keys, head: BlockHead, target: Architecture) -> None:
    """Raise ModelError for layers that are not Llama's, or another target's."""
    sizes.require("hidden_act", "silu")
    if sizes.flag("attention_bias", False) or sizes.flag("mlp_bias", False):
        raise ModelError("config.json: attention_bias and mlp_bias must be false to run here")
    if sizes.get("model_type", "qwen3") not in ("qwen3", "llama"):
        raise sizes.unfit("model_type", sizes.get("model_type"), "qwen3 or llama")
    kinds = sizes.get("layer_types", [])
    if any(kind != "full_attention" for kind in kinds):
        raise sizes.unfit("layer_types", kinds, "full_attention only: windows are not supported")
    shifted = sizes.integer("max_window_layers", 28)
    if not kinds and sizes.flag("use_sliding_window", False) and shifted < head.layers:
        raise sizes.unfit("use_sliding_window", True, "false: windows are not supported")
    made_for = keys.integer("num_target_layers", target.layers)
    if made_for != target.layers:
        raise ModelError(
            f"config.json: num_target_layers is {made_for}, this target has {target.layers}"
        )
    if not 2 <= head.places <= 1024:
        raise keys.unfit("block_size", head.places, "2 to 1024")


def _warnings(head: BlockHead, target: Architecture) -> list[str]:
    """Return what lowers acceptance silently."""
    warnings = []
    if head.context < target.context:
        warnings.append(
            f"max_position_embeddings is {head.context}, the target's context {target.context}: "
            "acceptance may fall beyond it"
        )
    if head.confidence:
        warnings.append("its confidence head is not read: the policy decides how much is drafted")
    return warnings


def _check_tensors(head: BlockHead, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Raise ModelError naming every missing, unexpected or wrongly shaped tensor."""
    expected = expected_block_tensors(head)
    faults = [f"missing {name}" for name in expected if name not in shapes]
    for name, shape in shapes.items():
        if name not in expected:
            faults += [] if name == "d2t" else [f"unexpected {name}"]
        elif shape != expected[name]:
            faults.append(f"{name} is {list(shape)}, not {list(expected[name])}")
    if faults:
        raise ModelError(
            f"{folder}: its tensors are not those of the block drafter its configuration "
            f"describes: {shortened(faults)}"
        )
