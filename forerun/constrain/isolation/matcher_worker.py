"""The process that matches one expensive grammar. Its first line is the vocabulary. Each request
then names tokens to take (the first one also the grammar, as the compiling process has translated
it), and is answered with what may follow: `{"mask": base64, "complete": ..., "error": ...}`.
"""

import base64
import json
import os
import resource
import sys
from typing import Any

from forerun.constrain.matcher.automaton import Automaton
from forerun.constrain.matcher.limits import ALL_SECONDS, MEMORY
from forerun.constrain.matcher.llguidance_backend import Guidance
from forerun.constrain.matcher.start_marker import only
from forerun.sandbox import question, serve


class SentVocabulary:
    """The parts of a tokenizer that a grammar library needs, received from the server's process.
    See Vocabulary.
    """

    def __init__(self, sent: dict[str, Any]) -> None:
        self._tokens = [bytes.fromhex(token) for token in sent["tokens"]]
        self.vocab_size = len(self._tokens)
        self.eos_ids: tuple[int, ...] = tuple(sent["eos_ids"])
        self.bos_id: int | None = sent["bos_id"]
        self.special_ids = frozenset[int](sent["special_ids"])

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that token `id` stands for. Raises IndexError beyond the vocabulary."""
        return self._tokens[id]

    def encode_within(self, text: str) -> list[int]:
        """Return the ids of Tokenizer.encode_within, requested from the server's process, which has
        the tokenizer.
        """
        ids: list[int] = question(text)
        return ids


class Follower:
    """Matches one text with one grammar."""

    def __init__(self, vocabulary: SentVocabulary) -> None:
        self._library, self._vocabulary = Guidance(vocabulary), vocabulary
        self._automaton: Automaton | str = "no grammar was sent"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Advance the grammar by the tokens in request["take"] and return the tokens allowed next:
        {"mask" (base64 of one bit per id), "complete", "error"}. "begin" in the request has a new
        grammar in llguidance's form. If a token does not fit or a limit is reached, "error" has the
        reason and the mask allows only the end of the text.
        """
        if "begin" in request:
            self._automaton = self._library.build(request["begin"])(True)
        automaton = self._automaton
        if isinstance(automaton, str):
            return {"mask": "", "complete": False, "error": automaton}
        error = ""
        for token in request["take"]:
            if not automaton.take(token):
                error = automaton.error or f"token {token} does not fit"
                break
        complete = not error and automaton.complete
        ends = only(self._vocabulary.eos_ids, self._vocabulary.vocab_size)
        mask = ends if complete or error else automaton.mask()
        error = error or automaton.error
        return {
            "mask": base64.b64encode(mask or b"").decode(),
            "complete": complete,
            "error": error,
        }


def main() -> None:
    """Run the matching process: read the vocabulary from the first line, limit processor time and
    memory, then answer requests until standard input ends.
    """
    os.nice(5)  # The model's own processes come first.
    resource.setrlimit(resource.RLIMIT_CPU, (ALL_SECONDS, ALL_SECONDS + 5))
    sent = json.loads(sys.stdin.readline())
    vocabulary = SentVocabulary(sent)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.stdout.write('"ready"\n')
    sys.stdout.flush()
    serve(Follower(vocabulary).answer)


if __name__ == "__main__":
    main()
