"""What a constant of control/constants.py does to the promise, on the simulated device: no clock.

python -m tests.control.vary [--rows 1 16] [--set TRIAL=16 ...]     worst and mean of the cells
python -m tests.control.vary again [--length 1000]     what it would bring to draft again
"""

import argparse
import sys

import numpy as np

from forerun.control import account, adaptive, costs, shapes
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.policy import FixedPolicy
from forerun.interface.drafter import DrafterTraits
from tests.control import device
from tests.control.device import PROMPT_TOKEN, HeadDevice, PlainDevice, TextDevice
from tests.control.test_promise import CHANGES, FIRST, HEADS, TEXTS, THEN, raced, startup

SEEDS = range(4)


def head_policy(reads=True):
    """Of a head; reads: it needs features, so that who went plain is lost to it."""
    traits = DrafterTraits("head", 3, needs_features=reads)
    return AdaptivePolicy(startup(in_round=True), 3, 3, traits)


def cell(kind, policy, rows, texts, seeds):
    """(whole over plain, after 200 steps over the best fixed shape), of the sums over seeds."""
    sums = np.zeros((2, 4))
    for seed in seeds:
        fixed = [kind(FixedPolicy(depth, depth), rows, seed) for depth in (1, 3)]
        alone = PlainDevice(FixedPolicy(0, 0), rows, seed)
        plain = (0.0, 0.0)
        given = [[text, plain, text, text] for text in texts]
        sums += raced([kind(policy(), rows, seed), alone, *fixed], given)
    whole, late = sums
    return whole[0] / whole[1], late[0] / late[1:].max()


def vary(rows):
    """Print the cells of test_promise."""

    def ngrams():
        return AdaptivePolicy(startup(False), 3, 3, DrafterTraits("ngram", 8, free=True))

    texts = [[(text,) for text in each] for each in TEXTS]
    kinds = {
        "heads": (HeadDevice, head_policy, [[head] for head in HEADS], SEEDS),
        "heads, texts that change": (HeadDevice, head_policy, CHANGES, SEEDS[:1]),
        "n-grams": (TextDevice, ngrams, texts, SEEDS),
    }
    for name, (kind, policy, cells, seeds) in kinds.items():
        done = np.array([cell(kind, policy, n, each, seeds) for n in rows for each in cells])
        worst, mean = done.min(0), done.mean(0)
        sys.stdout.write(
            f"{name}: of plain {worst[0]:.3f} (mean {mean[0]:.3f}), "
            f"of the best fixed shape {worst[1]:.3f} (mean {mean[1]:.3f})\n"
        )


class NeverBehind(HeadDevice):
    """A head that keeps up while nobody asks it, for nothing; or reads again, at the price of a
    prompt, what was written meanwhile and before.
    """

    def __init__(self, policy, rows, seed, rereads):
        self.rereads, self.plain, self.more = rereads, set(), 0.0
        super().__init__(policy, rows, seed, reads=False)

    def _plan(self, slots, old):
        plan, decision = super()._plan(slots, old)
        drafts = set(plan.slots[plan.max_nodes > 0].tolist())
        late = self.plain & drafts & set(old)
        self.more = self.rereads * PROMPT_TOKEN * sum(self.running[slot].kv_len for slot in late)
        self.plain = (self.plain & set(old)) - drafts if drafts else set(old)
        return plan, decision

    def _round(self, rows, deepest, levels):
        return super()._round(rows, deepest, levels) + self.more

    def _passes(self):
        return 0.0


def again(rows):
    """Print speed over plain decoding as built, never behind, and where texts are read again."""
    for count in rows:
        for texts in ([HEADS[1]], [HEADS[2]], *CHANGES):
            sums = np.zeros(4)
            for seed in SEEDS[:2]:
                devices = (
                    PlainDevice(FixedPolicy(0, 0), count, seed),
                    HeadDevice(head_policy(), count, seed),
                    *(NeverBehind(head_policy(False), count, seed, more) for more in (0, 1)),
                )
                for text in texts:
                    for each in devices:
                        each.run(FIRST + THEN, *text)
                sums += [each.tokens / each.ms for each in devices]
            built, free, reread = sums[1:] / sums[0]
            sys.stdout.write(
                f"{count} rows, {texts}: as built {built:.3f}, never behind {free:.3f}, "
                f"read again {reread:.3f}\n"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("vary", "again"), default="vary")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--set", nargs="*", default=[], help="NAME=VALUE")
    parser.add_argument("--length", type=int, default=device.LENGTH, help="of an answer, mean")
    options = parser.parse_args()
    device.LENGTH = options.length
    for change in options.set:
        name, value = change.split("=")
        for module in (account, adaptive, costs, shapes):
            if hasattr(module, name):
                setattr(module, name, type(getattr(module, name))(float(value)))
    {"vary": vary, "again": again}[options.what](options.rows)


if __name__ == "__main__":
    main()
