"""Launches of a captured round at the size of an 8B: what they are today, and no more."""

from pathlib import Path

import pytest
import torch

from tests.parity.interpreted import load
from tests.parity.launches import AIMS, COUNTED, Budget, Launches, budget, table

ROOT = Path(__file__).parents[2]

for name in ("triton_attention", "triton_choice", "triton_layers"):
    load(name)  # Interpreted, for whoever shares this process.

BUDGETS = {
    "plain": Budget(layer=14, outside=74, level=0, moves=32),
    "verified": Budget(layer=13, outside=74, level=0, moves=32),
    "drafted": Budget(layer=14, outside=169, level=75, moves=34),
}
"""Exact, so that who launches fewer says so here. The aims are in launches.py (AIMS)."""


@pytest.mark.parametrize("kind", list(COUNTED))
def test_a_round_launches_what_its_budget_says(kind):
    assert budget(COUNTED[kind]) == BUDGETS[kind]


def test_budgets_are_not_below_what_is_aimed_at():
    for found in BUDGETS.values():
        assert found.layer >= AIMS.layer, "lower the aim"


def test_what_is_launched_is_counted():
    """Of torch's own operations, and none that nobody has looked up."""
    x = torch.zeros(4, 4, device="meta")
    with torch.no_grad(), Launches() as mode:
        (x @ x).t().contiguous().add_(1)
        x[1:].view(-1)
    assert mode.found == {"mm": 1, "clone": 1, "add_": 1}
    with pytest.raises(AssertionError, match="not listed"), Launches():
        torch.linalg.qr(x)


@pytest.mark.slow
def test_the_table_is_up_to_date():
    assert (ROOT / "docs/gpu-roofline.md").read_text() == table()
