"""Reads block drafters from disk: converts every public format to a BlockHead and canonical
tensors.

z-lab writes Qwen3's flat keys and a `dflash_config`, as do LiquidAI and SpecForge, JetSpec the same
and `causal_head`, DeepSpec all keys flat, speculators a nested configuration. Every key is
supported or rejected. A missing, unexpected or wrongly shaped tensor is an error that names it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from forerun.checkpoints.folder import files_by_tensor
from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.shard import MAPS
from forerun.drafts.block_config import KERNEL_SIZE, BlockHead, PairRule, expected_block_tensors
from forerun.drafts.eagle_folder import canonical, check_tensors, mapped_ids
from forerun.drafts.lenient import lenient_requests
from forerun.drafts.opened_draft import OpenedDraft
from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.config_json import architectures, harmless, read_json
from forerun.networks.keys import Keys, shown
from forerun.networks.rope_config import rope_from
from forerun.types import Floats, Ints

_DFLASH, _LFM2 = ("DFlashDraftModel", "DFlashSpeculator"), "Lfm2DSparkDraftModel"
_DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", _LFM2)
_DFLASH2 = ("DFlash2DraftModel", "Qwen3DFlash2DraftModel")
_OTHERS = {
    "DominoDraftModel": "Domino's recurrent head is not supported",
    "Gemma4DSparkModel": "of DSpark drafters only those with Qwen3's layers are supported",
}
_SPECULATORS = _PROJECTORS = ("dflash", "dspark")
_PAIR_RULES: tuple[PairRule, ...] = ("vanilla", "gated", "rnn")
"""The rules of DSpark."""
_W1, _CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
_INTERLEAVED = re.compile(r"layers\.\d+\.self_attn\.[qk]_(proj|norm)\.weight")
_BOOKKEEPING = re.compile(
    r"auto_map | num_anchors | max_anchors | speculators_(model_type|version|config)"
    r" | embed_requires_grad | has_no_defaults_at_init | tie_word_embeddings | max_window_layers"
    r" | sliding_window | use_sliding_window | auf | projector_type | emb_dim"
    r" | gru_hidden_dim | pure_draft_prefix_len | lambda_base_\w+ | confidence_\w+ | \w+_loss_alpha"
    r" | runtime_block_size | loss_\w+ | training_\w+",
    re.VERBOSE,
)
"""Keys about training, and keys whose effect is decided by tensors or other keys."""


@dataclass(frozen=True, slots=True)
class BlockFile(OpenedDraft[BlockHead]):
    """An opened block drafter. kind: its name in a sentence."""

    kind: ClassVar[str] = "block drafter"

    def tensor(self, name: str) -> Floats:
        """Return a weight as OpenedDraft does. Heads that the file rotates by adjacent elements
        are reordered to Rope's halves, which does not change the scores of queries and keys.
        """
        values, head = OpenedDraft.tensor(self, name), self.head
        if not head.interleaved or not _INTERLEAVED.fullmatch(name):
            return values
        pairs = values.reshape(-1, head.head_size // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(np.moveaxis(pairs, 2, 1)).reshape(values.shape)

    def limited(self, token_map: Ints) -> "BlockFile":
        """Raise ModelError: a block drafter has its map of draft ids in its own files."""
        raise ModelError(
            f"{self.path} holds a block drafter, which takes no token map; leave "
            "speculative-token-map out"
        )


def holds_block(folder: Path) -> bool:
    """Return whether a draft's configuration names a block drafter. Raises ModelError if there is
    no configuration.
    """
    config = read_json(folder / "config.json")
    known = {*_DFLASH, *_DSPARK, *_DFLASH2, *_OTHERS} & set(architectures(config))
    kind = config.get("speculators_model_type")
    return bool(known) or "dflash_config" in config or kind in _SPECULATORS


def open_block(folder: Path, target: Architecture) -> BlockFile:
    """Read a block drafter for `target`. Raises ModelError if it is damaged, incomplete, for
    another target, or of an unsupported kind.
    """
    config = read_json(folder / "config.json")
    files = canonical(files_by_tensor(folder, MAPS), folder)
    shapes = {name: file.tensors[stored].shape for name, (file, stored) in files.items()}
    try:
        head = _describe(config, shapes, target)
        warnings = _warnings(config, head, target) + lenient_requests(config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    return checked_block(folder, head, target, files, tuple(warnings))


def checked_block(
    path: Path,
    head: BlockHead,
    target: Architecture,
    files: Mapping[str, tuple[TensorFile, str]],
    warnings: tuple[str, ...] = (),
) -> BlockFile:
    """Return the drafter of a folder or file; parameters as in OpenedDraft. Raises ModelError if it
    is for another target, incomplete, or has a number that is not finite.
    """
    head.check_against(target, str(path))
    expected = expected_block_tensors(head)
    check_tensors(files, expected, f"{path}: its tensors are not those of the block drafter")
    ids = mapped_ids(head.vocab, head.target_vocab, files, path)
    opened = BlockFile(path, head, ids, warnings, files)
    opened.read(expected)
    return opened


def _describe(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], target: Architecture
) -> BlockHead:
    """Return the drafter that configuration and tensors describe."""
    keys = Keys(config, "config.json: ")
    keys.get("architectures")
    nested = keys.get("transformer_layer_config")
    sizes = Keys(nested, "config.json: transformer_layer_config.") if nested else keys
    settings = _Settings(keys, config.get("dflash_config") or {})
    speculators = keys.get("speculators_model_type") is not None
    family = _family(config, settings)
    dspark, dflash2 = family == "dspark", family == "dflash2"
    hidden = sizes.integer("hidden_size")
    ids = settings.features()
    vocab = sizes.integer("vocab_size", target.vocab)
    context = sizes.integer("max_position_embeddings", target.context)
    pair, rank = _selector(settings) if dflash2 else _pair(settings, shapes)
    windows = _windows(sizes)
    if rank and family == "dflash" and not settings.has("sample_from_anchor"):
        raise ModelError(
            "config.json: sample_from_anchor is missing: with markov_rank the first token may be "
            "predicted at the anchor (true) or behind it (false)"
        )
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
        causal=settings.causal(windows),
        qk_norm="layers.0.self_attn.q_norm.weight" in shapes,
        own_embedding="embed_tokens.weight" in shapes,
        own_head="lm_head.weight" in shapes,
        own_mask="mask_embedding" in shapes,
        pair=pair,
        rank=rank,
        confidence=shapes.get(_CONFIDENCE, (1, 0))[-1],
        interleaved=_interleaved(keys, _LFM2 in architectures(config)),
        top_k=settings.integer("selector_top_k") if dflash2 else 0,
        convolved=_convolved(settings, hidden) if dflash2 else 0,
        windows=windows,
        embedding_scale=settings.real("input_embedding_scale"),
        logit_scale=settings.real("output_multiplier") or 1.0,
        logit_cap=settings.real("final_logit_softcapping") or 0.0,
    )
    _check_layers(settings, sizes, head, target)
    _check_confidence(settings, head)
    for part in (settings.inner, sizes, keys):
        part.refuse_the_rest(lambda n, v: harmless(n, v) or _BOOKKEEPING.fullmatch(n) is not None)
    return head


def _family(config: dict[str, Any], settings: "_Settings") -> str:
    """Return "dflash", "dspark" or "dflash2". Raises ModelError for an unsupported kind."""
    names = set(architectures(config))
    for name in sorted(names & _OTHERS.keys()):
        raise ModelError(f"config.json: {name} does not run here: {_OTHERS[name]}")
    projector = settings.value("projector_type", "dflash")
    if projector not in _PROJECTORS:
        raise ModelError(
            f"config.json: projector_type {shown(projector)} does not run here, only "
            f"{' and '.join(_PROJECTORS)}"
        )
    if settings.flag("shift_label", False):
        raise ModelError("config.json: shifted labels are not supported")
    if names & set(_DFLASH2):
        return "dflash2"
    spark = "dspark" in (projector, config.get("speculators_model_type"))
    return "dspark" if spark or names & set(_DSPARK) else "dflash"


class _Settings:
    """Looks up keys in dflash_config or next to it, as the authors' code does."""

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

    def has(self, name: str) -> bool:
        return self.inner.has(name) or self.keys.has(name)

    def value(self, name: str, default: Any) -> Any:
        return self._of(name).get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        return self._of(name).integer(name, default)

    def real(self, name: str) -> float | None:
        """Return a number, or None if there is none."""
        return None if self.value(name, None) is None else self._of(name).real(name)

    def flag(self, name: str, default: bool) -> bool:
        return self._of(name).flag(name, default)

    def features(self) -> list[int]:
        """Return the layer ids, which are required: a wrong set of the same number would load and
        draft badly.
        """
        layers = self.value("target_layer_ids", self.keys.get("aux_hidden_state_layer_ids"))
        if not isinstance(layers, list) or not layers or any(type(i) is not int for i in layers):
            raise self.keys.unfit("dflash_config.target_layer_ids", layers, "a list of layers")
        return layers

    def causal(self, windows: tuple[int | None, ...]) -> bool:
        """Return the setting under any of its names, which must agree. By default layers with
        windows are causal and others are not.
        """
        apart = self.keys.get("sliding_window_non_causal")
        values = {
            "dflash_config.causal_head": self.inner.get("causal_head"),
            "dflash_config.causal": self.inner.get("causal"),
            "is_causal": self.keys.get("is_causal"),
            "causal_head": self.keys.get("causal_head"),
            "not sliding_window_non_causal": not apart if windows and apart is not None else None,
        }
        given = {name: value for name, value in values.items() if value is not None}
        if len(set(given.values())) > 1 or any(type(value) is not bool for value in given.values()):
            raise ModelError(f"config.json: {given} must all be true or all be false")
        if not given and None in windows:
            raise ModelError(
                "config.json: is_causal is missing: some layers have windows, some none"
            )
        return next(iter(given.values())) if given else bool(windows)


