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
from tests.control.device import HeadDevice, PlainDevice, TextDevice
from tests.control.test_promise import CHANGES, FIRST, HEADS, TEXTS, THEN, raced, startup

SEEDS = range(4)


def head_policy(loses=False):
    """Of a head; loses: who went plain is lost to it."""
    traits = DrafterTraits("head", 3, needs_features=True, loses=loses)
    return AdaptivePolicy(startup(in_round=True), 3, 3, traits)


def cell(kind, policy, rows, texts, seeds):
    """(whole over plain, after 200 steps over the best fixed shape), of the sums over seeds."""
    sums = np.zeros((2, 4))
    for seed in seeds:
        sums += raced(kind(policy(), rows, seed), kind, rows, seed, texts)
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


def again(rows, length):
    """Print speed over plain decoding where sequences that went plain are lost to the head, and
    where features of plain rounds are kept.
    """
    for count in rows:
        for texts in [[head] for head in HEADS] + CHANGES:
            sums = np.zeros(3)
            for seed in SEEDS[:2]:
                devices = (
                    PlainDevice(FixedPolicy(0, 0), count, seed),
                    HeadDevice(head_policy(True), count, seed, loses=True),
                    HeadDevice(head_policy(), count, seed),
                )
                for each in devices:
                    each.length = length
                    for text in texts:
                        each.run(max(FIRST + THEN, 2 * length), *text)
                sums += [each.tokens / each.ms for each in devices]
            lost, kept = sums[1:] / sums[0]
            sys.stdout.write(f"{count} rows, {texts}: lost {lost:.3f}, kept {kept:.3f}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("vary", "again"), default="vary")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--set", nargs="*", default=[], help="NAME=VALUE")
    parser.add_argument("--length", type=int, default=device.LENGTH, help="of an answer, mean")
    options = parser.parse_args()
    for change in options.set:
        name, value = change.split("=")
        for module in (account, adaptive, costs, shapes):
            if hasattr(module, name):
                setattr(module, name, type(getattr(module, name))(float(value)))
    if options.what == "vary":
        vary(options.rows)
    else:
        again(options.rows, options.length)


if __name__ == "__main__":
    main()
