"""What a network that drafts level by level is to the programs, whatever it is made of.

A network reads the token of a node beside a hidden state (the target's features at first, then
what it made itself: an EAGLE head, the target's prediction layer), or tokens alone (a whole model).
Where it reads features, entry q of its cache pairs the feature at q with the token after it, and a
row's root is its last entry. One that reads tokens alone has at q the token at q, and runs the root
as one node more.
"""

from typing import NamedTuple, Protocol

from jax import Array

from forerun.executors.jax.decoder import Attend
from forerun.executors.jax.kv import DraftSizes
from forerun.executors.jax.weights import Params


class Ran(NamedTuple):
    """What a pass gives.

    read, output  [R,N,H] what the output head reads, and what a next draft step receives
    keys, values  [layers,R,N,G,E] of the nodes, ready to be kept
    """

    read: Array
    output: Array
    keys: Array
    values: Array


class DraftNetwork(Protocol):
    """A network as pure functions; its weights lie in params["draft"], `ids` int32[Vd] among them:
    the target id of every draft id.
    """

    @property
    def sizes(self) -> DraftSizes:
        """What does not change."""
        ...

    def enter(self, params: Params, features: Array) -> Array:
        """Hidden states [...,H] from the target's streams [...,width], side by side."""
        ...

    def run(
        self, params: Params, tokens: Array, hidden: Array, position: Array, attend: Attend
    ) -> Ran:
        """One draft step of the target's tokens int32[R,N] beside hidden states [R,N,H], at rope
        positions int32[R,N].
        """
        ...

    def logits(self, params: Params, read: Array) -> Array:
        """float32[n,Vd] from what `run` says the output head reads, [n,.]."""
        ...
