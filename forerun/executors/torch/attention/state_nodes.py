"""What kernels need to know of a step's nodes to advance recurrent states: trees, paths, and the
numbers that nodes bring. The kernels: triton/triton_states.py; their slow twins in torch:
tests/twins/states.py.

A node's window is its own input and those of the window - 1 tokens before it: of ancestors, and of
the row of states at which its tree begins. A row's trees never see each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.executors.torch.decoder.delta import DeltaNumbers
from forerun.networks.layer_spec import GatedDelta


@dataclass(frozen=True, slots=True)
class StateNodes:
    """A step's R rows of M nodes; all int32.

    slots    [R] row of states at which a row's tree begins; not read where there is no node
    start    [R+1] row r owns nodes start[r]:start[r+1], of which
    count    [R] are real; others read nothing, and what is found for them is 0
    parents  [M] within the row; -1: none
    tree_intervals  [2,M]  enter and leave of every node (speculative/verify.py)
    """

    slots: Tensor
    start: Tensor
    count: Tensor
    parents: Tensor
    tree_intervals: Tensor


@dataclass(frozen=True, slots=True)
class KeptNodes:
    """Nodes that become permanent: in each row none, or a path from its root.

    kept    bool[R,N]
    depth   int32[M]
    kv_len  int32[R] tokens before the root
    copies  int32[R] row of states that gets a copy of the state at the path's last end of a page;
            -1: none
    """

    kept: Tensor
    depth: Tensor
    kv_len: Tensor
    copies: Tensor
    page_size: int


@dataclass(frozen=True, slots=True)
class StateTables:
    """Tables of recurrent states, float32, of one layer; or of several, with a first axis more.

    windows   [rows,W-1,C] the convolution's inputs of the last tokens
    matrices  [rows,Hv,Dk,Dv]; None: a short convolution has none
    """

    windows: Tensor
    matrices: Tensor | None


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """Nodes of a step that are permanent whatever is accepted: the state after a row's last one is
    written to where its tree began.

    leading  int32[R] how many first nodes of a row those are, at least one
    targets  int32[M] row of states that gets a copy of the state after a node; -1: none
    """

    leading: Tensor
    targets: Tensor


Ancestors = Callable[[StateNodes, int], Tensor]
"""(nodes, width) -> int32[M,width]: each node's last tokens, its own last: a node's number, or
-1 - j for place j of the window of its row of states. Rows have equally many nodes.
"""


class Score(Protocol):
    """Runs a gated delta net over trees."""

    def __call__(
        self,
        about: GatedDelta,
        numbers: DeltaNumbers,
        states: StateTables,
        nodes: StateNodes,
        past: Tensor | None,
        known: KnownNodes | None = None,
    ) -> Tensor:
        """Return float32[M,Hv,Dv], what each node reads of its state.

        past   from Ancestors; None: `mixed` has passed the convolution and SiLU
        known  write the states after known tokens, in place; None: no state changes
        """
        ...


Convolve = Callable[[Tensor, Tensor, Tensor | None, StateTables, StateNodes, Tensor], Tensor]
"""(inputs [M,C], kernel, bias, states, nodes, their windows by Ancestors) -> float32[M,C], the sums
of the windows.
"""
Advance = Callable[[GatedDelta, DeltaNumbers, StateTables, StateNodes, Tensor, KeptNodes], None]
"""(what the net is, nodes' numbers, states, nodes, their windows by Ancestors, paths): advance the
matrices of each row's state along its path, in several layers at once, in place, by the same
numbers as Score; copy them at an end of a page. Windows are read, and stay.
"""
Shift = Callable[[Tensor, StateTables, StateNodes, Tensor, KeptNodes], None]
"""(inputs [L,M,C], states, nodes, their windows by Ancestors, paths): make each row's windows those
of its path's last node, in several layers at once, in place; copy those at an end of a page.
"""


@dataclass(frozen=True, slots=True)
class StateKernels:
    """Launches only."""

    ancestors: Ancestors
    score: Score
    convolve: Convolve
    advance: Advance
    shift: Shift
