"""Ranks give pages of windows back as rank 0 does, in eager steps and in captured rounds."""

from collections import Counter
from contextlib import ExitStack

import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.model_runner import TorchOptions
from forerun.executors.torch.parallel import executor
from tests.engine.drafters import ErraticDrafter
from tests.engine.toys import VOCAB
from tests.engine.window_schedules import (
    Known,
    Schedule,
    engine_on,
    reads_what_was_given_back,
    shaped,
)
from tests.models import tiny
from tests.parallel.test_captured_ranks import recorded


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    hf = tiny.model("gemma3_text", vocab_size=VOCAB, max_position_embeddings=512)
    return FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp("made")))


@pytest.fixture(scope="module")
def known(checkpoint):
    """Of one process that keeps every page."""
    return Known(TorchExecutor(checkpoint, Known.LIMITS))


@pytest.fixture
def ranks(checkpoint):
    """Two ranks with these limits; with `messages` their rounds are captured, and begin from each
    other.
    """
    with ExitStack() as stack:

        def begin(limits, messages=None):
            if messages is not None:
                stack.enter_context(recorded(messages))
            kind = executor.parallel_executor(limits)
            made = kind(checkpoint, limits, TorchOptions(), TensorParallel(0, 2), threads=1)
            stack.callback(made.shutdown)
            return made if messages is None else made.capture(overlap=True)

        yield begin


@pytest.mark.parametrize(
    ("page", "drafts", "rounds", "seed", "requests"),
    [
        (16, False, True, 13, 2),
        *(
            pytest.param(*values, 10, marks=pytest.mark.slow)
            for values in [
                (16, True, False, 2),
                (16, True, False, 7),
                (1, True, True, 0),
                (16, True, True, 2),
                (1, False, True, 5),
            ]
        ),
    ],
)
def test_any_schedule_meets_the_same_texts(ranks, known, page, drafts, rounds, seed, requests):
    """Of window pages there are too few for all sequences at once, and of pages too."""
    messages = Counter()
    made = ranks(shaped(page=page, tokens=304), messages if rounds else None)
    drafter = ErraticDrafter(known.following, VOCAB, seed) if drafts else None
    engine = engine_on(made, drafter, overlap=rounds)
    Schedule(engine, made, known, seed).run(requests)
    stats = engine.stats()
    assert (stats.acceptance_length > 1.05) == drafts
    assert (messages["round"] > 20) == rounds
    assert not rounds or drafts or stats.carried > 4


def test_what_was_given_back_is_never_read_or_written(ranks):
    reads_what_was_given_back(ranks(shaped()))
