"""The size of drafts. Without NumPy, because options are read before large imports."""

from typing import NamedTuple


class DraftShape(NamedTuple):
    """The largest draft of a row.

    nodes  draft tokens; 0 = none, or not set
    width  children per expanded node, and nodes expanded per level; 1 = chains
    depth  longest path; 0 if steps on the device grow nothing
    """

    nodes: int = 0
    width: int = 0
    depth: int = 0

    def full(self, block: bool) -> bool:
        """Return whether a full tree of this width and depth contains every draft: the best paths
        of a block (`block`) may have more nodes than that on one level.
        """
        return not block or self.width == 1 or 0 < self.nodes <= self.width**2

    def declared(self) -> list["DraftShape"]:
        """Return the few shapes that such drafts have, ascending, so that a device can prepare a
        program for each. Depths are 1, 3, 7, ... and `depth` itself, with equal levels (nodes //
        depth); if a level has more than one node, also a single draft token. Requires 1 <= depth <=
        nodes; not checked.
        """
        level = self.nodes // self.depth
        depths = {(2 << power) - 1 for power in range(self.depth.bit_length())}
        shapes = [(level * depth, depth) for depth in sorted(depths) if depth < self.depth]
        alone = [(1, 1)] if level > 1 else []
        shapes = [*alone, *shapes, (self.nodes, self.depth)]
        return [DraftShape(nodes, self.width, depth) for nodes, depth in shapes]
