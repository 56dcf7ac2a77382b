"""The executor around the compiled core: limits, refusals, memory, threads, idleness."""

import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.build.registry import EXECUTORS, choose_executor
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.mapped import Packed
from forerun.errors import ConfigError, EngineError, MemoryPlanError, ModelError
from forerun.executors.cpu import CpuExecutor, available, cache_bytes_per_token, native
from forerun.interface.plan import Outcome
from forerun.options.config import EngineConfig
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, chain_draft, limits, logits_in_chunks, scored
from tests.worlds.servers import run_program, wait_for


def test_what_it_says_of_itself(executor, checkpoint):
    made = executor(threads=2)
    facts = made.describe()
    assert facts["threads"] == 2 and facts["kernels"] == native.kernels()
    places = made.limits.pages * made.limits.page_size + made.limits.max_nodes
    assert (
        facts["cache_bytes"] == cache_bytes_per_token(checkpoint().architecture.caches, 2) * places
    )
    # Q8_0 is 34 bytes for 32 weights; what is beyond are norms and alignment.
    weights = checkpoint().architecture.parameters
    assert weights * 34 / 32 <= facts["weight_bytes"] < weights * 34 / 32 * 1.2


def test_it_tells_how_far_its_weights_are(tmp_path):
    progress = []
    folder = tiny.save_folder(tiny.model("llama"), tmp_path)
    config = EngineConfig(model=str(folder), kv_tokens=512, policy="fixed", threads=1)
    with closing(open_target(config, lambda *news: progress.append(news))) as target:
        weights = target.executor.describe()["weight_bytes"]
    assert {what for what, *_ in progress} == {"loading weights"}
    layers = FolderCheckpoint(folder).architecture.layers
    done = [so_far for _, so_far, _ in progress]
    assert len(done) > 4 * layers and done == sorted(set(done))
    assert {total for *_, total in progress} == {done[-1]} and 0.9 * weights < done[-1] <= weights


def test_no_logits_are_held_when_start_up_is_over(tmp_path):
    """Those of 64 nodes were, which it times; a step makes room for its own."""
    folder = tiny.save_folder(tiny.model("llama"), tmp_path)
    # A template's process has no room for what sanitizers take (tests/chaos/sanitize.py).
    (folder / "tokenizer_config.json").unlink()
    config = EngineConfig(model=str(folder), kv_tokens=512, policy="adaptive", threads=1)
    with closing(open_target(config)) as target:
        assert target.costs is not None and not target.executor._logits.size
        with Driver(target.executor) as driver:
            driver.open(0, [1, 2, 3])
            assert driver.step([Row(0)]).emitted(0)
        assert len(target.executor._logits) == 3


def test_models_it_cannot_run(checkpoint, executor):
    with pytest.raises(ModelError, match="multiple of 8, not 20"):
        executor(checkpoint("llama", None, num_attention_heads=4, head_dim=20))
    with pytest.raises(ModelError, match="latent that is a multiple of 8 wide, not 28"):
        executor(checkpoint("deepseek_v3", None, kv_lora_rank=28, qk_rope_head_dim=4))
    with pytest.raises(ModelError, match="planned for 10"):
        CpuExecutor(checkpoint(), limits(10))
    with pytest.raises(ConfigError, match="CPU kernels 'sse' do not run"):
        executor(kernels="sse")


def test_a_model_it_cannot_run_is_refused_in_one_sentence(checkpoint, executor):
    source = checkpoint("llama", None, num_attention_heads=4, head_dim=20)
    with pytest.raises(ModelError, match="needs a head size") as caught:
        executor(source)
    message = str(caught.value)
    assert message.endswith("; use the torch executor (--executor torch)")
    assert "\n" not in message
    with pytest.warns(UserWarning, match="needs a head size"):
        chosen = choose_executor(EngineConfig(), source.architecture)
    assert (chosen.executor, chosen.dtype) == ("torch", "float32")


def test_matrices_that_are_several_in_one_give_llamas_bits(executor, tmp_path):
    """Phi-3 is Llama's block with q, k, v and gate, up stored as one matrix each."""
    fused = tiny.model("phi3")
    plain = tiny.model("llama")
    weights = {name: torch.from_numpy(array) for name, array in tiny.weights(fused).items()}
    plain.load_state_dict(weights)
    prompt, results = np.arange(20, 60), []
    for name, hf in (("fused", fused), ("plain", plain)):
        made = executor(FolderCheckpoint(tiny.save_folder(hf, tmp_path / name)))
        results.append(logits_in_chunks(made, prompt))
    assert torch.equal(*results)


