"""Captured rounds of ranks, rehearsed on the recorder: collectives are in what is captured, every
replay does them again, and all ranks come to one process's text by themselves.
"""

import json
import socket
import subprocess
import sys

import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.executors.torch import TorchExecutor
from tests.models import tiny
from tests.parallel.rounds import LIMITS, VOCAB, texts


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("llama", 2),
        pytest.param("llama", 4, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_replay_rounds_to_one_text(tmp_path, nursery, family, size):
    folder = tiny.save_folder(tiny.model(family, vocab_size=VOCAB), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    line = [sys.executable, "-m", "tests.parallel.rounds"]
    ranks = [
        nursery.popen([*line, *map(str, (rank, size, port, folder))], stdout=subprocess.PIPE)
        for rank in range(size)
    ]
    try:
        said = [json.loads(rank.communicate()[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    torch.set_num_threads(1)
    expected = texts(TorchExecutor(FolderCheckpoint(folder), LIMITS))
    for plain, trees, replays, more, sizes in said:
        assert plain == expected
        # Some steps accept draft tokens: as many steps say more.
        assert all(a == b[: len(a)] for a, b in zip(plain, trees, strict=True))
        assert sum(map(len, trees)) > 1.5 * sum(map(len, plain))
        assert replays >= 10 and more >= 10
        assert {rows_nodes[1] > 1 for rows_nodes in sizes} == {True, False}
    assert all(each == said[0] for each in said)
