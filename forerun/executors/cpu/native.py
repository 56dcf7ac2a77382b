"""The ctypes interface of the compiled core (csrc/): its structures, its calls, and whether it can
run.
"""

import ctypes
from collections.abc import Callable, Mapping
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from forerun.errors import EngineError

Library = TypeVar("Library", ctypes.CDLL, ctypes.PyDLL)
AddressOf = Callable[[Any], int | None]
"""Token ids -> address of data that the core reads for them; None: nothing."""

LIBRARY = Path(__file__).with_name("_core.so")
ABI = 55
"""The version that `forerun_abi` of csrc/api.cpp must return; raise both together."""
KERNELS = ("avx512-amx", "avx512-vnni-512", "avx512-vnni", "avx-vnni", "avx2", "neon", "portable")
"""All names of csrc/dispatch.cpp, best first; `kernels` returns those that run here."""


class Sizes(ctypes.Structure):
    """Mirrors `Sizes` of csrc/model.h: the model's dimensions."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_size")),
        *((name, c_int32) for name in ("ffn", "vocab", "page_size", "pages", "max_nodes")),
        *((name, c_int32) for name in ("context", "threads", "cache_item", "cache_bytes")),
        *((name, c_int32) for name in ("rank", "nope", "value", "query_rank")),
        *((name, c_int32) for name in ("recurrent", "states", "channels", "convolved")),
        *((name, c_int32) for name in ("key_heads", "value_heads", "key_size", "value_size")),
        *((name, c_int32) for name in ("tiled", "gated")),
        ("vectors", c_int32),
        *((name, c_int32) for name in ("window", "window_pages", "window_bytes")),
        *((name, c_float) for name in ("norm_eps", "latent_eps")),
    )


class Ropes(ctypes.Structure):
    """Mirrors `Ropes` of csrc/model.h; see places.RopeTable."""

    _fields_ = (
        *((name, c_int32) for name in ("count", "pairs")),
        *((name, c_void_p) for name in ("frequencies", "factors")),
    )


class LayerKind(ctypes.Structure):
    """Mirrors `LayerKind` of csrc/model.h: the description of a layer."""

    _fields_ = (
        *((name, c_int32) for name in ("ffn", "experts", "top_k", "shared")),
        *((name, c_int32) for name in ("sigmoid", "normalised", "groups", "kept", "summed")),
        *((name, c_int32) for name in ("window", "gate", "rope", "wide_norms", "late_norms")),
        ("recurrent", c_int32),
        *((name, c_int32) for name in ("kv_heads", "head_size", "reads")),
        *((name, c_int32) for name in ("normed_values", "keyed_values", "beside")),
        *((name, c_float) for name in ("router_scale", "score_scale", "residual", "softcap")),
    )


class StepArrays(ctypes.Structure):
    """Mirrors `Step` of csrc/model.h: the arrays of a step, by pointer."""

    _fields_ = (
        *((name, c_int32) for name in ("rows", "nodes", "page_width", "scored")),
        *((name, c_void_p) for name in ("tokens", "parents", "depth")),
        *((name, c_void_p) for name in ("start", "known", "kv_len", "pages")),
        *((name, c_void_p) for name in ("adapters", "state_rows", "state_targets")),
        *((name, c_void_p) for name in ("scored_nodes", "logits", "token_rows", "logits_row")),
    )


class Walk(ctypes.Structure):
    """Mirrors `Walk` of csrc/model.h: the arrays for choosing tokens, by pointer."""

    _fields_ = (
        *((name, c_void_p) for name in ("temperature", "seed", "prompt_len", "cut_offs")),
        *((name, c_void_p) for name in ("slots", "samples", "mask_row", "masks", "choice")),
        ("all_slots", c_int32),
        ("mask_words", c_int32),
    )


class HeadKind(ctypes.Structure):
    """Mirrors `HeadKind` of csrc/draft.h: the description of a draft head."""

    _fields_ = tuple(
        (name, c_int32)
        for name in (
            "features",
            "width",
            "slots",
            "fusion",
            "feature_norm",
            "normed_residual",
            "normed_feedback",
            "begin",
            "zeroed",
        )
    )


class BlockKind(ctypes.Structure):
    """Mirrors `BlockKind` of csrc/draft.h: the description of a block drafter."""

    _fields_ = tuple(
        (name, c_int32)
        for name in ("features", "width", "slots", "causal", "own_embedding", "group")
    )


class DraftStep(ctypes.Structure):
    """Mirrors `DraftStep` of csrc/draft.h: the arrays of a draft pass, by pointer."""

    _fields_ = (
        *((name, c_int32) for name in ("rows", "nodes", "first", "extend", "page_width")),
        ("scored", c_int32),
        *((name, c_void_p) for name in ("tokens", "sources", "parents")),
        *((name, c_void_p) for name in ("start", "kv_len", "pages", "slots")),
        *((name, c_void_p) for name in ("scored_nodes", "token_rows", "logits", "features")),
        *((name, c_void_p) for name in ("hidden", "outputs", "clusters")),
    )


class AssistantKind(ctypes.Structure):
    """Mirrors `AssistantKind` of csrc/draft.h: the description of an assistant."""

    _fields_ = tuple((name, c_int32) for name in ("slots", "clusters", "top_k"))


class TableArrays(ctypes.Structure):
    """Mirrors `NgramTable` of csrc/ngram.h: the arrays of an n-gram table, by pointer."""

    _fields_ = (
        ("contexts", c_int32),
        *((name, c_void_p) for name in ("extensions", "earlier", "predictions", "tokens")),
        *((name, c_void_p) for name in ("rest", "shares")),
    )


class NgramRules(ctypes.Structure):
    """Mirrors `NgramRules` of csrc/ngram.h: the settings of n-gram lookup."""

    _fields_ = (
        ("slots", c_int32),
        ("orders", c_int32 * 2),
        *((name, c_int32) for name in ("places", "longest", "tail", "counted", "capacity")),
        *(
            (name, c_double)
            for name in ("discount", "doubt", "sure", "surest", "min_prob", "decay", "almost")
        ),
        ("trust", c_void_p),
        ("table", TableArrays),
    )


class DeltaStep(ctypes.Structure):
    """Mirrors `DeltaStep` of csrc/delta.h: the arrays of a step through a delta net."""

    _fields_ = (
        *((name, c_int32) for name in ("rows", "key_heads", "value_heads")),
        *((name, c_int32) for name in ("key_size", "value_size", "tiled")),
        *((name, c_void_p) for name in ("start", "known", "parents", "slots", "targets")),
        *((name, c_void_p) for name in ("states", "queries", "keys", "values")),
        *((name, c_void_p) for name in ("decay", "beta", "out")),
    )


_CALLS = {
    "forerun_abi": (c_int, []),
    "forerun_error": (c_char_p, []),
    "forerun_kernels": (c_char_p, [c_char_p]),
    "forerun_amx_fault": (c_char_p, []),
    "forerun_own_format": (c_int, [c_int]),
    "forerun_packed_bytes": (c_int64, [c_int, c_int, c_int]),
    "forerun_open": (c_void_p, [POINTER(Sizes), POINTER(Ropes), c_int64, c_char_p]),
    "forerun_close": (None, [c_void_p]),
    "forerun_set_window_pages": (None, [c_void_p, c_void_p]),
    "forerun_set_layer": (c_int, [c_void_p, c_int, POINTER(LayerKind)]),
    "forerun_set_scales": (None, [c_void_p, c_float, c_float, c_float]),
    "forerun_set_matrix": (
        c_int,
        [c_void_p, c_int, c_int, c_int, c_int, c_void_p, c_int, c_int, c_void_p],
    ),
    "forerun_tie_head": (c_int, [c_void_p]),
    "forerun_share_head": (c_int, [c_void_p, c_void_p]),
    "forerun_set_vector": (c_int, [c_void_p, c_int, c_int, c_void_p, c_int]),
    "forerun_forward": (c_int, [c_void_p, POINTER(StepArrays), POINTER(Walk)]),
    "forerun_logits_row": (c_int, [c_void_p, POINTER(StepArrays), c_int]),
    "forerun_read_weights": (c_uint64, [c_void_p]),
    "forerun_products": (c_int, [c_void_p, c_int, c_void_p]),
    "forerun_accept": (c_int, [c_void_p, POINTER(StepArrays), POINTER(Walk)]),
    "forerun_multiply": (
        c_int,
        [c_char_p, c_int, c_int, c_void_p, c_int, c_int, c_void_p, c_int, c_void_p],
    ),
    "forerun_gate": (c_int, [c_char_p, c_int, c_void_p, c_void_p, c_int, c_void_p]),
    "forerun_blocks": (c_int, [c_char_p, c_void_p, c_int, c_void_p]),
    "forerun_delta_open": (c_void_p, [c_char_p, c_int]),
    "forerun_delta_close": (None, [c_void_p]),
    "forerun_delta_run": (c_int, [c_void_p, POINTER(DeltaStep)]),
    "forerun_request_aux_hidden_states": (c_int, [c_void_p, c_void_p, c_int]),
    "forerun_aux_hidden_states": (c_int, [c_void_p, c_int, c_void_p]),
    "forerun_set_ring": (c_int, [c_void_p, c_void_p, c_int, c_int]),
    "forerun_final_hidden_states": (c_int, [c_void_p, c_void_p, c_int, c_void_p]),
    "forerun_open_adapters": (c_int, [c_void_p, c_int, c_int]),
    "forerun_set_adapter": (
        c_int,
        [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_int],
    ),
    "forerun_open_draft": (
        c_void_p,
        [c_void_p, POINTER(Sizes), POINTER(HeadKind), c_void_p, POINTER(Ropes), c_int64],
    ),
    "forerun_open_block": (
        c_void_p,
        [c_void_p, POINTER(Sizes), POINTER(BlockKind), c_void_p, POINTER(Ropes), c_int64],
    ),
    "forerun_open_decoder": (
        c_void_p,
        [c_void_p, POINTER(Sizes), c_int, POINTER(Ropes), c_int64],
    ),
    "forerun_open_assistant": (
        c_void_p,
        [c_void_p, POINTER(Sizes), POINTER(AssistantKind), POINTER(Ropes), c_int64],
    ),
    "forerun_draft": (c_int, [c_void_p, POINTER(DraftStep)]),
    "forerun_commit_paths": (c_int, [c_void_p, c_void_p, c_int, c_void_p, c_int]),
    "forerun_page_bytes": (c_int64, [c_void_p, c_int]),
    "forerun_copy_page": (c_int, [c_void_p, c_int, c_int, c_void_p, c_int]),
    "forerun_copy_state": (c_int, [c_void_p, c_int64, c_int64]),
    "forerun_state_bytes": (c_int64, [c_void_p]),
    "forerun_copy_state_outside": (c_int, [c_void_p, c_int64, c_void_p, c_int]),
    "forerun_follow": (c_int, [c_void_p, c_void_p, c_void_p, c_int]),
    "forerun_commit": (c_int, [c_void_p, c_void_p, c_void_p, c_int]),
}

_SHORT_CALLS = {
    "forerun_abi": (c_int, []),
    "forerun_error": (c_char_p, []),
    "forerun_ngram_open": (c_void_p, [POINTER(NgramRules)]),
    "forerun_ngram_close": (None, [c_void_p]),
    "forerun_ngram_begin": (
        c_int,
        [c_void_p, c_int, c_void_p, c_int, c_int, c_int, c_uint64, c_double, c_double, c_uint64],
    ),
    "forerun_ngram_end": (c_int64, [c_void_p, c_int, c_void_p, c_int]),
    "forerun_ngram_count": (c_int, [c_void_p, c_void_p, c_int, c_int, c_uint64]),
    "forerun_ngram_use": (None, [c_void_p, POINTER(TableArrays)]),
    "forerun_ngram_contexts": (c_int64, [c_void_p]),
    "forerun_ngram_propose": (
        c_int,
        [c_void_p, c_void_p, c_int, c_int, c_void_p, c_double, c_void_p, c_int, c_int],
    ),
}


_REFUSED = {
    "forerun_request_aux_hidden_states": "features",
    "forerun_aux_hidden_states": "features",
    "forerun_set_ring": "features",
    "forerun_final_hidden_states": "hidden states",
    "forerun_open_adapters": "an adapter",
    "forerun_set_adapter": "an adapter",
    "forerun_draft": "a draft step",
    "forerun_commit": "a draft step",
    "forerun_copy_state": "a state",
    "forerun_copy_state_outside": "a state",
    "forerun_follow": "a state",
    "forerun_delta_run": "a layer",
}
"""Calls that raise EngineError unless they return 0, with what the error names. Results of calls
for steps and pages are checked by their callers.
"""


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Load the compiled core once, with the types of all its calls. Calls release the global
    interpreter lock. Raises OSError if it is missing, for another machine, or built from other
    sources.
    """
    library = _typed(ctypes.CDLL(str(LIBRARY)), _CALLS)
    for name, what in _REFUSED.items():
        getattr(library, name).errcheck = partial(_check, what)
    return library


