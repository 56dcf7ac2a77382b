"""Whatever an engine with captured rounds runs, all that it runs was captured before the
first request: requests of every kind, drafts of every size that a policy may ask for.
"""

import numpy as np
import pytest

from forerun.build import engine as build
from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.constrain.grammar import Grammar
from forerun.control.policy import Budget, Decision, with_known
from forerun.draft_shape import DraftShape
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.captured.round import CapturedRound
from tests.parity.heads import opened_config
from tests.parity.tape import Tape, on_tape

DRAFTERS = {
    "ngrams": ("NGRAM", 8, 8, None),
    "chain": ("EAGLE", 3, 3, 1),
    "tree": ("EAGLE", 9, 3, 3),
    "both": ("EAGLE+NGRAM", 8, 3, 1),
}
"""Algorithm, draft tokens, steps, top-k."""

CELLS = [
    *(("ngrams", 1, 400), ("tree", 1, 400)),
    *(("chain", 16, 250), ("both", 16, 250), ("chain", 64, 150)),
]
"""Drafter, sequences at once, steps."""


class ChangingPolicy:
    """A policy that asks for another size in every few steps, none included."""

    def __init__(self, nodes, depth):
        self.sizes = [*DraftShape(nodes, 1, depth).declared(), DraftShape(), DraftShape()]
        self.random = np.random.default_rng(0)
        self.size, self.left = self.sizes[-1], 0

    def decide(self, slots, kv_len, constrained=False):
        if not self.left:
            self.size = self.sizes[self.random.integers(len(self.sizes))]
            self.left = int(self.random.integers(1, 6))
        self.left -= 1
        nodes, _, depth = self.size
        model = depth * bool(self.random.integers(2))
        rows = (Budget(nodes, depth, "a whim", model_depth=model),) * len(slots)
        if constrained:
            rows = with_known(rows, self.random.integers(0, 9, len(slots)).tolist())
        return Decision("a whim", rows)

    def observe(self, report):
        pass

    def disable(self, reason):
        raise AssertionError(reason)

    def describe(self):
        return {}


def requests(target, texts, count, calm):
    """Short and long, `calm` plain ones and as many of every kind in turn."""
    grammar = target.compile(Grammar.regex(r'(\{"name": "[a-z ]{3,30}"\}){1,9}'))
    kinds = [
        {},
        {"temperature": 0.8},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logprobs": 2, "presence_penalty": 0.5},
        {"grammar": grammar},
        {"logprobs": 20, "top_k": 5, "temperature": 1.1},
        {"grammar": grammar, "temperature": 1.0, "logit_bias": ((5, 2.0),)},
    ]
    random = np.random.default_rng(1)
    for n in range(count):
        text = np.tile(texts[n % len(texts)], 3)
        yield make_request(
            text[: int(random.integers(3, 60))],
            max_tokens=int(random.integers(1, 50)),
            ignore_eos=True,
            seed=n,
            **{"temperature": 0.0} | kinds[n % len(kinds) if n // calm % 2 else 0],
        )


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "slots", "steps"), CELLS)
def test_nothing_is_captured_after_the_first_request(
    folder, learned, monkeypatch, drafter, slots, steps
):
    tape, rounds = Tape(), []
    on_tape(monkeypatch, tape)
    algorithm, nodes, depth, width = DRAFTERS[drafter]
    head = str(learned[0].folder) if width else None
    target = open_target(
        opened_config(
            folder, learned[0], max_sequences=slots, context=128, kv_tokens=128 * min(slots, 24),
            chunked_prefill_size=128, overlap=True, speculative_algorithm=algorithm,
            speculative_num_draft_tokens=nodes + 1, speculative_num_steps=depth,
            speculative_eagle_topk=width, speculative_draft_model_path=head,
        )
    )  # fmt: skip
    begin = TorchExecutor.begin

    def counted(self, plan, trees, *rest):
        begun = begin(self, plan, trees, *rest)
        if max(map(len, plan.known)) == 1 and plan.samples.all():
            rounds.append(isinstance(begun, CapturedRound))
        return begun

    monkeypatch.setattr(TorchExecutor, "begin", counted)
    captures, ready = tape.captures, target.executor.describe()["captured"]
    assert captures == len(ready)
    monkeypatch.setattr(build, "policy_for", lambda *_: ChangingPolicy(nodes, depth))
    engine = make_engine(target, target.config)
    try:
        waiting = requests(target, learned[1], 100_000, 2 * slots)
        open_, done = 0, []
        for step in range(steps):
            while open_ - len(done) < slots + 1 and (step % 3 == 0 or open_ == len(done)):
                engine.submit(next(waiting), lambda news: done.append(1) if news.finish else None)
                open_ += 1
            engine.step_once()
        stats = engine.stats()
    finally:
        engine.shutdown()
        target.close()
    assert tape.captures == captures and len(done) > 5
    # A head beside n-grams drafts on the host: no step goes on from one that is not finished.
    assert len(rounds) > 20 and (stats.carried > 0 or drafter == "both")
    assert all(rounds), "a step that only decodes is a round"
