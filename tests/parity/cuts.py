"""Rows that ask for min_p, top_k and top_p, and how far two ways to cut are apart."""

from dataclasses import replace

import numpy as np
import torch

from forerun.executors.torch.shaping import STOP, Shaping, shaped


def shaping_of(settings, nodes, vocab, device="cpu", edits=True):
    """Rows that ask for (temperature, min_p, top_k, top_p); with edits, for penalties, biases and
    early stop tokens too, of chains.
    """
    temperatures, min_p, top_k, top_p = zip(*settings, strict=True)
    halves = np.array(top_p, np.float64).view(np.int32).reshape(-1, 2)
    least = [np.log(value) if value > 0 else -np.inf for value in min_p]
    rows, random = len(settings), np.random.default_rng(vocab)
    ones = np.ones(rows, np.float32)
    penalties = [random.uniform(*ends, rows) * edits for ends in ((-0.2, 0.5), (0, 1), (0, 1))]
    rules = {
        **{"min_p": np.array(least, np.float32), "top_k": np.array(top_k, np.int32)},
        **{"top_p_low": halves[:, 0].copy(), "top_p_high": halves[:, 1].copy()},
        **{"repetition": ones + penalties[0], "frequency": penalties[1], "presence": penalties[2]},
        "min_tokens": np.arange(rows, dtype=np.int32) % 5 * edits,
    }
    words = {
        n: v if v.dtype == np.int32 else v.astype(np.float32).view(np.int32)
        for n, v in rules.items()
    }
    history = random.integers(0, 12, (rows + 1, vocab)) * (random.random((rows + 1, vocab)) < 0.1)
    history[:, :2] &= ~STOP  # One token that may always be said.
    bias = np.where(
        random.random((rows + 1, vocab)) < 0.05, random.normal(size=(rows + 1, vocab)), 0
    )
    tokens = random.integers(0, min(vocab, 9), (rows, nodes))
    above = np.tril(np.ones((nodes, nodes), bool)) & (np.arange(nodes) > 0)
    made = Shaping(
        slots=torch.from_numpy(random.permutation(rows).astype(np.int32)),
        history=torch.from_numpy((history * edits).astype(np.int32)),
        bias=torch.from_numpy((bias * edits).astype(np.float32)),
        rules={name: torch.from_numpy(values).to(device) for name, values in words.items()},
        tokens=torch.from_numpy(tokens.astype(np.int32)),
        above=torch.from_numpy(np.tile(above, (rows, 1, 1)) & edits),
        positions=torch.arange(nodes, dtype=torch.int32).repeat(rows, 1),
        temperatures=torch.tensor(temperatures, dtype=torch.float32),
        cuts=True,
    )
    names = "slots", "history", "bias", "tokens", "above", "positions", "temperatures"
    return replace(made, **{name: getattr(made, name).to(device) for name in names})


def mixed(vocab):
    """What 23 rows ask for."""
    result = [(0.0, 0.5, 3, 0.3), (0.7, 0.0, vocab, 1.0), (1.0, 0.1, vocab, 1.0)]
    for top_k in (1, 5, 50, vocab):
        result += [(0.7, 0.0, min(top_k, vocab), top_p) for top_p in (0.1, 0.9, 0.999, 1.0)]
    result += [(0.7, 0.0, vocab, 0.0), (0.7, 1.0, min(5, vocab), 1e-30)]
    return [*result, (1.3, 0.02, min(50, vocab), 0.9), (1.0, 0.02, vocab, 0.95)]


def lost(logits, settings, shaping, kept):
    """float64[R,N]: the mass, among what the reference keeps, of tokens that were cut otherwise.
    None may be where top_p does not cut.
    """
    expected = shaped(logits, shaping, None)
    differ = kept != expected
    exact = torch.tensor([row[0] == 0 or row[3] == 1.0 for row in settings], device=logits.device)
    assert not differ[exact].any()
    # What both keep is the same.
    assert (torch.isinf(kept) | torch.isinf(expected))[differ].all()
    heats = shaping.temperatures.clamp_min(0.1)[:, None, None]
    total = (expected / heats).double().logsumexp(-1)
    mass = (torch.maximum(kept, expected) / heats - total[..., None]).double().exp()
    return torch.where(differ, mass, 0.0).sum(-1)
