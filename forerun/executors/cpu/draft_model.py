"""The base of draft models on the compiled core: native models that share the target's threads and
run extensions and levels (csrc/draft.h).
"""

import ctypes
from dataclasses import dataclass

import numpy as np

from forerun.errors import EngineError, MemoryPlanError
from forerun.executors.cpu import native
from forerun.executors.cpu.executor import CpuExecutor
from forerun.executors.cpu.features import CpuFeatures
from forerun.executors.cpu.places import RopeTable
from forerun.executors.draft_model import Declared, DraftModelBase
from forerun.interface.draft_model import Candidates, DraftExtension, DraftLevel
from forerun.interface.features import Features, HostFeatures
from forerun.types import AnyArray, Floats, Ints

BLOCK = 64
"""Size of the blocks whose maxima are compared first. (64 of 39,237: .09 ms a row, partitioned at
once .4 to .45; EPYC with AVX-512.)
"""


@dataclass(frozen=True, slots=True)
class CpuDraftPass:
    """An extension or a level in the form that the core reads (csrc/draft.h).

    sources   int32[n] see there
    features  float32[n,F*H], for an extension that does not read the core's own last step
    hidden    float32[n,H] the nodes' input instead of sources and features
    outputs   float32[n,H] to be filled with the input of the next step, or [s,H] with that of the
              output head at scored places of blocks
    token_rows  float32[n,L*D] the tokens' per-layer vectors (token_rows.py), if the model has them
    clusters  int32[s,top_k] to be filled with the clusters that were scored (csrc/draft.h)
    """

    tokens: Ints
    sources: Ints
    parents: Ints
    start: Ints
    kv_len: Ints
    slots: Ints
    pages: Ints
    first: int
    scored: Ints
    extend: bool
    features: Floats | None = None
    hidden: Floats | None = None
    outputs: Floats | None = None
    token_rows: Floats | None = None
    clusters: Ints | None = None


class CpuDraftModel(DraftModelBase):
    """A DraftModel that wraps a native model, `_model`. This base class serves a model that
    reads a hidden state together with the next token: the target's at first, then its own output.
    """

    _model: int

    def __init__(self, executor: CpuExecutor, declared: Declared) -> None:
        self._executor, self._library = executor, native.load()
        self._logits: Floats = np.empty((0, 0), np.float32)
        self.traits, self.facts = declared

    def opened_head(
        self,
        sizes: native.Sizes,
        kind: native.HeadKind | native.BlockKind,
        features: tuple[int, ...],
        ropes: RopeTable,
        weight_bytes: int,
    ) -> int:
        """Open a native draft model without tensors and return its handle. The target stores
        `features` for it from now on. Raises MemoryPlanError if it does not fit.

        kind      of a draft head, or of a block drafter
        features  hidden states, as transformers numbers them
        """
        aux_layers = np.array(features, np.int32)
        blocks = isinstance(kind, native.BlockKind)
        opened = self._library.forerun_open_block if blocks else self._library.forerun_open_draft
        model = opened(
            self._executor.native_model(),
            ctypes.byref(sizes),
            ctypes.byref(kind),
            aux_layers.ctypes.data,
            ctypes.byref(ropes),
            weight_bytes,
        )
        return self.adopted(model, len(features) * int(kind.width), weight_bytes)

    def adopted(self, model: int | None, features: int, weight_bytes: int) -> int:
        """Hand a newly opened native model to the target, which closes it with itself and stores
        `features` elements per token for it. Returns its handle. Raises MemoryPlanError if `model`
        is None: it could not be opened.
        """
        self.facts["weight_bytes"] = self.facts.get("weight_bytes", 0) + weight_bytes
        if model is None:
            raise MemoryPlanError(
                f"{self.traits.name} ({weight_bytes:,} bytes and its cache) does not fit: "
                f"{self._library.forerun_error().decode()}; lower kv-tokens"
            )
        self._executor.model.adopt(model, features)
        return model

    def extend(self, extension: DraftExtension, features: Features | None) -> Candidates:
        """Run the token after each permanent one, together with the features of the permanent one,
        and write pages.

        features  one row per token, of this executor's last step or from a host ring

        Returns Candidates [s,k]. Raises EngineError, and changes nothing, for an invalid extension.
        """
        work = pass_of_extension(extension, features)
        places = self.page_slots(extension)
        candidates = self.run(work, extension.candidates)
        self.commit(self._model, places)
        return candidates

    def expand(self, level: DraftLevel) -> Candidates:
        """Run one level of n draft tokens. Returns Candidates [n,k]. Raises EngineError for an
        invalid level.
        """
        return self.run(pass_of_level(level), level.candidates)

    def run(self, work: CpuDraftPass, candidates: int, model: int | None = None) -> Candidates:
        """Run one pass and rank its scored nodes. Returns Candidates [s,k], fewer if Vd is smaller.

        model  another native model than `_model`

        Raises EngineError, and changes nothing, for an invalid pass.
        """
        arrays = {
            "tokens": work.tokens,
            "sources": work.sources,
            "parents": work.parents,
            "start": work.start,
            "kv_len": work.kv_len,
            "pages": work.pages,
            "slots": work.slots,
            "scored_nodes": work.scored,
        }
        ints = {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}
        scored = len(work.scored)
        if scored > len(self._logits) or not self._logits.size:
            self._logits = np.empty((max(1, scored), self.scored_at_once), np.float32)
        step = native.DraftStep(
            features=_address(work.features),
            hidden=_address(work.hidden),
            outputs=_address(work.outputs),
            token_rows=_address(work.token_rows),
            clusters=_address(work.clusters),
            rows=len(work.kv_len),
            nodes=len(work.tokens),
            first=work.first,
            extend=work.extend,
            page_width=ints["pages"].shape[1],
            scored=scored,
            logits=self._logits.ctypes.data,
            **{name: array.ctypes.data for name, array in ints.items()},
        )
        self._library.forerun_draft(model or self._model, ctypes.byref(step))
        return likeliest(self._logits[:scored], candidates)

    @property
    def scored_at_once(self) -> int:
        """Number of draft ids that are scored per node: all of them."""
        return self.traits.vocab

    def page_slots(self, extension: DraftExtension) -> Ints:
        """Return int32[n]: the cache index, page * page_size + offset, of each token of an
        extension. Raises EngineError if a position has no page.
        """
        limits, start = self._executor.limits, extension.start
        rows = np.repeat(np.arange(len(extension.kv_len)), np.diff(start))
        column, width = extension.position // limits.page_size, extension.pages.shape[1]
        page = np.where(column < width, extension.pages[rows, np.minimum(column, width - 1)], -1)
        if np.any((page < 0) | (page >= limits.pages)):
            raise EngineError("a draft step was refused: a token's page does not exist")
        offset = extension.position % limits.page_size
        places: Ints = (page * limits.page_size + offset).astype(np.int32)
        return places

    def commit(self, model: int, places: Ints) -> None:
        """Copy the keys and values of a native model's last extension to int32[n] cache indices.
        Raises EngineError if the core rejects them.
        """
        nodes = np.arange(len(places), dtype=np.int32)
        arguments = nodes.ctypes.data, places.ctypes.data, len(nodes)
        self._library.forerun_commit(model, *arguments)


