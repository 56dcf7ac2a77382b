"""Serving a few prompts by fresh engines, as tests of draft models do."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from forerun.build import with_jax
from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.client.completion import complete, make_request
from forerun.executors.jax.rounds.batches import Buckets
from forerun.options.config import EngineConfig
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE
from tests.worlds.answers import drafting

SMALL = {
    "policy": "fixed",
    "max_sequences": 4,
    "chunked_prefill_size": 40,
    "kv_tokens": 1024,
    "page_size": 8,
}
"""Of EngineConfig: longer prompts are read in several steps, and pages are soon used again."""

TOKENS = 13
PROMPTS = [np.random.default_rng(n).integers(3, 250, n).astype(np.int32) for n in (9, 26, 61)]
PROMPTS += [PROMPTS[2], np.append(PROMPTS[2][:42], np.int32(7))]  # Whose pages are found again.
PROMPTS += [PROMPTS[2][:1], PROMPTS[2][1:3]]  # Shorter than prediction layers are many.


def requests_for(prompts, tokens, temperature=0.0, seed=None):
    """Requests of so many tokens each; a prompt's seed is its length, or the one given."""
    return [
        make_request(
            np.asarray(prompt, np.int32),
            max_tokens=tokens,
            ignore_eos=True,
            temperature=temperature,
            seed=len(prompt) if seed is None else seed,
        )
        for prompt in prompts
    ]


def completed(engine, requests, at_once=None):
    """What became of every request, all at once or `at_once` of them, and the engine's statistics;
    no step fails, and nothing is wrong with the drafter.
    """
    engine.start()
    try:
        done = [choices[0] for choices in complete(engine, requests, at_once)]
        assert engine.stats().failed_steps == 0
        assert engine.fault is None
        return done, engine.stats()
    finally:
        engine.shutdown()


def answered(target, config, requests, at_once=None):
    """As `completed`, by a fresh engine."""
    return completed(make_engine(target, config), requests, at_once)


class Served(NamedTuple):
    """Sums over all prompts; steps: of each; stats: the engine's."""

    accepted: int
    drafted: int
    steps: list[int]
    stats: object
    done: list


PLAIN = {}