def _check(what: str, code: int, *_: Any) -> None:
    """Raise EngineError unless a call returned 0."""
    if code:
        raise EngineError(f"{what} was refused: {load().forerun_error().decode()}")


@lru_cache(maxsize=1)
def load_short() -> ctypes.PyDLL:
    """Load the same library for calls of microseconds, which hold the global interpreter lock:
    acquiring it again from another thread that computes can take 5 ms. Raises OSError as `load`.
    """
    return _typed(ctypes.PyDLL(str(LIBRARY)), _SHORT_CALLS)


def _typed(library: Library, calls: Mapping[str, tuple[Any, Any]]) -> Library:
    for name, (result, arguments) in calls.items():
        call = getattr(library, name, None)
        if call is None:
            raise OSError(f"{LIBRARY} lacks {name}")
        call.restype, call.argtypes = result, arguments
    if (version := library.forerun_abi()) != ABI:
        raise OSError(f"{LIBRARY} has interface version {version}, this package needs {ABI}")
    return library


def available() -> str | None:
    """Return why the compiled core cannot run here and what to do, in one sentence; None if it
    can.
    """
    if not LIBRARY.exists():
        return (
            "the compiled core is missing (there was no C++ compiler when forerun was "
            "installed); install g++ or clang++ and reinstall forerun"
        )
    try:
        load()
    except OSError as error:
        return f"the compiled core cannot be loaded ({error}); reinstall forerun"
    return None


def kernels(name: str = "") -> str | None:
    """Return the full name of the kernels `name` ("" = the best); None if this machine cannot run
    them. Raises OSError as `load`.
    """
    best: bytes | None = load().forerun_kernels(name.encode())
    return best.decode() if best else None


def amx_fault() -> str:
    """Return why AMX is not used on a processor that has it, else "". Raises OSError as `load`."""
    fault: bytes = load().forerun_amx_fault()
    return fault.decode()
