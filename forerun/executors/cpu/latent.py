"""Latent attention on the compiled core: its sizes, the places of its tensors, and kv_b_proj split
into two matrices per head (csrc/latent.cpp).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from forerun.networks.layer_spec import Latent
from forerun.types import Floats

ABSORBED = "kv_b_proj"
"""Name of the matrix that the core splits into two per head."""


def sizes_of(latent: Latent | None) -> dict[str, Any]:
    """Return the fields of native.Sizes for latent attention; {} for None."""
    if latent is None:
        return {}
    return {
        "rank": latent.rank,
        "nope": latent.nope,
        "value": latent.value,
        "query_rank": latent.query_rank or 0,
        "latent_eps": latent.norm_eps,
    }


def numbered(latent: Latent, first: int) -> Iterator[tuple[str, int]]:
    """Yield (name without ".weight", number) of each matrix of latent attention, numbered within a
    layer as in forerun_set_matrix (csrc/model.cpp, Model::matrix). Those in the role of q, k and o
    have their numbers; the others count from `first`, which no other matrix uses. kv_b_proj becomes
    two matrices per head, and its number is that of the first.
    """
    query = "q_proj" if latent.query_rank is None else "q_b_proj"
    if latent.query_rank is not None:
        yield "q_a_proj", first
    yield from ((query, 0), ("kv_a_proj_with_mqa", 1), ("o_proj", 3), (ABSORBED, first + 1))


def absorbed(matrix: Floats, latent: Latent) -> list[Floats]:
    """Split kv_b_proj [A*(nope+value),rank] into A matrices [rank,nope], which project queries into
    the latent space, and A matrices [value,rank], which project attention's result out of it.
    """
    heads = matrix.reshape(-1, latent.nope + latent.value, latent.rank)
    into = [np.ascontiguousarray(head[: latent.nope].T) for head in heads]
    return into + [np.ascontiguousarray(head[latent.nope :]) for head in heads]


def in_kind(matrix: Floats, kind: str) -> np.ndarray[Any, Any]:
    """Convert float32 rows to ggml's type `kind`, F32, F16 or BF16, which must hold them
    exactly.
    """
    if kind == "F16":
        return matrix.astype("<f2")
    if kind == "BF16":
        return (np.ascontiguousarray(matrix).view("<u4") >> 16).astype("<u2")
    return matrix
