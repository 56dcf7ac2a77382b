"""Launches of a captured round at the size of an 8B: what they are today, and no more."""

from dataclasses import fields, replace

import pytest

from forerun.executors.torch.sizes import Size
from forerun.networks.config_json import architecture_from
from tests.covering import spread
from tests.models import tiny
from tests.parity.interpreted import load
from tests.parity.launches import (
    AIMS,
    COUNTED,
    KERNELS,
    Budget,
    Setting,
    budget,
    budget_of,
    count,
)

for name in KERNELS:
    load(f"triton.triton_{name}")  # Interpreted, for all tests of this process.

BUDGETS = {
    "plain": Budget(layer=10, outside=9, first=0, level=0, moves=0, carried=2),
    "verified": Budget(layer=10, outside=10, first=0, level=0, moves=0, carried=2),
    "drafted": Budget(layer=10, outside=11, first=20, level=14, moves=0, carried=2),
    "drafted in trees": Budget(layer=10, outside=11, first=20, level=15, moves=0, carried=2),
    "plain, float8": Budget(layer=9, outside=9, first=0, level=0, moves=0, carried=2),
    "verified, float8": Budget(layer=10, outside=10, first=0, level=0, moves=0, carried=2),
    "plain, 4 bits": Budget(layer=9, outside=9, first=0, level=0, moves=0, carried=2),
    "verified, 4 bits": Budget(layer=10, outside=10, first=0, level=0, moves=0, carried=2),
}
"""Upper bounds: what there was at last. The aims are in launches.py (AIMS)."""

PARTS = [part.name for part in fields(Budget)]


def beyond(launches, budget):
    """The parts of a round that launch more than a budget has."""
    return [part for part in PARTS if getattr(launches, part) > getattr(budget, part)]


@pytest.mark.parametrize("kind", spread(COUNTED, 2))
def test_a_round_launches_no_more_than_its_budget(kind):
    launches = budget_of(kind)
    assert not beyond(launches, BUDGETS[kind]), launches


def test_budgets_reach_what_is_aimed_at():
    assert not {name: beyond(each, AIMS) for name, each in BUDGETS.items() if beyond(each, AIMS)}


OTHERS = {
    "NEXTN, one layer": (22, 16),
    "DSpark, gated": (147, 43),
    "DSpark, vanilla": (142, 39),
    "DFLASH, five layers, blocks of 16": (85, 11),
    "DFlash2": (264, 20),
    "STANDALONE, llama-3.2-1b": (193, 167),
    "DSpark, rnn": (154, 50),
}
"""The first level, with what follows the step, and a level more."""


@pytest.mark.parametrize("method", spread(OTHERS, 3))
def test_other_draft_models_launch_no_more_than_they_did(method):
    launches, (first, level) = budget(COUNTED["drafted"], method=method), OTHERS[method]
    assert launches.first <= first and launches.level <= level, launches


@pytest.mark.parametrize(("family", "layer"), [("qwen3_5_text", 12), ("lfm2", 13)])
def test_a_recurrent_layer_launches_no_more_than_it_did(tmp_path, family, layer):
    """Beside the layers two or three launches that all share: windows, and what moves states."""
    arch = architecture_from(tiny.config(family).to_dict(), tmp_path)
    first = next(n for n, spec in enumerate(arch.layer_specs) if spec.recurrent)
    fewer = arch.layer_specs[:first] + arch.layer_specs[first + 1 :]
    small = Setting(arch, drafts=False, pages=64, slots=8, context=256)
    settings = small, replace(small, arch=replace(arch, layer_specs=fewer))
    whole, rest = (count(setting, Size(1, 4)).launches for setting in settings)
    assert whole.total() - rest.total() <= layer, whole - rest
    assert rest["_shift"] == rest["_ancestors"] == 1
    assert rest["_advance"] == (family != "lfm2")
