"""The process that compiles strangers' grammars with xgrammar first. See worker.

Its first line is the vocabulary: `{"tokens": [hex, ...], "ends": [id, ...]}`. What xgrammar only
warns of ("ignoring ...") is an error here, unless the grammar is lenient.

Its first mask and a few steps are tried, as llguidance's are: see probe.
"""

import json
import os
import re
import resource
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import xgrammar

from forerun.constrain.grammar import Kind
from forerun.constrain.limits import MEMORY, RECURSION, SLOW, UNREADABLE
from forerun.constrain.probe import expensive
from forerun.constrain.xgrammar_backend import (
    VocabularyMasks,
    XgrammarAutomaton,
    compile_grammar,
    compiler_of,
)
from forerun.constrain.xgrammar_rules import honoured
from forerun.sandbox import serve

_HARMLESS = re.compile(r"Escape sequence '\\[^a-zA-Z0-9]' is not recognized")


class Sent:
    """The vocabulary that this process was sent. See Vocabulary. Nothing is spelled here."""

    def __init__(self, tokens: list[bytes], ends: list[int]) -> None:
        self._tokens = tokens
        self.vocab_size, self.bos_id = len(tokens), None
        self.eos_ids = tuple(ends)
        self.special_ids = frozenset(id for id, token in enumerate(tokens) if not token)

    def token_bytes(self, id: int) -> bytes:
        """See Tokenizer."""
        return self._tokens[id]

    def encode_part(self, text: str, first: bool) -> list[int]:
        """No ids: what a step costs does not depend on how forced text is spelled."""
        return []


class Checker:
    """Compiles for one vocabulary.

    warnings  the file in the place of standard error, where xgrammar writes its warnings
    """

    def __init__(self, init_message: dict[str, Any], warnings: IO[str]) -> None:
        tokens = [bytes.fromhex(token) for token in init_message["tokens"]]
        self._compiler = compiler_of(tokens, init_message["ends"])
        self._known = VocabularyMasks(Sent(tokens, init_message["ends"]))
        self._words = -(-len(tokens) // 32)
        self._warnings = warnings

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compile one grammar and ask for its first mask."""
        self._warnings.seek(0)
        self._warnings.truncate()
        bits = np.zeros(self._words, np.int32)
        source, lenient = request["source"], request["lenient"]
        left_out: list[str] = []
        try:
            if request["kind"] == Kind.JSON_SCHEMA:
                schema, left_out = honoured(json.loads(source), lenient)
                if schema is False:
                    return {"error": "no text satisfies it"}
                source = json.dumps(schema, ensure_ascii=False)
            ready = compile_grammar(self._compiler, request["kind"], source, request["one_line"])
            constrained = xgrammar.GrammarMatcher(ready).fill_next_token_bitmask(bits)
        except (RuntimeError, ValueError, MemoryError) as error:
            return {"error": str(error) or type(error).__name__}
        except UNREADABLE as error:
            return {"error": f"it cannot be read ({type(error).__name__}: {error})"}
        if constrained and not bits.any():
            return {"error": "no text satisfies it"}
        self._warnings.seek(0)
        ignored = [
            line for line in self._warnings if "Warning" in line and not _HARMLESS.search(line)
        ]
        if ignored and not lenient:
            return {"error": ignored[0]}
        walked = XgrammarAutomaton(xgrammar.GrammarMatcher(ready), self._known, self._known.known)
        dear = expensive(walked, frozenset(self._known.ends), SLOW)
        return {"grammar": source, "expensive": dear, "unenforced": left_out}


def main() -> None:
    """Answer until standard input ends."""
    with tempfile.TemporaryFile("w+") as warnings:
        sys.setrecursionlimit(RECURSION)
        os.dup2(warnings.fileno(), sys.stderr.fileno())
        checker = Checker(json.loads(sys.stdin.readline()), warnings)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        sys.stdout.write('"ready"\n')
        sys.stdout.flush()
        serve(checker.answer)


if __name__ == "__main__":
    main()
