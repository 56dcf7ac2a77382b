"""Every small tree and every outcome: acceptance against its definition, nothing drawn at random.

A tree of n draft tokens is a list of parents (each the root or an earlier one) and of tokens out of
three. An outcome is what the target chooses at each node that acceptance reaches. All of both are
visited; the definition is spelled out below without the code's help.
"""

from itertools import product

import numpy as np
import pytest

from forerun.speculative.accept import NOTHING, accept_row
from forerun.speculative.tree import Draft, batch

VOCAB = range(3)


def trees(count):
    """All (parents, tokens) of `count` draft tokens."""
    for parents in product(*(range(-1, node) for node in range(count))):
        for tokens in product(VOCAB, repeat=count):
            yield parents, tokens


def outcomes(parents, tokens, node=-1, path=()):
    """All (accepted draft tokens, emitted tokens) by the definition, with the choices made.

    At a node the target chooses one of the vocabulary or, being spoilt, nothing. The first child
    that is the choice is entered; where there is none, or the child has no choice of its own, the
    choice is emitted and that is all.
    """
    children = [child for child, parent in enumerate(parents) if parent == node]
    for choice in VOCAB:
        hit = next((child for child in children if tokens[child] == choice), None)
        chosen = {node: choice}
        if hit is None:
            yield path, chosen
            continue
        yield path, chosen | {hit: NOTHING}
        for inner, more in outcomes(parents, tokens, hit, (*path, hit)):
            yield inner, chosen | more


def check(parents, tokens):
    """Every outcome of one tree; how many there were."""
    draft = Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
    made = batch([np.array([7, 8], np.int32)], [draft])
    count = 0
    for path, choices in outcomes(parents, tokens):
        visited = []

        def choose_at(node, above, choices=choices, visited=visited):
            visited.append((node, above))
            return choices[node - 2]

        accepted = accept_row(made, 0, choose_at)
        assert accepted.nodes == tuple(node + 2 for node in path)
        emitted = (*(tokens[node] for node in path), choices[path[-1] if path else -1])
        assert accepted.tokens == emitted
        # Each node was chosen at with the tokens from below the root down to it.
        for node, above in visited:
            line, here = [], node - 2
            while here >= 0:
                line.insert(0, tokens[here])
                here = parents[here]
            assert above == tuple(line)
        count += 1
    return count


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_all_trees(count):
    checked = sum(check(parents, tokens) for parents, tokens in trees(count))
    assert checked == {0: 3, 1: 18, 2: 153, 3: 1737}[count]


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 5])
def test_all_larger_trees(count):
    checked = sum(check(parents, tokens) for parents, tokens in trees(count))
    assert checked == {4: 24_804, 5: 427_500}[count]


def test_a_spoilt_root_emits_nothing():
    made = batch([np.array([7], np.int32)], [Draft(np.array([1], np.int32), np.array([-1]))])
    assert accept_row(made, 0, lambda node, above: NOTHING).tokens == ()
