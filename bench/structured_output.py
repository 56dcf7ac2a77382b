"""Measure structured output: what is accepted of public test suites, and what it costs.

    python bench/structured_output.py suite --data DIR     DIR/json_schema_test_suite and
                                                           DIR/grammar/*.jsonl
    python bench/structured_output.py speed                acceptance length and time per kind

`suite` checks single texts against compiled grammars, with the byte-level tokenizer. A grammar
writes one spelling where several are valid, so "valid refused" is not always a fault; "invalid
accepted" always is. The tables are in docs/structured-output.md.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from forerun.constrain.compile import Compiler
from forerun.constrain.grammar import Grammar
from forerun.constrain.matcher import Compiled, Matcher
from forerun.errors import RequestError
from forerun.llm import LLM
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


def fits(compiled: Compiled, tokenizer: Tokenizer, text: str) -> bool:
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
            found = fits(compiler.compile(make(source)), tokenizer, text)
        except RequestError:
            counts["grammar refused"] += 1
            continue
        wrong = "invalid accepted" if found else "valid refused"
        counts["right" if found == valid else wrong] += 1
    compiler.close()
    return counts


def _named(schema: Any, dialect: str) -> Any:
    """The schema saying which dialect it is of."""
    return {"$schema": dialect, **schema} if isinstance(schema, dict) else schema


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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


def speed(model: str, tokens: int) -> None:
    """Per kind: tokens per step and time per token, speculation on and off, and without grammar."""
    rows: dict[str, list[str]] = {name: [] for name in SPEED}
    for speculation in ("ngram", "off"):
        with LLM(model, speculation=speculation) as llm:
            llm.chat([{"role": "user", "content": "Hello"}], max_tokens=8)
            for name, (prompt, grammar) in SPEED.items():
                for rule in (grammar, None):
                    rows[name] += _timed(llm, prompt, rule, tokens)
    columns = ("constrained", "ms", "free", "ms")
    show(("kind", *(f"{c} {s}" for s in ("ngram", "off") for c in columns)), list(rows.items()))


def _timed(llm: LLM, prompt: str, grammar: Grammar | None, tokens: int) -> list[str]:
    steps = count = 0
    began = time.perf_counter()
    for seed in range(4):
        options = {"temperature": 0.8 if seed else 0.0, "seed": seed, "max_tokens": tokens}
        made = llm.chat([{"role": "user", "content": prompt}], grammar=grammar, **options)
        steps, count = steps + made.stats.steps, count + len(made.tokens)
    spent = time.perf_counter() - began
    return [f"{count / steps:.2f}", f"{1000 * spent / count:.1f}"]


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
    options = parser.parse_args()
    if options.what == "speed":
        speed(options.model, options.tokens)
    elif options.data is None:
        parser.error("suite needs --data")
    else:
        suite(options.data)


if __name__ == "__main__":
    main()
