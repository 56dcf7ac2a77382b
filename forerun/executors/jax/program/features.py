"""The target's hidden states of one step, on the device, as JAX draft models read them."""

from dataclasses import dataclass, replace

import numpy as np

from forerun.errors import EngineError
from forerun.executors.feature_ring import ring_place, ring_places
from forerun.executors.jax.program.functions import Key
from forerun.executors.jax.program.programs import JaxPrograms
from forerun.executors.jax.program.step import JaxRound
from forerun.types import AnyArray, Bools, Ints


@dataclass(frozen=True, slots=True)
class JaxFeatures:
    """Features of nodes in the step's buffer, which the next step overwrites, or in the ring.

    place   int[n] the row of `DraftArrays.streams` of each node
    ring    int[n] its row of the same array in the ring
    there   bool[n] whether the round that accepted it has written it to the ring
    begin   row at which the ring begins
    """

    programs: JaxPrograms
    place: AnyArray
    ring: AnyArray
    there: Bools
    begin: int

    @classmethod
    def of(
        cls, programs: JaxPrograms, round: JaxRound, begin: int, accepted: Bools
    ) -> "JaxFeatures":
        """Return the features of a round whose record was read. accepted: bool[M], nodes that
        programs have accepted; the ring begins at row `begin` of the streams.
        """
        ring = begin + ring_places(round.plan, round.trees, np.arange(len(round.place)))
        return cls(programs, round.place, ring, accepted, begin)

    def select(self, nodes: AnyArray) -> "JaxFeatures":
        """Return the rows nodes int[n], in this order, without a copy. Raises EngineError if a node
        is out of range.
        """
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < len(self.place):
            raise EngineError(
                f"features of a node outside of 0..{len(self.place) - 1} were requested"
            )
        place, ring, there = self.place[nodes], self.ring[nodes], self.there[nodes]
        return replace(self, place=place, ring=ring, there=there)

    def store(self) -> "JaxFeatureRing":
        """Move the rows to the ring, unless a round has written them there; copies nothing to the
        host.
        """
        late = ~self.there
        self.programs.move(Key("keep"), self.place[late], self.ring[late])
        return JaxFeatureRing(self.programs, self.begin)

    @property
    def streams(self) -> Ints:
        """int32[n]: `place`, as programs read it."""
        return np.asarray(self.place, np.int32)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.place)


@dataclass(frozen=True, slots=True)
class JaxFeatureRing:
    """The stored features: rows of `DraftArrays.streams` from `begin` on."""

    programs: JaxPrograms
    begin: int

    def at(self, slots: Ints, positions: Ints) -> JaxFeatures:
        """Return features [n,F*H] of slots int32[n] at positions int32[n], on the device, without a
        copy.
        """
        place = self.begin + ring_place(slots.astype(np.int64), positions)
        return JaxFeatures(self.programs, place, place, np.ones(len(place), np.bool_), self.begin)
