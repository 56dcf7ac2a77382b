"""The dense author writes what the serving engine writes, and samples what it should."""

from contextlib import closing

import numpy as np
import pytest
import torch

from forerun.build.engine import load
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import RequestError
from forerun.executors.torch.captured.graphs import CapturedPrograms
from forerun.options.config import EngineConfig
from forerun.train.answers import Ask
from forerun.train.generate import STEPS, DenseAuthor
from forerun.train.served import ServedAuthor
from forerun.train.target import DenseTarget
from tests.cli.toys import toy_loaded
from tests.models import tiny

STOPS = (2, 17, 40)


FAMILIES = [
    *("llama", "gemma3_text"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2", "qwen2_moe")),
]


def of_some(count):
    """Runs for so many families: what writes is the same for all of them, and that they compute
    what they should is seen in greedy text.
    """
    return pytest.mark.parametrize("folder", FAMILIES[:count], indirect=True)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    hf = tiny.model(request.param, max_position_embeddings=512)
    return tiny.save_folder(hf, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def target(folder):
    return DenseTarget(FolderCheckpoint(folder), "cpu", torch.float32)


def prompts(count, longest=70):
    random = np.random.default_rng(7)
    lengths = [1, 2, *random.integers(3, longest, count - 2)]
    return [random.integers(3, tiny.VOCAB, n).astype(np.int32) for n in lengths]


def outputs(author, asks):
    for key, ask in enumerate(asks):
        author.ask(key, ask)
    found = {}
    for _ in range(10_000):
        for key, ids in author.finished():
            assert key not in found
            found[key] = ids.tolist()
        if len(found) == len(asks):
            return found
    raise AssertionError(f"only {len(found)} of {len(asks)} came back")


def test_greedy_text_is_the_engines(folder, target):
    """More prompts than rows, so rows are used again; lengths cross the steps between looks."""
    asks = [Ask(p, 0.0, 0, 5 + 7 * i % 50) for i, p in enumerate(prompts(8))]
    dense = outputs(DenseAuthor(target, [2], width=3, context=512, longest=60), asks)
    config = EngineConfig(
        model=str(folder),
        executor="torch",
        speculative_algorithm="OFF",
        policy="fixed",
        max_sequences=4,
    )
    with closing(load(config)) as loaded:
        assert tuple(loaded.tokenizer.eos_ids) == (2,)
        served = outputs(ServedAuthor(loaded), asks)
    assert dense == served
    assert len({len(ids) for ids in dense.values()}) > 3


@of_some(1)
def test_ends_at_a_stop_id_or_at_the_limit(target):
    asks = [Ask(p, 1.0, i, 40) for i, p in enumerate(prompts(40))]
    found = outputs(DenseAuthor(target, STOPS, width=16, context=128, longest=64), asks)
    ends = 0
    for ids in found.values():
        assert not set(ids[:-1]) & set(STOPS)
        ends += ids[-1] in STOPS
        assert len(ids) == 40 or ids[-1] in STOPS
    assert 0 < ends < 40


@of_some(1)
def test_context_ends_an_output_and_refuses_a_prompt(target):
    author = DenseAuthor(target, [], width=2, context=32, longest=64)
    long = np.arange(3, 34, dtype=np.int32)
    assert len(long) == 31
    found = outputs(author, [Ask(long, 0.0, 0, 9), Ask(long[:20], 0.0, 0, 64)])
    assert [len(found[0]), len(found[1])] == [1, 12]
    with pytest.raises(RequestError, match="32 tokens"):
        author.ask(9, Ask(np.zeros(32, np.int32), 0.0, 0, 1))


@of_some(1)
def test_samples_the_tempered_distribution(target):
    prompt, count, temperature = prompts(4)[3], 1500, 2.5
    asks = [Ask(prompt, temperature, i, 1) for i in range(count)]
    found = outputs(DenseAuthor(target, [], width=500, context=72, longest=1), asks)
    seen = np.bincount([ids[0] for ids in found.values()], minlength=tiny.VOCAB) / count
    _, last = target.run(torch.from_numpy(prompt).long()[None], (0,))
    logits = last[0, -1] @ target.head.T

    def off(expected):
        likely = expected * count > 10
        spread = np.sqrt(expected * (1 - expected) / count)
        return (np.abs(seen - expected) / spread)[likely].max()

    assert off((logits / temperature).softmax(-1).numpy()) < 4.5
    assert off(logits.softmax(-1).numpy()) > 6  # The test would see a forgotten temperature.


@of_some(1)
def test_rows_do_not_see_their_predecessors(target):
    """One row, used again and again, writes what a fresh one writes."""
    asks = [Ask(p, 0.0, 0, 33) for p in prompts(5)]
    again = outputs(DenseAuthor(target, [2], width=1, context=256, longest=40), asks)
    for key, ask in enumerate(asks):
        fresh = DenseAuthor(target, [2], width=1, context=256, longest=40)
        assert outputs(fresh, [ask])[0] == again[key]


class Tape:
    """A recorder that remembers: capture must not run the work, a replay must."""

    def __init__(self):
        self.log = []

    def warm(self, work):
        self.log.append("warm")
        work()

    def capture(self, work):
        self.log.append("capture")
        return work


def test_programs_do_the_work_once_per_call():
    runs, tape = [], Tape()
    programs = CapturedPrograms(runs.append, tape)
    for size in (1, 2, 1, 1, 2, 1):
        programs[size]()
    assert runs == [1, 2, 1, 1, 2, 1]
    assert tape.log == ["warm", "warm", "capture", "capture"]
    assert programs.captured == (1, 2)


@of_some(2)
def test_steps_need_no_new_tensors_between_replays(target):
    """The captured step reads and writes the author's own tensors: addresses must not move."""
    author = DenseAuthor(target, [2], width=4, context=128, longest=40)
    state = ("_cache", "_token", "_length", "_count", "_limit", "_temperature", "_done", "_output")
    before = [getattr(author, name).data_ptr() for name in state]
    outputs(author, [Ask(p, 0.8, 1, 2 * STEPS) for p in prompts(9, 40)])
    assert before == [getattr(author, name).data_ptr() for name in state]


def test_an_output_of_no_use_ends_early():
    """What is ended is what the whole output would have begun with."""
    prompt = np.array([72, 105], np.int32)
    with toy_loaded(EngineConfig(model="toy")) as loaded:
        whole, ended, kept = (
            outputs(ServedAuthor(loaded), [Ask(prompt, 0.0, 0, 800, useless)])[0]
            for useless in (None, lambda ids: len(ids) >= 50, lambda ids: False)
        )
    assert kept == whole
    assert 50 <= len(ended) < len(whole) and ended == whole[: len(ended)]