def _windows(sizes: Keys) -> tuple[int | None, ...]:
    """Return each layer's window; () if none has any. Raises ModelError for other kinds of layers,
    or invalid windows.
    """
    layers, kinds = sizes.integer("num_hidden_layers"), sizes.get("layer_types")
    if kinds is None:
        first = sizes.integer("max_window_layers", 28)
        slides = sizes.flag("use_sliding_window", False)
        kinds = ["full_attention"] * min(first if slides else layers, layers)
        kinds += ["sliding_attention"] * (layers - len(kinds))
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not known.issuperset(kinds):
        raise sizes.unfit(
            "layer_types", kinds, f"a list of {layers}: " + " or ".join(sorted(known))
        )
    if "sliding_attention" not in kinds:
        return ()
    if (window := sizes.integer("sliding_window")) < 1:
        raise sizes.unfit("sliding_window", window, "1 or more")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _selector(settings: _Settings) -> tuple[PairRule, int]:
    """Return the rule and the rank of DFlash2's selector. Raises ModelError if a size is missing or
    invalid.
    """
    for name in ("selector_rank", "selector_top_k"):
        if settings.integer(name) < 1:
            raise settings.keys.unfit(name, settings.integer(name), "1 or more")
    return "selector", settings.integer("selector_rank")


