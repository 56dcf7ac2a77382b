"""Rows that ask for min_p, top_k and top_p, and how far two ways to cut are apart."""

import numpy as np
import torch

from forerun.executors.torch.shaping import Shaping, cut


def shaping_of(asked, nodes, device="cpu"):
    """Rows that ask for (temperature, min_p, top_k, top_p)."""
    temperatures, min_p, top_k, top_p = zip(*asked, strict=True)
    halves = np.array(top_p, np.float64).view(np.int32).reshape(-1, 2)
    least = [np.log(value) if value > 0 else -np.inf for value in min_p]
    rules = {
        "min_p": np.array(least, np.float32).view(np.int32),
        "top_k": np.array(top_k, np.int32),
        "top_p_low": halves[:, 0].copy(),
        "top_p_high": halves[:, 1].copy(),
    }
    rows, none = len(asked), torch.empty(0)
    return Shaping(
        history=none,
        bias=none,
        rules={name: torch.from_numpy(values).to(device) for name, values in rules.items()},
        tokens=torch.zeros(rows, nodes, dtype=torch.int32, device=device),
        above=none,
        positions=none,
        temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
        cuts=True,
    )


def mixed(vocab):
    """What 21 rows ask for."""
    found = [(0.0, 0.5, 3, 0.3), (0.7, 0.0, vocab, 1.0), (1.0, 0.1, vocab, 1.0)]
    for top_k in (1, 5, 50, vocab):
        found += [(0.7, 0.0, min(top_k, vocab), top_p) for top_p in (0.1, 0.9, 0.999, 1.0)]
    return [*found, (1.3, 0.02, min(50, vocab), 0.9), (1.0, 0.02, vocab, 0.95)]


def lost(logits, asked, shaping, found):
    """float64[R,N]: the mass, among what the twin keeps, of tokens that were cut otherwise. None
    may be where top_p does not cut.
    """
    expected = cut(logits, shaping)
    differ = found != expected
    exact = torch.tensor([row[0] == 0 or row[3] == 1.0 for row in asked], device=logits.device)
    assert not differ[exact].any()
    # What is kept is not changed.
    assert torch.equal(*(torch.where(differ, 0.0, each) for each in (found, expected)))
    heated = logits / shaping.temperatures.clamp_min(0.1)[:, None, None]
    total = torch.where(expected > -torch.inf, heated, -torch.inf).double().logsumexp(-1)
    return torch.where(differ, (heated.double() - total[..., None]).exp(), 0.0).sum(-1)
