"""A prediction layer trained on its target's answers: what is accepted at each depth, with the
hidden state carried as it was trained and with the other one, and the same text either way.
"""

import numpy as np
import pytest
import torch

from forerun.build.engine import open_target
from forerun.cli.eval import collapsed
from forerun.measure.acceptance import Finding, agreement, drafting, mean_length
from forerun.measure.probe import FEEDBACKS
from forerun.serve import second_position
from tests.drafters.kinds import Kind
from tests.drafters.prediction import random_layer, rms, with_layers
from tests.drafters.served import Cell, settings
from tests.models import tiny

ROUNDS, DEPTHS = 130, 3
PROMPTS = [np.random.default_rng(n).integers(3, 300, 9 + 13 * n).astype(np.int32) for n in range(5)]
PROMPTS += [PROMPTS[4], np.append(PROMPTS[4][:40], np.int32(7))]  # Whose pages are found again.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target whose final norm turns half of the hidden state's signs, so that states before and
    after it are not alike, and its layer, trained on what the target says to the tests' prompts.
    """
    hf = tiny.model("llama", seed=3)
    width, random = hf.config.hidden_size, torch.Generator().manual_seed(0)
    with torch.no_grad():
        signs = torch.randint(0, 2, (width,), generator=random) * 2.0 - 1.0
        hf.model.norm.weight.copy_(signs * (0.5 + torch.rand(width, generator=random)))
    texts = [_answered(hf, prompt) for prompt in PROMPTS]
    layer = _trained(hf, texts)
    return with_layers(hf, [layer], tmp_path_factory.mktemp("trained"), "deepseek")


@torch.no_grad()
def _answered(hf, prompt):
    """What it says, 40 tokens, behind a prompt: both, and how many of them are prompt."""
    known = torch.tensor([list(map(int, prompt))])
    ids = hf.generate(known, max_new_tokens=40, min_new_tokens=40, do_sample=False)[0]
    return ids, len(prompt)


def _trained(hf, texts):
    """Row i reads the state at i and token i + 1 and says token i + 2; at the next depth it reads
    what the layer made at i and token i + 2, and so on. Texts are filled up behind their ends.
    """
    made, embedding_norm, hidden_norm, _, fuse = random_layer(hf, 5)
    final = hf.model.norm.weight.detach().clone()
    learnt = [embedding_norm, hidden_norm, fuse, *made.parameters()]
    for weight in learnt:
        weight.requires_grad_()
    steps = torch.optim.Adam(learnt, lr=3e-3)
    whole = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in texts], batch_first=True)
    answer = torch.zeros_like(whole, dtype=torch.bool)
    for row, (ids, prompt) in enumerate(texts):
        answer[row, prompt : len(ids)] = True
    with torch.no_grad():
        first = hf.model(whole).last_hidden_state
    rows, eps = whole.shape[1] - 1 - DEPTHS, hf.config.rms_norm_eps
    for _ in range(ROUNDS):
        read, loss, inputs = first[:, :rows], 0.0, []
        for depth in range(1, DEPTHS + 1):
            tokens = hf.model.embed_tokens(whole[:, depth : depth + rows]).detach()
            parts = rms(tokens, embedding_norm, eps), rms(read, hidden_norm, eps)
            inputs.append(torch.cat(parts, -1) @ fuse.T)
            x, position = torch.cat(inputs, 1), _positions(rows, depth)
            rotary = hf.model.rotary_emb(x, position)
            mask = _sees(rows, depth)[None, None]
            y = made(x, attention_mask=mask, position_ids=position, position_embeddings=rotary)
            read = rms((y[0] if isinstance(y, tuple) else y)[:, -rows:], final, eps)
            there = slice(depth + 1, depth + 1 + rows)
            said = hf.lm_head(read[answer[:, there]])
            wanted = whole[:, there][answer[:, there]]
            loss = loss + torch.nn.functional.cross_entropy(said, wanted)
        steps.zero_grad()
        loss.backward()
        steps.step()
    return made, *(weight.detach() for weight in (embedding_norm, hidden_norm, final, fuse))


def _positions(rows, depths):
    """int64[1,depths*rows] of rows of the first depth, then of the second, and so on."""
    return torch.cat([torch.arange(rows) + depth for depth in range(depths)])[None]


def _sees(rows, depths):
    """As in a chain of drafts: row i sees all rows of the first depth up to i, of each further one
    row i alone.
    """
    below = torch.full((rows, rows), -torch.inf).triu(1)
    alone = torch.full((rows, rows), -torch.inf).fill_diagonal_(0.0)
    never = torch.full((rows, rows), -torch.inf)
    lines = []
    for depth in range(depths):
        after = depths - 1 - depth
        lines.append(torch.cat([below, *[alone] * depth, *[never] * after], 1))
    return torch.cat(lines)


def test_acceptance_falls_from_the_second_position_on_where_the_wrong_state_is_carried(
    folder, monkeypatch
):
    """Measured 1.00 .88 1.00 carrying the normed state, as it was trained, and .96 .43 .61 carrying
    the other: tokens and earlier rows are left to the layer then, so that it does not fall to none.
    """
    shares, lengths, looks = {}, {}, {}
    monkeypatch.setattr(second_position, "ENOUGH", 40)
    for reading in FEEDBACKS:
        kind = Kind("NEXTN", folder)
        cell = Cell(kind, open_target(settings(kind, "torch", draft_reading=reading)))
        cell.prompts, cell.tokens = PROMPTS, 31
        served, look = cell.served(), second_position.SecondPosition()
        done, looks[reading] = served.done, look.look(served.stats)
        assert look.over and second_position.concerns(cell.target.config)
        cell.target.close()
        histogram = drafting(done)
        shares[reading], lengths[reading] = agreement(histogram), mean_length(histogram)
    right, wrong = shares["feedback=normed"], shares["feedback=raw"]
    assert min(right[:DEPTHS]) > 0.8
    assert wrong[0] > 0.8  # The first position reads the target's state either way.
    assert wrong[1] < 0.7 * wrong[0] and wrong[1] < right[1] - 0.2
    # A server says it after its first drafts.
    assert looks["feedback=normed"] is None
    assert "acceptance collapses at the second position" in looks["feedback=raw"]
    assert lengths["feedback=normed"] > 1.3 * lengths["feedback=raw"]
    facts = dict.fromkeys(Finding.__dataclass_fields__, 0) | {"question": "q", "shape": "chain"}
    found = [Finding(**facts | {"agreement": each}) for each in (right, wrong)]
    assert (
        len(collapsed(found)) == 1 and f"{wrong[0]:.2f}, then {wrong[1]:.2f}" in collapsed(found)[0]
    )
