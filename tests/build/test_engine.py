import gc
import json
import math
import weakref
from dataclasses import fields, replace

import pytest

from forerun.build.engine import encode_chat, load
from forerun.build.registry import EXECUTORS
from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.client.llm import LLM
from forerun.errors import ConfigError, EngineError, ModelError, RequestError
from forerun.executors import cpu
from forerun.interface.executor import ExecutorLimits
from forerun.machine import collected_later, trim_memory
from forerun.measure.prove import Trial, prove
from forerun.measure.workload import read_prompts, spread
from forerun.options.config import EngineConfig
from tests.cli.toys import toy_loaded, toy_target
from tests.models import tiny
from tests.worlds.servers import run_program

native = pytest.mark.skipif(bool(cpu.available()), reason="no compiled core on this machine")


def test_loading_resolves_everything_into_new_values():
    given = EngineConfig(model="toy")
    with toy_loaded(given) as loaded:
        chosen = loaded.config
        assert given == EngineConfig(model="toy")
        undecided = {each.name for each in fields(chosen) if getattr(chosen, each.name) == "auto"}
        assert undecided == {"prefill_attention_backend"}, "what the device decides stays as it is"
        assert chosen.executor == "toy" and chosen.context == loaded.context
        assert chosen.kv_tokens >= 64 * 256
        assert loaded.info["memory"]["cache"] > 0
        json.dumps(loaded.info)


def test_llm_in_a_few_lines():
    with LLM("toy", kv_tokens=4096) as llm:
        one, two = llm.generate(["Hi", "abc"], max_tokens=10)
        (alone,) = llm.generate("abc", max_tokens=10)
        assert two.tokens == alone.tokens != one.tokens
        assert len(llm.generate("abc", max_tokens=3, n=3, temperature=1.0)) == 3
        messages = [{"role": "user", "content": "Hello"}]
        text = "".join(delta.text for delta in llm.stream(messages, max_tokens=20))
        assert text == llm.chat(messages, max_tokens=20).text
        for wrong in (
            {"temperature": -1}, {"top_p": "hot"}, {"top_k": 2.5}, {"seed": 1.5},
            {"max_tokens": "nine"}, {"n": 1.5}, {"stop": ["a", 5]}, {"min_p": None},
        ):  # fmt: skip
            with pytest.raises(RequestError, match=next(iter(wrong))):
                llm.generate("Hi", **wrong)
        with pytest.raises(RequestError, match="takes messages"):
            llm.chat("Hello")
        with pytest.raises(RequestError, match="n is 1000000000"):
            llm.generate("Hi", n=10**9)
    llm.close()
    with pytest.raises(EngineError, match="was shut down"):
        llm.chat(messages)


def test_llm_loses_no_choice():
    messages = [{"role": "user", "content": "Hello"}]
    with LLM("toy", kv_tokens=4096) as llm:
        several = llm.choices(messages, max_tokens=9, n=3, temperature=1.0)
        assert [item.index for item in several] == [0, 1, 2]
        assert len({item.text for item in several}) == 3
        assert llm.chat(messages, max_tokens=9, temperature=1.0).text == several[0].text
        with pytest.raises(RequestError, match="choices"):
            llm.chat(messages, n=3)
        texts = ["", "", ""]
        for delta in llm.stream(messages, max_tokens=9, n=3, temperature=1.0):
            texts[delta.index] += delta.text
        assert texts == [item.text for item in several]


def test_a_model_without_a_chat_template_says_what_to_do():
    with toy_target() as target, pytest.raises(ModelError, match="--raw"):
        encode_chat(replace(target, chat=None), [{"role": "user", "content": "Hi"}])


def test_the_toy_runs_in_one_process():
    with pytest.raises(ConfigError, match="tp-size is 2, but the toy model runs in one process"):
        EngineConfig(model="toy", tp_size=2)


def test_a_model_on_this_machine_needs_neither_torch_nor_the_hubs_library():
    """Whose client takes a fifth of the time that all imports take."""
    program = (
        "import sys; from forerun.client.llm import LLM\n"
        "with LLM('toy', kv_tokens=1024) as llm: llm.generate('Hi', max_tokens=3)\n"
        "heavy = ('torch', 'transformers', 'huggingface_hub.errors', 'httpx', 'httpx2')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = run_program(program)
    assert done.stdout.strip() == "[]", done.stderr


def test_cuda_without_a_device_is_a_configuration_error():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="no CUDA device"):
        load(EngineConfig(device="cuda"))


@pytest.fixture(scope="module")
def default_model():
    target = open_target(EngineConfig(policy="fixed", max_sequences=8, kv_tokens=8192))
    yield target
    target.close()


@pytest.mark.slow
@native
@pytest.mark.model
def test_the_default_model_is_proved_on_a_few_prompts(default_model):
    trial = Trial(tuple(spread(read_prompts(), 4)), tokens=24, group=4)
    proof = prove(default_model, default_model.config, trial)
    assert proof.holds, proof
    # A drafter that never drafts right would be invisible in the text.
    greedy = [run for run in proof.runs if run.speculation != "OFF" and run.temperature == 0.0]
    assert all(run.tokens_per_step > 1.05 for run in greedy)


@native
@pytest.mark.model
def test_the_default_model_is_small_in_memory_and_knows_paris():
    program = (
        "from pathlib import Path; from forerun.client.llm import LLM\n"
        "with LLM() as llm:\n"
        "    done = llm.generate(['The sky is'] * 16, max_tokens=32, temperature=1.0)\n"
        "    (answer,) = llm.generate('The capital of France is', max_tokens=4)\n"
        "    print(Path('/proc/self/status').read_text().split('VmRSS:')[1].split()[0])\n"
        "    print(answer.text)\n"
    )
    done = run_program(program)
    used, text = done.stdout.split("\n", 1)
    assert int(used) < 500_000  # kB
    assert "Paris" in text


@pytest.mark.parametrize("collects", [True, False])
def test_cycles_are_collected_later_only_where_they_were(collects):
    try:
        (gc.enable if collects else gc.disable)()
        with collected_later():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_what_is_loaded_is_searched_for_garbage_once_and_again_when_more_is_loaded():
    loaded = [[]]
    loaded[0].append(loaded)
    alive = weakref.ref(each := type("Each", (), {})())
    each.itself = each
    try:
        trim_memory(cycles=True)
        assert gc.get_freeze_count()
        del each
        gc.collect()
        assert alive()
        trim_memory(cycles=True)
        assert not alive() and loaded[0][0] is loaded
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("executor", ["torch", "jax"])
def test_loading_tells_how_far_the_weights_are_read(executor, tmp_path):
    pytest.importorskip(executor)
    folder = tiny.save_folder(tiny.model("llama"), tmp_path)
    progress, checkpoint = [], FolderCheckpoint(folder)
    config = EngineConfig(model=str(folder), executor=executor, dtype="float32", device="cpu")
    limits = ExecutorLimits(16, 8, 1, 16, 64, checkpoint.architecture.vocab)
    EXECUTORS[executor].build(
        config, checkpoint, limits, lambda *news: progress.append(news)
    ).shutdown()
    total = 4 * sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    done = [so_far for what, so_far, _ in progress if what == "loading weights"]
    assert len(done) == len(checkpoint.names()) and done == sorted(set(done))
    assert done[-1] == total
    assert {of for what, _, of in progress if what == "loading weights"} == {total}
