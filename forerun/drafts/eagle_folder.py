"""Reads draft heads from disk: converts every public format to a DraftHead and canonical tensors.

EAGLE's repository, SpecForge/SGLang and AngelSlim write a flat config.json, speculators a nested
one. Tensors take precedence over wrong configurations: a head published as plain LlamaForCausalLM
loads. A missing, unexpected or wrongly shaped tensor is an error that names it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from forerun.checkpoints.checkpoint import shortened
from forerun.checkpoints.folder import files_by_tensor
from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.shard import MAPS
from forerun.drafts.eagle_config import (
    TARGET_TENSORS,
    DraftHead,
    FeatureNorm,
    default_features,
    expected_draft_tensors,
)
from forerun.drafts.lenient import lenient_requests
from forerun.drafts.opened_draft import OpenedDraft
from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.config_json import read_json
from forerun.networks.keys import Keys
from forerun.networks.rope_config import rope_from
from forerun.types import AnyArray, Ints

_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
_DERIVED = re.compile(r"^(t2d|.*rotary_emb\.inv_freq)$")
"""Tensors without new information: the map's inverse, rotary tables."""


@dataclass(frozen=True, slots=True)
class DraftFile(OpenedDraft[DraftHead]):
    """An opened draft head. kind: its name in a sentence."""

    kind: ClassVar[str] = "EAGLE head"

    def limited(self, token_map: Ints) -> "DraftFile":
        """Return a copy that proposes only the target ids `token_map` int32[n] (FR-Spec). Raises
        ModelError if it has an output head of its own.
        """
        if self.head.trained_head or len(self.target_ids) < self.head.target_vocab:
            raise ModelError(
                f"{self.path} brings its own draft vocabulary; leave speculative-token-map out"
            )
        head = replace(self.head, vocab=len(token_map))
        return replace(self, head=head, target_ids=token_map)


def open_draft(folder: Path, target: Architecture) -> DraftFile:
    """Read a draft head for `target`. Raises ModelError if it is damaged, incomplete, or for
    another target.
    """
    config = read_json(folder / "config.json")
    files = canonical(files_by_tensor(folder, MAPS), folder)
    shapes = {name: file.tensors[stored].shape for name, (file, stored) in files.items()}
    try:
        head, keys = _describe(config, shapes, target)
        doubts = [*_doubts(keys, head, target), *_window(config, head), *lenient_requests(config)]
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    return checked_head(folder, head, target, files, doubts)


def checked_head(
    path: Path,
    head: DraftHead,
    target: Architecture,
    files: Mapping[str, tuple[TensorFile, str]],
    doubts: Sequence[str] = (),
    absolute: bool = False,
) -> DraftFile:
    """Return the head of a folder or file; parameters as in OpenedDraft and mapped_ids. Raises
    ModelError if it is for another target, incomplete, or has a number that is not finite.
    """
    head.check_against(target, str(path))
    expected, rows = expected_draft_tensors(head), (head.target_vocab, head.vocab)
    borrowed = {n: (count, head.hidden) for n, count in zip(TARGET_TENSORS, rows, strict=True)}
    what = f"{path}: its tensors are not those of the {head.algorithm} head"
    check_tensors(files, expected, what, borrowed)
    ids = mapped_ids(head.vocab, head.target_vocab, files, path, absolute)
    draft = DraftFile(path, head, ids, (*_warnings(head, target), *doubts), files)
    draft.read(expected)
    return draft


def canonical(found: dict[str, TensorFile], folder: Path) -> dict[str, tuple[TensorFile, str]]:
    """Return, by canonical name, the file of each tensor and its name there; derived tensors are
    left out. Raises ModelError if two have one canonical name.
    """
    files: dict[str, tuple[TensorFile, str]] = {}
    for stored, file in found.items():
        name = stored
        for pattern, replacement in _RENAMED:
            name = pattern.sub(replacement, name)
        if _DERIVED.match(name):
            continue
        if name in files:
            raise ModelError(f"{folder}: {stored} and {files[name][1]} are the same tensor")
        files[name] = (file, stored)
    return files


