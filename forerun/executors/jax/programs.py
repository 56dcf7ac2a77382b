"""The compiled programs of an executor: every one there will ever be is made at start-up.

    chunk   (R=1, N)  prompt tokens: forward, keys and values into pages
    round   (R, N)    forward, choose, walk, commit: one dispatch and one small copy to the host
    decide  (R, N)    the second half of a round again, for rows that a grammar holds: the host
                      makes the masks while the round runs
    logits            of a few nodes, for rows that the host decides, and for reports
    move              keys and values of what the host accepted, from scratch into pages

All take the state (kv.py), donated, and give it back. No shape and no branch depends on a value.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.jax.accept import choose, unpacked, walk
from forerun.executors.jax.attention import Layer, Past, Tree, ancestors, attend
from forerun.executors.jax.batches import Buckets, Size
from forerun.executors.jax.decoder import Decoder, Forwarded
from forerun.executors.jax.inputs import Inputs, packed_size
from forerun.executors.jax.kv import State, StateShape, slots_of
from forerun.executors.jax.weights import Params
from forerun.interface.executor import ExecutorLimits
from forerun.models.layer_spec import AttentionSpec
from forerun.speculative.accept import NOTHING

log = logging.getLogger("forerun.executors.jax")

FEW = 8
"""Nodes whose logits cross to the host in one dispatch."""

MOVED = 64
"""Nodes that one `move` moves."""

Attention = Callable[..., Array]
"""`attention.attend` or its twin."""


class Key(NamedTuple):
    """What tells programs apart."""

    kind: str
    size: Size = Size(0, 0)


@dataclass(frozen=True)
class Functions:
    """The programs as pure functions, not compiled.

    width  places of a page table's row
    """

    decoder: Decoder
    shape: StateShape
    page_size: int
    width: int
    attend: Attention = attend

    def chunk(
        self, params: Params, state: State, whole: Array, *, size: Size
    ) -> tuple[State, Array]:
        """Keep what N known tokens leave. Gives nothing."""
        given, passed = self._forward(params, state, whole, size)
        return self._kept(state, given, passed, given.trees.real), jnp.zeros(0, jnp.int32)

    def round(
        self, params: Params, state: State, whole: Array, *, size: Size
    ) -> tuple[State, Array]:
        """Score, choose, accept, commit. Gives int32[R*N]: choices along the accepted paths of
        decided rows, NOTHING elsewhere.
        """
        given, passed = self._forward(params, state, whole, size)
        choices = choose(
            self.decoder.logits(params, passed.last.reshape(size.total, -1)), given.rules
        )
        kept = walk(choices.reshape(size), given.trees)
        state = self._kept(state, given, passed, kept)
        return state, jnp.where(kept.reshape(-1), choices, NOTHING)

    def decide(
        self, params: Params, state: State, whole: Array, masks: tuple[Array, Array], *, size: Size
    ) -> tuple[State, Array]:
        """As `round`, from streams that are kept already, under grammar masks (inputs.py)."""
        given = Inputs.of(whole, size, self.width)
        which, bits = masks
        logits = self.decoder.logits(params, state.hidden[given.place])
        allowed = unpacked(lax.bitcast_convert_type(bits[which], jnp.uint32), logits.shape[1])
        choices = choose(logits, given.rules, allowed)
        kept = walk(choices.reshape(size), given.trees)
        scratch = self.shape.slots + given.place
        target = jnp.where(kept.reshape(-1), self._slots(given), scratch)
        return _moved(state, scratch, target), jnp.where(kept.reshape(-1), choices, NOTHING)

    def logits(self, params: Params, state: State, rows: Array) -> Array:
        """float32[FEW,V] of rows int32[FEW] of the streams."""
        return self.decoder.logits(params, state.hidden[rows])

    def move(self, params: Params, state: State, moves: Array) -> State:
        """Copy slots moves[0] to slots moves[1], int32[2,MOVED]."""
        del params
        return _moved(state, moves[0], moves[1])

    def _forward(
        self, params: Params, state: State, whole: Array, size: Size
    ) -> tuple[Inputs, Forwarded]:
        given = Inputs.of(whole, size, self.width)
        past = Past(state.keys, state.values, given.table, given.kv_len)
        position = given.kv_len[:, None] + given.depth
        tree = Tree(ancestors(given.trees.intervals), position)

        def attend(
            layer: tuple[Any, AttentionSpec], queries: Array, keys: Array, values: Array
        ) -> Array:
            how = Layer(*layer, self.page_size)
            return self.attend(queries, (keys, values), past, tree, how)

        return given, self.decoder.forward(params, given.trees.tokens, position, attend)

    def _slots(self, given: Inputs) -> Array:
        """int32[R*N] of nodes, in pages."""
        position = given.kv_len[:, None] + given.depth
        return slots_of(given.table, position, self.page_size).reshape(-1)

    def _kept(self, state: State, given: Inputs, passed: Forwarded, kept: Array) -> State:
        """Keep streams, and keys and values: of kept nodes in pages, of others in scratch.

        Of a chunk what is not kept is no node, and goes nowhere.
        """
        scratch = self.shape.slots + given.place
        target = jnp.where(kept.reshape(-1), self._slots(given), scratch)
        keys, values = (
            held.at[:, target].set(new.reshape(new.shape[0], -1, *new.shape[3:]), mode="drop")
            for held, new in ((state.keys, passed.keys), (state.values, passed.values))
        )
        last = passed.last.reshape(-1, passed.last.shape[-1])
        return State(
            keys, values, lax.dynamic_update_slice(state.hidden, last, (given.place[0], 0))
        )


def _moved(state: State, source: Array, target: Array) -> State:
    keys, values = (held.at[:, target].set(held[:, source]) for held in state[:2])
    return state._replace(keys=keys, values=values)


class Programs:
    """Compiled programs and how often they ran.

    params, state  on the device; `state` is another after every call
    compile_seconds  of start-up; late  programs that start-up had not foreseen
    """

    def __init__(
        self, functions: Functions, params: Params, limits: ExecutorLimits, buckets: Buckets
    ) -> None:
        self._functions, self.params = functions, params
        self.state = functions.shape.made(
            functions.decoder.arch, params["embed"].dtype, functions.decoder.sharding
        )
        self._whole = functions.decoder.sharding.whole
        self._words = -(-limits.vocab // 32)
        self._buckets = buckets
        self._compiled: dict[Key, Any] = {}
        self.dispatches = self.late = 0
        self.compile_seconds = 0.0

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every program that can be asked for."""
        chunks = [Key("chunk", Size(1, nodes)) for nodes in self._buckets.chunks]
        rounds = [Key("round", size) for size in self._buckets.rounds]
        decides = [Key("decide", size) for size in self._buckets.widest.rounds]
        return *chunks, *rounds, *decides, Key("logits"), Key("move")

    @property
    def compiled(self) -> tuple[Key, ...]:
        """Every program that is ready."""
        return tuple(self._compiled)

    def warm_up(self, buckets: Buckets, threads: int, progress: Callable[[int, int], None]) -> None:
        """Compile everything for these sizes; `threads` at once: the compiler is not Python."""
        self._buckets = buckets
        began, keys = perf_counter(), self.keys
        with ThreadPoolExecutor(threads) as pool:
            for done, (key, made) in enumerate(
                zip(keys, pool.map(lambda k: self._lowered(k).compile(), keys), strict=True)
            ):
                self._compiled[key] = made
                progress(done + 1, len(keys))
        self.compile_seconds = perf_counter() - began

    def run(self, key: Key, *given: Any) -> Any:
        """Dispatch a program that changes the state; returns what else it gives, not waited for."""
        self.dispatches += 1
        found = self._of(key)(self.params, self.state, *self._there(given))
        self.state, rest = found if key.kind != "move" else (found, None)
        return rest

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """float32[n,V] of rows int32[n] of the streams, on the host."""
        found = []
        for begin in range(0, len(rows), FEW):
            part = np.zeros(FEW, np.int32)
            count = len(rows[begin : begin + FEW])
            part[:count] = rows[begin : begin + FEW]
            self.dispatches += 1
            made = self._of(Key("logits"))(self.params, self.state, *self._there((part,)))
            found.append(jax.device_get(made)[:count])
        return np.concatenate(found)

    def text(self, key: Key) -> str:
        """What the compiler made of a program."""
        return str(self._of(key).as_text())

    def lowered(self, key: Key) -> Any:
        """A program before it is compiled."""
        return self._lowered(key)

    def _there(self, given: tuple[Any, ...]) -> Any:
        return jax.device_put(given, self._whole)

    def _of(self, key: Key) -> Any:
        if key not in self._compiled:
            self.late += bool(self._compiled)
            self._compiled[key] = self._lowered(key).compile()
        return self._compiled[key]

    def _lowered(self, key: Key) -> Any:
        work = getattr(self._functions, key.kind)
        if key.size.rows:
            work = partial(work, size=key.size)
        state = jax.tree.map(lambda array: array.sharding, self.state)
        donated: tuple[int, ...] = (1,)
        out: Any = (state, self._whole)
        if key.kind == "logits":
            out, donated = self._whole, ()
        elif key.kind == "move":
            out = state
        made = jax.jit(work, donate_argnums=donated, out_shardings=out)
        return made.lower(_shapes(self.params), _shapes(self.state), *self._given(key))

    def _given(self, key: Key) -> tuple[Any, ...]:
        """Shapes of what a program takes beside parameters and state."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._whole)

        if key.kind == "logits":
            return (ints(FEW),)
        if key.kind == "move":
            return (ints(2, MOVED),)
        whole = ints(packed_size(key.size, self._functions.width))
        if key.kind == "decide":
            total = key.size.total
            return whole, (ints(total), ints(total + 1, self._words))
        return (whole,)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree
    )
