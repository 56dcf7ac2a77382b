"""The interface between programs and any network that drafts level by level.

A network reads the token of a node and a hidden state (first the target's features, then its own
output: an EAGLE head, the target's MTP layer), or tokens alone (a whole model). If it reads
features, entry q of its cache pairs the feature at q with the next token, and a row's root is its
last entry. If it reads tokens alone, entry q has the token at q, and the root runs as an additional
node.
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
    """A network as pure functions; its weights are in params["draft"], including `ids` int32[Vd],
    the target id of every draft id.
    """

    @property
    def sizes(self) -> NetworkSizes:
        """Sizes of the arrays that the network keeps between steps; constant."""
        ...

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All values of the network that the functions below depend on, each with a distinct
        `repr`, which is part of the key of compiled programs.
        """
        ...

    def enter(self, params: Params, features: Array) -> Array:
        """Return hidden states [...,H] from the target's features [...,width], F concatenated
        streams; width 0 if the network reads none.
        """
        ...

    def run(
        self, params: Params, tokens: Array, hidden: Array, position: Array, attend: Attend
    ) -> Ran:
        """Run one draft step over R rows of N nodes, as a pure function.

        tokens    int32[R,N] target ids
        hidden    [R,N,H] hidden state of each token: `enter`'s result, or an earlier step's output
        position  int32[R,N] for RoPE
        attend    attention over the draft's pages and the step's own nodes
        """
        ...

    def logits(self, params: Params, read: Array) -> Array:
        """Return float32[n,Vd] logits from `Ran.read`, [n,.]."""
        ...