def _convolved(settings: _Settings, hidden: int) -> int:
    """Return the channels per kernel. Raises ModelError for another kind of convolution."""
    size, group = settings.integer("conv_kernel_size"), settings.integer("conv_group_size")
    if size != KERNEL_SIZE:
        raise settings.keys.unfit("conv_kernel_size", size, f"{KERNEL_SIZE} to run here")
    if group < 1 or hidden % group:
        raise settings.keys.unfit("conv_group_size", group, f"a divisor of hidden_size {hidden}")
    return group


def _vocab(keys: Keys, shapes: dict[str, tuple[int, ...]], vocab: int) -> int:
    """Return Vd, by the output head's rows, else by the configuration."""
    stated = keys.integer("draft_vocab_size", vocab)
    return shapes["lm_head.weight"][0] if shapes.get("lm_head.weight") else stated


def _pair(settings: _Settings, shapes: dict[str, tuple[int, ...]]) -> tuple[PairRule, int]:
    """Return the rule of the bias by the token above, and its rank, from the tensors if the
    configuration lacks it. Raises ModelError for an unknown rule.
    """
    rank = settings.integer("markov_rank", shapes.get(_W1, (0, 0))[-1])
    rule = settings.value("markov_head_type", "vanilla")
    if rule not in _PAIR_RULES:
        raise settings.keys.unfit("markov_head_type", rule, "one of: " + ", ".join(_PAIR_RULES))
    return (rule, rank) if rank else ("", 0)


