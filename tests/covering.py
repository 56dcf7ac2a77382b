"""Some cells of a matrix of parameters in which every pair of values meets that meets in any.

Most faults that a matrix finds need one value or two together, so these run always and the whole
matrix with the slow tests.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from itertools import combinations, product

import pytest

Feature = Hashable


def pairs(cell: tuple) -> set[Feature]:
    """Every two values of a cell, each with its place; a value alone where there is no other."""
    placed = list(enumerate(map(repr, cell)))
    return set(combinations(placed, min(2, len(placed))))


def values(cell: tuple) -> set[Feature]:
    """Every value of a cell, with its place."""
    return set(enumerate(map(repr, cell)))


def covering(cells: list[tuple], features: Callable[[tuple], set[Feature]] = pairs) -> list[tuple]:
    """Of `cells` those, in their order, that a greedy search takes until every feature of any is
    had: in each turn the cell that has the most new ones, of these the one whose values were taken
    least often, of these the first.
    """
    of = [features(cell) for cell in cells]
    wanted, taken, used = set().union(*of), set(), Counter()

    def gain(place):
        return len(of[place] & wanted), -sum(used[value] for value in values(cells[place])), -place

    while wanted:
        best = max(range(len(cells)), key=gain)
        taken.add(best)
        used.update(values(cells[best]))
        wanted -= of[best]
    return [cell for place, cell in enumerate(cells) if place in taken]


def thinned(
    cells: Iterable[tuple],
    features: Callable[[tuple], set[Feature]] = pairs,
    marks: Callable[[tuple], list] = lambda cell: [],
    dear: Callable[[tuple], bool] = lambda cell: False,
) -> list:
    """All cells as parameters of a test; those that are not in `covering` are slow ones.

    marks  (cell) -> further marks of it
    dear   whether a cell is slow in any case, and what only such cells have is not asked for
    """
    cells = list(cells)
    fast = covering([cell for cell in cells if not dear(cell)], features)
    return [
        pytest.param(*cell, marks=marks(cell) + [pytest.mark.slow] * (cell not in fast))
        for cell in cells
    ]


def every(*values: Iterable) -> list[tuple]:
    """The cells of a whole matrix, by the values of each of its parameters."""
    return list(product(*values))


def spread(cases: Iterable, keep: int) -> list:
    """All cases as values of one parameter; but for `keep` of them, evenly spread, slow ones."""
    cases = list(cases)
    kept = {place * len(cases) // keep for place in range(keep)}
    return [
        case if place in kept else pytest.param(case, marks=pytest.mark.slow)
        for place, case in enumerate(cases)
    ]
