"""The size of a round, and the record that it returns."""

from typing import Any, NamedTuple

from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.tree import full_size


class Size(NamedTuple):
    """R rows of N nodes (see declared.py), which then grow full trees of draft tokens, `levels`
    deep; 0: none. Further needs of rows (shaped_rows.py): 0, or

    shaping  which sampling parameters
    masked   whether a row has a grammar
    reports  alternatives to report with each token
    """

    rows: int
    nodes: int
    levels: int = 0
    width: int = 0
    shaping: int = 0
    masked: int = 0
    reports: int = 0

    @property
    def total(self) -> int:
        """R*N: nodes of all rows, padding included."""
        return self.rows * self.nodes

    @property
    def draft_tokens(self) -> int:
        """K: nodes of a full tree, 0 without levels."""
        return full_size(self.width, self.levels)

    @property
    def candidates(self) -> int:
        """How many candidates for the token after the next root a record has."""
        return CANDIDATES if self.masked and self.levels else 0

    @property
    def reported(self) -> int:
        """How many numbers the reports of all nodes are."""
        return self.total * (1 + 2 * self.reports) if self.reports else 0


class Record(NamedTuple):
    """The parts of a record: the choices of nodes [R*N]; where rounds carry on from each other,
    their tokens and, where N > 1, parents [R*N] and how many nodes each row has [R]; tokens,
    parents and values' bits of the trees that were grown, [3*R*K]; what may follow the roots of
    the next trees, ids and bits of log-probabilities [2*R*candidates]; reports of nodes
    [R*N*(1+2*reports)], see shaping.reported; bits of how sure a draft model is of the best token
    below each root and node, [R*(1+K)] if it says that.
    """

    choices: Any
    tokens: Any
    parents: Any
    count: Any
    grown: Any
    candidates: Any
    reported: Any
    confident: Any

    @classmethod
    def of(cls, size: Size, whole: Any) -> "Record":
        """Return views of a tensor or array int32[n], n as RoundBuffers makes it for this size."""
        ends = [size.total, 2 * size.total, 3 * size.total, 3 * size.total + size.rows]
        ends.append(ends[-1] + 3 * size.rows * size.draft_tokens)
        ends.append(ends[-1] + 2 * size.rows * size.candidates)
        ends.append(ends[-1] + size.reported)
        bounds = zip([0, *ends], [*ends, len(whole)], strict=True)
        return cls(*(whole[begin:end] for begin, end in bounds))
