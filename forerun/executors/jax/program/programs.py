"""The compiled programs of an executor.

    chunk   (R=1, N)  prompt tokens: forward, keys and values into pages
    round   (R, N)    forward, choose, walk, commit: one dispatch and one small copy to the host
    shaped  (R, N)    a round with grammars, sampling parameters beyond a temperature, or
                      log-probabilities
    report            log-probabilities of a prompt's tokens
    logits            of a few nodes, if rounding leaves a choice open
    hidden            hidden states of a prompt's tokens
    move              keys and values of what the host accepted, from scratch into pages
    keep              features of the same, from the step's streams into the ring
    states            recurrent states, from row to row

Those that one short text needs (FIRST) are compiled before service, the others during it. Meanwhile
steps run in the sizes that there are (`ready`); what else a step needs it compiles itself. With a
draft network rounds of `levels` also follow and draft (drafting.py), and there are the passes of
draft_passes.py. All take the state (kv.py), donated, and return it. No shape and no branch depends
on a value.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.draft_shape import DraftShape
from forerun.executors.jax.drafts.block import BlockNetwork
from forerun.executors.jax.drafts.block_drafting import block_shapes, enter_shapes
from forerun.executors.jax.drafts.draft_network import DraftNetwork
from forerun.executors.jax.drafts.draft_passes import (
    DEPTHS,
    FEW,
    expand_shapes,
    extend_shapes,
)
from forerun.executors.jax.network.kv import DraftArrays
from forerun.executors.jax.network.weights import Params
from forerun.executors.jax.program.functions import Functions, Key
from forerun.executors.jax.program.future_map import FutureMap
from forerun.executors.jax.program.program_cache import ProgramCache, loads
from forerun.executors.jax.rounds.batches import Bucket, Buckets
from forerun.executors.jax.rounds.inputs import packed_size
from forerun.executors.jax.rounds.reports import REPORTED
from forerun.executors.jax.rounds.shaping import shaping_shapes
from forerun.executors.packed import total
from forerun.interface.draft_model import CANDIDATES
from forerun.interface.executor import ExecutorLimits
from forerun.types import Floats

log = logging.getLogger("forerun.executors.jax")

MOVED = READ = 64
"""Nodes that one `move` moves, and whose hidden states one `hidden` returns."""

STATE_ONLY = ("move", "keep", "states", "extend", "expand", "enter")
"""Programs that return only the state."""

FEW_ROWS = ("logits", "candidates")
"""Programs that read a few rows of the state."""

FIRST = ("chunk", "round", "enter", "block")
"""Programs that any text needs: the smallest chunk, and of the others those of one row, which are
also timed at start-up. (bench/jax_start.py, under a load of 5: 20 s of processor time for these 3
programs, 64 s for the 8 of up to 16 rows and both chunks.)
"""

NO_STATE = (*FEW_ROWS, "block", "report", "hidden")
"""Programs that do not change the state."""


class JaxPrograms:
    """Compiled programs, and how often each has run.

    folder  stores them for later starts; None: they are not stored
    params, state  on the device; `state` is replaced by every call
    compile_seconds  of start-up; late  programs that start-up had not compiled
    """

    def __init__(
        self,
        functions: Functions,
        params: Params,
        limits: ExecutorLimits,
        buckets: Buckets,
        folder: str | None = None,
    ) -> None:
        self._functions, self.params, self._folder = functions, params, folder
        self.state = functions.shape.allocate(
            functions.decoder.arch, params["embed"].dtype, functions.decoder.sharding
        )
        self._replicated = functions.decoder.sharding.replicated
        self._words, self._slots = -(-limits.vocab // 32), limits.slots
        self._everything: dict[Bucket, Any] = {}
        self._buckets = buckets
        self._draft = DraftShape()
        self._compiled: dict[Key, Any] = {}
        self._rest: dict[Key, Future[Any] | None] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._cache: ProgramCache | None = None
        self._chances: Floats = np.zeros((2, 2, 0, 0), np.float32)
        self.dispatches = self.late = 0
        self.compile_seconds = 0.0

    @property
    def keys(self) -> tuple[Key, ...]:
        """Return the keys of all programs for the present sizes, network and draft shape."""
        chunks = [Key("chunk", Bucket(1, nodes)) for nodes in self._buckets.chunks]
        grown = self._draft.width, self._draft.depth
        rounds = [
            Key(kind, size, *grown) for kind in ("round", "shaped") for size in self._buckets.rounds
        ]
        few = [Key("report"), Key("logits"), Key("hidden"), Key("move")]
        few += [Key("states")] * (self.state.recurrent is not None)
        return *chunks, *rounds, *few, *self._of_drafts()

    def _of_drafts(self) -> Iterator[Key]:
        """Return the keys of the additional programs for a network: the passes that the host
        runs.
        """
        network, (nodes, width, levels) = self._functions.network, self._draft
        if network is None or not nodes:
            return
        if network.sizes.width:
            yield Key("keep")
        count = min(CANDIDATES, network.sizes.vocab)
        followed = [Bucket(1, chunk) for chunk in self._buckets.chunks]
        followed += self._buckets.widest.rounds
        if network.sizes.block:
            yield from (Key("enter", size) for size in followed)
            yield from (Key("block", Bucket(rows, count)) for rows in self._buckets.rows)
            return
        if not levels:
            return
        if network.sizes.borrows:
            followed = list(self._buckets.narrowest.rounds)
        yield from (Key("extend", size) for size in followed)
        depth = next(size for size in DEPTHS if size >= levels - 1)
        for rows in self._buckets.rows:
            yield Key("expand", Bucket(rows, width), levels=depth)
        yield Key("candidates", Bucket(FEW, count))

    def attach(
        self, network: DraftNetwork | BlockNetwork, weights: Params, held: DraftArrays
    ) -> None:
        """Attach a draft network, its weights and its arrays; drops every compiled program."""
        self._drop()
        self._functions = replace(self._functions, network=network)
        self.params = {**self.params, "draft": weights}
        if network.sizes.confident:
            self._chances = jax.device_get(weights["pairs"]["chances"])
        self.state = self.state._replace(draft=held)

    def calibrate(self, chances: Floats) -> None:
        """Use OnDeviceDraftSpec.chances in rounds from the next one on."""
        draft = self.params["draft"]
        whole = np.array(self._chances)
        whole[:, :, : chances.shape[2]] = chances
        if not np.array_equal(whole, self._chances):
            self._chances = whole
            pairs = {**draft["pairs"], "chances": self._to_devices(whole)}
            self.params = {**self.params, "draft": {**draft, "pairs": pairs}}

    def keep_state(self, width: int, levels: int) -> None:
        """Let rounds overlap: allocate room in the state for trees of this width and these levels.
        Drops compiled programs, unless there was such room already.
        """
        if self._functions.future == (width, levels):
            return
        self._drop()
        self._functions = replace(self._functions, future=(width, levels))
        future = FutureMap.of(self._slots, width, levels)
        self.state = self.state._replace(future=self._to_devices(future))

    @property
    def compiled(self) -> tuple[Key, ...]:
        """The keys of all programs that are compiled."""
        return tuple(self._compiled)

    @property
    def left(self) -> int:
        """Number of programs that are still to be compiled, by `compile_rest` or by a step that
        needs them.
        """
        return len(self._rest.keys() - self._compiled.keys())

    def warm_up(
        self,
        buckets: Buckets,
        draft: DraftShape,
        threads: int,
        progress: Callable[[int, int], None],
    ) -> None:
        """Compile the FIRST programs for these sizes, `threads` at once, since the compiler
        releases the GIL. The others are compiled by `compile_rest`, or by a step that needs them.

        draft     trees of its width and depth are built within rounds, if it has any
        progress  called with (done, total), before the first and after each. Sets compile_seconds.
        """
        self._drop()
        self._buckets, self._draft = buckets, draft
        began = perf_counter()
        if self._folder is not None:
            devices = list(self._replicated.mesh.devices.flat)
            self._cache = ProgramCache(Path(self._folder) / "programs", self._about, devices)
        most = {"chunk": buckets.chunks[0], "enter": buckets.chunks[0]}
        first = [
            key
            for key in self.keys
            if key.kind in FIRST
            and key.size.rows <= buckets.rows[0]
            and key.size.nodes <= most.get(key.kind, key.size.nodes)
        ]
        self._rest = dict.fromkeys(sorted(set(self.keys) - set(first), key=_soon))
        progress(0, len(first))
        with ThreadPoolExecutor(threads) as pool:
            for done, _ in enumerate(pool.map(self._load_or_compile, first)):
                progress(done + 1, len(first))
        self.compile_seconds = perf_counter() - began

    def ready(self, buckets: Buckets) -> Buckets:
        """Return the sizes that steps may have now: while others are being compiled
        (`compile_rest`) those of compiled rounds and chunks, else all.
        """
        if self._pool is None or not self._rest:
            return buckets
        missing = [key for key in list(self._rest) if key not in self._compiled]
        wide = {key.size.rows for key in missing if key.kind == "round"}
        long = {key.size.nodes for key in missing if key.kind == "chunk"}
        if not missing:
            self._rest.clear()
        rows = tuple(count for count in buckets.rows if count not in wide)
        chunks = tuple(count for count in buckets.chunks if count not in long)
        return replace(buckets, rows=rows or buckets.rows, chunks=chunks or buckets.chunks)

    def compile_rest(self) -> None:
        """Start compiling the programs that `warm_up` left, one after the other in a thread;
        returns at once. A step that needs one sooner compiles it itself, or waits for it.
        """
        if self._rest and self._pool is None:
            self._pool = ThreadPoolExecutor(1, "forerun-compile")
            for key in self._rest:
                begun = self._rest[key] = self._pool.submit(self._load_or_compile, key)
                begun.add_done_callback(_log_failure)

    def wait(self) -> None:
        """Wait until everything is compiled. Raises the compiler's exceptions."""
        for key in list(self._rest):
            self._of(key)

    def close(self) -> None:
        """Stop compiling; waits for the program that is being compiled."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _drop(self) -> None:
        """Discard every compiled program."""
        self.close()
        self._compiled.clear()
        self._rest.clear()
        self._cache = None

    def run(self, key: Key, *given: Any) -> Any:
        """Dispatch a program that changes the state. Returns its record on the device, without
        waiting; None if it has none. A program that is not compiled yet is compiled first and
        counted in `late`.
        """
        self.dispatches += 1
        found = self._of(key)(self.params, self.state, *self._to_devices(given))
        self.state, rest = found if key.kind not in STATE_ONLY else (found, None)
        return rest

    def query(self, key: Key, *given: Any) -> np.ndarray:
        """Run a program that does not change the state. Returns its result on the host; waits for
        it.
        """
        self.dispatches += 1
        found: np.ndarray = jax.device_get(
            self._of(key)(self.params, self.state, *self._to_devices(given))
        )
        return found

    def everything(self, size: Bucket) -> Any:
        """Return grammar masks that allow every token at all nodes of a round, in the form of
        `padded_masks`, on the device; cached per size.
        """
        if size not in self._everything:
            which = np.full(size.total, size.total, np.int32)
            bits = np.full((size.total + 1, self._words), -1, np.int32)
            self._everything[size] = self._to_devices((which, bits))
        return self._everything[size]

    def lines(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return int32[n,line_size] of the report program for rows int32[n] of the streams and the
        tokens int32[n] that follow them; n >= 1. Waits.
        """
        return np.concatenate(self.parts(Key("report"), np.stack([rows, tokens]), 0, REPORTED))

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return float32[n,V] logits of rows int32[n] of the streams, n >= 1, on the host."""
        return np.concatenate(self.parts(Key("logits"), rows, 0))

    def hidden(self, rows: np.ndarray) -> np.ndarray:
        """Return float32[n,H], hidden states after the final norm, of rows int32[n] of the streams,
        on the host.
        """
        none = np.zeros((0, self.state.hidden.shape[1]), np.float32)
        return np.concatenate([none, *self.parts(Key("hidden"), rows, 0, READ)])

    def move(self, key: Key, source: np.ndarray, target: np.ndarray, unused: Any = 0) -> None:
        """Run `move`, `keep` or `states`: copies the contents of places `source` int[n], or by page
        table int[K,n], to places `target`. Nothing is ever copied to `unused`, one place or
        int[K,1].
        """
        for begin in range(0, source.shape[-1], MOVED):
            part = slice(begin, begin + MOVED)
            moves = np.empty((2, *source.shape[:-1], MOVED), np.int32)
            moves[:] = unused
            count = source[..., part].shape[-1]
            moves[0, ..., :count], moves[1, ..., :count] = source[..., part], target[..., part]
            self.run(key, moves)

    def parts(
        self, key: Key, given: np.ndarray, axis: int = 1, each: int = FEW
    ) -> list[np.ndarray]:
        """Return the results of a program that reads `each` of given int32[...,n] at a time, as a
        list of arrays on the host, to be concatenated along `axis`. [] for n = 0.
        """
        found = []
        for begin in range(0, given.shape[-1], each):
            part = given[..., begin : begin + each]
            missing = [(0, 0)] * (part.ndim - 1) + [(0, each - part.shape[-1])]
            answer = self.query(key, np.pad(part, missing).astype(np.int32))
            found.append(answer.take(range(part.shape[-1]), axis))
        return found

    def text(self, key: Key) -> str:
        """Return the compiler's text of a program (HLO), for tests and debugging; compiles it if
        needed.
        """
        return str(self._of(key).as_text())

    def _to_devices(self, given: Any) -> Any:
        return jax.device_put(given, self._replicated)

    def _of(self, key: Key) -> Any:
        if key in self._compiled:
            return self._compiled[key]
        self.late += bool(self._compiled) and key not in self._rest
        begun = self._rest.pop(key, None)
        if begun is not None and not begun.cancel():
            return begun.result()
        return self._load_or_compile(key)

    def _load_or_compile(self, key: Key) -> Any:
        """Return a program, loaded if it is stored, else compiled and stored."""
        made = self._cache and self._cache.load(key, self._trees(key))
        if made is None:
            lowered, loaded = self._lowered(key), loads()
            made = lowered.compile()
            if self._cache is not None and loads() == loaded:
                self._cache.store(key, made)
        self._compiled[key] = made
        return made

    @property
    def _about(self) -> str:
        """All that programs depend on other than their keys, as text."""
        functions, network = self._functions, self._functions.network
        drafts = network and (type(network).__name__, network.sizes, network.fixed)
        parts = replace(functions, network=None), drafts, self._words, self._slots
        return f"{parts} {_shapes(self.params)} {_shapes(self.state)}"

    def _trees(self, key: Key) -> tuple[Any, Any]:
        """Return the structures of a program's arguments and of its result."""
        given = self.params, self.state, *self._input_shapes(key)
        out = _returned(key, self.state, 0)
        return jax.tree.structure((given, {})), jax.tree.structure(out)

    def _lowered(self, key: Key) -> Any:
        work = self._functions.of(key.kind)
        if key.kind in ("round", "shaped"):
            work = partial(work, key=key)
        elif key.size.rows:
            work = partial(work, size=key.size)
        if key.kind == "expand":
            work = partial(work, levels=key.levels)
        state = jax.tree.map(lambda array: array.sharding, self.state)
        donated = () if key.kind in NO_STATE else (1,)
        out = _returned(key, state, self._replicated)
        made = jax.jit(work, donate_argnums=donated, out_shardings=out)
        return made.lower(_shapes(self.params), _shapes(self.state), *self._input_shapes(key))

    def _input_shapes(self, key: Key) -> tuple[Any, ...]:
        """Return the shapes of a program's inputs other than parameters and state."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)

        tables = self._functions.tables
        match key.kind:
            case "move":
                return (ints(2, tables[0], MOVED),)
            case "keep" | "states":
                return (ints(2, MOVED),)
            case "report":
                return (ints(2, REPORTED),)
            case "extend":
                whole = ints(total(extend_shapes(key.size, tables)))
            case "enter":
                whole = ints(total(enter_shapes(key.size, tables)))
            case "block":
                whole = ints(total(block_shapes(key.size.rows, tables)))
            case "expand":
                whole = ints(total(expand_shapes(key.size, tables, key.levels)))
            case "hidden":
                whole = ints(READ)
            case kind if kind in FEW_ROWS:
                whole = ints(FEW)
            case _:
                whole = ints(packed_size(key.size, tables))
        if key.kind == "shaped":
            nodes = key.size.total
            shaping = ints(total(shaping_shapes(key.size.rows, self._functions.edits)))
            return whole, (ints(nodes), ints(nodes + 1, self._words)), shaping
        return (whole,)


def _returned(key: Key, state: Any, record: Any) -> Any:
    """Return the result of a program: the state, the record, or both."""
    if key.kind in NO_STATE:
        return record
    return state if key.kind in STATE_ONLY else (state, record)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree
    )


def _soon(key: Key) -> tuple[bool, int]:
    """Return a program's priority among those to compile: drafts' passes first, which a text's
    first steps run, then few rows before many.
    """
    return key.kind in ("round", "shaped"), key.size.total


def _log_failure(ended: Future[Any]) -> None:
    """Log why a program could not be compiled; the step that needs it fails."""
    error = None if ended.cancelled() else ended.exception()
    if error is not None:
        log.warning("a program cannot be compiled: %s", error)


def keep_compiled(folder: str) -> None:
    """Store compiled programs in `folder`, and load those that are there, for the whole process
    (JAX's persistent compilation cache).
    """
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
