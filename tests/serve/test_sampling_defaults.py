"""What a model recommends holds where a request sets nothing: of run, chat and serve alike."""

import json
import shutil
from contextlib import closing
from dataclasses import fields

import pytest

from forerun.build.engine import load
from forerun.errors import ConfigError, ModelError
from forerun.hub.catalog import RECOMMENDED, open_model
from forerun.options.config import EngineConfig, SamplingConfig, ServeSettings
from forerun.options.sampling_params import NEUTRAL, RANGES
from forerun.serve.bodies.fields import read
from forerun.serve.bodies.prepare import chat_generation, completion_generation
from forerun.serve.bodies.schema import ChatBody, CompletionBody
from forerun.serve.dialects.llama.schema import NativeBody
from tests.models import tiny

GENERATION = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny.save_folder(tiny.model("llama"), tmp_path_factory.mktemp("model"))
    (path / "generation_config.json").write_text(json.dumps(GENERATION))
    return path


def samplings(folder, how="model", override=()):
    options = {"sampling_defaults": how, "sampling_override": override}
    config = EngineConfig(model=str(folder), kv_tokens=512, executor="torch", **options)
    with closing(load(config)) as loaded:
        plain = {"prompt": "the quick", "top_k": 0}
        chat = {"messages": [{"role": "user", "content": "the quick"}], "temperature": 0}
        made = [
            completion_generation(read(CompletionBody, plain), loaded, ServeSettings()),
            chat_generation(read(ChatBody, chat), loaded, ServeSettings()),
        ]
        served = [one.requests[0].sampling for one in made]
        assert loaded.info["sampling_defaults"].keys() >= NEUTRAL.keys()
        return served, SamplingConfig(min_p=0.1).options(loaded.target.sampling)


def test_what_the_model_says(folder):
    (plain, chat), sampling = samplings(folder)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.6, 0.95, 0)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.min_p) == (0.0, 0.95, 20, 0.0)
    assert (sampling["temperature"], sampling["top_k"], sampling["min_p"]) == (0.6, 20, 0.1)
    assert sampling["repetition_penalty"] == 1.0


def test_or_nothing(folder):
    (plain, chat), sampling = samplings(folder, "openai")
    assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, 0)
    assert (chat.temperature, chat.top_k) == (0.0, 0)
    assert sampling == NEUTRAL | {"min_p": 0.1, "max_tokens": 512, "seed": 0, "stop": (),
                               "ignore_eos": False}  # fmt: skip


def test_what_an_option_overrides_holds_for_requests_that_leave_it_out(folder):
    pairs = ("temperature=0.3", "top_k=5", "presence-penalty=1.5")
    (plain, chat), sampling = samplings(folder, override=pairs)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.3, 0.95, 0)
    assert (chat.temperature, chat.top_k, chat.presence_penalty) == (0.0, 5, 1.5)
    assert (sampling["temperature"], sampling["top_k"]) == (0.3, 5)
    assert plain.seed != chat.seed
    (plain, chat), _ = samplings(folder, override=("seed=3407",))
    assert (plain.seed, chat.seed) == (3407, 3407)


def test_the_longest_answer_of_requests_without_a_limit_is_an_option(folder):
    config = EngineConfig(
        model=str(folder), kv_tokens=512, executor="torch", sampling_override=("max_tokens=20",)
    )
    with closing(load(config)) as loaded:
        for more, most in (({}, 20), ({"max_tokens": 30}, 30)):
            plain = read(CompletionBody, {"prompt": "the quick", **more})
            native = read(NativeBody, {"prompt": "the quick", **more})
            chat = read(ChatBody, {"messages": [{"role": "user", "content": "the"}], **more})
            for made in (
                completion_generation(plain, loaded, ServeSettings()),
                completion_generation(
                    native.plain(("the quick",), loaded.sampling), loaded, ServeSettings()
                ),
                chat_generation(chat, loaded, ServeSettings()),
            ):
                assert made.requests[0].stopping.max_tokens == most


@pytest.mark.parametrize(
    "pair", ["warm=1", "temperature", "temperature=x", "temperature=3", "top_k=1.5", "top_p=nan"]
)
def test_an_override_that_is_none_is_named(pair):
    with pytest.raises(ConfigError, match=f"sampling-override has '{pair}'"):
        EngineConfig(sampling_override=(pair,))


@pytest.mark.parametrize("name", RANGES)
def test_options_have_the_bounds_of_requests(name):
    """SamplingConfig took any repetition penalty from 0.01 on, and no top_k of -1."""
    low, high = RANGES[name]
    asked = {name} & {item.name for item in fields(SamplingConfig)}
    for value in (low, high):
        EngineConfig(sampling_override=(f"{name}={value}",))
        SamplingConfig(**dict.fromkeys(asked, value))
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=name):
            EngineConfig(sampling_override=(f"{name}={value}",))
        for each in asked:
            with pytest.raises(ConfigError, match=each.replace("_", "-")):
                SamplingConfig(**{each: value})


@pytest.mark.parametrize("wrong", [{"temperature": "warm"}, {"top_p": 1.5}, {"min_p": True}])
def test_a_recommendation_that_is_none(folder, tmp_path, wrong):
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ModelError, match=rf"generation_config\.json: {min(wrong)} is"):
        open_model(str(copied))


@pytest.mark.model
def test_the_built_in_model_has_what_its_card_says():
    assert open_model("smollm2-135m").sampling == RECOMMENDED["smollm2-135m"]
