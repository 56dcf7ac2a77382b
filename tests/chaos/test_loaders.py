"""Model and draft folders that were damaged in a structured way: a clear error, or they run.

Whatever opens must also run: three tokens on the compiled core, so that what a loader lets through
cannot crash later. Nothing may hang (processor time) or take much memory.
"""

import json
import random
import resource
import shutil

import numpy as np
import pytest

from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.checkpoints.gguf.header import read_header
from forerun.drafts.eagle_folder import open_draft
from forerun.drafts.ngram_counts import write_ngrams
from forerun.drafts.ngram_table import FILE, read_ngram_table
from forerun.errors import ForerunError
from forerun.options.config import EngineConfig
from tests.chaos.agents import ask
from tests.chaos.mutations import damaged, mutated, safetensors_parts, safetensors_whole
from tests.fuzz.bounded import bounded
from tests.models import tiny
from tests.models.test_ngram_table import VOCAB, counted
from tests.train.exports import export_like
from tests.train.test_export import IDS, TARGET, trained
from tests.worlds.real_server import NIGHTLY

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
TIMES = 20 if NIGHTLY else 1
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")
MEGABYTES = 400
"""What a whole round may add to the process: each load alone is a few."""


@pytest.fixture(autouse=True)
def memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < MEGABYTES * 1024, f"{(after - before) / 1024:.0f} MB"


def runs(path, **changes):
    """Open a model and let it say three tokens. None, or the error that refused it."""
    with bounded(loops=600, megabytes=None) as verdict:
        try:
            config = EngineConfig(
                model=str(path), executor="cpu", context=64, kv_tokens=128, max_sequences=2,
                chunked_prefill_size=16, policy="fixed", threads=1, **changes,
            )  # fmt: skip
            target = open_target(config)
        except ForerunError as error:
            assert 0 < len(str(error)) < 5000
            return error
        try:
            engine = make_engine(target, target.config)
            prompt = target.tokenizer.encode("Hi there")[:20]
            if len(prompt):
                ask(engine, [(tuple(prompt.tolist()), {"max_tokens": 3})])
        except ForerunError as error:
            return error
        finally:
            target.close()
    return verdict.error


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        hf = tiny.model(family, hidden_size=32, head_dim=8, intermediate_size=32)
        made[family] = tiny.save_folder(hf, tmp_path_factory.mktemp(family), shards=2)
    return made


def test_the_folders_are_fine(folders):
    opened = [family for family in FAMILIES if runs(folders[family]) is None]
    assert {"llama", "qwen3"} <= set(opened), opened


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
     "model.safetensors.index.json"],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_json_files(folders, family, name, tmp_path):
    random_ = random.Random(f"{family}{name}")
    folder = tmp_path / "model"
    shutil.copytree(folders[family], folder)
    value = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    if name == "tokenizer.json":
        value["model"]["vocab"] = dict(list(value["model"]["vocab"].items())[:40])
    refused = 0
    for _ in range(60 * TIMES):
        (folder / name).write_text(json.dumps(mutated(value, random_)))
        refused += runs(folder) is not None
    assert refused or name in ("generation_config.json", "tokenizer_config.json")


def test_safetensors(folders, tmp_path):
    random_ = random.Random(5)
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) >= 2
    for number in range(150 * TIMES):
        path = shards[number % len(shards)]
        whole = path.read_bytes()
        header, data = safetensors_parts(whole)
        spoilt = (
            safetensors_whole(mutated(header, random_), data)
            if random_.random() < 0.7
            else damaged(whole, random_)
        )
        path.write_bytes(spoilt)
        runs(folder)
        path.write_bytes(whole)
    assert runs(folder) is None


def test_gguf(tmp_path):
    """Damage in header and metadata; what opens must run."""
    hf = tiny.model("llama", hidden_size=32, head_dim=8, intermediate_size=32)
    path = tiny.write_gguf(hf, tmp_path / "model.gguf", "Q8_0")
    whole, random_ = path.read_bytes(), random.Random(6)
    assert runs(path) is None
    head = min(stored.start for stored in read_header(path).tensors.values())
    for _ in range(250 * TIMES):
        path.write_bytes(damaged(whole[:head], random_) + whole[head:])
        runs(path)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    export_like(trained(), IDS, folder, full=True)
    return folder


def test_draft_folders(draft, tmp_path):
    random_ = random.Random(7)
    folder = tmp_path / "draft"
    shutil.copytree(draft, folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    value, whole = json.loads(config.read_text()), weights.read_bytes()
    refused = 0
    for number in range(400 * TIMES):
        if number % 2:
            config.write_text(json.dumps(mutated(value, random_)))
        else:
            header, data = safetensors_parts(whole)
            weights.write_bytes(safetensors_whole(mutated(header, random_), data))
        with bounded(loops=150, megabytes=64) as verdict:
            open_draft(folder, TARGET)
        refused += verdict.error is not None
        config.write_text(json.dumps(value))
        weights.write_bytes(whole)
    assert refused > 100 * TIMES


def test_ngram_tables(tmp_path):
    random_ = random.Random(8)
    chats = [np.random.default_rng(n).integers(0, VOCAB, 40).tolist() for n in range(5)]
    write_ngrams(counted(chats), tmp_path)
    path = tmp_path / FILE
    whole = path.read_bytes()
    refused = 0
    for number in range(400 * TIMES):
        header, data = safetensors_parts(whole)
        if number % 2:
            path.write_bytes(safetensors_whole(mutated(header, random_), data))
        else:
            path.write_bytes(safetensors_whole(header, damaged(data, random_)[: len(data)]))
        with bounded(loops=150, megabytes=64) as verdict:
            table = read_ngram_table(path, VOCAB)
            for token in range(VOCAB):
                table.follow(np.array([token], np.int32))
        refused += verdict.error is not None
    assert refused > 50 * TIMES
