"""The target's hidden states of one step, on the device: what a JAX draft model reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.errors import EngineError
from forerun.executors.feature_ring import ring_places
from forerun.executors.jax.functions import Key
from forerun.executors.jax.programs import Programs
from forerun.executors.jax.step import JaxRound
from forerun.types import AnyArray, Bools


@dataclass(frozen=True, slots=True)
class JaxFeatures:
    """Features of nodes, where the target's step left them, which the next one overwrites, or in
    the ring.

    place   int[n] the row of `DraftArrays.streams` that each node has
    ring    int[n] the row of the same array where it is kept
    there   bool[n] it is there: the round that accepted it has written it
    """

    programs: Programs
    place: AnyArray
    ring: AnyArray
    there: Bools

    @classmethod
    def of(cls, programs: Programs, round: JaxRound, begin: int, accepted: Bools) -> "JaxFeatures":
        """Of a round that is read, bool[M] which nodes programs have accepted; the ring begins at
        row `begin` of the streams.
        """
        ring = begin + ring_places(round.plan, round.trees, np.arange(len(round.place)))
        return cls(programs, round.place, ring, accepted)

    def select(self, nodes: AnyArray) -> "JaxFeatures":
        """The rows nodes int[n], in this order, without a copy. Raises EngineError where a node is
        out of range.
        """
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < len(self.place):
            raise EngineError(
                f"features of a node outside of 0..{len(self.place) - 1} were asked for"
            )
        place, ring, there = self.place[nodes], self.ring[nodes], self.there[nodes]
        return replace(self, place=place, ring=ring, there=there)

    def keep(self) -> "JaxFeatures":
        """In the ring: nothing leaves the device. What no round has put there is moved."""
        late = ~self.there
        self.programs.move(Key("keep"), self.place[late], self.ring[late])
        return replace(self, place=self.ring, there=np.ones_like(self.there))

    def joined(self, others: Sequence["JaxFeatures"]) -> "JaxFeatures":
        """Its rows and those of `others`, all of them kept."""
        parts = [self, *others]
        place = np.concatenate([part.place for part in parts])
        return replace(self, place=place, ring=place, there=np.ones(len(place), np.bool_))