def test_a_window_is_no_end_of_its_context(checkpoint, executor):
    """Longer contexts than the shortest window run on the core and are planned for."""
    source = checkpoint("mistral", None, sliding_window=100)
    config = EngineConfig(model=str(source.path), context=300)
    assert EXECUTORS["cpu"].needs(config, source.architecture, source).context == 512
    assert choose_executor(config, source.architecture).executor == "cpu"
    assert executor(source, context=300).limits.context == 300


class Damaged:
    """A checkpoint one of whose matrices is shorter than its shape says."""

    def __init__(self, whole, culprit):
        self._whole, self._culprit = whole, culprit

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def packed(self, name):
        matrix = self._whole.packed(name)
        if name == self._culprit:
            matrix = Packed(matrix.kind, matrix.rows[:-1], matrix.columns)
        return matrix


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_damaged_tensor_is_named(executor, checkpoint, kind):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=name):
        executor(Damaged(checkpoint("llama", kind), name))


def test_a_cache_that_does_not_fit(checkpoint):
    with pytest.raises(MemoryPlanError, match="lower kv-tokens"):
        CpuExecutor(checkpoint(), limits(tiny.VOCAB, page_size=1 << 15, pages=1 << 30))


def test_bad_plans_are_refused_and_change_nothing(executor, random):
    tokens = random.integers(0, tiny.VOCAB, 20)
    made = executor()
    with Driver(made) as driver:
        driver.open(0, tokens)
        driver.step([Row(0, known=10)])
        plan, trees = driver.plan([Row(0, known=5, draft=chain_draft([1, 2]))])

        def logits():
            made.begin(plan, trees)
            return [made._logits_of(node).copy() for node in scored(made)]

        first = logits()
        assert len(first) == 7
        bad_trees = {
            "a token out of range": {"tokens": trees.tokens + tiny.VOCAB},
            "a parent that is not above": {"parents": trees.parents * 0},
            "a depth that is not": {"depth": trees.depth + 1},
        }
        above_root = {"parents": trees.parents.copy(), "depth": trees.depth.copy()}
        above_root["parents"][5], above_root["depth"][5:7] = 1, (2, 3)
        for message, change in (("not above its child", above_root), *bad_trees.items()):
            with pytest.raises(EngineError, match=message):
                made.begin(plan, replace(trees, **change))
        bad_plans = {
            "a page that does not exist": {"page_table": plan.page_table * 0 - 1},
            "a row longer than its pages": {"page_table": plan.page_table[:, :0]},
            "a row beyond the context": {"kv_len": plan.kv_len + 600},
            "a node beyond the context": {
                "kv_len": np.full(1, made.limits.context - 6, np.int32),
                "page_table": np.zeros((1, 40), np.int32),
            },
        }
        for message, change in bad_plans.items():
            with pytest.raises(EngineError, match=message):
                made.begin(replace(plan, **change), trees)
        assert np.array_equal(logits(), first)
        made.begin(plan, trees)
        with pytest.raises(EngineError, match="node 7 is none of those scored"):
            made._logits_of(7)


def test_row_starts_that_lie_are_refused(executor, random):
    """Bounds of a row are checked before what lies in them is read."""
    made = executor()
    with Driver(made) as driver:
        for slot in (0, 1):
            driver.open(slot, random.integers(0, tiny.VOCAB, 6), Sampling())
        plan, trees = driver.plan([Row(0, known=4), Row(1, known=4)])
        plan = replace(plan, samples=np.zeros(2, np.bool_))  # The host then counts no scores.
        assert trees.start.tolist() == [0, 4, 8]
        for start in ([0, 1 << 30, 8], [0, 9, 8], [0, -1, 8], [0, 0, 8], [0, 8, 8], [0, 4, 4]):
            with pytest.raises(EngineError, match="refused"):
                made.begin(plan, replace(trees, start=np.array(start, np.int32)))
        made.begin(plan, trees)


def test_nothing_is_committed_to_a_page_that_is_not_there(executor, random, monkeypatch):
    made = executor()
    with Driver(made) as driver:
        driver.open(0, random.integers(0, tiny.VOCAB, 20))
        plan, trees = driver.plan([Row(0, draft=chain_draft([1, 2]))])
        begun, one = made.begin(plan, trees), np.ones(1, np.int32)
        both = np.array([20, 21], np.int32)
        outcome = Outcome(3 * one, np.zeros((1, 3), np.int32), 2 * one, one == 1, accepted=both)
        monkeypatch.setattr(made._sampler, "finish", lambda *_, **__: outcome)
        for table in (plan.page_table * 0 - 1, plan.page_table * 0 + 96, plan.page_table[:, :1]):
            begun.plan = replace(plan, page_table=table)
            with pytest.raises(EngineError, match="a page that does not exist"):
                made.finish(begun)
        begun.plan = plan
        made.finish(begun)


