"""A small target and a head that knows its answers by heart, made by `forerun train` itself."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from forerun.bench.workload import Prompt, read_prompts
from forerun.cli import main
from tests.models import tiny

TEXT = "the quick brown fox jumps over lazy dog and then there is another one of them"
TRAINING = [
    *("--preset", "smoke", "--answers", "24", "--answer-tokens", "80", "--held-out", "8"),
    *("--greedy", "1", "--follow-up", "0", "--draft-vocab", "300", "--steps", "3"),
    *("--rate", "1e-2", "--width", "8", "--kv-tokens", "4096"),
]


@dataclass(frozen=True)
class Small:
    """model: folder of the target; prompts: twelve, twice over, so what is held out was seen."""

    model: Path
    prompts: Path
    out: Path

    @property
    def draft(self) -> Path:
        return self.out / "draft"

    @property
    def questions(self) -> list[Prompt]:
        return read_prompts(self.prompts)[:12]

    def train(self, out: Path, *flags: str) -> dict:
        line = ["train", "--model", str(self.model), "--prompts", str(self.prompts)]
        assert main([*line, *TRAINING, "--out", str(out), *flags]) == 0
        return json.loads((out / "metrics.json").read_text())


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    hf = tiny.model("llama", num_hidden_layers=6, max_position_embeddings=512)
    with torch.no_grad():
        hf.lm_head.weight.mul_(8)  # As sure of itself as a trained model.
    folder = tmp_path_factory.mktemp("small")
    words = TEXT.split()
    asked = [" ".join(words[i * j % len(words)] for j in range(1, 6)) for i in range(1, 13)]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in asked * 3]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, chats)))
    made = Small(tiny.save_folder(hf, folder / "target"), folder / "prompts.jsonl", folder / "out")
    made.train(made.out, "--epochs", "240", "--decay", "1", "--check-every", "200")
    return made
