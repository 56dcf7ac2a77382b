"""Passes of a block drafter that the host runs: what rounds do not do themselves.

    enter  (R, N)       features of chains that became permanent: their keys and values into pages
    block  (R, k)       one block below each root: candidates of every depth

The first takes the state, donated, and gives it back; the second reads it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.jax.drafts.block_drafting import JaxBlockDrafting
from forerun.executors.jax.drafts.drafting import log_normaliser
from forerun.executors.jax.network.kv import State
from forerun.executors.jax.network.weights import Params
from forerun.executors.jax.rounds.batches import Bucket
from forerun.executors.packed import Shapes, views_of


def enter_shapes(size: Bucket, tables: tuple[int, int]) -> Shapes:
    """Return the parts of the int32 vector that `enter` reads: by row kv_len; by node `stream`, the
    row of the streams that holds its features, and `real`, 1 if there is a node; page tables of
    this shape (inputs.py).
    """
    nodes = dict.fromkeys(("stream", "real"), (size.rows, size.nodes))
    return {"kv_len": (size.rows,), **nodes, "tables": (size.rows, *tables)}


def block_shapes(rows: int, tables: tuple[int, int]) -> Shapes:
    """Return the parts of the int32 vector that `block` reads: by row kv_len, root token and page
    tables of this shape (inputs.py).
    """
    return {"kv_len": (rows,), "root": (rows,), "tables": (rows, *tables)}


class BlockPasses(NamedTuple):
    """The programs as pure functions. tables: shape of a row's page tables."""

    drafting: JaxBlockDrafting
    tables: tuple[int, int]

    def enter(self, params: Params, state: State, whole: Array, *, size: Bucket) -> State:
        """Return the state with keys and values of accepted positions [R,N] written into the
        drafter's pages.

        whole  int32[total] vector of `enter_shapes(size, tables)`; padding is written nowhere
        """
        held = state.drafting
        given = views_of(whole, enter_shapes(size, self.tables))
        position = given["kv_len"][:, None] + jnp.arange(size.nodes)
        where = given["tables"][:, 0], position, given["real"] > 0
        held = self.drafting.enter(params, held, held.streams[given["stream"]], where)
        return state._replace(draft=held)

    def block(self, params: Params, state: State, whole: Array, *, size: Bucket) -> Array:
        """Return the candidates of one block below each of R = size.rows roots,
        int32[R,depth,2*k+h]: draft ids, the bits of float32 log-probabilities (nats), best first,
        and the bits of h numbers that the output head reads, if tokens depend on those above;
        k = size.nodes.

        whole  int32 vector of `block_shapes`. Changes nothing.
        """
        held, network = state.drafting, self.drafting.network
        given = views_of(whole, block_shapes(size.rows, self.tables))
        where = given["root"], given["tables"][:, 0], given["kv_len"]
        read = self.drafting.propose(params, held, *where)
        logits = network.logits(params, read.reshape(-1, read.shape[-1]))
        best, ids = lax.top_k(logits, size.nodes)
        log_probs = (best - log_normaliser(logits)[:, None]).reshape(*read.shape[:2], -1)
        numbers = [log_probs, read[..., : 0 if network.about.algorithm == "dflash" else None]]
        bits = (lax.bitcast_convert_type(each.astype(jnp.float32), jnp.int32) for each in numbers)
        return jnp.concatenate([ids.reshape(log_probs.shape), *bits], -1)
