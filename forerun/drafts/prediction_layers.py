"""The target's own prediction layers ("multi-token prediction", MTP; SGLang's NEXTN), read from the
target's checkpoint under any of the published names.

A prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2) reads a hidden state together with
the embedding of a token, and predicts the token after it. Of K layers the k-th (from 1) has an
entry at every token from t_k on, each in one of the paper's rows (its row i is the entry at
t_{i+k}):

    x        = fuse_k [norm_e(embed(t_p)); norm_h(o_{k-1}(p-1))]
    o_k(p)   = norm_f(layer_k(x))       logits of t_{p+1} = head(o_k(p))

where o_0 is the target's hidden state after the final norm, embedding and output head are the
target's, and a layer's attention sees its own entries, from t_k on. So layer k predicts the k-th
token after those that the target has run. Later tokens are predicted by layer K from its own
outputs, with o_K(p-1) in the place of o_{K-1}(p-1): with one layer, all depths, as SGLang serves
these. DeepSeek's and Qwen's fuse reads the embedding first, MiMo's the hidden state; Qwen's layers
share one fuse and its norms.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from forerun.checkpoints.checkpoint import Checkpoint, shortened
from forerun.checkpoints.gguf.naming import AnyStored
from forerun.checkpoints.mapped import Packed
from forerun.checkpoints.naming import StoredTensor
from forerun.checkpoints.prediction_naming import (
    BORROWED,
    EMBEDDING,
    HEAD,
    ZEROED,
    Files,
    Naming,
    copied,
    copy_name,
    naming_of,
    own_name,
    pieces,
    several,
)
from forerun.errors import ModelError
from forerun.networks.arch import Architecture
from forerun.networks.cache_layer import CacheLayer
from forerun.types import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class PredictionLayers:
    """A target's prediction layers, as a Checkpoint: K decoder layers, the target's embedding and
    head, and for each layer FUSE [H,2H], EMBEDDING_NORM, HIDDEN_NORM and FINAL_NORM [H], with the
    names from `own`.

    kind          of draft, for messages
    hidden_first  the fuse reads the hidden state before the embedding
    apart         all layers share the tensors named by `own`
    count         K: layer k drafts depth k, the last one all deeper ones
    target_ids    int32[Vd] the tokens that may be proposed, which are the head's rows
    folder        location, if not in the target's checkpoint
    zeroed        the embedding of the entry at position 0 is zeros
    """

    kind: ClassVar[str] = "prediction layers"
    warnings: ClassVar[tuple[str, ...]] = ()

    target: Checkpoint
    files: Mapping[str, AnyStored]
    hidden_first: bool
    apart: bool
    count: int
    target_ids: Ints
    folder: Path | None = None
    zeroed: bool = False

    @property
    def architecture(self) -> Architecture:
        """An architecture of K layers, each like the target's last layer with attention."""
        return several(self.target.architecture, self.count)

    def own(self, layer: int, part: str) -> str:
        """Return the canonical name of a part, such as FUSE, of layer 0 .. K-1."""
        return own_name(0 if self.apart else layer, part)

    def first(self, count: int) -> "PredictionLayers":
        """Return a copy with the first `count` layers only."""
        if count >= self.count:
            return self
        beyond = [f"model.layers.{layer}." for layer in range(count, self.count)]
        beyond += [own_name(layer, "") for layer in range(count, self.count) if not self.apart]
        files = {n: item for n, item in self.files.items() if not n.startswith(tuple(beyond))}
        return replace(self, files=files, count=count)

    @property
    def path(self) -> Path:
        """The folder or file that they are read from: their own, or the target's."""
        return self.folder or self.target.path

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors, including the target's."""
        borrowed = (name for name in BORROWED if name in self.target.names())
        return tuple(dict.fromkeys([*self.files, *borrowed]))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of that canonical name. Raises KeyError for an unknown
        one.
        """
        if name not in self.files:
            return self.target.shape(name)
        return self.files[name].piece.shape

    def tensor(self, name: str) -> Floats:
        """Return the tensor as float32. Raises KeyError for an unknown name, ModelError if a number
        is not finite.
        """
        if name not in self.files:
            return self.target.tensor(name)
        held = self.files[name]
        values = held.floats()
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: {held.name} holds NaN or infinity; the file is damaged")
        return values

    def packed(self, name: str) -> Packed | None:
        """Return a matrix as stored; None for a vector. Raises KeyError for an unknown name."""
        if name not in self.files:
            return self.target.packed(name)
        return self.files[name].packed()

    def limited(self, token_map: Ints) -> "PredictionLayers":
        """Return a copy that proposes only the target ids `token_map` int32[n] (FR-Spec). Raises
        ModelError if they have a vocabulary of their own.
        """
        if self.vocab < self.architecture.vocab:
            raise ModelError(
                f"{self.path} brings its own draft vocabulary; leave speculative-token-map out"
            )
        return replace(self, target_ids=token_map)

    @property
    def cache(self) -> tuple[CacheLayer, ...]:
        """The cache of each of the K layers per position."""
        arch = self.architecture
        return (arch.cache_layer,) * self.count

    @property
    def vocab(self) -> int:
        """Vd, the number of draft ids."""
        return len(self.target_ids)

    @property
    def parameters(self) -> int:
        """Number of weights besides the target's; a head with some of its rows is a copy and
        counts.
        """
        own = [name for name in self.files if name not in BORROWED]
        copied = 0 if self.vocab == self.architecture.vocab else self.vocab
        copies = copied * self.architecture.hidden
        return sum(math.prod(self.shape(name)) for name in own) + copies

    @property
    def node_numbers(self) -> int:
        """Float32 elements of scratch per node of a pass, other than its logits."""
        arch = self.architecture
        return 6 * arch.hidden + 3 * arch.ffn + arch.latent_numbers

    @property
    def feature_numbers(self) -> int:
        """H: the size of a token's last hidden state in the target."""
        return self.architecture.hidden


