"""Gemma 4's assistant, a small model that drafts for one target: published as a folder of its own,
or as a GGUF file (llama.cpp's gemma4-assistant).

Its layers only have queries: they attend to the target's keys and values. Layers without a window
read those of the target's last layer without one, the others those of its last layer with one. So
the assistant has no cache, reads no prompt, and nothing has to be rolled back. After n decided
tokens, of which the target has run n - 1, all draft tokens have the position P = n - 1:

    x = before [embed(t) sqrt(H); h]     both of the target
    y = norm(layers(x))                  keys at positions < P; with a window w, the last w + 1
    logits of the next token = head y    h of the next token = behind y

The first h is the target's at P - 1, after its final norm, together with t = t_{n-1}; further ones
are the assistant's own, together with its draft tokens (SinglePositionMultiTokenCandidateGenerator
of transformers). The head may be ordered: tokens are in clusters, and only those of the best
clusters are scored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from forerun.checkpoints.checkpoint import check_complete, shortened
from forerun.checkpoints.folder import files_by_tensor
from forerun.checkpoints.gguf.config import ASSISTANT, assistant_of
from forerun.checkpoints.gguf.header import declared, is_gguf
from forerun.checkpoints.gguf.naming import AnyStored, divided, stored_tensors
from forerun.checkpoints.gguf.parts import read_gguf
from forerun.checkpoints.mapped import Packed, TensorFile
from forerun.checkpoints.naming import StoredPart, StoredTensor
from forerun.checkpoints.shard import MAPS
from forerun.errors import ModelError
from forerun.networks.arch import Architecture, expected_tensors
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.config_json import architecture_from, harmless, read_json
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import LayerSpec
from forerun.networks.rope import Rope
from forerun.types import AnyArray, Floats, Ints

BEFORE, BEHIND = "pre_projection", "post_projection"
CENTROIDS, ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"
_CLASSES = {
    "gemma4_assistant": ("Gemma4AssistantForCausalLM", "gemma4_text"),
    "gemma4_unified_assistant": ("Gemma4UnifiedAssistantForCausalLM", "gemma4_unified_text"),
}
"""model_type -> (the only value of `architectures`, the model_type inside text_config)."""


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """The clusters of an ordered head.

    tokens  int32[C,V/C] the tokens of each cluster
    top_k   number of clusters that are scored, those with the highest centroid scores
    """

    tokens: Ints
    top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class Assistant:
    """An opened assistant, as a Checkpoint: a decoder's tensors without those of keys and values,
    BEFORE [Hd,2H] and BEHIND [H,Hd] with its own width Hd, and CENTROIDS [C,Hd] of an ordered head.

    kind          of draft, for messages
    architecture  `LayerSpec.reads` are the target's layers
    target_hidden H, the width of the target's hidden states
    clusters      of an ordered head; None: all tokens are scored
    target_ids    int32[Vd] the tokens that may be proposed
    warnings      sentences about conditions that lower acceptance
    """

    kind: ClassVar[str] = "Gemma 4 assistant"

    path: Path
    architecture: Architecture
    target_hidden: int
    files: Mapping[str, AnyStored]
    clusters: Clusters | None
    target_ids: Ints
    warnings: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors."""
        return tuple(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises KeyError for an unknown name."""
        return self.files[name].piece.shape

    def tensor(self, name: str) -> Floats:
        """Return a tensor as float32. Raises KeyError for an unknown name, ModelError if a number
        is not finite.
        """
        values = self.files[name].floats()
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: {name} holds NaN or infinity; the file is damaged")
        return values

    def packed(self, name: str) -> Packed | None:
        """Return a matrix as stored; None for a vector. Raises KeyError for an unknown name."""
        return self.files[name].packed()

    def limited(self, token_map: Ints) -> "Assistant":
        """Return a copy that proposes only the target ids `token_map` int32[n] (FR-Spec). Raises
        ModelError if its head is ordered.
        """
        if self.clusters is not None:
            raise ModelError(
                f"{self.path} scores few tokens already, by clusters of its own; leave "
                "speculative-token-map out"
            )
        return replace(self, target_ids=token_map)

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """Empty: it reads the target's cache."""
        return ()

    @property
    def vocab(self) -> int:
        """Vd, the number of draft ids."""
        return len(self.target_ids)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(self.shape(name)) for name in self.files)

    @property
    def node_numbers(self) -> int:
        """Float32 elements of scratch per node of a pass, other than its logits."""
        arch = self.architecture
        clusters = 0 if self.clusters is None else len(self.clusters.tokens)
        return 4 * self.target_hidden + 6 * arch.hidden + 3 * arch.ffn + clusters

    @property
    def feature_numbers(self) -> int:
        """H: the size of a token's last hidden state in the target."""
        return self.target_hidden


