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
from forerun.executors.jax.kv import NetworkSizes
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
    def sizes(self) -> NetworkSizes:
        """Sizes of the arrays that the network keeps from step to step; fixed for its life."""
        ...

    def enter(self, params: Params, features: Array) -> Array:
        """Hidden states [...,H] from the target's features [...,width], F streams side by side;
        width 0 where the network reads none.
        """
        ...

    def run(
        self, params: Params, tokens: Array, hidden: Array, position: Array, attend: Attend
    ) -> Ran:
        """One draft step over R rows of N nodes, as a pure function.

        tokens    int32[R,N] target ids
        hidden    [R,N,H] what stands beside each token: `enter`'s result, or an earlier step's
                  output
        position  int32[R,N] for RoPE
        attend    attention over the draft's pages and the step's own nodes
        """
        ...

    def logits(self, params: Params, read: Array) -> Array:
        """float32[n,Vd] logits from `Ran.read`, [n,.]."""
        ...