def _address(array: AnyArray | None) -> int | None:
    """Return the address of a contiguous array; None for None."""
    return None if array is None else array.ctypes.data


def pass_of_extension(extension: DraftExtension, features: Features | None) -> CpuDraftPass:
    """Return the pass of an extension: over the token after each permanent one, together with the
    features of the permanent one.

    Raises EngineError if features are missing, of another executor, or not one row per token.
    """
    count = len(extension.tokens)
    sources, host_features = np.zeros(count, np.int32), None
    if isinstance(features, HostFeatures):
        host_features = np.ascontiguousarray(features.values, np.float32)
    elif isinstance(features, CpuFeatures):
        sources = features.nodes.astype(np.int32)
    else:
        raise EngineError("a draft head was extended without features of the compiled core")
    if len(sources if host_features is None else host_features) != count:
        raise EngineError("an extension whose features are not one row per token")
    return CpuDraftPass(
        tokens=extension.next_tokens,
        sources=sources,
        parents=np.full(count, -1, np.int32),
        start=extension.start,
        kv_len=extension.kv_len,
        slots=extension.slots,
        pages=extension.pages,
        first=0,
        scored=extension.scored,
        extend=True,
        features=host_features,
    )


def pass_of_level(level: DraftLevel) -> CpuDraftPass:
    """Return a pass over a level's draft tokens, all scored; each reads its parent's output."""
    slot_outputs = -1 - np.repeat(level.slots, np.diff(level.start))
    return CpuDraftPass(
        tokens=level.tokens,
        sources=np.where(level.parents < 0, slot_outputs, level.parents),
        parents=level.parents,
        start=level.start,
        kv_len=level.kv_len,
        slots=level.slots,
        pages=level.pages,
        first=level.first,
        scored=np.arange(len(level.tokens), dtype=np.int32),
        extend=False,
    )


def likeliest(logits: Floats, count: int) -> Candidates:
    """Return the `count` most probable ids of each row of logits float32[s,Vd], best first, ties to
    the lowest id, with log-probabilities in nats; all if Vd is smaller. NaN where a row has NaN.
    """
    count = min(count, logits.shape[1])
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    found = [_largest(row, count) for row in logits]
    ids = np.array(found, np.int32).reshape(len(logits), count)
    values = np.take_along_axis(logits, ids, -1) - top
    values -= np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return Candidates(ids, values)


def _largest(row: Floats, count: int) -> AnyArray:
    """Return int[count] indices of the `count` largest elements of float32[n], largest first, ties
    to the lower index.
    """
    if count == 1:
        return np.array([row.argmax()])
    # At least `count` numbers are no smaller than the largest of as many blocks.
    blocks, places = len(row) // BLOCK, np.arange(len(row))
    if blocks >= count:
        largest = row[: blocks * BLOCK].reshape(blocks, BLOCK).max(-1)
        found = np.flatnonzero(row >= np.partition(largest, -count)[-count])
        places = found if len(found) else places  # None with NaN.
    return places[np.argsort(-row[places], kind="stable")[:count]]
