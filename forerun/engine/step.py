"""One step of speculative decoding: the page to read first.

draft    draft token a small tree of continuations for each sequence
verify   let the target score every node of every tree in one forward pass
accept   keep one root-to-node path per tree, plus one token of the target's own
commit   make the kept keys and values permanent, forget the rest

So every planned sequence advances by at least one token. The step has two halves because a device
may be at work between them, with the host free for something else (see engine/overlap.py).
"""

from forerun.constrain.grammars import Grammars
from forerun.interface.drafter import Drafter
from forerun.interface.executor import Executor, Scores
from forerun.interface.plan import Outcome, Plan
from forerun.speculative.tree import TreeBatch, batch


def begin(
    plan: Plan, device: Executor, drafter: Drafter, grammars: Grammars
) -> tuple[TreeBatch, Scores]:
    """Draft and verify. A device that works by itself may still be at it afterwards."""
    drafts = grammars.guide(plan.slots, drafter.propose(plan), plan.max_nodes, plan.max_depth)
    trees = batch(plan.known, drafts)
    return trees, device.verify(plan, trees, drafter.draft_request(plan))


def finish(
    plan: Plan,
    trees: TreeBatch,
    scores: Scores,
    device: Executor,
    drafter: Drafter,
    grammars: Grammars,
) -> Outcome:
    """Accept and commit; waits for the device."""
    masks = grammars.masks(plan.slots, trees)
    accepted = device.accept(plan, trees, scores, masks)
    outcome = device.commit(plan, trees, scores, accepted)
    drafter.observe(plan, trees, outcome)
    return outcome
