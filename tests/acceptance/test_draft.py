"""What the trainer promises is what the server reaches; what breaks a draft is noticed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.api import encode_chat, open_target
from forerun.bench.acceptance import Shape, agreement, mean_length, summed
from forerun.bench.prove import answers
from forerun.catalog import open_model
from forerun.cli import main
from forerun.completion import make_request
from forerun.config import EngineConfig
from forerun.drafters import heads
from forerun.executors import cpu
from forerun.executors.torch.eagle import EagleHead
from forerun.train.corpus import Piece
from forerun.train.loss import Batch, Dense, Vocabulary, simulated_length, ttt_loss
from forerun.train.target import DenseTarget
from forerun.train.unroll import Unrolling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.model,
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
]

CHAIN = Shape("chain of 3", 3, 3, 1)
QUESTIONS = ["Why is the sky blue?", "Name the planets.", "How do I boil an egg?", "What is 2+2?"]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    out = tmp_path_factory.mktemp("smoke")
    assert main(["train", "--preset", "smoke", "--epochs", "8", "--out", str(out)]) == 0
    return out / "draft"


@pytest.fixture(scope="module")
def target(draft):
    config = EngineConfig(draft=str(draft), kv_tokens=4096, policy="fixed")
    target = open_target(config)
    yield target
    target.close()


def serve(target, requests, speculation="head"):
    side = replace(
        target.config,
        speculation=speculation,
        draft_nodes=CHAIN.nodes,
        draft_depth=CHAIN.depth,
        draft_width=1,
    )
    return answers(target, side, requests, 1)[0]


def requests_of(target):
    return [
        make_request(
            encode_chat(target, [{"role": "user", "content": text}]),
            max_tokens=96,
            ignore_eos=True,
        )
        for text in QUESTIONS
    ]


def length_of(done):
    return mean_length(summed([item.stats.histogram for item in done]))


def test_served_is_what_was_simulated(target):
    requests = requests_of(target)
    plain = serve(target, requests, "off")
    served = serve(target, requests)
    assert [a.tokens for a in plain] == [a.tokens for a in served]
    file, _ = target.head
    checkpoint = open_model(target.config.model).checkpoint
    dense = DenseTarget(checkpoint, "cpu", torch.float32)
    head = EagleHead(file.head)
    ids = torch.from_numpy(file.target_ids).long()
    vocabulary = Vocabulary.of(ids, dense.head)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            own = name != "lm_head.weight"
            parameter.copy_(torch.tensor(file.tensor(name)) if own else vocabulary.rows)
    hits, rows = np.zeros(3), np.zeros(3)
    for request, answer in zip(requests, plain, strict=True):
        tokens = np.concatenate([request.prompt, np.array(answer.tokens, np.int32)])
        ids = torch.tensor(tokens.astype(np.int64))[None]
        features, last = dense.run(ids, file.head.features)
        wanted = torch.zeros_like(ids, dtype=torch.bool)
        wanted[:, len(request.prompt) + 1 :] = True
        # What the served target wrote is its choice, whatever float32 would have said.
        choice = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
        teacher = Dense(last.flatten(0, 1), vocabulary.rows)
        batch = Batch(ids, wanted, features, choice, teacher)
        with torch.no_grad():
            _, scores = ttt_loss(head, batch, dense.embed, vocabulary, Unrolling(3))
        hits += [score.hits for score in scores]
        rows += [score.rows for score in scores]
    simulated = simulated_length((hits / rows).tolist())
    length = length_of(served)
    print(f"simulated {simulated:.3f}, served {length:.3f}")
    assert length > 1.02, "the draft does nothing"
    assert abs(length / simulated - 1) < 0.02


def test_a_starved_draft_is_noticed(target, monkeypatch):
    """Features of the wrong node: the text stays, the acceptance falls."""
    requests = requests_of(target)
    good = serve(target, requests)
    true_pass = heads.HeadPass

    def wrong(**fields):
        if (fields["parents"] == -1).all() and (fields["sources"] >= 0).all():
            fields["sources"] = np.zeros_like(fields["sources"])
        return true_pass(**fields)

    monkeypatch.setattr(heads, "HeadPass", wrong)
    bad = serve(target, requests)
    assert [a.tokens for a in good] == [a.tokens for a in bad]
    print(f"good {length_of(good):.3f}, starved {length_of(bad):.3f}")
    assert length_of(bad) - 1 < 0.7 * (length_of(good) - 1)


def test_agreement_is_conditional():
    assert agreement(np.array([6, 3, 1])) == (0.4, 0.25)
    assert mean_length(np.array([6, 3, 1])) == pytest.approx(1.5)
    assert Piece(0, 1).end == 1
