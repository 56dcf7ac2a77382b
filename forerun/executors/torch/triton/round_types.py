"""The values before and after the forward pass of a captured round, and of a draft head's levels.
The kernels that compute them: triton_round.py, triton_draft.py and triton_future.py; their
references in torch: tests/references/rounds.py and future.py. A round has R rows of N nodes, M =
R*N. Its inputs are named in captured/fixed.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.decoder.elementwise import Rotary
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import full_size

RoundInputs = dict[str, Tensor]
"""By name: captured/fixed.py."""


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The constants of a model's rounds.

    page_size    positions of a page
    scratch      slot of node 0 (see kv.py)
    frequencies  float32[K,E/2] of the K kinds of rotary positions
    factors      float32[K] factors of their cos and sin
    """

    page_size: int
    scratch: int
    frequencies: Tensor
    factors: Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """Positions, slots and noise of a round's nodes, computed from its inputs.

    position  int32[M] in tokens
    pages     int32[M] slot of that position in the row's pages
    slots     int32[M] slots for keys and values: in `pages` for a decided row that is a chain,
              where accepted ones stay and the next step overwrites the rest; else in scratch
    noise     sampling parameters of each node
    rotary    of the positions, one for each kind
    """

    position: Tensor
    pages: Tensor
    slots: Tensor
    noise: NodeNoise
    rotary: tuple[Rotary, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted paths of a round's rows.

    choices  int32[M] of all nodes
    on_path  bool[R,N] nodes on the accepted path of a decided row, including its root
    count    int32[R] length of the path in nodes
    last     int32[R] node within the row at which the path ends; 0 without a path
    """

    choices: Tensor
    on_path: Tensor
    count: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class Levels:
    """The size of the trees that a round builds: `levels` deep, `width` children of each of `width`
    nodes.
    """

    levels: int
    width: int


@dataclass(frozen=True, slots=True)
class TreeStarts:
    """The roots of the next trees of R rows: the ends of their extensions.

    read, hidden  [R,H] input of the output head, [R,W] input of a next step
    kv_len        int32[R] cached draft positions
    noise         of each level's expanded nodes, for a child's position: [R] at first, then
                  [R*width]
    position      int32[levels-1,R*width] of the nodes that run, level by level
    """

    read: Tensor
    hidden: Tensor
    kv_len: Tensor
    noise: tuple[NodeNoise, ...]
    position: Tensor

    def row_noise(self, level: int, width: int) -> NodeNoise:
        """Return the noise [R] of the rows' children at a level, the same for all of its nodes."""
        of, every = self.noise[level], width if level else 1
        return NodeNoise(*(each[::every] for each in (of.seeds, of.positions, of.temperatures)))


@dataclass(frozen=True, slots=True)
class Extended:
    """The results of a draft model's extension for all M nodes.

    read, hidden  [M,H] and [M,W], as in TreeStarts
    outputs       [n,W] to which a row's `hidden` is written by slot, from `first` on; the last row
                  is padding
    """

    read: Tensor
    hidden: Tensor
    outputs: Tensor
    first: int


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes that a level runs, `width` in each of R trees.

    chosen  int32[R,width] their numbers in the newest level, ascending
    tokens  int32[R*width]
    hidden  [R*width,W] their input: their parents' outputs
    above   int32[R,levels-1,width] the index of each node's ancestor in each level that has run,
            and its own in this level; -1 in later ones
    tree_intervals  int32[2,n] of each row's root, if it runs, and of the nodes of all levels that
                    run: see geometry.py; only this level's nodes are queries
    """

    chosen: Tensor
    tokens: Tensor
    hidden: Tensor
    above: Tensor
    tree_intervals: Tensor


@dataclass(frozen=True, slots=True)
class FutureState:
    """State that a round leaves for the next, by slot, the last slot being padding; K =
    full_size(width, levels).

    state   int32[S,3] kv_len, output position, last token
    tokens, parents, value  int32, int32, float32[S,K] the full tree below it; -inf = no such node
    """

    state: Tensor
    tokens: Tensor
    parents: Tensor
    value: Tensor
    width: int
    levels: int


def with_room(state: Tensor, width: int, levels: int) -> FutureState:
    """Return state int32[S,3] of slots, with room for a tree of this width and depth in each; no
    slot has a tree yet.
    """
    shape = len(state), full_size(width, levels)
    kinds = (0, torch.int32), (NOTHING, torch.int32), (-torch.inf, torch.float32)
    tokens, parents, value = (
        torch.full(shape, none, dtype=kind, device=state.device) for none, kind in kinds
    )
    return FutureState(state, tokens, parents, value, width, levels)
