"""The size of drafts. Without NumPy: options are read before anything heavy is imported."""

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
        """Return whether a full tree of this width and depth holds every draft: the best of a
        block's paths (`block`) may be more than that on one level.
        """
        return not block or self.width == 1 or 0 < self.nodes <= self.width**2

    def declared(self) -> list["DraftShape"]:
        """Return the few shapes that such drafts have, ascending, so that a device can prepare a
        program for each.

        Depths are 1, 3, 7, ... and `depth` itself, every level as large as the others
        (nodes // depth); where that is more than one, also a single draft token. Requires
        1 <= depth <= nodes; not checked.
        """
        level = self.nodes // self.depth
        depths = {(2 << power) - 1 for power in range(self.depth.bit_length())}
        shapes = [(level * depth, depth) for depth in sorted(depths) if depth < self.depth]
        alone = [(1, 1)] if level > 1 else []
        shapes = [*alone, *shapes, (self.nodes, self.depth)]
        return [DraftShape(nodes, self.width, depth) for nodes, depth in shapes]