def _interleaved(keys: Keys, lfm2: bool) -> bool:
    """Return whether heads are rotated by adjacent elements. Raises ModelError if the key is
    missing in an LFM2 draft, which may be either.
    """
    stated = [keys.get(name) for name in ("rope_is_neox_style", "is_neox_style")]
    given = {value for value in stated if value is not None}
    if len(given) > 1 or not all(isinstance(value, bool) for value in given):
        raise keys.unfit("rope_is_neox_style", stated, "true or false")
    if lfm2 and not given:
        raise ModelError("config.json: rope_is_neox_style is missing")
    return False in given


def _check_confidence(settings: _Settings, head: BlockHead) -> None:
    """Raise ModelError for a confidence head that is missing or has other inputs than it should."""
    wide = head.hidden + head.rank
    wanted = settings.value("enable_confidence_head", head.confidence > 0)
    above = settings.value("confidence_head_with_markov", head.confidence == wide)
    if not head.confidence and wanted:
        raise ModelError(
            f"config.json: enable_confidence_head is true, but {_CONFIDENCE} is missing"
        )
    if head.confidence not in (0, wide if above else head.hidden):
        raise ModelError(
            f"{_CONFIDENCE} reads {head.confidence} numbers; confidence_head_with_markov asks for "
            f"{wide if above else head.hidden}"
        )


def _check_layers(settings: _Settings, sizes: Keys, head: BlockHead, target: Architecture) -> None:
    """Raise ModelError for layers that are not Llama's, or do not match the target."""
    sizes.require("hidden_act", "silu")
    if sizes.flag("attention_bias", False) or sizes.flag("mlp_bias", False):
        raise ModelError("config.json: attention_bias and mlp_bias must be false to run here")
    if sizes.get("model_type", "qwen3") not in ("qwen3", "llama"):
        raise sizes.unfit("model_type", sizes.get("model_type"), "qwen3 or llama")
    if any(window is not None and window < head.places for window in head.windows):
        raise sizes.unfit("sliding_window", min(filter(None, head.windows)), "the block or more")
    made_for = settings.integer("num_target_layers", target.layers)
    if made_for != target.layers:
        raise ModelError(
            f"config.json: num_target_layers is {made_for}, this target has {target.layers}"
        )
    if not 2 <= head.places <= 1024:
        raise settings.keys.unfit("block_size", head.places, "2 to 1024")


def _warnings(config: dict[str, Any], head: BlockHead, target: Architecture) -> list[str]:
    """Return sentences about conditions that lower acceptance without an error."""
    warnings = []
    if head.context < target.context:
        warnings.append(
            f"max_position_embeddings is {head.context}, the target's context {target.context}: "
            "acceptance may fall beyond it"
        )
    if config.get("confidence_temperatures") is not None:
        warnings.append("confidence_temperatures are not read: outcomes calibrate its confidence")
    return warnings
