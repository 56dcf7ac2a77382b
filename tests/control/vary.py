"""What a constant of control/constants.py does to the promise, on the simulated device: no clock.

python -m tests.control.vary [--rows 1 16] [--length 1000] [--set TRIAL=16 ...]
"""

import argparse
import sys

import numpy as np

from forerun.control import account, adaptive, costs, shapes
from forerun.control.adaptive import AdaptivePolicy
from forerun.interface.drafter import DrafterTraits
from tests.control import device
from tests.control.device import HeadDevice, TextDevice
from tests.control.test_promise import CHANGES, HEADS, TEXTS, THEN, adaptive_head, raced, startup

SEEDS = range(4)


def cell(kind, policy, rows, texts, seeds, length):
    """(whole over plain, after 200 steps over the best fixed shape), of the sums over seeds."""
    sums = np.zeros((2, 4))
    for seed in seeds:
        driven = kind(policy(), rows, seed)
        driven.length = length
        sums += raced(driven, kind, rows, seed, texts, max(THEN, 4 * length // 5))
    whole, late = sums
    return whole[0] / whole[1], late[0] / late[1:].max()


def vary(rows, length, names):
    """Print the cells of test_promise; of long answers two seeds."""

    def ngrams():
        return AdaptivePolicy(startup(False), 3, 3, DrafterTraits("ngram", 8, no_draft_model=True))

    texts = [[(text,) for text in each] for each in TEXTS]
    seeds = SEEDS if length == device.LENGTH else SEEDS[:2]
    kinds = {
        "heads": (HeadDevice, adaptive_head, [[head] for head in HEADS], seeds),
        "change": (HeadDevice, adaptive_head, CHANGES, SEEDS[:1]),
        "n-grams": (TextDevice, ngrams, texts, seeds),
    }
    for name in names:
        kind, policy, cells, mine = kinds[name]
        done = [cell(kind, policy, n, each, mine, length) for n in rows for each in cells]
        worst, mean = np.min(done, 0), np.mean(done, 0)
        every = " ".join(f"{plain:.3f}/{best:.3f}" for plain, best in done)
        sys.stdout.write(
            f"{name}: of plain {worst[0]:.3f} (mean {mean[0]:.3f}), "
            f"of the best fixed shape {worst[1]:.3f} (mean {mean[1]:.3f}); {every}\n"
        )
        sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--set", nargs="*", default=[], help="NAME=VALUE")
    parser.add_argument("--length", type=int, default=device.LENGTH, help="of an answer, mean")
    kinds = ["heads", "change", "n-grams"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    options = parser.parse_args()
    for change in options.set:
        name, value = change.split("=")
        holders = [m for m in (account, adaptive, costs, shapes) if hasattr(m, name)]
        if not holders:
            parser.error(f"no part of control reads a constant named {name}")
        for module in holders:
            setattr(module, name, type(getattr(module, name))(float(value)))
    vary(options.rows, options.length, options.kinds)


if __name__ == "__main__":
    main()