class Cell:
    """A kind of draft on an executor: every text is the one without drafts, and every token is
    accounted for.
    """

    prompts, tokens = PROMPTS, TOKENS

    def __init__(self, kind, target):
        self.kind, self.target, self.depth = kind, target, kind.depth

    def model(self):
        return self.target.draft_model

    def engine(self, model, shape=None, **changes):
        """With drafts of `shape` (draft tokens, depth, width), or without any."""
        if shape is None:
            changes |= {"speculative_algorithm": "OFF"}
        else:
            changes |= drafting(*shape)
        made = replace(self.target, draft_model=model)
        return make_engine(made, replace(self.target.config, **changes))

    def plain(self, temperature=0.0):
        """Answers without drafts: the same for all that draft for one target."""
        key = (*self.alike(), len(self.prompts), self.tokens, temperature)
        if key not in PLAIN:
            requests = requests_for(self.prompts, self.tokens, temperature)
            done, _ = completed(self.engine(None), requests)
            PLAIN[key] = [item.tokens for item in done]
        return PLAIN[key]

    def alike(self):
        """Cells of which this is the same have the same answers."""
        return type(self.target.executor), self.target.config.dtype, self.kind.text

    def texts(self, temperature=0.0):
        """Prompts and answers."""
        pairs = zip(self.prompts, self.plain(temperature), strict=True)
        return [[*map(int, prompt), *map(int, tokens)] for prompt, tokens in pairs]

    def served(self, temperature=0.0, at_once=None, around=None, shape=None, **changes):
        """around: what is put around the draft model, (model) -> model; shape: a chain, if None."""
        model = around(self.model()) if around else self.model()
        requests = requests_for(self.prompts, self.tokens, temperature)
        engine = self.engine(model, shape or (self.depth, self.depth, 1), **changes)
        done, stats = completed(engine, requests, at_once)
        assert [item.tokens for item in done] == self.plain(temperature)
        for item in (item.stats for item in done):
            assert sum(item.histogram) == item.steps
            emitted = sum((a + 1) * steps for a, steps in enumerate(item.histogram))
            assert emitted == self.tokens and item.accepted == self.tokens - item.steps
        sums = (sum(getattr(i.stats, name) for i in done) for name in ("accepted", "draft_tokens"))
        return Served(*sums, [item.stats.steps for item in done], stats, done)

    def steps(self, accepted):
        """Of a text of which so many draft tokens are accepted each time: the prompt's, then those
        and one more each; the last chain is cut to what is left.
        """
        return 1 + -(-(self.tokens - 1) // (accepted + 1))


def settings(kind, executor, **changes):
    """How a kind is opened. Drafts beside the compiled core are 8 bits, and a target that is its
    own draft must be, too.
    """
    whole = kind.method == "STANDALONE"
    dtypes = {"cpu": "q8_0" if whole else "auto", "jax": "float32", "torch": "float32"}
    chosen = {
        "model": str(kind.model),
        "executor": executor,
        "dtype": dtypes[executor],
        "speculative_algorithm": kind.method,
        "speculative_draft_model_path": None if kind.draft is None else str(kind.draft),
        "speculative_num_steps": kind.depth,
        **SMALL,
        "chat_template": BYTE_LEVEL_TEMPLATE,  # Rendered here: no process begins.
        "threads": None if executor == "jax" else 1,
        "draft_on_error": "stop",
    }
    return EngineConfig(**chosen | changes)


def padded(patch, *fields):
    """Executors on XLA that are made while `patch` holds (a MonkeyPatch) pad these fields of their
    Buckets to the largest: half as many programs, and more, for what does not ask which run.
    """
    of = Buckets.of

    def largest(limits, draft_nodes):
        sizes = of(limits, draft_nodes)
        return replace(sizes, **{field: getattr(sizes, field)[-1:] for field in fields})

    patch.setattr(Buckets, "of", staticmethod(largest))


@contextmanager
def on_xla(compiled, warm=False, pads=()):
    """Targets that are opened meanwhile have their layers in a scan, which compiles sooner, and
    keep what they compile; warm: it is all compiled before they run. pads: see `padded`.
    """
    import forerun.executors.jax as jax
    from forerun.executors.jax.program import programs

    with pytest.MonkeyPatch.context() as patch:
        padded(patch, *pads)
        patch.setattr(with_jax, "cache_dir", lambda: Path(compiled))
        patch.setattr(jax, "JaxOptions", partial(jax.JaxOptions, stacked=True))
        real = programs.JaxPrograms.warm_up

        def whole(self, *given):
            real(self, *given)
            self.wait()

        patch.setattr(programs.JaxPrograms, "warm_up", whole if warm else lambda *_: None)
        yield


@contextmanager
def in_rounds():
    """Torch targets that are opened meanwhile decode in rounds that go on from each other, on a
    tape (tests/parity/tape.py), captured when they come up.
    """
    from tests.parity.tape import on_tape

    with pytest.MonkeyPatch.context() as patch:
        on_tape(patch, warm=False)
        yield


class Cells:
    """Kinds on executors, each opened once; closed at the end. Executor "rounds" is torch's. pads:
    see `padded`.
    """

    def __init__(self, kinds, compiled, pads=()):
        self._kinds, self._compiled, self._made = kinds, compiled, {}
        self._pads = pads

    def __call__(self, executor, name, **changes):
        key = executor, name, *sorted(changes.items())
        if key not in self._made:
            rounds = executor == "rounds"
            config = settings(self._kinds[name], "torch" if rounds else executor, **changes)
            with ExitStack() as stack:
                if executor == "jax":
                    stack.enter_context(on_xla(self._compiled, pads=self._pads))
                elif rounds:
                    stack.enter_context(in_rounds())
                self._made[key] = Cell(self._kinds[name], open_target(config))
        return self._made[key]

    def close(self):
        for cell in self._made.values():
            cell.target.close()
