"""The compiled programs of an executor: every one there will ever be is made at start-up.

    chunk   (R=1, N)  prompt tokens: forward, keys and values into pages
    round   (R, N)    forward, choose, walk, commit: one dispatch and one small copy to the host
    decide  (R, N)    the second half of a round again, for rows that a grammar holds: the host
                      makes the masks while the round runs
    logits            of a few nodes, for rows that the host decides, and for reports
    move              keys and values of what the host accepted, from scratch into pages

With a draft head a round of `levels` also follows and drafts (drafting.py), and there are the
passes of draft_passes.py. All take the state (kv.py), donated, and give it back. No shape and no
branch depends on a value.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.executors.jax.accept import choose, unpacked, walk
from forerun.executors.jax.attention import Layer, Past, Tree, ancestors, attend
from forerun.executors.jax.batches import Buckets, Size
from forerun.executors.jax.decoder import Decoder, Forwarded
from forerun.executors.jax.draft_passes import (
    DEPTHS,
    FEW,
    DraftPasses,
    expand_shapes,
    extend_shapes,
)
from forerun.executors.jax.drafting import Decided, Drafting
from forerun.executors.jax.eagle import EagleHead
from forerun.executors.jax.inputs import Inputs, packed_size, total
from forerun.executors.jax.kv import DraftArrays, State, StateShape, slots_of
from forerun.executors.jax.weights import Params
from forerun.interface.draft_model import CANDIDATES
from forerun.interface.executor import DraftShape, ExecutorLimits
from forerun.models.layer_spec import AttentionSpec
from forerun.speculative.accept import NOTHING

log = logging.getLogger("forerun.executors.jax")

MOVED = 64
"""Nodes that one `move` moves."""

STATE_ONLY = ("move", "extend", "expand", "load")
"""Programs that give the state back and nothing else."""

NO_STATE = ("logits", "candidates", "features")
"""Programs that read a few rows of the state."""

Attention = Callable[..., Array]
"""`attention.attend` or its twin."""


class Key(NamedTuple):
    """What tells programs apart.

    width, levels  of the trees that a round grows at its end; levels: also draft tokens above those
                   that `expand` runs
    """

    kind: str
    size: Size = Size(0, 0)
    width: int = 0
    levels: int = 0


@dataclass(frozen=True)
class Functions:
    """The programs as pure functions, not compiled.

    width  places of a page table's row
    head   the draft head whose features are kept, if there is one
    """

    decoder: Decoder
    shape: StateShape
    page_size: int
    width: int
    attend: Attention = attend
    head: EagleHead | None = None

    @property
    def drafting(self) -> Drafting:
        """The head's part of a round."""
        assert self.head is not None, "a draft head was attached"
        return Drafting(self.head, self.page_size, self.attend)

    def of(self, kind: str) -> Callable[..., Any]:
        """A program by its name."""
        if hasattr(self, kind):
            return cast("Callable[..., Any]", getattr(self, kind))
        passes = DraftPasses(self.drafting, self.width, self.shape.slots)
        return cast("Callable[..., Any]", getattr(passes, kind))

    def chunk(
        self, params: Params, state: State, whole: Array, *, size: Size
    ) -> tuple[State, Array]:
        """Keep what N known tokens leave. Gives nothing."""
        given, passed = self._forward(params, state, whole, size)
        return self._kept(state, given, passed, given.trees.real), jnp.zeros(0, jnp.int32)

    def round(
        self,
        params: Params,
        state: State,
        whole: Array,
        *,
        size: Size,
        width: int = 0,
        levels: int = 0,
    ) -> tuple[State, Array]:
        """Score, choose, accept, commit; with levels also follow and draft. Gives int32[R*N]:
        choices along the accepted paths of decided rows, NOTHING elsewhere; then what was drafted
        (drafting.py).
        """
        given, passed = self._forward(params, state, whole, size)
        choices = choose(
            self.decoder.logits(params, passed.last.reshape(size.total, -1)), given.rules
        )
        kept = walk(choices.reshape(size), given.trees)
        state = self._kept(state, given, passed, kept)
        record = jnp.where(kept.reshape(-1), choices, NOTHING)
        if not levels:
            return state, record
        assert state.draft is not None, "a draft head was attached"
        streams = jnp.concatenate(passed.streams, -1)
        decided = Decided(given, choices.reshape(size), kept, streams)
        held, grown = self.drafting.work(params, state.draft, decided, width, levels)
        return state._replace(draft=held), jnp.concatenate([record, grown])

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

        asked = self.head.about.features if self.head is not None else ()
        return given, self.decoder.forward(params, given.trees.tokens, position, attend, asked)

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
        hidden = _put(state.hidden, passed.last, given.place)
        draft = state.draft
        if draft is not None:
            streams = _put(draft.streams, jnp.concatenate(passed.streams, -1), given.place)
            draft = draft._replace(streams=streams)
        return State(keys, values, hidden, draft)


def _put(held: Array, streams: Array, place: Array) -> Array:
    """Rows `held` with streams [R,N,.] where a batch's nodes have theirs, side by side."""
    flat = streams.reshape(-1, streams.shape[-1]).astype(held.dtype)
    return lax.dynamic_update_slice(held, flat, (place[0], 0))


