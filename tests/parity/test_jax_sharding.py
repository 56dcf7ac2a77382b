"""Tensor parallel: 1, 2, 4 and 8 devices give the same tokens, by two sums per layer."""

import json
import os
import subprocess
import sys

import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from tests.drafters import assistants
from tests.models import tiny
from tests.parity.heads import RandomHead, Target
from tests.shape.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory, compiled):
    """What sharded_jax.py found, in a process that sees 8 devices."""
    folder = tmp_path_factory.mktemp("sharded")
    many = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    many["max_position_embeddings"] = 512
    tiny.save_folder(tiny.model("llama", **many), folder / "dense")
    tiny.save_folder(tiny.model("gpt_oss", num_local_experts=8, **many), folder / "experts")
    tiny.save_folder(tiny.model("gemma4_text"), folder / "shapes")
    tiny.save_folder(tiny.model("qwen3_5_text"), folder / "states")
    return found_by("sharded_jax", 8, folder, compiled)


def found_by(module, devices, *arguments):
    """What a program of this folder says, in a process that sees so many devices."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.parity.{module}", *map(str, arguments)],
        env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_any_number_of_shards_says_the_same(ran):
    dense, experts, shapes = ran["tokens"][:5], ran["tokens"][5:7], ran["tokens"][7:9]
    for each in (dense, experts, shapes, ran["tokens"][9:]):
        assert all(tokens == each[0] for tokens in each)
    assert dense[0] != experts[0]
    assert len(set(dense[0][0][30:])) > 5


def test_collectives_are_two_per_layer_and_one_at_each_end(ran):
    """Two layers; in a scan the compiled text holds one. Embedding: a sum; logits: gathered."""
    apart, scanned = {"all-gather": 1, "all-reduce": 5}, {"all-gather": 1, "all-reduce": 3}
    assert ran["collectives"][:9] == [
        {}, apart, apart, apart, scanned, {}, apart, {}, {"all-gather": 1, "all-reduce": 8},
    ]  # fmt: skip


def test_shards_that_cannot_be(ran):
    assert ran["refused"] == [
        "tp-size is 3, but the model's 4 attention heads do not divide by it; choose a number "
        "that divides them.",
        "tp-size is 16, but jax sees 8 devices here; lower it to 8 or less.",
    ]


@pytest.mark.parametrize("vocab", [160, 159])
def test_a_head_on_four_devices_drafts_the_same(tmp_path, vocab):
    """Its map of draft ids is the same on every shard, whether or not they divide."""
    many = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    hf = tiny.model("llama", max_position_embeddings=512, num_hidden_layers=6, **many)
    saved = tiny.save_folder(hf, tmp_path / "target")
    (tmp_path / "draft").mkdir()
    RandomHead(Target(FolderCheckpoint(saved)), tmp_path / "draft", {}, range(1, 2 * vocab + 1, 2))
    the_same_on(tmp_path, 4)


@pytest.mark.parametrize("columns", [48, 47])
def test_an_assistant_on_two_devices_drafts_the_same(tmp_path, columns):
    """It reads the target's pages, which are cut, whether or not its own columns divide."""
    hf = tiny.model("gemma4_text")
    tiny.save_folder(hf, tmp_path / "target")
    made = assistants.beside(hf, ordered=True, intermediate_size=columns)
    made.save_pretrained(tmp_path / "draft")
    the_same_on(tmp_path, 2)


def the_same_on(folder, shards):
    one, many = found_by("sharded_head", 4, folder, shards)
    assert one == many
    assert len({tuple(tokens[0]) for tokens, _ in one["trees"]}) > 2
