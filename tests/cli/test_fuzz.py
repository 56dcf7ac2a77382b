"""`forerun prove --fuzz`: finds planted faults, and runs them again by their number."""

import json
from contextlib import closing

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.cli.main import main
from forerun.executors import host_choice
from forerun.measure.fuzz import GRAMMARS, Fuzzer
from forerun.measure.fuzz_case import Case, FuzzRequest
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
        (["--case", "3"], "--case has no effect here; leave it out, or add --fuzz"),
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
def test_a_planted_fault_is_found_and_run_again(monkeypatch, capsys):
    forgetful(monkeypatch)
    line = ["prove", "--fuzz", "--model", "toy"]
    # With the n-gram cache a request may be drafted for because another one ended before.
    line += ["--speculative-ngram-capacity", "0", "--json"]
    assert main([*line, "--cases", "300"]) == 1
    failure = json.loads(capsys.readouterr().out)["failure"]
    assert failure["what"].startswith("request ") and failure["number"] > 1
    assert main([*line, "--case", str(failure["number"])]) == 1
    again = json.loads(capsys.readouterr().out)
    assert again["cases"] == 1 and again["failure"] == failure
    monkeypatch.undo()
    main([*line, "--case", str(failure["number"])])
    assert json.loads(capsys.readouterr().out)["failure"] is None


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
