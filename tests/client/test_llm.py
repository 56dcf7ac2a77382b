"""`from forerun import LLM, AsyncLLM`."""

import asyncio
from dataclasses import fields
from inspect import signature

import numpy as np
import pytest
from starlette.testclient import TestClient

import forerun
from forerun import LLM, AsyncLLM
from forerun.cli.main import main
from forerun.client.completion import make_request
from forerun.client.options import RANGES, EngineArgs, SamplingOptions
from forerun.engine.request import Speculation
from forerun.errors import EngineError, RequestError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app
from forerun.speculative.sampling import Sampling
from tests.worlds.servers import run_program

CHAT = [{"role": "user", "content": "Hello"}]


def test_typed_options_are_the_real_ones():
    assert EngineArgs.__annotations__.keys() == {
        item.name for item in fields(EngineConfig) if item.name != "model"
    }
    named = {
        p.name for p in signature(make_request).parameters.values() if p.kind == p.KEYWORD_ONLY
    }
    sampling = {item.name for item in fields(Sampling)} - {"stop_tokens"}
    assert SamplingOptions.__annotations__.keys() == named | sampling | {
        "lora_name",
        "stop",
        "stop_token_ids",
        "include_stop",
    }


def test_the_package_loads_nothing_before_use():
    program = "import sys, forerun; print('numpy' in sys.modules, forerun.LLM.__name__)"
    done = run_program(program)
    assert done.stdout.split() == ["False", "LLM"]
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = forerun.Llm


def test_answers_are_those_of_llm():
    async def run():
        async with AsyncLLM("toy", kv_tokens=4096) as llm:
            one, two = await asyncio.gather(
                llm.chat(CHAT, max_tokens=20), llm.generate(["Hi", "abc"], max_tokens=9)
            )
            text = "".join([delta.text async for delta in llm.stream(CHAT, max_tokens=20)])
            several = await llm.choices(CHAT, max_tokens=9, n=3, temperature=1.0)
            with pytest.raises(RequestError, match="choices"):
                await llm.chat(CHAT, n=2)
            with pytest.raises(RequestError, match="temprature"):
                await llm.chat(CHAT, temprature=1)
            return one.text, [item.text for item in two], text, [item.text for item in several]

    answers = asyncio.run(run())
    with LLM("toy", kv_tokens=4096) as llm:
        assert answers == (
            llm.chat(CHAT, max_tokens=20).text,
            [item.text for item in llm.generate(["Hi", "abc"], max_tokens=9)],
            answers[0],
            [item.text for item in llm.choices(CHAT, max_tokens=9, n=3, temperature=1.0)],
        )


def test_a_call_that_is_cancelled_ends_its_request():
    async def cancelled():
        async with AsyncLLM("toy", kv_tokens=4096) as llm:
            stream = llm.stream(CHAT, max_tokens=3000, ignore_eos=True)
            await anext(stream)
            await stream.aclose()
            return await asyncio.to_thread(llm._llm.loaded.engine.drain, 10.0)

    assert asyncio.run(cancelled()) is True


def test_a_call_that_fails_ends_its_other_requests(monkeypatch):
    """One prompt was refused, and the others were written to their ends in vain."""
    ended = []

    async def choices(self, prompt, **options):
        if prompt == "wrong":
            raise RequestError("It is refused.", "prompt")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(prompt)

    async def failed():
        with pytest.raises(RequestError, match="refused"):
            await AsyncLLM("toy").generate(["one", "wrong", "two"])
        return [*ended]

    monkeypatch.setattr(AsyncLLM, "choices", choices)
    assert asyncio.run(failed()) == ["one", "two"]


def test_a_model_that_was_not_loaded():
    with pytest.raises(EngineError, match="async with"):
        asyncio.run(AsyncLLM("toy").chat(CHAT))


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_options(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--speculative-algorithm" in script and "serve" in script


@pytest.mark.parametrize("name", RANGES)
def test_numbers_are_taken_where_they_are_over_http(name):
    """Just inside and just outside, of Python and of a server."""
    low, high = RANGES[name]
    whole = isinstance(low, int)
    step = 1 if whole else 0.01
    with LLM("toy") as llm, TestClient(create_app(llm.loaded, ServeSettings())) as client:
        for value in (low - step, *((high + step,) if high <= 2 else ())):
            with pytest.raises(RequestError, match=f"{name} is {value}") as refused:
                llm.choices("Hi", **{name: value})
            assert refused.value.field == name
            body = {"prompt": "Hi", name: value}
            if name == "max_tokens":  # -1 is everything there.
                continue
            assert client.post("/v1/completions", json=body).status_code == 400
        for value in (low + step, low + 2 * step):
            options = {"max_tokens": 2, "temperature": 0.5} | {name: value}
            assert len(llm.choices("Hi", **options)) == options.get("n", 1)
            body = {"prompt": "Hi", **options}
            assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": "many"},
        {"temperature": None},
        {"temperature": float("nan")},
        {"stop": 5},
        {"stop_token_ids": "abc"},
        {"seed": 1.5},
        {"n": "0"},
        {"logprobs": True},
        {"grammar": "root ::= x"},
        {"speculation": False},
        {"logit_bias": ((1,),)},
    ],
)
def test_options_of_another_type_are_refused_by_name(option):
    (name,) = option
    with LLM("toy") as llm, pytest.raises(RequestError, match=name) as refused:
        llm.generate("Hi", **option)
    assert refused.value.field == name


def test_options_that_spell_their_type_otherwise():
    plain = {"max_tokens": 9, "temperature": 0.5, "stop_token_ids": [1, 2], "n": 2, "seed": 7}
    other = {
        "max_tokens": "9",
        "temperature": np.float32(0.5),
        "stop_token_ids": np.array([1, 2]),
        "n": np.int64(2),
        "seed": 7.0,
        "stop": None,
        "speculation": Speculation(trace=True),
    }

    async def run():
        async with AsyncLLM("toy", kv_tokens="4096") as llm:
            return await llm.choices("Hi", **other)

    with LLM("toy", kv_tokens=4096) as llm:
        expected = [item.text for item in llm.choices("Hi", **plain)]
        assert [item.text for item in llm.choices("Hi", **other)] == expected
    assert [item.text for item in asyncio.run(run())] == expected
