"""The programs as pure functions: what programs.py compiles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax import Array, lax

from forerun.executors.feature_ring import ring_place
from forerun.executors.jax.drafts.block import BlockNetwork
from forerun.executors.jax.drafts.block_drafting import JaxBlockDrafting
from forerun.executors.jax.drafts.draft_network import DraftNetwork
from forerun.executors.jax.drafts.draft_passes import DraftPrograms
from forerun.executors.jax.drafts.drafting import NOWHERE, AcceptedStep, JaxDrafting
from forerun.executors.jax.network.attention import Layer, Tree, attend, pasts_of
from forerun.executors.jax.network.decoder import Forwarded, JaxDecoder
from forerun.executors.jax.network.kv import State, StateShape, after, of_nodes, slots_of
from forerun.executors.jax.network.recurrent import (
    RecurrentNodes,
    RecurrentStep,
    Windows,
    no_states,
)
from forerun.executors.jax.network.weights import Params
from forerun.executors.jax.program.future_map import enter, leave
from forerun.executors.jax.rounds.accept import choose, unpacked, walk
from forerun.executors.jax.rounds.batches import Bucket
from forerun.executors.jax.rounds.inputs import Inputs
from forerun.executors.jax.rounds.reports import line_size, lines
from forerun.executors.jax.rounds.shaping import JaxShaping, choose_shaped
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import full_size


class Key(NamedTuple):
    """The key of a program.

    width, levels  of the trees that a round can build at its end; levels: also draft tokens above
                   those that `expand` runs
    """

    kind: str
    size: Bucket = Bucket(0, 0)
    width: int = 0
    levels: int = 0


@dataclass(frozen=True)
class Functions:
    """The programs as pure functions, not compiled.

    tables   shape [K,W] of a row's page tables (inputs.py)
    edits    most tokens, over all rows, whose logits a round may change (shaping.py)
    network  that drafts, whose features are stored, if there is one
    future   width, levels of trees for carried rounds; None = none are carried
    """

    decoder: JaxDecoder
    shape: StateShape
    page_size: int
    tables: tuple[int, int]
    edits: int
    network: DraftNetwork | BlockNetwork | None = None
    future: tuple[int, int] | None = None

    @property
    def drafting(self) -> JaxDrafting | JaxBlockDrafting:
        """The draft network's work in a round. Raises AssertionError if none is attached."""
        assert self.network is not None, "a draft network was attached"
        if isinstance(self.network, BlockNetwork):
            return JaxBlockDrafting(self.network, self.page_size, self.tables)
        shape = self.shape
        return JaxDrafting(self.network, self.page_size, shape.slots, shape.nodes)

    def of(self, kind: str) -> Callable[..., Any]:
        """Return the program named `kind` (programs.py lists them) as a pure function, not
        compiled. Raises AttributeError for another name.
        """
        if hasattr(self, kind):
            return cast("Callable[..., Any]", getattr(self, kind))
        drafting = self.drafting
        passes: Any = drafting
        if isinstance(drafting, JaxDrafting):
            passes = DraftPrograms(drafting, self.tables)
        return cast("Callable[..., Any]", getattr(passes, kind))

    def chunk(
        self, params: Params, state: State, whole: Array, *, size: Bucket
    ) -> tuple[State, Array]:
        """Return the state with keys, values and streams of N known tokens of one row; and
        int32[0].

        whole  int32 vector of inputs.py for `size`
        """
        given = Inputs.of(whole, size, self.tables)
        given, passed = self._forward(params, state, given, chain=True)
        return self._store_nodes(params, state, given, passed, given.trees.real), jnp.zeros(
            0, jnp.int32
        )

    def round(self, params: Params, state: State, whole: Array, *, key: Key) -> tuple[State, Array]:
        """Run one step of R rows: forward, choose, walk, commit; with key.levels also extend and
        draft. Returns the state and a record: int32[R*N] choices along the accepted paths of
        decided rows, NOTHING elsewhere; then the drafts (drafting.py), then, if the next round may
        continue from this one, the nodes that ran (future_map.py).
        """

        def chosen(given: Inputs, logits: Array) -> tuple[Array, Array]:
            choices = choose(logits, given.sampling).reshape(key.size)
            return choices, jnp.zeros(0, jnp.int32)

        return self._step(params, state, whole, key, chosen)

    def shaped(
        self,
        params: Params,
        state: State,
        whole: Array,
        masks: tuple[Array, Array],
        shaping: Array,
        *,
        key: Key,
    ) -> tuple[State, Array]:
        """Run `round` with grammar masks (inputs.padded_masks) and every sampling parameter
        (shaping.py).

        In the record, directly after the choices: int32[R*N,line_size] lines of log-probabilities
        (reports.py), zeros if no row reports any.
        """
        size = key.size

        def chosen(given: Inputs, logits: Array) -> tuple[Array, Array]:
            which, bits = masks
            allowed = unpacked(lax.bitcast_convert_type(bits[which], jnp.uint32), logits.shape[1])
            allowed, rows = allowed.reshape(*size, -1), logits.reshape(*size, -1)
            how = JaxShaping.of(shaping, size.rows, self.edits)
            choices = choose_shaped(rows, given.sampling, given.trees, how, allowed)
            reported = lax.cond(
                (how.reported > 0).any(),
                lambda: lines(logits, choices.reshape(-1)),
                lambda: jnp.zeros((size.total, line_size(logits.shape[1])), jnp.int32),
            )
            return choices, reported.reshape(-1)

        return self._step(params, state, whole, key, chosen)

    def report(self, params: Params, state: State, wanted: Array) -> Array:
        """Return int32[REPORTED,line_size] lines (reports.py) of tokens wanted[1] at rows wanted[0]
        of the streams; wanted int32[2,REPORTED].
        """
        return lines(self.decoder.logits(params, state.hidden[wanted[0]]), wanted[1])

    def logits(self, params: Params, state: State, rows: Array) -> Array:
        """Return float32[FEW,V] logits of rows int32[FEW] of the streams."""
        return self.decoder.logits(params, state.hidden[rows])

    def hidden(self, params: Params, state: State, rows: Array) -> Array:
        """Return float32[READ,H] hidden states after the final norm, of rows int32[READ] of the
        streams.
        """
        return self.decoder.final_norm(params, state.hidden[rows]).astype(jnp.float32)

    def move(self, params: Params, state: State, moves: Array) -> State:
        """Return the state with keys and values copied from slots moves[0] to slots moves[1]; the
        draft's too, if both slots are in pages.

        moves  int32[2,K,MOVED], for each of the K page tables (JaxDecoder.table_numbers)
        """
        del params
        keys, values = (
            tuple(
                held.at[:, moves[1, which]].set(held[:, moves[0, which]])
                for held, which in zip(both, self.decoder.table_numbers, strict=True)
            )
            for both in (state.keys, state.values)
        )
        draft = state.draft
        if draft is not None:
            source, target = moves[:, 0]
            target = jnp.where(source < self.shape.slots, target, NOWHERE)
            own = (
                held.at[:, target].set(held[:, source], mode="drop")
                for held in (draft.keys, draft.values)
            )
            draft = draft._replace(**dict(zip(("keys", "values"), own, strict=True)))
        return state._replace(keys=keys, values=values, draft=draft)

    def keep(self, params: Params, state: State, moves: Array) -> State:
        """Return the state with features at rows moves[0] of the draft's streams copied to rows
        moves[1]; moves int32[2,MOVED].
        """
        del params
        held = state.drafting
        streams = held.streams.at[moves[1]].set(held.streams[moves[0]])
        return state._replace(draft=held._replace(streams=streams))

    def _step(
        self,
        params: Params,
        state: State,
        whole: Array,
        key: Key,
        chosen: Callable[[Inputs, Array], tuple[Array, Array]],
    ) -> tuple[State, Array]:
        """Run a step, in which carried rows continue from their slots. chosen: (inputs, logits
        [R*N,V]) -> int32[R,N] choices, and the part of the record after them.
        """
        given = Inputs.of(whole, key.size, self.tables)
        if self.future is not None:
            given = enter(given, state.future, self.future)
        given, passed = self._forward(params, state, given)
        logits = self.decoder.logits(params, passed.last.reshape(key.size.total, -1))
        choices, reported = chosen(given, logits)
        kept = walk(choices, given.trees)
        state = self._in_ring(
            self._store_nodes(params, state, given, passed, kept), given, passed, kept
        )
        grown = ran = jnp.zeros(0, jnp.int32)
        if key.levels:
            pages = state.keys, state.values
            about = AcceptedStep(given, choices, kept, passed.features, pages)
            state, grown = self._drafted(params, state, about, key)
        if self.future is not None:
            trees = grown[: 3 * key.size.rows * full_size(key.width, key.levels)]
            held, ran = leave(state.future, given, choices, kept, trees)
            state = state._replace(future=held)
        record = jnp.where(kept, choices, NOTHING).reshape(-1)
        return state, jnp.concatenate([record, reported, grown, ran])

    def _drafted(
        self, params: Params, state: State, about: AcceptedStep, key: Key
    ) -> tuple[State, Array]:
        """Return the state, and the drafts if a row is followed."""
        drafting, shape = self.drafting, (key.width, key.levels)
        count = drafting.network.sizes.record(key.size.rows, *shape)
        held, grown = lax.cond(
            (about.inputs.draft_slot >= 0).any(),
            lambda: drafting.work(params, state.drafting, about, *shape),
            lambda: (state.drafting, jnp.zeros(count, jnp.int32)),
        )
        return state._replace(draft=held), grown

    def _forward(
        self, params: Params, state: State, given: Inputs, chain: bool = False
    ) -> tuple[Inputs, Forwarded]:
        pages = state.keys, state.values
        pasts = pasts_of(
            pages, given.tables, given.kv_len, self.page_size, self.decoder.table_numbers
        )
        position = given.kv_len[:, None] + given.depth
        tree = Tree(given.trees.seen, position)

        def of_layer(layer: Layer, queries: Array, keys: Array, values: Array) -> Array:
            return attend(queries, (keys, values), pasts[layer.kind], tree, layer)

        wanted = self.network.sizes.features if self.network is not None else ()
        recur = no_states
        if state.recurrent is not None:
            recur = RecurrentStep(self._nodes(given), state.recurrent, chain).read
        return given, self.decoder.forward(
            params, given.trees.tokens, position, of_layer, wanted, recur
        )

    def _nodes(self, given: Inputs) -> RecurrentNodes:
        about, bounds = self.decoder.arch.recurrent, given.bounds
        assert about is not None
        slot = jnp.where(bounds.slot < 0, self.shape.states - 1, bounds.slot)
        windows = Windows.of(given.trees.parents, slot, about.window)
        return RecurrentNodes(about, windows, given.trees.parents, given.trees.real)

    def _advanced(
        self, params: Params, state: State, given: Inputs, passed: Forwarded, kept: Array
    ) -> State:
        """Return the state with recurrent states after the last kept node of each row, and copies
        of those at the last page end among them, if one is requested.
        """
        tables = state.recurrent
        if tables is None:
            return state
        ends = kept & ((given.kv_len[:, None] + given.depth + 1) % self.page_size == 0)
        weights = [
            layer
            for layer, spec in zip(params["layers"], self.decoder.arch.layer_specs, strict=True)
            if spec.recurrent is not None
        ]
        step = RecurrentStep(self._nodes(given), tables, chain=False)
        found, copies = step.advanced(weights, passed.brought, given.depth, kept, ends)
        bounds = given.bounds
        for states, chosen, row in ((copies, ends, bounds.copies), (found, kept, bounds.slot)):
            target = jnp.where(chosen.any(1) & (row >= 0), row, NOWHERE)
            tables = tables.put(target, states)
        return state._replace(recurrent=tables)

    def states(self, params: Params, state: State, moves: Array) -> State:
        """Return the state with recurrent states copied from rows moves[0] to rows moves[1]; moves
        int32[2,MOVED].
        """
        assert state.recurrent is not None
        return state._replace(recurrent=state.recurrent.copied(*moves))

    def _targets(self, given: Inputs, kept: Array) -> list[Array]:
        """Return int32[R*N] by page table, the slots of nodes: kept ones in pages, others in
        scratch.
        """
        position = given.kv_len[:, None] + given.depth
        return [
            jnp.where(
                kept.reshape(-1),
                slots_of(given.tables[:, which], position, self.page_size).reshape(-1),
                scratch + given.place,
            )
            for which, scratch in enumerate(self.shape.paged)
        ]

    def _store_nodes(
        self, params: Params, state: State, given: Inputs, passed: Forwarded, kept: Array
    ) -> State:
        """Store streams, and keys and values: of kept nodes in pages, of others in scratch. In a
        chunk, nodes that are not kept are padding and are not stored.
        """
        targets = [after(target, passed.last) for target in self._targets(given, kept)]
        keys, values = (
            tuple(
                held.at[:, targets[which]].set(of_nodes(new), mode="drop")
                for held, new, which in zip(*both, self.decoder.table_numbers, strict=True)
            )
            for both in ((state.keys, passed.keys), (state.values, passed.values))
        )
        hidden = _put(state.hidden, passed.last, given.place)
        draft = state.draft
        if draft is not None:
            streams = _put(draft.streams, passed.features, given.place)
            draft = draft._replace(streams=streams)
        state = self._advanced(params, state, given, passed, kept)
        return state._replace(keys=keys, values=values, hidden=hidden, draft=draft)

    def _in_ring(self, state: State, given: Inputs, passed: Forwarded, kept: Array) -> State:
        """Store features of accepted nodes, for drafts that are requested later."""
        held = state.draft
        if held is None or not held.streams.shape[1]:
            return state
        position = given.kv_len[:, None] + given.depth
        place = self.shape.hidden + ring_place(given.bounds.slot[:, None], position)
        place = jnp.where(kept, place, NOWHERE)
        values = passed.features.astype(held.streams.dtype)
        streams = held.streams.at[place].set(values, mode="drop")
        return state._replace(draft=held._replace(streams=streams))


def _put(held: Array, streams: Array, place: Array) -> Array:
    """Return the rows `held` with streams [R,N,.] written at the places of a batch's nodes,
    concatenated.
    """
    flat = streams.reshape(len(place), streams.shape[-1]).astype(held.dtype)
    return lax.dynamic_update_slice(held, flat, (place[0], 0))
