"""`attention.attend` as one Pallas kernel for TPUs, over pages where they lie.

The grid is rows by places of the page table: a step reads one page of one row, whose number comes
from the table in scalar memory, so that the next page is fetched while this one is used. The tree
is read first, then pages are merged by online softmax (arXiv 1805.02867); places behind a row's
last page fetch that page again, which costs nothing, and skip the arithmetic.

Held to its plain twin in interpret mode, and lowered for TPUs; it has not run on one.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from forerun.executors.jax.attention import Layer, Past, Tree, attend
from forerun.executors.jax.layers import softcapped
from forerun.models.layer_spec import AttentionSpec

LEAST = -1e30
"""A score that nothing is below, yet finite: a block that hides everything adds weights of 0."""


class _Refs(NamedTuple):
    """A kernel's references: of scalars table, kv_len and layer; of one row queries [1,G,N*A/G,E],
    seen int32[1,N*A/G,T], position [1,N*A/G,1], fresh keys and values [1,G,T,E]; of one page keys
    and values [1,page,G,E]; the output, like the queries; the running maximum, sum and mix.
    """

    table: Any
    kv_len: Any
    layer: Any
    queries: Any
    seen: Any
    position: Any
    fresh_keys: Any
    fresh_values: Any
    keys: Any
    values: Any
    out: Any
    most: Any
    total: Any
    mixed: Any


def attend_pallas(
    queries: Array,
    fresh: tuple[Array, Array],
    past: Past,
    tree: Tree,
    how: Layer,
    interpret: bool = False,
) -> Array:
    """attention.attend as one Pallas kernel: context [R,N,A,E] of queries [R,N,A,E].

    fresh      keys and values [R,T,G,E] that are not in pages
    how        latent attention is left to attention.attend
    interpret  run it step by step on the CPU, for comparison only
    """
    rows, nodes, heads, size = queries.shape
    groups, spec, page = fresh[0].shape[2], how.spec, how.page_size
    if spec.latent is not None:
        return attend(queries, fresh, past, tree, how)
    share, fresh_count = heads // groups, fresh[0].shape[1]
    asking = nodes * share
    grouped = (queries * spec.scale).reshape(rows, nodes, groups, share, size)
    grouped = jnp.moveaxis(grouped, 2, 1).reshape(rows, groups, asking, size)
    seen = tree.seen
    if spec.window is not None:
        seen = seen & (tree.position[:, :, None] - tree.position[:, None] < spec.window)
    width = past.table.shape[1]

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda row, *_: (row, *[0] * len(shape)))

    def page_of(row: Any, place: Any, table: Any, kv_len: Any, layer: Any) -> tuple[Any, ...]:
        last = jnp.maximum(kv_len[row] - 1, 0) // page
        return layer[0], jnp.maximum(table[row, jnp.minimum(place, last)], 0), 0, 0

    pages = pl.BlockSpec((None, page, groups, size), page_of)
    turned = [jnp.moveaxis(part, 2, 1) for part in fresh]
    made = pl.pallas_call(
        partial(_kernel, spec=spec, page=page, width=width),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows, width),
            in_specs=[
                of_row(groups, asking, size),
                of_row(asking, fresh_count),
                of_row(asking, 1),
                of_row(groups, fresh_count, size),
                of_row(groups, fresh_count, size),
                pages,
                pages,
            ],
            out_specs=of_row(groups, asking, size),
            scratch_shapes=[
                pltpu.VMEM((groups, asking, width), jnp.float32) for width in (1, 1, size)
            ],
        ),
        interpret=interpret,
    )(
        past.table,
        past.kv_len,
        jnp.asarray(how.number, jnp.int32).reshape(1),
        grouped,
        jnp.repeat(seen, share, 1).astype(jnp.int32),
        jnp.repeat(tree.position, share, 1)[..., None],
        *turned,
        past.keys,
        past.values,
    )
    apart = made.reshape(rows, groups, nodes, share, size)
    whole: Array = jnp.moveaxis(apart, 1, 2).reshape(rows, nodes, heads, size)
    return whole


def _kernel(*refs: Any, spec: AttentionSpec, page: int, width: int) -> None:
    """One page of one row; before the first, the row's tree."""
    ref = _Refs(*refs)
    row, place = pl.program_id(0), pl.program_id(1)
    kv_len = ref.kv_len[row]

    @pl.when(place == 0)
    def _() -> None:
        ref.most[...] = jnp.full_like(ref.most, LEAST)
        ref.total[...] = jnp.zeros_like(ref.total)
        ref.mixed[...] = jnp.zeros_like(ref.mixed)
        seen = ref.seen[0] > 0
        for group in range(ref.queries.shape[1]):
            _merge(ref, group, (ref.fresh_keys[0, group], ref.fresh_values[0, group]), seen, spec)

    @pl.when(place * page < kv_len)
    def _() -> None:
        asking = ref.position.shape[1]
        position = place * page + lax.broadcasted_iota(jnp.int32, (asking, page), 1)
        seen = position < kv_len
        if spec.window is not None:
            seen = seen & (ref.position[0] - position < spec.window)
        for group in range(ref.queries.shape[1]):
            _merge(ref, group, (ref.keys[:, group], ref.values[:, group]), seen, spec)

    @pl.when(place == width - 1)
    def _() -> None:
        ref.out[0] = (ref.mixed[...] / ref.total[...]).astype(ref.out.dtype)


def _merge(
    ref: _Refs, group: int, held: tuple[Array, Array], seen: Array, spec: AttentionSpec
) -> None:
    """Take keys and values [T,E] of a group into the running softmax, where seen [N*A/G,T]."""
    keys, values = held
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scores = softcapped(dot(ref.queries[0, group], keys, (((1,), (1,)), ((), ()))), spec.softcap)
    scores = jnp.where(seen, scores, LEAST)
    before = ref.most[group]
    most = jnp.maximum(before, scores.max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - most), 0.0)
    fade = jnp.exp(before - most)
    mixed = dot(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))
    ref.most[group] = most
    ref.total[group] = ref.total[group] * fade + weights.sum(-1, keepdims=True)
    ref.mixed[group] = ref.mixed[group] * fade + mixed
