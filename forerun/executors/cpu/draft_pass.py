"""One pass of a draft model on the compiled core, for an extension or a level."""

import ctypes
from dataclasses import dataclass

import numpy as np

from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.interface.draft_model import Candidates, DraftExtension
from forerun.interface.executor import ExecutorLimits
from forerun.types import AnyArray, Floats, Ints


@dataclass(frozen=True, slots=True)
class CpuDraftPass:
    """An extension or a level as the core reads it (csrc/draft.h).

    sources   int32[n] see there
    features  float32[n,F*H], for an extension that does not read the core's own last step
    hidden    float32[n,H] the nodes' input instead of sources and features
    outputs   float32[n,H] to be filled with the input of a next step, or [s,H] of scored places of
              blocks with that of the output head
    token_rows  float32[n,L*D] the tokens' own (token_rows.py), of a whole model that has such
    clusters  int32[s,top_k] to be filled: of which tokens the logits are (csrc/draft.h)
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


def run(
    library: ctypes.CDLL, model: int, work: CpuDraftPass, logits: Floats, candidates: int
) -> Candidates:
    """Run one pass of a native draft model and rank its scored nodes. Returns Candidates [s,k].

    model       the core's handle
    logits      float32[s or more,Vd], contiguous; overwritten
    candidates  of each scored node; fewer if Vd is smaller

    Raises EngineError, and changes nothing, for an invalid pass.
    """
    launch(library, model, work, logits)
    return likeliest(logits[: len(work.scored)], candidates)


def launch(library: ctypes.CDLL, model: int, work: CpuDraftPass, logits: Floats) -> None:
    """Run one pass of a native draft model, and fill its scored nodes' logits. Raises as `run`."""
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
    int_arrays = {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}
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
        page_width=int_arrays["pages"].shape[1],
        scored=len(work.scored),
        logits=logits.ctypes.data,
        **{name: array.ctypes.data for name, array in int_arrays.items()},
    )
    refuse(library, library.forerun_draft(model, ctypes.byref(step)))


def _address(array: AnyArray | None) -> int | None:
    """Return the address of a contiguous array; None for None."""
    return None if array is None else array.ctypes.data


def page_slots(extension: DraftExtension, limits: ExecutorLimits) -> Ints:
    """Return int32[n]: the place in the cache, page * page_size + offset, of each token of an
    extension. Raises EngineError if a position has no page.
    """
    size, start = limits.page_size, extension.start
    rows = np.repeat(np.arange(len(extension.kv_len)), np.diff(start))
    position = extension.kv_len[rows] + np.arange(len(rows)) - start[rows]
    column, width = position // size, extension.pages.shape[1]
    page = np.where(column < width, extension.pages[rows, np.minimum(column, width - 1)], -1)
    if np.any((page < 0) | (page >= limits.pages)):
        raise EngineError("a draft step was refused: a token's page does not exist")
    places: Ints = (page * size + position % size).astype(np.int32)
    return places


def commit(library: ctypes.CDLL, model: int, places: Ints) -> None:
    """Copy the keys and values of the last extension's nodes to places int32[n] of the cache.
    Raises EngineError if the core refuses.
    """
    nodes = np.arange(len(places), dtype=np.int32)
    refuse(
        library,
        library.forerun_commit(model, nodes.ctypes.data, places.ctypes.data, len(nodes)),
    )


def refuse(library: ctypes.CDLL, code: int) -> None:
    """Raise EngineError with the core's message unless a call returned 0."""
    if code:
        raise EngineError(f"a draft step was refused: {library.forerun_error().decode()}")


def likeliest(logits: Floats, count: int) -> Candidates:
    """Return the `count` most probable ids of each row of logits float32[s,Vd], best first, with
    log-probabilities in nats; all if Vd is smaller.
    """
    count = min(count, logits.shape[1])
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    if count == 1:
        ids = logits.argmax(-1)[:, None]
    else:
        ids = np.argpartition(-logits, count - 1)[:, :count]
        order = np.argsort(-np.take_along_axis(logits, ids, -1), kind="stable")
        ids = np.take_along_axis(ids, order, -1)
    values = np.take_along_axis(logits, ids, -1) - top
    values -= np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return Candidates(ids.astype(np.int32), values)
