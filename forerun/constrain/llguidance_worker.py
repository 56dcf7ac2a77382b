"""The process that compiles strangers' grammars first, so that a hostile one can be killed.

Reads one JSON request per line, the arguments of `translate`, and answers each with one
line: `{"grammar": ..., "expensive": ...}`, in llguidance's form and whether it should be followed
in a process of its own, or `{"error": ...}`.
"""

import re
import resource
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from forerun.constrain.limits import CALL_LIMITS, LIMITS, MEMORY, SLOW, json_options
from forerun.constrain.llguidance_backend import GuidanceAutomaton
from forerun.constrain.probe import expensive
from forerun.sandbox import serve


def translate(kind: str, source: str, lenient: bool, one_line: bool) -> str:
    """The grammar in llguidance's form. Raises ValueError where the source cannot be read."""
    matcher = llguidance.LLMatcher
    if kind == "regex":
        return str(matcher.grammar_from_regex(source))
    if kind == "json_schema":
        options: Any = json_options(lenient, one_line)
        return str(matcher.grammar_from_json_schema(source, overrides=options))
    if "::=" not in source:
        return str(matcher.grammar_from_lark(source))
    try:
        return str(matcher.grammar_from_lark(any_to_lark(source)))
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(str(error)) from error


class Bytes:
    """A vocabulary of single bytes: what compiling costs does not depend on the vocabulary."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        """One id per byte."""
        return list(text.encode() if isinstance(text, str) else text)


_TOKEN = re.compile(r"<\[\d+\]>")


_BYTES_OF_TOKEN = 8
"""A long token is several bytes: one of them may take no more than its share."""


def answer(request: dict[str, Any], vocabulary: llguidance.LLTokenizer) -> dict[str, Any]:
    """Translate one grammar, compile it, ask for its first mask and try a few steps."""
    try:
        grammar = translate(**request)
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": str(error) or type(error).__name__}
    # Ids of the model's control tokens mean nothing here: the one there is stands for all.
    probe = _TOKEN.sub("<[256]>", grammar)
    matcher = llguidance.LLMatcher(vocabulary, probe, limits=LIMITS, log_level=0)
    matcher.compute_bitmask()
    if matcher.is_error() and "<special_token>" not in matcher.get_error():
        return {"error": matcher.get_error()}
    matcher = llguidance.LLMatcher(vocabulary, probe, limits=CALL_LIMITS, log_level=0)
    ends, slow = frozenset({Bytes.eos_token_id}), SLOW / _BYTES_OF_TOKEN
    return {"grammar": grammar, "expensive": expensive(GuidanceAutomaton(matcher), ends, slow)}


def main() -> None:
    """Answer with llguidance."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    like_a_tokenizer: Any = Bytes()
    vocabulary = llguidance.LLTokenizer(like_a_tokenizer)
    serve(lambda request: answer(request, vocabulary))


if __name__ == "__main__":
    main()
