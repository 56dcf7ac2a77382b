"""The command line of SGL-JAX's page on speculative decoding, on small models of the same names."""

import os
import re
import sys
from contextlib import contextmanager

import httpx
import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from tests.models import tiny
from tests.parity.heads import RandomHead, Target
from tests.shape.tree import ROOT
from tests.worlds.servers import started

TARGET, DRAFT = "Qwen/Qwen3-32B", "AngelSlim/Qwen3-32B_eagle3"
PAGE = f"""
  --model-path {TARGET} --device=tpu --mem-fraction-static=0.8 --max-prefill-tokens=4096
  --max-running-requests=16 --decode-log-interval=1 --dtype=bfloat16 --host 127.0.0.1
  --disable-overlap-schedule --tp-size 4 --speculative-algorithm EAGLE3
  --speculative-draft-model-path {DRAFT}
  --page-size 64 --attention-backend=fa --trust-remote-code --speculative-eagle-topk 1
  --speculative-num-steps 3
  --speculative-num-draft-tokens 4
"""
"""As printed there, but for the revision and where it listens."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with both models under their names."""
    folder = tmp_path_factory.mktemp("models")
    many = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    save_models(folder, max_position_embeddings=512, num_hidden_layers=6, **many)
    return folder


def save_models(folder, **sizes):
    """Save a random target with these sizes and an EAGLE-3 head, under their names."""
    (folder / DRAFT).mkdir(parents=True)
    saved = tiny.save_folder(tiny.model("qwen3", **sizes), folder / TARGET)
    RandomHead(Target(FolderCheckpoint(saved)), folder / DRAFT, {})


@contextmanager
def serving(place, flags, program="tests.parity.sgl_jax", cache=None):
    """The address of a server with these flags, once it is ready. cache: its cache directory."""
    forced = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(ROOT)}
    # In one process, which is where devices are pretended.
    line = [sys.executable, "-m", program, "serve", *flags, "--no-engine-process"]
    environment = os.environ | forced | {"XDG_CACHE_HOME": str(cache or place / "cache")}
    line += ["--kv-tokens", "4096", "--policy", "fixed"]
    with started(line, place / "log", cwd=place, env=environment) as server:
        yield server.url


def completion(url, **changes):
    body = {"prompt": "the quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/completions", json=body | changes, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_pages_command_line_serves(place):
    with serving(place, PAGE.split()) as url:
        assert completion(url)["usage"]["completion_tokens"] == 24
        info = httpx.get(url.removesuffix("/v1") + "/server_info", timeout=600).json()
    config, executor = info["config"], info["executor"]
    assert (config["device"], config["executor"], config["tp_size"]) == ("tpu", "jax", 4)
    assert (config["page_size"], config["max_sequences"], config["chunked_prefill_size"]) == (
        64,
        16,
        4096,
    )
    shape = ("speculative_num_steps", "speculative_num_draft_tokens", "speculative_eagle_topk")
    assert [config[name] for name in shape] == [3, 4, 1]
    assert executor["devices"] == 4 and executor["dtype"] == "bfloat16"


def test_overlap_needs_no_disabling(place):
    """The same text in float32, with steps that were begun before the one before was read."""
    exact = PAGE.replace("bfloat16", "float32")
    answers = []
    for flags in (exact, exact.replace("--disable-overlap-schedule", "--overlap")):
        with serving(place, flags.split()) as url:
            answers.append([completion(url, temperature=t, seed=5)["choices"] for t in (0, 0.8)])
            metrics = httpx.get(url.removesuffix("/v1") + "/metrics", timeout=600).text
    assert answers[0] == answers[1]
    carried = re.search(r"^forerun:carried_steps\S* (\S+)$", metrics, re.MULTILINE)
    assert carried and float(carried[1]) > 0


def test_without_the_draft_it_serves_plainly(place):
    """What the page promises, and says so."""
    flags = PAGE.replace(DRAFT, "AngelSlim/missing").split()
    with serving(place, [*flags, "--draft-on-error", "disable"]) as url:
        assert completion(url)["usage"]["completion_tokens"] == 24
        info = httpx.get(url.removesuffix("/v1") + "/server_info", timeout=600).json()
    assert info["config"]["speculative_algorithm"] == "OFF"
