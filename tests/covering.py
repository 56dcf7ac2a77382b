"""Some cells of a matrix of parameters in which every pair of values meets that meets in any.

Most faults that a matrix finds need one value or two together, so no other cells run.
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


def covering(
    cells: list[tuple],
    features: Callable[[tuple], set[Feature]] = pairs,
    beside: Iterable[tuple] = (),
) -> list[tuple]:
    """Of `cells` those, in their order, that a greedy search takes until every feature of any is
    had: in each turn the cell that has the most new ones, of these the one whose values were taken
    least often, of these the first.

    beside  cells that run as well: what they have need not be had again
    """
    of = [features(cell) for cell in cells]
    wanted, taken, used = set().union(*of), set(), Counter()
    for cell in beside:
        wanted -= features(cell)
        used.update(values(cell))

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
    """The `covering` of the cells as parameters of a test; what only dear cells have runs with the
    slow tests.

    marks  (cell) -> further marks of it
    """
    cells = list(cells)
    fast = covering([cell for cell in cells if not dear(cell)], features)
    slow = covering([cell for cell in cells if dear(cell)], features, fast)
    return [
        pytest.param(*cell, marks=marks(cell) + [pytest.mark.slow] * (cell in slow))
        for cell in [*fast, *slow]
    ]


def rarely(
    cells: Iterable[tuple],
    often: Iterable[tuple],
    features: Callable[[tuple], set[Feature]] | None = pairs,
) -> list:
    """The cells `often` as parameters of a test, and with the slow tests what covers the others, or
    without `features` all others.
    """
    often = list(often)
    rest = [cell for cell in cells if cell not in often]
    rest = covering(rest, features, often) if features else rest
    return [*often, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in rest)]


def some_of(cells: Iterable[tuple], features: Callable[[tuple], set[Feature]] = pairs) -> list:
    """The `covering` of the cells as parameters of a test; all others run with the slow tests."""
    cells = list(cells)
    return rarely(cells, covering(cells, features), None)


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
