"""Long prompt chunks: what they take of memory, and that they change no text."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bench.step_bench import random_draft
from forerun.build.memory import dense_needs, plan_memory
from forerun.build.shapes import SHAPES, RandomCheckpoint
from forerun.build.with_torch import ENTRY
from forerun.errors import EngineError
from forerun.executors.torch import TorchEagleModel, TorchExecutor, model_runner
from forerun.executors.torch.features import TorchFeatures
from forerun.interface.draft_model import DraftExtension
from forerun.interface.executor import ExecutorLimits
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.options.config import EngineConfig
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import batch
from tests.models import tiny
from tests.parity.driver import Driver, Row, chain_draft, limits
from tests.parity.interpreted import load
from tests.parity.launches import counted_kernels, kernels, tensors
from tests.parity.tape import Tape, on_tape
from tests.references.kernels import REFERENCE_KERNELS
from tests.speculative.worlds import plan_of

for name in ("attention", "choice", "layers", "round", "draft", "future"):
    load(f"triton.triton_{name}")  # Interpreted, for all tests of this process.

LLAMA = SHAPES["llama-3.1-8b"]
CHUNK = 8192
REPORTED = Sampling(temperature=0.0, prompt_logprobs=2, logprobs=2)


class PeakBytes(TorchDispatchMode):
    """Bytes of the tensors that operations make: the largest, and the most that live at a time."""

    def __init__(self):
        super().__init__()
        self._live, self.largest, self.most = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for made in (t.untyped_storage() for t in tensors(out)):
            if made._cdata not in given:
                self._live[made._cdata] = StorageWeakRef(made), made.nbytes()
                self.largest = max(self.largest, made.nbytes())
        self._live = {k: each for k, each in self._live.items() if not each[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return out


def large(monkeypatch, **changes):
    """An 8B in bfloat16 on a device that has shapes and no numbers, under our kernels."""
    monkeypatch.setattr(model_runner, "kernels_for", lambda device: kernels())
    monkeypatch.setattr(model_runner, "check_fits", lambda *_: None)
    numbers = {"page_size": 16, "pages": 2048, "slots": 64, "context": 32_768, "max_scored": 512}
    most = ExecutorLimits(**numbers | {"max_nodes": CHUNK} | changes, vocab=LLAMA.vocab)
    return TorchExecutor(RandomCheckpoint(LLAMA), most, "meta", "bfloat16", prompts="triton")


@pytest.mark.parametrize("behind", [0, CHUNK])
@pytest.mark.parametrize("sampling", [Sampling(), REPORTED], ids=["text", "log-probabilities"])
def test_a_chunk_of_8k_holds_no_logits_but_those_that_choose(monkeypatch, behind, sampling):
    made = large(monkeypatch)
    tokens = np.zeros(behind + CHUNK, np.int32)
    made.open(SlotInit(0, TokenText(tokens), len(tokens), sampling))
    plan = plan_of([0], [behind], [tokens[behind:]], [True])
    table = np.arange(len(tokens) // 16 + 1, dtype=np.int32)[None]
    plan = replace(plan, page_table=table)
    with counted_kernels(lambda *_: None), PeakBytes() as held:
        scores = made.begin(plan, batch(list(plan.known), plan_drafts(1)))
    assert scores.logits.shape == (1, LLAMA.vocab)
    assert len(scores.reported) == (CHUNK - 1 if sampling is REPORTED else 0)
    # The largest is a layer's gate and up, and not a row of logits for every token: 2.1 GB.
    assert held.largest == 2 * 2 * CHUNK * LLAMA.ffn < 2 * CHUNK * LLAMA.vocab
    config = EngineConfig(model="x", dtype="bfloat16", device="cuda", chunked_prefill_size=CHUNK)
    needs = ENTRY.needs(config, LLAMA, None)
    assert held.most < CHUNK * needs.per_node < 2.5e9


@pytest.mark.parametrize("behind", [0, 33])
def test_a_draft_head_reads_prompts_through_the_targets_kernels(checkpoint, monkeypatch, behind):
    """By their references: what follows each prompt is what the pass without kernels finds."""
    target = checkpoint("llama", num_hidden_layers=6)
    draft = random_draft(target.architecture, tiny.VOCAB)
    runs, launched = [], []

    def attend(queries, keys, values, geometry, spec=None, **others):
        launched.append(len(geometry.slots))
        return REFERENCE_KERNELS.attend(queries, keys, values, geometry, spec, **others)

    for parts in (None, replace(REFERENCE_KERNELS, attend=attend)):
        monkeypatch.setattr(model_runner, "kernels_for", lambda device, parts=parts: parts)
        made = TorchExecutor(target, limits(tiny.VOCAB))
        head = TorchEagleModel(made, target, draft)
        launched.clear()
        for begin, length in ((0, behind), (behind, 70)):
            if length:
                last = head.extend(*permanent(head, begin, length))
        runs.append(last)
    assert launched == [2 * length for length in (behind, 70) if length]
    np.testing.assert_array_equal(runs[0].ids, runs[1].ids)
    np.testing.assert_allclose(runs[0].log_probs, runs[1].log_probs, atol=1e-5)


def permanent(head, begin, length):
    """Two rows that became longer by so many tokens, and features of these."""
    random = np.random.default_rng(begin)
    tokens = random.integers(8, tiny.VOCAB, 2 * length).astype(np.int32)
    extension = DraftExtension(
        tokens=tokens,
        next_tokens=np.roll(tokens, -1),
        start=np.array([0, length, 2 * length], np.int32),
        kv_len=np.full(2, begin, np.int32),
        slots=np.arange(2, dtype=np.int32),
        pages=np.arange(16, dtype=np.int32)[::-1].reshape(2, 8).copy(),
        scored=np.array([length - 1, 2 * length - 1], np.int32),
        candidates=4,
    )
    width = len(head.traits.features.layers) * 64
    values = torch.from_numpy(random.normal(size=(2 * length, width)).astype(np.float16)).float()
    return extension, TorchFeatures(values, np.arange(2 * length))


def plan_drafts(rows):
    return [chain_draft([])] * rows


def test_the_cache_has_scratch_for_draft_tokens_and_not_for_prompts(monkeypatch):
    small, large_chunk = (large(monkeypatch, max_nodes=nodes) for nodes in (512, CHUNK))
    assert small.describe()["cache_bytes"] == large_chunk.describe()["cache_bytes"]


@pytest.mark.parametrize("chunk", [3, 50, 300])
@pytest.mark.parametrize("scored", [4, 7, None])
def test_texts_and_log_probabilities_are_those_of_any_chunks(checkpoint, chunk, scored):
    """Pieces of as many rows as may choose a token: bit by bit what one piece gives."""
    prompt = np.random.default_rng(1).integers(8, tiny.VOCAB, 90).tolist()
    runs = []
    for most, size in ((scored, chunk), (None, 90)):
        made = TorchExecutor(checkpoint("qwen2"), limits(tiny.VOCAB, slots=2, max_scored=most))
        reports = []
        with Driver(made) as driver:
            for slot in range(2):
                driver.open(slot, prompt[slot:], REPORTED)
            while driver.sequences[0].kv_len < 95:
                rows = [Row(slot, known=size) for slot in range(2)]
                outcome = driver.step(rows).outcome
                reports += [*outcome.prompt_logprobs[0], *outcome.logprobs[0]]
            text = driver.sequences[0].tokens
            draft = chain_draft([text[-1], 5, 6])
            reports += driver.step([Row(0, draft=draft)]).outcome.logprobs[0]
            runs.append((text[:96], reports[:96]))
    assert runs[0] == runs[1]


def test_more_nodes_than_are_scored_are_refused(checkpoint):
    made = TorchExecutor(checkpoint("qwen2"), limits(tiny.VOCAB, max_scored=4))
    with Driver(made) as driver:
        driver.open(0, range(10, 40))
        driver.step([Row(0, draft=chain_draft([5, 6, 7]))])
        with pytest.raises(EngineError, match="5 nodes choose a token; at most 4 fit"):
            driver.step([Row(0, draft=chain_draft([5, 6, 7, 8]))])


@pytest.mark.parametrize("scored", [8, None])
def test_rounds_hold_logits_of_what_is_scored(checkpoint, monkeypatch, scored):
    tape = Tape()
    on_tape(monkeypatch, tape)
    most = limits(tiny.VOCAB, max_scored=scored)
    made = TorchExecutor(checkpoint("qwen2"), most).capture()
    assert made.rounds.runner.logits.shape == (scored or 384, tiny.VOCAB)
    prompt = np.random.default_rng(2).integers(8, tiny.VOCAB, 120)
    texts = []
    for each in (made, TorchExecutor(checkpoint("qwen2"), most)):
        with Driver(each) as driver:
            for slot in range(2):
                driver.open(slot, prompt[slot:], Sampling(temperature=0.0))
            for _ in range(6):
                step = [Row(slot, draft=chain_draft([5, 6, 7])) for slot in range(2)]
                driver.step(step)
            texts.append([driver.sequences[slot].tokens for slot in range(2)])
    assert tape.replays > 2
    assert texts[0] == texts[1]
    size = made.rounds.size_of(*driver_plan(made, prompt, 9))
    assert (size is None) == (scored == 8)


def driver_plan(made, prompt, drafted):
    with Driver(made) as driver:
        driver.open(0, prompt)
        driver.sequences[0].kv_len = len(prompt) - 1
        return driver.plan([Row(0, draft=chain_draft([5] * drafted))])


GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "chunk"), [(22, 2048), (39, 4096), (59, 4096), (79, 8192), (139, 8192)]
)
def test_a_gpu_is_planned_by_its_memory(monkeypatch, total, chunk):
    """From what the device reports: SGLang's chunk, and 88 % of what is free."""
    free = int((total - 0.5) * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total * GIB))
    config = EngineConfig(model="x", device="cuda", executor="torch", dtype="bfloat16")
    assert ENTRY.prefill_chunk(config, None) == chunk
    assert ENTRY.prefill_chunk(config, total * GIB) == chunk
    config = replace(config, chunked_prefill_size=chunk)
    needs = ENTRY.needs(config, LLAMA, None)
    assert needs.weights == 2 * LLAMA.parameters == 16_060_522_496
    assert needs.per_token == 2 * 32 * 8 * 128 * 2
    assert needs.weights == dense_needs(config, LLAMA, None).weights
    plan = plan_memory(config, needs, ENTRY.free_memory(config), fill=True)
    assert (plan.limits.max_nodes, plan.limits.scored_nodes) == (chunk, 512)
    page = 16 * needs.per_token
    kept = 8 * 65 * LLAMA.vocab
    assert plan.scratch == chunk * needs.per_node + 512 * 4 * LLAMA.vocab + kept
    room = int(0.88 * free) - needs.weights - plan.scratch - plan.graphs
    assert plan.limits.pages == room // page
    assert 0 <= 0.88 * free - sum(plan.describe().values()) < page + 1


def test_the_cpu_keeps_its_chunk():
    assert ENTRY.prefill_chunk(EngineConfig(model="x", device="cpu"), None) == 512
