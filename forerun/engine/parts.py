"""The parts of an engine, and a guard around the drafter: if it fails, no request ends."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from forerun.control.policy import Policy, off
from forerun.engine.sequence import Sequence
from forerun.interface.drafter import Drafter
from forerun.interface.executor import Executor
from forerun.interface.grammars import Grammars
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger("forerun.engine")

Answer = TypeVar("Answer")


class GuardedDrafter(Drafter):
    """A Drafter that wraps another one until its first exception.

    After that the drafter, whose state may be inconsistent, is not called any more: nothing is
    proposed, and the policy is disabled.

    fault  why speculation is off, a sentence of `policy.off`; None = it is on
    """

    def __init__(self, drafter: Drafter, policy: Policy, fault: str | None = None) -> None:
        self.traits, self.fault = drafter.traits, fault
        self._drafter, self._policy = drafter, policy
        if fault is not None:
            policy.disable(fault)

    def begin(self, slot_init: SlotInit) -> None:
        """Start a sequence; after a failure do nothing."""
        self._call(lambda: self._drafter.begin(slot_init), None)

    def propose(self, plan: Plan) -> list[Draft]:
        """Return one draft per row; after a failure empty ones."""
        return self._call(lambda: self._drafter.propose(plan), [NO_DRAFT] * plan.rows)

    def on_device_draft(self, plan: Plan) -> OnDeviceDraftSpec | None:
        """Return what the executor does for the draft model; after a failure None."""
        return self._call(lambda: self._drafter.on_device_draft(plan), None)

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Return whether the step may begin from the running round; after a failure False."""
        return self._call(lambda: self._drafter.can_overlap(plan, running), False)

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Learn the outcome of a step; after a failure do nothing."""
        self._call(lambda: self._drafter.observe(plan, trees, outcome), None)

    def end(self, slot: int) -> None:
        """Discard the state of a slot; after a failure do nothing."""
        self._call(lambda: self._drafter.end(slot), None)

    def describe(self) -> dict[str, Any]:
        """Return the drafter's facts, and `fault`."""
        return self._drafter.describe() | {"fault": self.fault}

    def _call(self, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return the result of `call`; `otherwise` if it raises, or an earlier call did."""
        if self.fault is not None:
            return otherwise
        try:
            return call()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.fault = off(f"the drafter {self.traits.name} failed with {what}")
            log.exception("%s", self.fault)
            self._policy.disable(self.fault)
            return otherwise


@dataclass(slots=True)
class Parts:
    """The parts of an engine, and which slots are open in them.

    open_slots  open slots with their sequences
    """

    executor: Executor
    drafter: GuardedDrafter
    policy: Policy
    tokenizer: Tokenizer
    grammars: Grammars
    open_slots: dict[int, Sequence] = field(default_factory=dict)

    def open(self, sequence: Sequence) -> None:
        """Open the slot of `sequence` in executor, drafter and grammars. Raises what they raise;
        `close` then closes it in those where it was opened.
        """
        assert sequence.slot is not None
        self.open_slots[sequence.slot] = sequence
        slot_init = SlotInit(
            slot=sequence.slot,
            text=sequence,
            prompt_len=sequence.prompt_len,
            sampling=sequence.sampling,
            prediction=sequence.request.prediction,
            cached=sequence.table.length,
            pages=np.array(sequence.table.pages, np.int32),
            shared=sequence.shared,
            salt=sequence.table.salt,
            tenant=sequence.request.tenant_key,
            adapter=sequence.request.adapter,
        )
        self.executor.open(slot_init)
        self.drafter.begin(slot_init)
        grammar = sequence.request.grammar
        if grammar is not None and sequence.constrained:
            output, tenant = sequence.output.tolist(), slot_init.tenant
            self.grammars.open(sequence.slot, grammar, output, tenant)

    def close(self, slot: int) -> None:
        """Close a slot in all parts where it is open. Does nothing for a slot that is not open."""
        sequence = self.open_slots.pop(slot, None)
        if sequence is None:
            return
        if sequence.request.grammar is not None:
            self.grammars.close(slot)
        self.drafter.end(slot)
        self.executor.close(slot)
