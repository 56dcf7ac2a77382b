"""A small target and a head that knows its answers by heart, made by `forerun train` itself."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.cli.main import main
from forerun.measure.workload import Prompt, read_prompts
from tests.models import tiny

TEXT = "the quick brown fox jumps over lazy dog and then there is another one of them"
TRAINING = [
    *("--preset", "smoke", "--answers", "24", "--answer-tokens", "80", "--held-out", "8"),
    *("--greedy", "1", "--follow-up", "0", "--steps", "3", "--batch-tokens", "320"),
    *("--width", "8", "--kv-tokens", "4096"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    hf = tiny.model("llama", num_hidden_layers=6)
    return FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp("llama")))


@dataclass(frozen=True)
class Small:
    """model: folder of the target, in bfloat16; prompts: eight, repeated: what is held out was
    seen.
    """

    model: Path
    prompts: Path
    out: Path

    @property
    def draft(self) -> Path:
        return self.out / "draft"

    @property
    def questions(self) -> list[Prompt]:
        return read_prompts(self.prompts)[:8]

    def train(self, out: Path, *flags: str) -> dict:
        line = ["train", "--model", str(self.model), "--prompts", str(self.prompts)]
        assert main([*line, *TRAINING, "--out", str(out), *flags]) == 0
        return json.loads((out / "metrics.json").read_text())


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """The target and its prompts."""
    hf = tiny.model("llama", num_hidden_layers=6, max_position_embeddings=512)
    with torch.no_grad():
        hf.lm_head.weight.mul_(12)  # As sure of itself as a trained model.
    folder = tmp_path_factory.mktemp("small")
    words = TEXT.split()
    questions = [" ".join(words[i * j % len(words)] for j in range(1, 6)) for i in range(1, 9)]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in questions * 4]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, chats)))
    target = tiny.save_folder(hf, folder / "target", dtype=torch.bfloat16)
    return Small(target, folder / "prompts.jsonl", folder / "out")


@pytest.fixture(scope="session")
def small(untrained):
    made = untrained
    learning = "--epochs 40 --rate 2e-2 --draft-vocab 300 --ema 0.96 --check-every 60"
    made.train(made.out, *learning.split())
    return made