def _moved(state: State, source: Array, target: Array) -> State:
    both = state.keys, state.values
    keys, values = (held.at[:, target].set(held[:, source]) for held in both)
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
        self._draft = DraftShape()
        self._compiled: dict[Key, Any] = {}
        self.dispatches = self.late = 0
        self.compile_seconds = 0.0

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every program that can be asked for."""
        chunks = [Key("chunk", Size(1, nodes)) for nodes in self._buckets.chunks]
        rounds = [Key("round", size) for size in self._buckets.rounds]
        decides = [Key("decide", size) for size in self._buckets.widest.rounds]
        return *chunks, *rounds, *decides, Key("logits"), Key("move"), *self._of_drafts()

    def _of_drafts(self) -> Iterator[Key]:
        """What a draft head adds: rounds that draft, and the passes that the host asks for."""
        head, (_, width, levels) = self._functions.head, astuple(self._draft)
        if head is None or not levels:
            return
        for size in self._buckets.rounds:
            yield Key("round", size, width, levels)
        for nodes in self._buckets.chunks:
            yield Key("extend", Size(1, nodes))
        for size in self._buckets.widest.rounds:
            yield Key("extend", size)
        depth = next(size for size in DEPTHS if size >= levels - 1)
        for rows in self._buckets.rows:
            yield Key("expand", Size(rows, width), levels=depth)
        count = min(CANDIDATES, head.about.vocab)
        yield Key("candidates", Size(FEW, count))
        yield Key("features")
        yield Key("load", Size(1, self._buckets.chunks[-1]))

    def attach(self, head: EagleHead, weights: Params, held: DraftArrays) -> None:
        """A draft head joins; what was compiled is forgotten."""
        self._functions = replace(self._functions, head=head)
        self.params = {**self.params, "draft": weights}
        self.state = self.state._replace(draft=held)
        self._compiled.clear()

    @property
    def _streams(self) -> int:
        """Numbers of features of a node."""
        assert self.state.draft is not None, "a draft head was attached"
        return int(self.state.draft.streams.shape[1])

    @property
    def compiled(self) -> tuple[Key, ...]:
        """Every program that is ready."""
        return tuple(self._compiled)

    def warm_up(
        self,
        buckets: Buckets,
        draft: DraftShape,
        threads: int,
        progress: Callable[[int, int], None],
    ) -> None:
        """Compile everything for these sizes; `threads` at once: the compiler is not Python."""
        self._buckets, self._draft = buckets, draft
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
        self.state, rest = found if key.kind not in STATE_ONLY else (found, None)
        return rest

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """float32[n,V] of rows int32[n] of the streams, on the host."""
        return self.rows("logits", rows)

    def rows(self, kind: str, rows: np.ndarray) -> np.ndarray:
        """What `logits` or `features` gives of rows int32[n], at least one, on the host."""
        return np.concatenate(self.parts(Key(kind), rows, 0))

    def parts(self, key: Key, rows: np.ndarray, axis: int = 1) -> list[np.ndarray]:
        """The same in parts of FEW rows, which lie along `axis`."""
        found = []
        for begin in range(0, len(rows), FEW):
            part = np.zeros(FEW, np.int32)
            count = len(rows[begin : begin + FEW])
            part[:count] = rows[begin : begin + FEW]
            self.dispatches += 1
            made = self._of(key)(self.params, self.state, *self._there((part,)))
            found.append(jax.device_get(made).take(range(count), axis))
        return found

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
        work = self._functions.of(key.kind)
        if key.size.rows:
            work = partial(work, size=key.size)
        if key.levels:
            work = partial(work, levels=key.levels)
        if key.width:
            work = partial(work, width=key.width)
        state = jax.tree.map(lambda array: array.sharding, self.state)
        donated: tuple[int, ...] = (1,)
        out: Any = (state, self._whole)
        if key.kind in NO_STATE:
            out, donated = self._whole, ()
        elif key.kind in STATE_ONLY:
            out = state
        made = jax.jit(work, donate_argnums=donated, out_shardings=out)
        return made.lower(_shapes(self.params), _shapes(self.state), *self._given(key))

    def _given(self, key: Key) -> tuple[Any, ...]:
        """Shapes of what a program takes beside parameters and state."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._whole)

        width = self._functions.width
        match key.kind:
            case "move":
                return (ints(2, MOVED),)
            case "extend":
                whole = ints(total(extend_shapes(key.size, width)))
            case "expand":
                whole = ints(total(expand_shapes(key.size, width, key.levels)))
            case "load":
                streams = key.size.nodes, self._streams
                floats = jax.ShapeDtypeStruct(streams, jnp.float32, sharding=self._whole)
                return ((ints(key.size.nodes), floats),)
            case kind if kind in NO_STATE:
                whole = ints(FEW)
            case _:
                whole = ints(packed_size(key.size, width))
        if key.kind == "decide":
            nodes = key.size.total
            return whole, (ints(nodes), ints(nodes + 1, self._words))
        return (whole,)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree
    )
