"""Recurrent layers cut over ranks: states follow accepted branches and go on from checkpoints on
every rank, in eager steps and in captured rounds.
"""

from collections import Counter
from contextlib import closing

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.model_runner import TorchOptions
from forerun.executors.torch.parallel.executor import ParallelExecutor
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parallel.test_captured_ranks import ROUNDS, captured, config, texts
from tests.parallel.test_methods import same_texts
from tests.parity.driver import Driver, Row, as_draft, limits
from tests.worlds.answers import OFF, resumed


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2"])
def folder(request, tmp_path_factory):
    return tiny.save_folder(tiny.model(request.param), tmp_path_factory.mktemp("made"))


def walked(executor, truth=None):
    """Texts of two rows, over trees that are right for up to two tokens where the truth is known;
    and how many tokens of the first a sequence can go on behind.
    """
    with Driver(executor) as driver:
        for slot, temperature in enumerate((0.0, 0.9)):
            sampling = Sampling(temperature=temperature, seed=slot)
            driver.open(slot, np.arange(40, 49 + slot), sampling)
        driver.step([Row(0), Row(1)])
        for step in range(40):
            rows = [Row(0), Row(1)]
            for row in rows if truth else ():
                done = len(driver.sequences[row.slot].tokens)
                first, second = truth[row.slot][done : done + 2]
                wrong = [second, 9][step % 2]
                row.draft = as_draft([5, first, wrong, second], [-1, -1, 1, 1])
            driver.step(rows)
            most = max(len(sequence.tokens) for sequence in driver.sequences.values())
            if most > (24 if truth else 34):
                break
        texts = [driver.sequences[slot].tokens for slot in (0, 1)]
    return texts, executor.reusable_prefix_len(np.array(texts[0], np.int32))


def test_states_follow_accepted_branches_on_every_rank(folder):
    checkpoint = FolderCheckpoint(folder)
    room = limits(tiny.VOCAB, context=128, page_size=4, checkpoints=6, pages=80)
    truth, _ = walked(TorchExecutor(checkpoint, room))
    shared = ParallelExecutor(checkpoint, room, TorchOptions(), TensorParallel(0, 2), threads=1)
    try:
        texts, kept = walked(shared, truth)
    finally:
        shared.shutdown()
    assert texts == walked(TorchExecutor(checkpoint, room), truth)[0]
    assert all(mine == text[: len(mine)] for mine, text in zip(texts, truth, strict=True))
    assert kept > 12, "of the answer a state is kept"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "page", "overlap"),
    [("OFF", 4, True), ("NGRAM", 4, True), ("NGRAM", 1, False)],
)
def test_rounds_move_states_on_every_rank(folder, monkeypatch, algorithm, page, overlap):
    """Preempted in little room, and found again behind what rounds have kept."""
    behind = resumed(monkeypatch)
    little = {"page_size": page, "kv_tokens": 56, "context": 56}
    with closing(open_target(config(folder, **little))) as one:
        expected, _ = texts(one, OFF, ROUNDS)
    sent = Counter()
    settings = config(folder, tp_size=2, overlap=True, **little)
    with captured(sent, settings) as (target, _):
        sent.clear()
        behind.clear()
        changes = {"speculative_algorithm": algorithm, "overlap": overlap}
        for _ in range(2):
            actual, stats = texts(target, changes, ROUNDS, expected)
            assert actual == expected
        assert sent["round"] >= (10 if algorithm == "OFF" else 5) and any(behind)
        assert stats.accepted > 10 or algorithm == "OFF"
        target.executor.states.book.check()


@pytest.mark.slow
def test_ranks_of_a_file_whose_value_heads_stand_in_turns_write_the_same(tmp_path):
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 32}
    tiny.write_gguf(tiny.model("qwen3_5_text", **heads), tmp_path / "model.gguf", "Q8_0")
    same_texts(GgufCheckpoint(tmp_path / "model.gguf"), TensorParallel(0, 2))