def open_prediction_layers(
    target: Checkpoint,
    files: Files,
    declared: int | None = None,
    folder: Path | None = None,
    target_ids: Ints | None = None,
) -> PredictionLayers:
    """Return the prediction layers of `target`, from the tensors that `divided` separated.

    declared    their number in its configuration, if it has one
    folder      where the tensors are, if not in the target's checkpoint
    target_ids  int32[Vd] the tokens they choose among; None = all

    Raises ModelError if there are none, or another number than declared, or naming all missing,
    unexpected or wrongly shaped tensors.
    """
    where = folder or target.path
    if not files:
        announced = f"announces {declared} prediction layers, but " if declared else ""
        raise ModelError(
            f"{where} {announced}has no prediction layers (no tensors called mtp or eh_proj)"
        )
    naming, first, count = naming_of(files, target.architecture, where)
    if declared and declared != count:
        raise ModelError(
            f"{where}: its configuration promises {declared} prediction layers "
            f"(num_nextn_predict_layers), its tensors are those of {count}"
        )
    arch = several(target.architecture, count)
    parts = pieces(arch, naming, first, count, files)
    check_stored(
        naming.title,
        where,
        {stored: piece.stored_shape for stored, piece in parts.values()},
        {stored: file.tensors[stored].shape for stored, file in files.items()},
        {stored for name, (stored, _) in parts.items() if copied(name)},
    )
    layers = {
        name: StoredTensor(files[stored], stored, piece)
        for name, (stored, piece) in parts.items()
        if stored in files
    }
    return layers_of(target, naming, layers, count, folder, target_ids)


def check_stored(
    title: str,
    where: Path,
    expected: Mapping[str, tuple[int, ...]],
    there: Mapping[str, tuple[int, ...]],
    optional: Set[str],
) -> None:
    """Raise ModelError naming every tensor that is missing, unexpected or wrongly shaped, by its
    stored name. title: the owner of the layers, for the message.
    """
    faults = [f"unexpected {stored}" for stored in there if stored not in expected]
    faults += [
        f"missing {stored}" for stored in expected if stored not in there and stored not in optional
    ]
    faults += [
        f"{stored} is {list(there[stored])}, not {list(right)}"
        for stored, right in expected.items()
        if there.get(stored, right) != right
    ]
    if faults:
        raise ModelError(
            f"{where}: its prediction layers are not those of {title}: " + shortened(sorted(faults))
        )


def layers_of(
    target: Checkpoint,
    naming: Naming,
    found: Mapping[str, AnyStored],
    count: int,
    folder: Path | None = None,
    target_ids: Ints | None = None,
) -> PredictionLayers:
    """Return the layers whose tensors, by canonical names, are `found`. Copies of the target's
    embedding and head are left out if they are equal. Raises ModelError if layers have different
    copies.
    """
    arch = target.architecture
    tensors = {name: item for name, item in found.items() if not copied(name)}
    tensors |= _copies(target, found, count, folder or target.path)
    ids = np.arange(arch.vocab, dtype=np.int32) if target_ids is None else target_ids
    layers = PredictionLayers(
        target, tensors, naming.hidden_first, naming.apart, count, ids, folder
    )
    return replace(layers, zeroed=folder is None and arch.family in ZEROED)


def _copies(
    target: Checkpoint,
    found: Mapping[str, AnyStored],
    count: int,
    where: Path,
) -> dict[str, StoredTensor]:
    """Return the file's embedding and head, by the target's names, if they differ from the
    target's. Raises ModelError if the layers' copies differ.
    """
    tensors: dict[str, StoredTensor] = {}
    for name in BORROWED:
        copies = [found.get(copy_name(name, layer)) for layer in range(count)]
        stored = [item for item in copies if isinstance(item, StoredTensor)]
        others = [item for item in stored if _differs(target, name, item)]
        odd = [i for i in others if len(others) < len(stored) or not _equal(i, others[0])]
        if odd:
            raise ModelError(
                f"{where}: {odd[0].name} is another than that of the other prediction layers, "
                "which share one embedding and one head"
            )
        tensors |= {name: others[0]} if others else {}
    return tensors


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    return np.array_equal(one.rows(), other.rows())


def _differs(target: Checkpoint, name: str, item: StoredTensor) -> bool:
    """Return whether a file's copy of the target's embedding or head differs from it."""
    tied = name == HEAD and target.architecture.tied_head
    theirs = target.packed(EMBEDDING if tied else name)
    return theirs is None or not np.array_equal(item.rows(), theirs.rows)
