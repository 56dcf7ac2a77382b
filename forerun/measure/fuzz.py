"""Differential fuzzing of the losslessness promise: `forerun prove --fuzz`.

A case is a configuration (drafting, tree shape, page size, cache size, slots, overlap), some
requests with any sampling parameters, the step at which each arrives, and the step at which some
are aborted. All of them run on one engine, stepped by this thread. Every answer must equal the one
that the same request gets alone, without speculation, on an engine of its own: tokens, text, finish
reason and log-probabilities; of an aborted request, as far as it came. At the end no page or slot
may be held.

The same seed draws the same cases for the same model and prompts: `forerun prove --fuzz --seed S
--case N` runs one of them again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from forerun.build.engine import make_engine
from forerun.build.target import Target, open_target
from forerun.client.completion import Completion, make_request
from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Calling, Signature, tool_rules
from forerun.engine.request import Delta, Finish, Request, Speculation
from forerun.engine.thread import Engine
from forerun.errors import ForerunError
from forerun.measure.fuzz_case import (
    SHAPES,
    Case,
    CaseSource,
    Failure,
    FuzzRequest,
)
from forerun.measure.mixed import report_difference
from forerun.measure.workload import Prompt
from forerun.options.config import EngineConfig
from forerun.text.tools import GLM, HERMES, ToolFormat

_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": _INTEGER,
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
_WORDS = [f"{a}{b}{c}" for a in ("in", "un", "re") for b in "abdegrst" for c in ("", "ed", "ing")]
_FORM = {
    "type": "object",
    "properties": {"word": {"enum": _WORDS}, "ten": {"enum": [10, 100, 1000, None, True]}},
    "required": ["word", "ten"],
    "additionalProperties": False,
}
_PICK = {
    "type": "object",
    "properties": {
        "city": {**_TEXT, "maxLength": 9},
        "unit": {"enum": ["C", "F"]},
        "days": _INTEGER,
    },
    "required": ["city"],
    "additionalProperties": False,
}
_MANY = {
    "type": "object",
    "properties": {f"field{number}": _INTEGER for number in range(400)},
    "additionalProperties": False,
}
_AMBIGUOUS = 'start: a0 "z"\n' + "".join(
    f"a{level}: a{level + 1}? a{level + 1}? a{level + 1}?\n" for level in range(5)
)


def _calls(format: ToolFormat) -> Grammar:
    tools = [Signature(name, Grammar.json_schema(_PICK)) for name in ("weather", "wear")]
    return tool_rules(format, tools, Calling(required=False, several=True)).grammar


GRAMMARS: dict[str, Callable[[], Grammar]] = {
    "open object": lambda: Grammar.json_schema(
        {"type": "object", "properties": {"name": _TEXT, "age": _INTEGER}}
    ),
    "closed object": lambda: Grammar.json_schema(
        {
            "type": "object",
            "properties": {"name": {**_TEXT, "maxLength": 8}, "ok": {"type": "boolean"}},
            "required": ["name", "ok"],
            "additionalProperties": False,
        }
    ),
    "further keys": lambda: Grammar.json_schema(
        {"type": "object", "properties": {"a": _TEXT}, "additionalProperties": _INTEGER}
    ),
    "tree": lambda: Grammar.json_schema(_TREE),
    "enum": lambda: Grammar.json_schema({"enum": ["red", "green", "blue", "bluish"]}),
    "many words": lambda: Grammar.json_schema(_FORM),
    "many keys": lambda: Grammar.json_schema(_MANY),
    "large integers": lambda: Grammar.json_schema(
        {"type": "array", "items": {**_INTEGER, "minimum": 2**60, "maximum": 2**63 - 1}}
    ),
    "regex": lambda: Grammar.regex(r"(ab|cd){1,6}e?[0-9]{2,4}"),
    "GBNF": lambda: Grammar.grammar(
        'root ::= sum\nsum ::= sum [+-] part | part\npart ::= [0-9]{1,3} | "(" sum ")"'
    ),
    "Lark": lambda: Grammar.grammar(
        'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: list | WORD\nWORD: /[a-z]{1,4}/'
    ),
    "ambiguous": lambda: Grammar.grammar(_AMBIGUOUS + "a5: /x/"),
    "calls": lambda: _calls(HERMES),
    "calls in tags": lambda: _calls(GLM),
}
"""Grammars by name. The first step of the one with many keys takes too long for the engine's thread
and continues in a process. None reaches a limit of processor time, which would end answers at
varying places.
"""


MAX_STEPS = 4000
"""A case with more steps counts as hanging."""
CASES_PER_TARGET = 8
"""Cases that share one opened executor, since opening takes longer than a case."""


@dataclass(slots=True)
class Report:
    """Counts of a fuzzing run, and its failure if any. `draft_tokens` and `accepted` show that
    speculation was active.
    """

    cases: int = 0
    answers: int = 0
    tokens: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    failure: Failure | None = None


class Fuzzer:
    """Generates cases from a seed and runs them on targets of one configuration.

    config   the configuration to fuzz; cases change its drafting, pages and slots
    prompts  texts that the cases' prompts are cut from

    Raises the errors of opening the target.
    """

    def __init__(self, config: EngineConfig, prompts: tuple[Prompt, ...], seed: int) -> None:
        self._config = config
        self._reference_target = open_target(replace(config, speculative_algorithm="OFF"))
        tokenizer = self._reference_target.tokenizer
        self._source = CaseSource(
            [tokenizer.encode(prompt.text, bos=True) for prompt in prompts],
            self._reference_target.memory.limits.vocab,
            self._reference_target.config.device != "cpu",
            GRAMMARS,
            seed,
        )
        self._target: tuple[dict[str, Any], Target] | None = None
        self._alone: dict[str, list[Completion]] = {}
        self.report = Report()

    def close(self) -> None:
        """Release both targets. Idempotent; no case may run afterwards."""
        self._reference_target.close()
        if self._target is not None:
            self._target[1].close()
            self._target = None

    def run(self, enough: Callable[[Report], bool], first: int = 1) -> Report:
        """Run cases from number `first` on until one fails or `enough` returns True, which is
        called before each with the report so far. Returns the report, which is also `self.report`.
        Raises the errors of opening a target.
        """
        shape: dict[str, Any] = {}
        for number in count(1):
            if number >= first and enough(self.report):
                break
            if number % CASES_PER_TARGET == 1:
                shape = self._source.shape()
            drafting = self._source.drafting(self._config.algorithm)
            case = Case(shape | drafting, self._source.requests())
            if number < first:
                continue
            what = self.check(case)
            self.report.cases += 1
            if what is not None:
                self.report.failure = Failure(number, case, what)
                break
        return self.report

    def check(self, case: Case) -> str | None:
        """Run one case. Returns a description of the first wrong answer or engine error; None if
        all answers are right. Raises the errors of opening the case's target. After a failure the
        next case gets a new target, so that no state of this one is left.
        """
        what = self._run(case)
        if what is not None and self._target is not None:
            self._target[1].close()
            self._target = None
        return what

    def _run(self, case: Case) -> str | None:
        target = self._opened(case)
        engine = make_engine(target, replace(target.config, **case.changes))
        try:
            choices = _drive(engine, [self._request(target, each) for each in case.requests], case)
            engine.check()
            stats = engine.stats()
        except (ForerunError, AssertionError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            engine.shutdown()
        self.report.preemptions += stats.preemptions
        if stats.load.pages_held or stats.load.running or stats.load.waiting:
            return f"something is held when all is over: {stats.load}"
        for number, (fuzz_request, found) in enumerate(zip(case.requests, choices, strict=True)):
            what = self._compare(fuzz_request, found)
            if what is not None:
                return f"request {number}: {what}"
        return None

    # --- one case ----------------------------------------------------------------------------

    def _opened(self, case: Case) -> Target:
        """Return a target with the case's pages and slots; the previous one if they are the
        same.
        """
        shape = {name: case.changes[name] for name in SHAPES if name in case.changes}
        if self._target is None or self._target[0] != shape:
            if self._target is not None:
                self._target[1].close()
            self._target = shape, open_target(replace(self._config, **shape))
        return self._target[1]

    def _request(self, target: Target, fuzz_request: FuzzRequest) -> Request:
        grammar = None
        if fuzz_request.grammar is not None:
            grammar = target.compile(GRAMMARS[fuzz_request.grammar]())
        options = dict(fuzz_request.options)
        if "logit_bias" in options:
            options["logit_bias"] = tuple((token, bias) for token, bias in options["logit_bias"])
        return make_request(
            np.array(fuzz_request.prompt, np.int32),
            target.tokenizer.eos_ids,
            grammar=grammar,
            speculation=Speculation(**fuzz_request.speculation),
            **options,
        )

    def _compare(self, fuzz_request: FuzzRequest, found: list[Completion]) -> str | None:
        key = json.dumps([fuzz_request.prompt, fuzz_request.options, fuzz_request.grammar])
        if key not in self._alone:
            target = self._reference_target
            engine = make_engine(target, target.config)
            alone = replace(fuzz_request, arrives=0, aborts=None, speculation={})
            request = self._request(target, alone)
            self._alone[key] = _drive(engine, [request], Case({}, (alone,)))[0]
            engine.shutdown()
        for expected, one in zip(self._alone[key], found, strict=True):
            what = _difference(expected, one)
            if what is not None:
                return f"choice {one.index}: {what}"
            self._count(one)
        return None

    def _count(self, one: Completion) -> None:
        report = self.report
        report.answers += 1
        report.tokens += len(one.tokens)
        report.cached_tokens += one.cached_tokens
        if one.stats is not None:
            report.draft_tokens += one.stats.draft_tokens
            report.accepted += one.stats.accepted


def _drive(engine: Engine, requests: list[Request], case: Case) -> list[list[Completion]]:
    """Step an engine until every request has ended. Returns the choices of each. Raises
    TimeoutError after MAX_STEPS, RequestError if a request is refused.
    """
    choices = [[Completion(index) for index in range(request.n)] for request in requests]
    place = {request.id: number for number, request in enumerate(requests)}

    def sink(delta: Delta) -> None:
        choices[place[delta.request]][delta.index].take(delta)

    waiting = sorted(range(len(requests)), key=lambda number: case.requests[number].arrives)
    aborting = {n: each.aborts for n, each in enumerate(case.requests) if each.aborts}
    step, busy = 0, True
    while busy or waiting:
        while waiting and case.requests[waiting[0]].arrives <= step:
            engine.submit(requests[waiting.pop(0)], sink)
        for number in [n for n, when in aborting.items() if when <= step]:
            engine.abort(requests[number].id)
            del aborting[number]
        busy = engine.step_once()
        step += 1
        if step > MAX_STEPS:
            raise TimeoutError(f"the case has not ended after {MAX_STEPS} steps")
    return choices


def _difference(expected: Completion, found: Completion) -> str | None:
    """Return, as text, where an answer differs from the reference; None if it does not."""
    if found.finish == Finish.ABORT:
        count = len(found.tokens)
        complete = found.text.rstrip("\ufffd")  # An incomplete last character.
        if found.tokens == expected.tokens[:count] and expected.text.startswith(complete):
            return None
        return f"aborted after {found.tokens}, but alone it is {expected.tokens}"
    if found.tokens != expected.tokens or found.finish != expected.finish:
        return (
            f"alone {expected.tokens} ({expected.finish}, {expected.text!r}), "
            f"here {found.tokens} ({found.finish}, {found.text!r})"
        )
    at = report_difference(expected, found)
    if at is None:
        return None
    return f"the same tokens, but text, end or log-probabilities differ at output token {at}"
