"""The process that compiles clients' grammars first, so that a hostile one can be killed.

Reads one JSON request per line, the arguments of `translate`, and answers each with one line:
`{"grammar": ..., "expensive": ..., "unenforced": [...]}` (the grammar in llguidance's form, whether
it should be matched in a process of its own, and what is left out of a schema), or `{"error":
...}`.
"""

import json
import re
import resource
import sys
from typing import Any

import llguidance

from forerun.constrain.grammar.calls import with_tags
from forerun.constrain.grammar.gbnf import lark
from forerun.constrain.isolation.probe import expensive
from forerun.constrain.matcher.limits import (
    CALL_LIMITS,
    LIMITS,
    MEMORY,
    RECURSION,
    SLOW,
    UNREADABLE,
    json_options,
)
from forerun.constrain.matcher.llguidance_backend import GuidanceAutomaton
from forerun.constrain.schema.keys import Free
from forerun.constrain.schema.paths import forbid_references, without
from forerun.constrain.schema.rewrite import rewritten
from forerun.errors import RequestError
from forerun.sandbox import serve


def translate(
    kind: str, source: str, lenient: bool, one_line: bool, vocabulary: llguidance.LLTokenizer
) -> tuple[str, list[str]]:
    """Translate a request's grammar to llguidance's own form. Returns it, and the paths that are
    left out of a lenient schema.

    kind        value of a Kind
    source      of the grammar
    lenient     leave out keywords that cannot be enforced, instead of raising
    one_line    of a schema: white space as json.dumps has it
    vocabulary  with which schemas are tested

    Raises ValueError if the source cannot be parsed or a strict schema cannot be enforced.
    """
    matcher = llguidance.LLMatcher
    if kind == "regex":
        return str(matcher.grammar_from_regex(source)), []
    if kind == "json_schema":
        schema, left_out = _fitted(json.loads(source), lenient, one_line, vocabulary, alone=True)
        options: Any = json_options(one_line)
        return str(
            matcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        ), left_out
    if not _GBNF.search(source):
        source, left_out = _with_schemas(source, vocabulary)
        return str(matcher.grammar_from_lark(source)), left_out
    return str(matcher.grammar_from_lark(lark(source))), []


def _fitted(
    schema: Any,
    lenient: bool,
    one_line: bool,
    vocabulary: llguidance.LLTokenizer,
    alone: bool = False,
) -> tuple[Any, list[str]]:
    """Return a schema that llguidance can enforce, and the paths that were left out of a lenient
    one.

    alone  it is the whole constraint: if no text satisfies it, nothing is left out, and llguidance
           reports why. Among tools, one that cannot be called does not affect the others; and
           optional arguments of one that is not strict come in any order.

    Raises ValueError, naming the path, if a strict schema requires more.
    """
    free: Free = "always" if lenient and not alone else "open"
    result = rewritten(schema, plain=not lenient, free=free)
    if result.unenforced and not lenient:
        raise ValueError(str(result.unenforced[0]))
    if result.schema is False:
        raise ValueError("no text satisfies it")
    left_out = [fault.path for fault in result.unenforced]
    brief = False
    for _ in range(MAX_LEFT_OUT if lenient or _refers(result.schema) else 0):
        message = _refusal(result.schema, one_line, vocabulary)
        empty = _EMPTY_DEFINITION.search(message)
        if empty and (brief or not lenient):
            forbid_references(result.schema, empty[1])
            continue
        if not lenient:
            break
        if not brief and any(words in message for words in _TOO_MUCH):
            brief = True
            result = rewritten(schema, plain=False, brief=True)
            left_out = [fault.path for fault in result.unenforced]
            continue
        unsatisfiable = alone and _UNSATISFIABLE in message
        path = message and not unsatisfiable and without(result.schema, message)
        if not path:
            break
        left_out.append(result.original(path))
    return result.schema, left_out


def _refers(schema: Any) -> bool:
    return isinstance(schema, dict) and "$defs" in schema


_UNSATISFIABLE = "Unsatisfiable schema"
_EMPTY_DEFINITION = re.compile(
    rf"{_UNSATISFIABLE}.*\n\s*while processing json-schema://[^#]*(#/\$defs/\w+)", re.DOTALL
)
"""llguidance's message for a schema that refers, at any place, to a definition that no value
satisfies.
"""


