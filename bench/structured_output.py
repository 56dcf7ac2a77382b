"""Measure structured output: what is accepted of public test suites, and what it costs.

    python bench/structured_output.py suite --data DIR     DIR/json_schema_test_suite and
                                                           DIR/grammar/*.jsonl
    python bench/structured_output.py speed --out bench/results/structured-output.json
                                                           acceptance length and time per kind

`suite` checks single texts against compiled grammars, with the byte-level tokenizer. A grammar
writes one spelling where several are valid, so "valid refused" is not always a fault; "invalid
accepted" always is. The tables are in docs/inside/structured-output.md.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.records import ended, keep
from forerun.build.engine import encode_chat, make_engine
from forerun.build.target import Target, open_target
from forerun.client.completion import complete, make_request
from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.matcher import CompiledGrammar, Matcher
from forerun.errors import RequestError
from forerun.interface.grammars import Grammars
from forerun.options.config import EngineConfig
from forerun.speculative.tree import NodeMasks
from forerun.text.tokenizer import Tokenizer

DIALECTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
VERDICTS = ("right", "invalid accepted", "valid refused", "grammar refused")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"type": "string", "maxLength": 40},
        "skills": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 2,
            "maxItems": 4,
        },
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "occupation", "skills", "married"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "population_in_millions": {"type": "number", "minimum": 0, "maximum": 50},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "population_in_millions", "is_capital"],
    "additionalProperties": False,
}
CITIES = {"type": "array", "minItems": 3, "maxItems": 5, "items": CITY}
LINES = 'root ::= line{4}\nline ::= "- " [A-Z] [a-z ]{3,40} ".\\n"'
SPEED: dict[str, tuple[str, Grammar]] = {
    "choice": ("Is the sky blue?", Grammar.choice(["yes", "no", "it depends on the weather"])),
    "regex": ("When did the war end?", Grammar.regex(r"On \d{4}-\d{2}-\d{2}, at \d{2}:\d{2}\.")),
    "grammar": ("List four animals.", Grammar.grammar(LINES)),
    "json_object": ("Describe an invented person in JSON.", Grammar.json_object()),
    "schema": ("Describe an invented person in JSON.", Grammar.json_schema(PERSON)),
    "schema, one line": (
        "Describe an invented person in JSON.",
        Grammar.json_schema(PERSON).on_one_line(),
    ),
    "records": ("List some cities as JSON records.", Grammar.json_schema(CITIES)),
    "records, one line": (
        "List some cities as JSON records.",
        Grammar.json_schema(CITIES).on_one_line(),
    ),
}


def fits(compiled: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether exactly this text is accepted."""
    matcher = Matcher(compiled)
    if not all(matcher.advance(token) for token in tokenizer.encode(text).tolist()):
        return False
    mask, end = matcher.mask() or b"", tokenizer.eos_ids[0]
    return bool(mask[end // 8] >> end % 8 & 1)


def verdicts(cases: list[tuple[Any, str, bool]], make: Any) -> Counter[str]:
    """Counts over (grammar source, text, valid)."""
    tokenizer = Tokenizer.byte_level()
    compiler, counts = Compiler(tokenizer), Counter[str]()
    for source, text, valid in cases:
        try:
            verdict = fits(compiler.compile(make(source)), tokenizer, text)
        except RequestError:
            counts["grammar refused"] += 1
            continue
        wrong = "invalid accepted" if verdict else "valid refused"
        counts["right" if verdict == valid else wrong] += 1
    compiler.close()
    return counts


def _named(schema: Any, dialect: str) -> Any:
    """The schema saying which dialect it is of."""
    return {"$schema": dialect, **schema} if isinstance(schema, dict) else schema


def suite(data: Path) -> None:
    """One line per keyword file and kind of grammar."""
    table: dict[str, Counter[str]] = {}
    for draft, dialect in DIALECTS.items():
        for path in sorted((data / "json_schema_test_suite" / "tests" / draft).glob("*.json")):
            cases = [
                (
                    _named(group["schema"], dialect),
                    json.dumps(test["data"], ensure_ascii=False),
                    test["valid"],
                )
                for group in json.loads(path.read_text())
                for test in group["tests"]
            ]
            table[f"{draft} {path.stem}"] = verdicts(cases, Grammar.json_schema)
    kinds: dict[str, list[tuple[Any, str, bool]]] = defaultdict(list)
    for line in (data / "grammar" / "xgrammar_accept_vectors.jsonl").read_text().splitlines():
        row = json.loads(line)
        if not row["options"]:
            kinds[row["kind"]].append((row["grammar"], row["input"], row["accept"]))
    make = {
        "regex": Grammar.regex,
        "ebnf": Grammar.grammar,
        "json_schema": lambda source: Grammar.json_schema(json.loads(source)),
    }
    for kind, rows in kinds.items():
        table[f"xgrammar {kind}"] = verdicts(rows, make[kind])
    show(("", *VERDICTS), [(name, [counts[v] for v in VERDICTS]) for name, counts in table.items()])


class Timed:
    """Seconds that an engine spends in its grammars, and the masks it made."""

    def __init__(self, grammars: Grammars) -> None:
        self.seconds, self.masks = 0.0, 0
        for name in ("open", "predicted", "filter_and_extend_drafts", "masks", "commit"):
            setattr(grammars, name, self._wrapped(getattr(grammars, name)))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begun = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - begun
            if isinstance(result, NodeMasks):
                self.masks += int((result.row >= 0).sum())
            return result

        return call


def speed(model: str, tokens: int, requests: int, rounds: int, out: Path | None) -> None:
    """Per kind, with grammar and without, speculation on and off, sides in turn: one engine each,
    which sees `requests` answers one after the other, the first greedy, the others at 0.8.
    """
    target = open_target(EngineConfig(model=model, kv_tokens=4096, context=2048))
    _measure(target, *SPEED["choice"], "on", tokens, 2)
    rows: list[dict[str, Any]] = []
    for name, (prompt, grammar) in SPEED.items():
        row: dict[str, Any] = {"kind": name}
        for rule, bound in (("constrained", grammar), ("free", None)):
            runs: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
            for step in range(rounds):
                for side in ("on", "off") if step % 2 == 0 else ("off", "on"):
                    runs[side].append(_measure(target, prompt, bound, side, tokens, requests))
            assert runs["on"][0].pop("texts") == runs["off"][0].pop("texts"), "not lossless"
            for side, sides in runs.items():
                best = min(sides, key=lambda one: one["ms_per_token"])
                row |= {f"{rule} {side}": {k: v for k, v in best.items() if k != "texts"}}
        rows.append(row)
        sys.stderr.write(json.dumps(row) + "\n")
    columns = [f"{rule} {side}" for rule in ("constrained", "free") for side in ("on", "off")]
    facts = ("tokens_per_step", "first", "ms_per_token", "grammar_ms_per_step")
    show(
        ("kind", *(f"{column} {fact}" for column in columns for fact in facts)),
        [(row["kind"], [row[c][fact] for c in columns for fact in facts]) for row in rows],
    )
    if out:
        keep(out, {"rounds": rounds, "rows": rows})
    target.close()


def _measure(
    target: Target, prompt: str, grammar: Grammar | None, side: str, tokens: int, requests: int
) -> dict[str, Any]:
    """What one engine needs for the same prompt with different seeds, one after the other."""
    config = target.config if side == "on" else replace(target.config, speculative_algorithm="OFF")
    engine = make_engine(target, config)
    timed = Timed(engine._parts.grammars)
    engine.start()
    compiled = None if grammar is None else target.compile(grammar)
    ids = encode_chat(target, [{"role": "user", "content": prompt}])
    batch = [
        make_request(
            ids,
            target.tokenizer.eos_ids,
            max_tokens=tokens,
            grammar=compiled,
            temperature=0.8 if seed else 0.0,
            seed=seed,
        )
        for seed in range(requests)
    ]
    begun = time.perf_counter()
    done = [choices[0] for choices in complete(engine, batch, 1)]
    seconds = time.perf_counter() - begun
    engine.shutdown()
    stats = [one.stats for one in done if one.stats]
    steps, count = sum(each.steps for each in stats), sum(len(one.tokens) for one in done)
    return {
        "tokens_per_step": round(count / steps, 2),
        "first": round(len(done[0].tokens) / stats[0].steps, 2),
        "ms_per_token": round(1000 * seconds / count, 2),
        "grammar_ms_per_step": round(1000 * timed.seconds / steps, 3),
        "masks_per_step": round(timed.masks / steps, 2),
        "tokens": count,
        "steps": steps,
        "draft_tokens": sum(each.draft_tokens for each in stats),
        "accepted": sum(each.accepted for each in stats),
        "texts": [one.text for one in done],
    }


def show(head: tuple[str, ...], rows: list[tuple[str, list[Any]]]) -> None:
    """A Markdown table."""
    lines: list[list[Any]] = [list(head), ["---"] * len(head)]
    lines += [[name, *cells] for name, cells in rows]
    sys.stdout.writelines("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("suite", "speed"))
    parser.add_argument("--data", type=Path, help="where the suites lie")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=4, help="answers per engine")
    parser.add_argument("--rounds", type=int, default=1, help="the fastest of so many counts")
    parser.add_argument("--out", type=Path, help="JSON with the machine's stamp")
    options = parser.parse_args()
    if options.what == "speed":
        speed(options.model, options.tokens, options.requests, options.rounds, options.out)
    elif options.data is None:
        parser.error("suite needs --data")
    else:
        suite(options.data)


if __name__ == "__main__":
    ended(main)