def _describe(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], target: Architecture
) -> tuple[DraftHead, Keys]:
    """Return the head that configuration and tensors describe, and the configuration."""
    nested = config.get("transformer_layer_config")
    sizes = Keys(nested if isinstance(nested, dict) else config, "config.json: ")
    keys = Keys(config, "config.json: ")
    if sizes.get("hidden_act") is not None:
        sizes.require("hidden_act", "silu")
    nvidia = config.get("eagle_config")
    if isinstance(nvidia, dict) and nvidia.get("use_aux_hidden_state") is False:
        raise ModelError(
            "config.json: eagle_config.use_aux_hidden_state is false; heads of the third kind that "
            "read the last layer alone are not read here"
        )
    fused, query = _matrix(shapes, "fc.weight"), _matrix(shapes, "layers.0.self_attn.q_proj.weight")
    hidden = fused[0]
    first = query[1] == hidden
    if not first and query[1] != 2 * hidden:
        raise ModelError(f"q_proj reads {query[1]} numbers beside a hidden size of {hidden}")
    target_hidden = keys.integer("target_hidden_size", target.hidden)
    heads = sizes.integer("num_attention_heads")
    head_size = sizes.integer("head_dim", query[0] // max(heads, 1))
    kv_heads = _matrix(shapes, "layers.0.self_attn.k_proj.weight")[0] // max(head_size, 1)
    context = sizes.integer("max_position_embeddings", target.context)
    own_head = "lm_head.weight" in shapes and not first
    vocab = keys.integer("draft_vocab_size", target.vocab)
    head = DraftHead(
        algorithm="eagle1" if first else "eagle3",
        target_hidden=target_hidden,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=_matrix(shapes, "layers.0.mlp.gate_proj.weight")[0],
        vocab=shapes["lm_head.weight"][0] if own_head else vocab,
        target_vocab=sizes.integer("vocab_size", target.vocab),
        norm_eps=sizes.real("rms_norm_eps", 1e-6),
        rope=rope_from(sizes, context),
        context=context,
        features=_features(config, first, fused[1] // max(target_hidden, 1), target),
        feature_norm=_feature_norm(shapes),
        normed_residual=_normed_residual(keys, nested is not None) and not first,
        normed_feedback=keys.flag("norm_output", False) and not first,
        fc_bias="fc.bias" in shapes,
        trained_head=own_head,
    )
    return head, keys


def _matrix(shapes: dict[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise ModelError(f"{name} is missing or not a matrix; this is not an EAGLE draft head")
    return shape[0], shape[1]


def _features(
    config: dict[str, Any], first: bool, parts: int, target: Architecture
) -> tuple[int, ...]:
    """Return the indices of hidden states (see DraftHead.features) by the conventions of each
    format.

    Nested eagle_config ids mean "output of layer i"; the top-level ids of speculators mean
    "entering layer i"; absent means EAGLE's default. Speculators also name the last layer, which
    only its trainer reads.
    """
    if first:
        return (target.layers,)
    nested = config.get("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    shift = 1
    ids = nested.get(key) if isinstance(nested, dict) else None
    if ids is None:
        ids, shift = config.get(key), 0
    if ids is None:
        ids, shift = default_features(target.layers), 0
    if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
        raise ModelError(f"config.json: {key} must be a list of layer numbers, not {ids!r}")
    if len(ids) == parts + 1 and ids[-1] == target.layers - 1:
        ids = ids[:-1]
    if len(ids) != parts:
        raise ModelError(f"fc reads {parts} features, but the configuration names {list(ids)}")
    return tuple(i + shift for i in ids)


def _feature_norm(shapes: dict[str, tuple[int, ...]]) -> FeatureNorm:
    if "input_norm.weight" in shapes:
        return "joint"
    return "each" if "fc_norm.0.weight" in shapes else "none"


def _normed_residual(keys: Keys, speculators: bool) -> bool:
    """Return whether the residual is normed; the default is True in Speculators' files, False in
    flat configurations.
    """
    return keys.flag("norm_before_residual", speculators)


def _warnings(head: DraftHead, target: Architecture) -> list[str]:
    """Return sentences about conditions that lower acceptance without an error, however the file is
    read.
    """
    if head.context >= target.context:
        return []
    return [
        f"max_position_embeddings is {head.context}, the target's context {target.context}: "
        "acceptance may fall beyond it"
    ]


def _doubts(keys: Keys, head: DraftHead, target: Architecture) -> list[str]:
    """Return sentences about settings that may be meant otherwise and would then lower acceptance
    without an error, with the key of config.json to change.
    """
    doubts = []
    if head.rope.theta != target.rope.theta:
        doubts.append(
            f"rope_theta is {head.rope.theta:g}, the target's {target.rope.theta:g}; EAGLE's own "
            "trainer ignores rope_theta: if few draft tokens are accepted, try 10000 in config.json"
        )
    if keys.get("norm_output") and head.algorithm == "eagle3":
        doubts.append(
            "norm_output is true: SGLang and vLLM feed the normed output back, SpecForge trains "
            "with the raw one: if few draft tokens are accepted, try false in config.json"
        )
    if head.normed_residual and not keys.has("norm_before_residual"):
        doubts.append(
            "norm_before_residual is not set, read as true, as in a speculators file: if few draft "
            "tokens are accepted, try false in config.json"
        )
    return doubts


def _window(config: dict[str, Any], head: DraftHead) -> list[str]:
    """Return a sentence about a window of the head's layer, which is not kept here; none if it has
    none, or one as long as its context.
    """
    nested = config.get("transformer_layer_config")
    sizes = Keys(nested if isinstance(nested, dict) else config, "config.json: ")
    kinds = sizes.get("layer_types")
    slides = "sliding_attention" in kinds if isinstance(kinds, list) else False
    slides = slides or (kinds is None and sizes.flag("use_sliding_window", False))
    window = sizes.integer("sliding_window", head.context) if slides else head.context
    if window >= head.context:
        return []
    return [
        f"its layer read the last {window} tokens (sliding_window) when it was trained, and reads "
        "all of them here: fewer draft tokens may be accepted beyond"
    ]


def check_tensors(
    files: Mapping[str, tuple[TensorFile, str]],
    expected: Mapping[str, tuple[int, ...]],
    draft: str,
    borrowed: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Raise ModelError naming every missing, unexpected or wrongly shaped tensor.

    draft     location and kind of the draft, for the message
    borrowed  shapes of tensors that may be missing, because the target has them
    """
    optional = borrowed or {}
    faults = [f"missing {name}" for name in expected if name not in files]
    for name, (file, stored) in files.items():
        shape, expected_shape = file.tensors[stored].shape, expected.get(name, optional.get(name))
        if name == "d2t" and expected_shape is None:
            continue  # A map onto the full vocabulary is the identity; checked with the ids.
        if expected_shape is None:
            faults.append(f"unexpected {name}")
        elif shape != expected_shape:
            faults.append(f"{name} is {list(shape)}, not {list(expected_shape)}")
    if faults:
        raise ModelError(f"{draft} its configuration describes: {shortened(faults)}")


def mapped_ids(
    vocab: int,
    target_vocab: int,
    files: Mapping[str, tuple[TensorFile, str]],
    folder: Path,
    absolute: bool = False,
) -> Ints:
    """Return int32[Vd] from the offsets in d2t, or, if `absolute`, its target ids; the identity if
    there is no map. Raises ModelError unless they are integers, one per draft id, each another id
    of the target.
    """
    if "d2t" not in files:
        return np.arange(vocab, dtype=np.int32)
    file, stored = files["d2t"]
    kind = file.tensors[stored].kind
    if kind not in ("I64", "I32"):
        raise ModelError(f"{folder}: {stored} is stored as {kind}; it must be I64")
    offsets: AnyArray = file.rows(stored).view("<i8" if kind == "I64" else "<i4").reshape(-1)
    if len(offsets) != vocab:
        raise ModelError(f"{folder}: {stored} maps {len(offsets)} ids, the head has {vocab}")
    ids = offsets.astype(np.int64) + (0 if absolute else np.arange(len(offsets)))
    wrong = np.flatnonzero((ids < 0) | (ids >= target_vocab))
    if len(wrong):
        raise ModelError(
            f"{folder}: {stored}[{wrong[0]}] = {offsets[wrong[0]]} leads to target id "
            f"{ids[wrong[0]]}, outside 0..{target_vocab - 1}"
        )
    if len(np.unique(ids)) != len(ids):
        raise ModelError(f"{folder}: {stored} maps two draft ids to one target id")
    return ids.astype(np.int32)
