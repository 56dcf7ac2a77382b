"""Latent attention on the compiled core: its sizes, where its tensors go, and how kv_b_proj is cut
into a head's two products (csrc/latent.cpp).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from forerun.models.layer_spec import Latent
from forerun.types import Floats

ABSORBED = "kv_b_proj"
"""A matrix in files that the core has as two for each head."""


def sizes_of(latent: Latent | None) -> dict[str, Any]:
    """What native.Sizes says of latent attention; nothing where there is none."""
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
    """(name without ".weight", number) of each matrix of latent attention, as forerun_set_matrix
    counts them in a layer (csrc/model.cpp, Model::matrix). Those that take the place of q, k and o
    have their numbers; the others count from `first`, which no other matrix of a layer has.
    kv_b_proj is two matrices a head there, and its number is that of the first.
    """
    query = "q_proj" if latent.query_rank is None else "q_b_proj"
    if latent.query_rank is not None:
        yield "q_a_proj", first
    yield from ((query, 0), ("kv_a_proj_with_mqa", 1), ("o_proj", 3), (ABSORBED, first + 1))


def absorbed(matrix: Floats, latent: Latent) -> list[Floats]:
    """kv_b_proj [A*(nope+value),rank] as A matrices [rank,nope], which bring queries into the
    latent's space, and A matrices [value,rank], which bring what is found there out of it.
    """
    heads = matrix.reshape(-1, latent.nope + latent.value, latent.rank)
    into = [np.ascontiguousarray(head[: latent.nope].T) for head in heads]
    return into + [np.ascontiguousarray(head[latent.nope :]) for head in heads]


def in_kind(matrix: Floats, kind: str) -> np.ndarray[Any, Any]:
    """The rows as ggml stores `kind`, whose numbers these are already: F32, F16 or BF16."""
    if kind == "F16":
        return matrix.astype("<f2")
    if kind == "BF16":
        return (np.ascontiguousarray(matrix).view("<u4") >> 16).astype("<u2")
    return matrix