_TOO_MUCH = (
    *("schema too large", "Schema intersection stack level exceeded", "grammar size"),
    _UNSATISFIABLE,
)
"""llguidance's messages for a schema that exceeds its limits when its parts are merged, or that no
value satisfies after rewriting.
"""


def _refusal(schema: Any, one_line: bool, vocabulary: llguidance.LLTokenizer) -> str:
    """Return llguidance's error for a schema; "" if it accepts it."""
    options: Any = json_options(one_line)
    text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    matcher = llguidance.LLMatcher(vocabulary, text, limits=LIMITS, log_level=0)
    return str(matcher.get_error()) if matcher.is_error() else ""


_GBNF = re.compile(r"^[ \t]*+(?:[A-Za-z0-9_-]++[ \t]*+)?::=", re.MULTILINE)
"""A rule of GBNF, well-formed or not; Lark texts may contain the sign as well."""

_SCHEMA = re.compile(r'%json (?=\{"x-forerun":)')


def _with_schemas(source: str, vocabulary: llguidance.LLTokenizer) -> tuple[str, list[str]]:
    """Return a Lark grammar with its schemas (see calls.py) rewritten for llguidance, and the paths
    that were left out of them.
    """
    out, at = "", 0
    source, left_out = with_tags(source)
    while match := _SCHEMA.search(source, at):
        part, end = json.JSONDecoder().raw_decode(source, match.end())
        place, lenient, one_line = part["x-forerun"]
        schema, paths = _fitted(part["schema"], lenient, one_line, vocabulary)
        options = {"x-guidance": json_options(one_line)}
        whole = {**schema, **options} if isinstance(schema, dict) else schema
        out += source[at : match.end()] + json.dumps(whole)
        left_out += [f"{place}.{path}" for path in paths]
        at = end
    return out + source[at:], left_out


class Bytes:
    """A vocabulary of single bytes, for compiling: the cost of that does not depend on the
    vocabulary.
    """

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return one id per byte."""
        return list(text.encode() if isinstance(text, str) else text)


_TOKEN = re.compile(r"<\[\d+(,\d+)*\]>")


MAX_LEFT_OUT = 64
"""Most keywords to leave out because llguidance refuses them."""

_BYTES_OF_TOKEN = 8
"""Bytes that a long token is assumed to have; a single byte may take no more than its share of a
token's time.
"""


def answer(request: dict[str, Any], vocabulary: llguidance.LLTokenizer) -> dict[str, Any]:
    """Return the reply to one request of the server: {"grammar", "expensive", "unenforced"}, or
    {"error"}. Translates the grammar, compiles it, computes its first mask and tries a few steps.
    No source makes it raise.
    """
    try:
        grammar, left_out = translate(**request, vocabulary=vocabulary)
    except MemoryError:
        return {"error": f"it takes more than {MEMORY >> 20} MiB of memory"}
    except (ValueError, RecursionError, RequestError) as error:
        return {"error": str(error) or type(error).__name__}
    except UNREADABLE as error:
        return {"error": f"it cannot be read ({type(error).__name__}: {error})"}
    # This vocabulary has one control token, which replaces the ids of the model's.
    probe = _TOKEN.sub("<[256]>", grammar)
    matcher = llguidance.LLMatcher(vocabulary, probe, limits=LIMITS, log_level=0)
    matcher.compute_bitmask()
    if matcher.is_error() and "<special_token>" not in matcher.get_error():
        return {"error": matcher.get_error()}

    def begin() -> GuidanceAutomaton:
        limits = CALL_LIMITS
        return GuidanceAutomaton(
            llguidance.LLMatcher(vocabulary, probe, limits=limits, log_level=0)
        )

    dear = expensive(begin, frozenset({Bytes.eos_token_id}), SLOW / _BYTES_OF_TOKEN)
    return {"grammar": grammar, "expensive": dear, "unenforced": left_out}


def main() -> None:
    """Run the compiling process: limit its memory, then answer each line of standard input until it
    ends.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.setrecursionlimit(RECURSION)
    like_a_tokenizer: Any = Bytes()
    vocabulary = llguidance.LLTokenizer(like_a_tokenizer)
    serve(lambda request: answer(request, vocabulary))


if __name__ == "__main__":
    main()
