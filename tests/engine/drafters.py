"""Drafters for tests: one that is always right, one that never is, one that is either.

They know what the target will say, by a function (text so far, how many) -> tokens, and
prove that nothing but speed depends on a drafter.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import Draft, TreeBatch

Foresee = Callable[[SlotInit, list[int], int], Sequence[int]]
"""(the sequence's opening, all its tokens so far, n) -> the n tokens the target will emit."""


class _FollowingDrafter:
    """Keeps every slot's text and asks for the future; what to make of it is the subclass's."""

    def __init__(self, name: str, foresee: Foresee) -> None:
        self.traits = DrafterTraits(name=name, max_depth=64)
        self._foresee = foresee
        self._open: dict[int, tuple[SlotInit, list[int]]] = {}

    def begin(self, slot_init: SlotInit) -> None:
        """Keep the text. Raises ValueError where the slot is taken."""
        if slot_init.slot in self._open:
            raise ValueError(f"slot {slot_init.slot} was never ended")
        self._open[slot_init.slot] = (slot_init, slot_init.text.tokens.tolist())

    def propose(self, plan: Plan) -> list[Draft]:
        """One draft per row, made of the future."""
        return [self._row(plan, row) for row in range(plan.rows)]

    def _row(self, plan: Plan, row: int) -> Draft:
        nodes, depth = int(plan.max_nodes[row]), int(plan.max_depth[row])
        if not nodes:
            return Draft()
        slot_init, text = self._open[int(plan.slots[row])]
        return self.draft(self._foresee(slot_init, text, min(nodes, depth)), nodes)

    def draft(self, future: Sequence[int], nodes: int) -> Draft:
        """At most `nodes` draft tokens, no deeper than `future` is long."""
        raise NotImplementedError

    def on_device_draft(self, plan: Plan) -> None:
        """Whatever guides CarryingToy needs no asking."""

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Whether CarryingToy asks for the draft tokens, when it comes to them."""
        return self.traits.drafts_on_device or not plan.max_nodes.any()

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Append what was emitted."""
        for row, slot in enumerate(plan.slots.tolist()):
            self._open[slot][1].extend(outcome.tokens[row, : outcome.n_tokens[row]].tolist())

    def end(self, slot: int) -> None:
        """Forget the slot. Raises KeyError where it was not begun."""
        del self._open[slot]

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {"drafter": self.traits.name}


def _chain(tokens: Sequence[int]) -> Draft:
    count = len(tokens)
    parents = np.arange(-1, count - 1, dtype=np.int32)
    return Draft(np.array(tokens, np.int32), parents, np.ones(count, np.float32))


class OracleDrafter(_FollowingDrafter):
    """A chain of what the target will say: everything is accepted."""

    def __init__(self, foresee: Foresee) -> None:
        super().__init__("oracle", foresee)

    def draft(self, future: Sequence[int], nodes: int) -> Draft:
        """The future."""
        return _chain(future)


class AdversaryDrafter(_FollowingDrafter):
    """A chain of what the target will not say: nothing is accepted."""

    def __init__(self, foresee: Foresee, vocab: int) -> None:
        super().__init__("adversary", foresee)
        self._vocab = vocab

    def draft(self, future: Sequence[int], nodes: int) -> Draft:
        """Every token of the future, off by one."""
        return _chain([(token + 1) % self._vocab for token in future])


class ErraticDrafter(_FollowingDrafter):
    """A random tree with the future somewhere in it, or not."""

    def __init__(self, foresee: Foresee, vocab: int, seed: int) -> None:
        super().__init__("erratic", foresee)
        self._vocab = vocab
        self._random = Random(seed)

    def draft(self, future: Sequence[int], nodes: int) -> Draft:
        """Hang draft tokens below random earlier ones, right ones and wrong ones, siblings
        distinct."""
        pick = self._random
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for _ in range(pick.randint(0, nodes)):
            parent = pick.randint(-1, len(tokens) - 1)
            depth = depths[parent] + 1 if parent >= 0 else 0
            if depth >= len(future):
                continue
            token = future[depth] if pick.random() < 0.6 else pick.randrange(self._vocab)
            if (parent, token) in zip(parents, tokens, strict=True):
                continue
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return Draft(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.zeros(len(tokens), np.float32),
        )
