"""Plans and reports of made-up steps, for tests of policies."""

from dataclasses import replace

import numpy as np

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.constants import MIN_REPEATS
from forerun.control.costs import LARGEST
from forerun.control.report import StepReport
from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import Plan
from forerun.speculative.tree import Draft

FREE = DrafterTraits("ngram", 64, no_draft_model=True)
MODEL = DrafterTraits("model", 64)


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


def report_of(
    tokens, draft_tokens, ms, *, draft_ms=0.0, allowed=None, carried=False, cached=64, **more
):
    """A decoding step that emitted `tokens`, a list per row, and took `ms` beside drafting."""
    nodes = len(tokens) + sum(draft_tokens)
    return StepReport(
        rows=len(tokens),
        tokens=tokens,
        draft_tokens=list(draft_tokens),
        allowed=list(draft_tokens) if allowed is None else list(allowed),
        nodes=nodes,
        cached=cached * nodes,
        prompt_tokens=0,
        carried=carried,
        constrained=False,
        ms={"draft": draft_ms, "mask": 0.0, "verify": ms, "host": 0.0},
        **more,
    )


def seen(policy):
    """The policy after steps of all sizes, which took what its table says."""
    costs = policy.account.costs
    for rows in (1 << power for power in range(LARGEST)):
        for cached in (0, 64 * rows) * MIN_REPEATS:
            costs.learn_plain(rows, cached, False, costs.plain(rows, cached, False))
    return policy


def reached(policy, rows, speed):
    """Steps of about so many rows have been so many times as fast as plain ones."""
    returns = policy.account.main.of(rows)
    returns.tokens.value, returns.time.value = speed, 1.0


class Text:
    """A drafter that proposes chains with random shares; its draft tokens are right `honesty` times
    as often as it says.

    late   how many times as long a step takes that looks for draft tokens, or comes after one that
           does: others are carried
    look   milliseconds that looking takes
    share  of every token, instead of random ones
    """

    def __init__(self, costs, rows, honesty, match=0.6, seed=0, late=None, share=None, look=0.0):
        self.costs, self.rows, self.honesty, self.match = costs, rows, honesty, match
        self.least, self.most = (0.2, 0.95) if share is None else (share, share)
        self.late, self.look, self.drafting = late, look, True
        self.random = np.random.default_rng(seed)
        self.ms = self.tokens = 0.0
        self.looks = 0
        self.verified: list[int] = []

    def run(self, policy, steps):
        for _ in range(steps):
            self.step(policy)
        return self

    def step(self, policy):
        decision = policy.decide(*arrays(self.rows))
        allowed = [each.nodes for each in decision.rows]
        shares = [
            self.random.uniform(
                self.least, self.most, count if self.random.random() < self.match else 0
            )
            for count in allowed
        ]
        proposed = [chain(row) for row in shares] if any(allowed) else []
        kept = decision.select(proposed) if proposed else [chain([])] * self.rows
        out = []
        for row, draft in zip(shares, kept, strict=True):
            right = self.random.random(len(row)) < self.honesty * row
            truth = int(np.argmin(np.append(right, False)))
            accepted = min(truth, len(draft))
            out.append([*range(1, accepted + 1), accepted + 1 if truth > accepted else 0])
            self.tokens += 1 + accepted
        sizes = list(map(len, kept))
        ms = float(self.costs.verify(self.rows + sum(sizes)))
        carried = self.late is not None and not any(allowed) and not self.drafting
        self.drafting = any(allowed)
        self.looks += self.drafting
        ms *= 1.0 if carried else self.late or 1.0
        facts = {"allowed": allowed, "carried": carried, "proposed": proposed}
        facts["draft_ms"] = look = self.look * self.drafting
        policy.observe(report_of(out, sizes, ms, reason=decision.reason, **facts))
        self.ms += ms + look
        self.verified.append(sum(sizes))

    def over_plain(self):
        plain = self.rows / (float(self.costs.verify(self.rows)))
        return self.tokens / self.ms / plain


class PolicyOnTable(AdaptivePolicy):
    """Hears that every step took what its table says: no clock has a part in what it decides."""

    def observe(self, report):
        costs = self.account.costs.measured
        ms = float(costs.verify(np.array(report.nodes)))
        drafting = costs.draft_ms * sum(report.draft_tokens)
        stages = dict.fromkeys(report.ms, 0.0) | {"draft": drafting, "verify": ms}
        super().observe(replace(report, ms=stages))
