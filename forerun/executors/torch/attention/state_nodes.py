"""The inputs of kernels that advance recurrent states over the nodes of a step: trees, paths, and
the nodes' own numbers. The kernels: triton/triton_states.py; their reference in torch:
tests/references/states.py.

A node's window is its own input and those of the window - 1 tokens before it: of its ancestors, and
of the row of states at which its tree begins. The trees of different rows are independent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.executors.torch.decoder.delta import DeltaNumbers
from forerun.networks.layer_spec import GatedDelta


@dataclass(frozen=True, slots=True)
class StateNodes:
    """A step's R rows with M nodes; all int32.

    slots    [R] row of states at which a row's tree begins; not read for rows without nodes
    start    [R+1] row r has nodes start[r]:start[r+1], of which
    count    [R] are real; the others are padding, with results 0
    parents  [M] within the row; -1: none
    tree_intervals  [2,M]  enter and leave of every node (speculative/verify.py)
    """

    slots: Tensor
    start: Tensor
    count: Tensor
    parents: Tensor
    tree_intervals: Tensor


@dataclass(frozen=True, slots=True)
class PathNodes:
    """The nodes that become permanent: in each row none, or a path from its root.

    on_path bool[R,N]
    depth   int32[M]
    kv_len  int32[R] tokens before the root
    copies  int32[R] row of states to which the state at the last page end of the path is copied;
            -1: none
    """

    on_path: Tensor
    depth: Tensor
    kv_len: Tensor
    copies: Tensor
    page_size: int


@dataclass(frozen=True, slots=True)
class StateTables:
    """Tables of recurrent states, float32, of one layer; or of several, with a leading axis.

    windows   [rows,W-1,C] the convolution's inputs of the last tokens
    matrices  [rows,Hv,Dk,Dv]; None for a short convolution
    """

    windows: Tensor
    matrices: Tensor | None


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """Nodes of a step that are permanent whatever is accepted: the state after a row's last one is
    written to the row of states at which its tree began.

    leading  int32[R] how many leading nodes of a row these are, at least one
    targets  int32[M] row of states to which the state after a node is copied; -1: none
    """

    leading: Tensor
    targets: Tensor


Ancestors = Callable[[StateNodes, int], Tensor]
"""(nodes, width) -> int32[M,width]: the last tokens up to each node, itself last: a node's number,
or -1 - j for place j of the window of its row of states. All rows have the same number of nodes.
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
        """Return float32[M,Hv,Dv], each node's output.

        past   from Ancestors; None: `mixed` has passed the convolution and SiLU
        known  write the states after known tokens, in place; None: change no state
        """
        ...


Convolve = Callable[[Tensor, Tensor, Tensor | None, StateTables, StateNodes, Tensor], Tensor]
"""(inputs [M,C], kernel, bias, states, nodes, their windows by Ancestors) -> float32[M,C], the sums
of the windows.
"""
Advance = Callable[[GatedDelta, DeltaNumbers, StateTables, StateNodes, Tensor, PathNodes], None]
"""(description of the net, nodes' numbers, states, nodes, their windows by Ancestors, paths):
advances the matrices of each row's state along its path, in several layers at once, in place, with
the same numbers as Score; copies them at a page end. Reads the windows and does not change them.
"""
Shift = Callable[[Tensor, StateTables, StateNodes, Tensor, PathNodes], None]
"""(inputs [L,M,C], states, nodes, their windows by Ancestors, paths): replaces each row's window by
that of its path's last node, in several layers at once, in place; copies those at a page end.
"""


@dataclass(frozen=True, slots=True)
class StateKernels:
    """Kernels for recurrent states. None synchronises with the device."""

    ancestors: Ancestors
    score: Score
    convolve: Convolve
    advance: Advance
    shift: Shift
