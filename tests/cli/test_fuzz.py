"""`forerun prove --fuzz`: finds planted faults, makes them small, writes what can be replayed."""

import json
from contextlib import closing

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.cli.main import main
from forerun.errors import ConfigError
from forerun.executors import host_choice
from forerun.measure import fuzz_case
from forerun.measure.fuzz import GRAMMARS, Fuzzer
from forerun.measure.fuzz_case import Case, FuzzRequest, read, write
from forerun.measure.workload import read_prompts
from forerun.options.config import EngineConfig

TOY = EngineConfig(model="toy")


@pytest.fixture
def fuzzer():
    made = Fuzzer(TOY, tuple(read_prompts()), seed=5)
    yield made
    made.close()


def cases(count):
    return lambda report: report.cases >= count


@pytest.mark.slow
def test_every_answer_is_the_one_that_its_request_gets_alone(fuzzer):
    report = fuzzer.run(cases(30))
    assert report.failure is None
    assert report.answers > 200
    assert report.accepted > 100 and report.preemptions > 0 and report.cached_tokens > 500


def test_every_grammar_is_taken():
    with closing(open_target(EngineConfig(model="toy"))) as target:
        for name, make in GRAMMARS.items():
            compiled = target.compile(make())
            if name == "many keys":
                first = compiled.begin()
                assert not first.take(ord("{")) and first.error, "it goes on in a process"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (["--fuzz", "--quick"], "--quick has no effect beside --fuzz"),
        (["--fuzz", "--regex", "a"], "--regex has no effect beside --fuzz"),
        (["--replay", "x", "--tokens", "9"], "--tokens has no effect beside --fuzz"),
        (["--cases", "3"], "--cases has no effect here; leave it out, or add --fuzz"),
        (["--fuzz", "--minutes", "nan"], "is not a number above 0, or inf"),
        (["--fuzz", "--minutes", "0"], "is not a number above 0, or inf"),
    ],
)
def test_flags_that_change_nothing_are_refused(line, why, capsys):
    assert main(["prove", "toy", *line]) == 2
    assert why in capsys.readouterr().err


def forgetful(monkeypatch):
    """Penalties do not see the draft tokens above a node."""
    right = host_choice.process
    monkeypatch.setattr(
        host_choice,
        "process",
        lambda logits, sampling, history, ancestors, mask: right(
            logits, sampling, history, (), mask
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("plant", [forgetful])
def test_a_planted_fault_is_found_made_small_and_replayed(plant, monkeypatch, tmp_path, capsys):
    plant(monkeypatch)
    file = tmp_path / "case.json"
    line = ["prove", "--fuzz", "--model", "toy", "--cases", "300", "--reproduction", str(file)]
    # With the n-gram cache a request may be drafted for because another one ended before.
    assert main([*line, "--speculative-ngram-capacity", "0", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failure"]["what"].startswith("request ")
    small = report["failure"]["case"]
    assert len(small["requests"]) == 1
    penalties = {"repetition_penalty", "frequency_penalty", "presence_penalty"}
    assert set(small["requests"][0]["options"]) <= penalties | {"max_tokens", "temperature"}
    assert main(["prove", "--replay", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fails"]
    monkeypatch.undo()
    assert main(["prove", "--replay", str(file)]) == 0
    assert "passes" in capsys.readouterr().err


def test_a_reproduction_comes_back_as_it_was(tmp_path):
    asked = FuzzRequest(
        (1, 2, 3), {"n": 2, "logit_bias": [[1, 2.0]]}, "enum", {"max_nodes": 2}, 3, 9
    )
    failure = fuzz_case.Failure(Case({"page_size": 2}, (asked,)), "it is wrong")
    write(failure, TOY, tmp_path / "x.json")
    config, case = read(tmp_path / "x.json")
    assert (config, case) == (TOY, failure.case)


@pytest.mark.parametrize("text", ["", "{}", '{"config": {"model": "toy", "wrong": 1}}'])
def test_what_is_no_reproduction_is_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json is no reproduction"):
        read(tmp_path / "x.json")


def test_a_grammar_alone_in_a_step_without_decoding_rows():
    """Found by --fuzz: pricing what a grammar predicts divided by no rows, and the engine died."""
    config = EngineConfig(model="toy", policy="adaptive")
    prompt = tuple(np.arange(60, 120).tolist())
    held = FuzzRequest(prompt, {"max_tokens": 16, "ignore_eos": True}, "closed object")
    shape = {"page_size": 2, "max_sequences": 1, "chunked_prefill_size": 16, "context": 256}
    drafting = {"speculative_num_draft_tokens": 3, "speculative_num_steps": 1}
    changes = shape | {"kv_tokens": 2048} | drafting
    with closing(Fuzzer(config, tuple(read_prompts()), 0)) as fuzzer:
        assert fuzzer.check(Case(changes, (held, held))) is None
