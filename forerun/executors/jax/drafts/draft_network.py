"""The interface between programs and any network that drafts level by level.

A network reads the token of a node beside a hidden state (the target's features at first, then its
own output: an EAGLE head, the target's prediction layer), or tokens alone (a whole model). If it
reads features, entry q of its cache pairs the feature at q with the token after it, and a row's
root is its last entry. If it reads tokens alone, entry q has the token at q, and the root runs as
one more node.
"""

from typing import Any, NamedTuple, Protocol

from jax import Array

from forerun.executors.jax.network.decoder import Attend
from forerun.executors.jax.network.kv import NetworkSizes
from forerun.executors.jax.network.weights import Params


class Ran(NamedTuple):
    """The result of a pass.

    read, output  [R,N,H] input of the output head, and of a next draft step
    keys, values  [layers,R,N,G,E] of the nodes, ready to be cached
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

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All that the functions below read of the network itself, as values with a text of their
        own (`repr`): compiled programs are kept under it.
        """
        ...

    def enter(self, params: Params, features: Array) -> Array:
        """Return hidden states [...,H] from the target's features [...,width], F streams side by
        side; width 0 if the network reads none.
        """
        ...

    def run(
        self, params: Params, tokens: Array, hidden: Array, position: Array, attend: Attend
    ) -> Ran:
        """Run one draft step over R rows of N nodes, as a pure function.

        tokens    int32[R,N] target ids
        hidden    [R,N,H] what stands beside each token: `enter`'s result, or an earlier step's
                  output
        position  int32[R,N] for RoPE
        attend    attention over the draft's pages and the step's own nodes
        """
        ...

    def logits(self, params: Params, read: Array) -> Array:
        """Return float32[n,Vd] logits from `Ran.read`, [n,.]."""
        ...