@pytest.mark.parametrize("rows", ["0", "1", "01", "10"])
def test_accepted_draft_tokens_are_in_their_pages_on_host_and_device(executor, random, rows):
    """Slot 0 is decided by the core, slot 1 by the specification; slot 2 drafts nothing."""
    made, prompt = executor(), random.integers(0, tiny.VOCAB, 20)
    kinds = Sampling(temperature=0.0), Sampling(temperature=0.0, min_tokens=1)
    slots = list(map(int, rows))
    with Driver(made) as driver:
        for slot, kind in ((2, kinds[0]), *((slot, kinds[slot]) for slot in slots)):
            driver.open(slot, prompt, kind)
            driver.step([Row(slot)])
        text = [driver.step([Row(2)]).emitted(0)[0] for _ in range(5)]
        # Two of four draft tokens are right, below one that is not.
        draft = as_draft(
            [(text[0] + 1) % 256, text[0], text[1], (text[2] + 1) % 256], [-1, -1, 1, 2]
        )
        step = driver.step([Row(slot, draft=draft) for slot in slots])
        assert [step.emitted(row) for row in range(len(slots))] == [text[:3]] * len(slots)
        step = driver.step([Row(slot) for slot in slots])
        actual = [step.logits(row, 0).clone() for row in range(len(slots))]
        driver.close(2)
        driver.open(2, [*prompt, *driver.sequences[slots[0]].tokens[20:-1]], kinds[0])
        step = driver.step([Row(2)])
        wanted = step.logits(0, len(step.trees.tokens) - 1)
    assert all(torch.equal(logits, wanted) for logits in actual)


def test_a_step_larger_than_its_limit(executor, random):
    made = executor(max_nodes=8)
    with Driver(made) as driver:
        driver.open(0, random.integers(0, tiny.VOCAB, 9))
        with pytest.raises(EngineError, match="more nodes than the step may have"):
            driver.step([Row(0)])
        driver.step([Row(0, known=8)])


def awake():
    """Threads of this process beside this one that do not sleep."""
    states = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # It has ended meanwhile.
            states[int(task.name)] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    del states[threading.get_native_id()]
    return {thread for thread, state in states.items() if state != "S"}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_idle_threads_sleep(executor, random):
    made = executor(threads=4)
    with Driver(made) as driver:
        driver.open(0, random.integers(0, tiny.VOCAB, 50))
        driver.step([Row(0)])
        assert wait_for(lambda: not awake()), "another thread runs on with nothing to do"


def test_other_threads_and_float_settings_do_not_matter(executor, random):
    """Steps from changing threads, as an engine's and a test's, give the same bits."""
    tokens = random.integers(0, tiny.VOCAB, 30)
    assert np.array_equal(*(logits_in_chunks(executor(threads=2), tokens) for _ in range(2)))


def test_why_the_core_is_not_available(monkeypatch, tmp_path):
    assert available() is None
    native.load.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    assert "no C++ compiler" in available()
    (tmp_path / "missing.so").write_bytes(b"\x7fELF but not really")
    assert "cannot be loaded" in available()
    native.load.cache_clear()


START = """
import re
from pathlib import Path
from tests.counted import lines
from forerun.hub.catalog import open_model
from forerun.executors.cpu import CpuExecutor
from forerun.interface.executor import ExecutorLimits
def start():
    model = open_model("smollm2-135m")
    limits = ExecutorLimits(16, 1024, 64, 512, 8192, model.architecture.vocab)
    CpuExecutor(model.checkpoint, limits)
start()  # Modules that are imported when they are needed are imported.
assert "torch" not in __import__("sys").modules
status = Path("/proc/self/status").read_text()
print(lines(start), re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
"""


@pytest.mark.model
def test_the_default_model_is_ready_soon_and_small():
    """Lines of Python that run meanwhile, some 30 for each token of a vocabulary of 49,152."""
    done = run_program(START, timeout=120)
    count, kilobytes = map(int, done.stdout.split())
    assert count < 45 * 49_152
    assert kilobytes < 500_000
