"""The flags that constrain an answer with a grammar, for `run` and `prove`."""

import argparse
import json
from pathlib import Path

from forerun.constrain.grammar import Grammar
from forerun.errors import RequestError, reason_of


def grammar_of(arguments: argparse.Namespace) -> Grammar | None:
    """Return the grammar of --schema, --regex or --grammar; None without one. Raises RequestError
    naming the flag and the place in its value.
    """
    if arguments.schema is not None:
        source = _read(arguments.schema, "--schema")
        try:
            schema = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"--schema {arguments.schema} is not JSON: {error}") from error
        return Grammar.json_schema(schema, field="--schema")
    if arguments.regex is not None:
        return Grammar.regex(arguments.regex, "--regex")
    if arguments.grammar is not None:
        return Grammar.grammar(_read(arguments.grammar, "--grammar"), "--grammar")
    return None


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise RequestError(f"{flag} {path} cannot be read: {reason_of(error)}") from error