def holds_assistant(path: Path) -> bool:
    """Return whether a local folder or GGUF file is an assistant; False if that cannot be
    determined.
    """
    try:
        if is_gguf(path):
            return declared(path, "general.architecture") == ASSISTANT
        about = path / "config.json"
        return about.is_file() and str(read_json(about).get("model_type")) in _CLASSES
    except ModelError:
        return False


def open_assistant(path: Path, target: Architecture) -> Assistant:
    """Open the assistant in a folder, or in a GGUF file, for `target`. Raises ModelError if it is
    damaged, incomplete, for another target, or has unknown settings that may change what it
    computes.
    """
    return (_open_file if path.is_file() else _open_folder)(path, target)


def _open_file(path: Path, target: Architecture) -> Assistant:
    file = read_gguf(path)
    try:
        arch, hidden = assistant_of(file)
        arch, warnings = _for_target(arch, hidden, target)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    tensors = stored_tensors(file, arch)
    for name, shape in _projections(arch, hidden).items():
        tensors[name] = StoredTensor(file, f"nextn.{name}", StoredPart(name, shape, shape))
    parts = [part for item in tensors.values() for part in item.parts]
    check_complete(
        arch, divided(file, arch)[0], path, {part.name: part.piece.stored_shape for part in parts}
    )
    ids = np.arange(arch.vocab, dtype=np.int32)
    return Assistant(path, arch, hidden, tensors, None, ids, warnings)


def _open_folder(folder: Path, target: Architecture) -> Assistant:
    try:
        arch, hidden, ordered = _described(read_json(folder / "config.json"), folder)
        arch, warnings = _for_target(arch, hidden, target)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    files, clusters = files_by_tensor(folder, MAPS), None
    expected = expected_tensors(arch) | _projections(arch, hidden)
    if ordered is not None:
        clusters = _clusters(files.pop(ORDERING, None), *ordered, arch.vocab, folder)
        expected[f"{CENTROIDS}.weight"] = len(clusters.tokens), arch.hidden
    found = {name: file.tensors[name].shape for name, file in files.items()}
    check_complete(arch, found, folder, expected)
    stored = {
        name: StoredTensor(files[name], name, StoredPart(name, shape, shape))
        for name, shape in expected.items()
    }
    ids = np.arange(arch.vocab, dtype=np.int32)
    return Assistant(folder, arch, hidden, stored, clusters, ids, warnings)


def _projections(arch: Architecture, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{BEFORE}.weight": (arch.hidden, 2 * hidden),
        f"{BEHIND}.weight": (hidden, arch.hidden),
    }


def _described(
    config: Mapping[str, Any], folder: Path
) -> tuple[Architecture, int, tuple[int, int] | None]:
    """Return the decoder that a configuration describes, as if it had keys and values of its own;
    H; and (number of clusters, number that are scored) of an ordered head.
    """
    keys = Keys(config, "config.json: ")
    kind, inner = keys.get("model_type"), keys.get("text_config")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise keys.unfit("model_type", kind, "that of an assistant of Gemma 4")
    if not isinstance(inner, dict):
        raise keys.unfit("text_config", inner, "an object")
    name, inside = _CLASSES[kind]
    if keys.get("architectures", [name]) != [name]:
        raise keys.unfit("architectures", keys.get("architectures"), f"[{name!r}] to run here")
    hidden = keys.integer("backbone_hidden_size")
    clusters = keys.integer("num_centroids", 2048), keys.integer("centroid_intermediate_top_k", 32)
    ordered = clusters if keys.flag("use_ordered_embeddings", False) else None
    tied = keys.flag("tie_word_embeddings", True)
    keys.refuse_the_rest(harmless)
    text = Keys(inner, "config.json: text_config.")
    layers = text.integer("num_hidden_layers")
    if text.integer("num_kv_shared_layers", 0) not in (0, layers):
        raise text.unfit("num_kv_shared_layers", text.get("num_kv_shared_layers"), f"{layers}")
    if text.flag("use_double_wide_mlp", False):
        raise text.unfit("use_double_wide_mlp", True, "false")
    if text.get("model_type", inside) != inside:
        raise text.unfit("model_type", text.get("model_type"), inside)
    own = {"model_type": inside, "num_kv_shared_layers": 0, "tie_word_embeddings": tied}
    return architecture_from({**inner, **own}, folder), hidden, ordered


