"""Plans and reports of made-up steps, for tests of policies."""

from dataclasses import replace

import numpy as np

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.report import StepReport
from forerun.interface.plan import Plan
from forerun.speculative.tree import Draft


def slots_of(rows: int) -> np.ndarray:
    return np.arange(rows, dtype=np.int32)


def arrays(rows, cached=64):
    return slots_of(rows), np.full(rows, cached, np.int32)


def chain(shares):
    """A chain whose every token is right with such a chance, given the one above."""
    scores = np.cumprod(shares).astype(np.float32)
    return Draft(
        np.arange(1, len(shares) + 1, dtype=np.int32),
        np.arange(-1, len(shares) - 1, dtype=np.int32),
        scores,
    )


def plan_of(rows, allowed, cached=64) -> Plan:
    """A decoding step; `allowed` draft tokens per row, one below the other."""
    slots, kv_len = arrays(rows, cached)
    allowed = np.array(allowed, np.int32)
    return Plan(
        slots=slots,
        kv_len=kv_len,
        known=(np.zeros(1, np.int32),) * rows,
        samples=np.ones(rows, np.bool_),
        max_nodes=allowed,
        max_depth=allowed,
        page_table=np.zeros((rows, 1), np.int32),
        constrained=np.zeros(rows, np.bool_),
    )


def report_of(tokens, draft_tokens, ms, *, draft_ms=0.0, allowed=None, carried=False, cached=64):
    """A decoding step that emitted `tokens`, a list per row, and took `ms` beside drafting."""
    nodes = len(tokens) + sum(draft_tokens)
    return StepReport(
        slots=list(range(len(tokens))),
        tokens=tokens,
        draft_tokens=list(draft_tokens),
        allowed=list(draft_tokens) if allowed is None else list(allowed),
        nodes=nodes,
        cached=cached * nodes,
        prefill=False,
        carried=carried,
        ms={"draft": draft_ms, "mask": 0.0, "verify": ms, "host": 0.0},
    )


class PolicyOnTable(AdaptivePolicy):
    """Hears that every step took what its table says: no clock has a part in what it decides."""

    def observe(self, report):
        costs = self.guard.costs.measured
        ms = float(costs.verify(np.array(report.nodes)))
        drafting = costs.draft_ms * sum(report.draft_tokens)
        stages = dict.fromkeys(report.ms, 0.0) | {"draft": drafting, "verify": ms}
        super().observe(replace(report, ms=stages))