def _for_target(
    arch: Architecture, hidden: int, target: Architecture
) -> tuple[Architecture, tuple[str, ...]]:
    """Return the assistant's architecture with layers that read the target's, and sentences about
    conditions that may lower acceptance. Raises ModelError if it is for another target.
    """
    faults = []
    if arch.token_vector or any(spec.beside for spec in arch.layer_specs):
        faults.append(
            "an assistant has no experts and no per-layer embeddings (hidden_size_per_layer_input "
            "must be 0)"
        )
    sizes = ("width", hidden, target.hidden), ("vocabulary", arch.vocab, target.vocab)
    for what, own, of_target in sizes:
        if own != of_target:
            faults.append(f"it is for a {what} of {own}, the target's is {of_target}")
    layers, warnings = list[LayerSpec](), dict[str, None]()
    for number, spec in enumerate(arch.layer_specs):
        source, fault = _source(arch, spec, target)
        if fault:
            faults.append(f"layer {number} {fault}")
        elif not _same_rotation(arch.rope_of(spec), target.rope_of(target.layer_specs[source])):
            warnings[
                "its rotary positions are not the target's: few draft tokens may be accepted"
            ] = None
        attention = replace(spec.attention, normed_values=False, keyed_values=False)
        layers.append(replace(spec, attention=attention, reads=source, cache=arch.cache_of(spec)))
    if faults:
        raise ModelError("this assistant does not fit the target: " + shortened(faults))
    # As in transformers, no softcap applies to its logits, whatever the configuration has.
    borrowing = replace(arch, layer_specs=tuple(layers), borrows=True, final_softcap=None)
    return borrowing, tuple(warnings)


def _same_rotation(one: tuple[Rope, int], two: tuple[Rope, int]) -> bool:
    """Return whether two ropes rotate heads in the same way, however files describe them."""
    (first, size), (second, other) = one, two
    alike = size == other and first.attention_factor == second.attention_factor
    return alike and bool(np.allclose(first.frequencies(size), second.frequencies(size), rtol=1e-4))


def _source(arch: Architecture, spec: LayerSpec, target: Architecture) -> tuple[int, str]:
    """Return the target's layer whose keys and values a layer reads, and the reason why it cannot;
    "" if it can.
    """
    window = spec.attention.window
    alike = [
        number
        for number, each in enumerate(target.layer_specs)
        if each.recurrent is None and (each.attention.window is None) == (window is None)
    ]
    if not alike:
        kind = "no window" if window is None else "a window"
        return 0, f"has {kind}, and no layer of the target has {kind}"
    last = target.layer_specs[alike[-1]]
    own, shared, widest = arch.cache_of(spec), target.cache_of(last), last.attention.window
    source = alike[-1] if last.reads is None else last.reads
    if own != shared:
        sizes = (f"{c.kv_heads} heads of {c.head_size}" for c in (own, shared))
        return source, "reads {}, the target keeps {}".format(*sizes)
    if window is not None and widest is not None and window > widest:
        return source, f"has a window of {window}, the target's is {widest}"
    return source, ""


def _clusters(
    file: TensorFile | None, count: int, top_k: int, vocab: int, folder: Path
) -> Clusters:
    """Read the tokens of each cluster. Raises ModelError unless they divide the vocabulary into
    clusters of one size.
    """
    if file is None:
        raise ModelError(f"{folder}: missing {ORDERING}, which use_ordered_embeddings needs")
    kind = file.tensors[ORDERING].kind
    if kind not in ("I64", "I32"):
        raise ModelError(f"{folder}: {ORDERING} is stored as {kind}; it must be I64")
    tokens: AnyArray = file.rows(ORDERING).view("<i8" if kind == "I64" else "<i4").reshape(-1)
    if not 1 <= top_k <= count or vocab % count:
        raise ModelError(
            f"{folder}: config.json: {count} clusters (num_centroids), of which {top_k} are scored "
            f"(centroid_intermediate_top_k), do not divide {vocab} tokens"
        )
    if not np.array_equal(np.sort(tokens), np.arange(vocab)):
        raise ModelError(f"{folder}: {ORDERING} does not name each of the {vocab} tokens once")
    return Clusters(tokens.reshape(count, -1).astype(np.int32), top_k)
