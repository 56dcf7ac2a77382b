"""Grammars compiled: strangers' first in a process that can be killed, then here; kept a while."""

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import llguidance

from forerun.constrain.grammar import Grammar, Kind
from forerun.constrain.limits import LIMITS, SECONDS
from forerun.constrain.matcher import Compiled
from forerun.constrain.schema import locate
from forerun.errors import BusyError, EngineError, ModelError, RequestError
from forerun.text.tokenizer import Tokenizer

WORKER = [sys.executable, "-m", "forerun.constrain.worker"]

MAX_WAITING = 64
"""Grammars that may wait for the compiling process; more are refused for the moment."""

_Key = tuple[str, str, bool, bool]
_Value = llguidance.LLMatcher | str

LONG = 256
"""Characters of a forced text that are made into tokens at once; the last quarter is dropped
again, for its tokens may have been cut."""

_FIXED_COST = 256 * 1024
_COST_PER_BYTE = 64


class Compiler:
    """Compiles grammars for one tokenizer. Safe to share between threads; cheap until first used.

    seconds      a grammar that takes longer is refused
    cache_bytes  estimated size of what is kept: 256 KiB per grammar and 64 bytes per byte of
                 source; the least recently used go first
    """

    def __init__(
        self, tokenizer: Tokenizer, seconds: float = SECONDS, cache_bytes: int = 128 << 20
    ) -> None:
        if not tokenizer.eos_ids:
            raise ModelError("the model declares no end-of-text token; a grammar could not end")
        self._tokenizer = tokenizer
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._worker = Worker(seconds)
        self._cache = _Cache(cache_bytes)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._waiting = threading.Semaphore(MAX_WAITING)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile, or find in the cache. Blocks; not for the engine's thread.

        Raises RequestError naming the field and, where it can be told, the place at fault;
        BusyError when too many wait.
        """
        key = (grammar.kind, grammar.source, grammar.lenient, grammar.one_line)
        with self._lock:
            found = self._cache.get(key)
        if found is None:
            found = self._compile_in_turn(key, grammar)
        if isinstance(found, str):
            raise RequestError(explained(grammar, found), grammar.field)
        return Compiled(found, grammar.start, self._tokenizer.vocab_size)

    def close(self) -> None:
        """End the compiling process."""
        with self._turn:
            self._worker.close()

    def _compile_in_turn(self, key: _Key, grammar: Grammar) -> _Value:
        """One at a time; whoever waited for the same grammar finds it in the cache."""
        if not self._waiting.acquire(blocking=False):
            raise BusyError("Too many grammars are being compiled; try again later.")
        try:
            with self._turn:
                with self._lock:
                    found = self._cache.get(key)
                if found is None:
                    found = self._compile(grammar)
                    size = _FIXED_COST + _COST_PER_BYTE * len(grammar.source)
                    with self._lock:
                        self._cache.put(key, found, size)
                return found
        finally:
            self._waiting.release()

    def _compile(self, grammar: Grammar) -> _Value:
        """A matcher at the beginning of the grammar, or why there is none."""
        names = ("kind", "source", "lenient", "one_line")
        request = {name: getattr(grammar, name) for name in names}
        answer = self._worker.ask(request)
        if "error" in answer:
            return answer["error"]
        if self._vocabulary is None:
            like_a_tokenizer: Any = _Vocabulary(self._tokenizer)
            ends = list(self._tokenizer.eos_ids)
            self._vocabulary = llguidance.LLTokenizer(like_a_tokenizer, eos_token=ends)
        matcher = llguidance.LLMatcher(
            self._vocabulary, answer["grammar"], limits=LIMITS, log_level=0
        )
        matcher.compute_bitmask()  # The first mask is the dearest; a dead end shows here.
        if matcher.is_error():
            return str(matcher.get_error())
        if matcher.is_stopped() and not matcher.is_accepting():
            return "no text satisfies it"
        return matcher


def explained(grammar: Grammar, message: str) -> str:
    """The compiler's message, in one piece, with the path of the keyword at fault."""
    if "NoExtension" in message:
        return f"{grammar.field} cannot be satisfied by any text"
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if "<non-verbose/>" not in line]
    if grammar.kind is Kind.JSON_SCHEMA:
        said, path = " ".join(map(str.strip, lines)), locate(grammar.source, message)
        return f"{grammar.field}: {f'{path} cannot be honoured: ' if path else ''}{said}"
    if grammar.kind is Kind.REGEX and "regex parse error" in message:
        # Between the headline and the excerpt of the grammar stand the pattern and its caret.
        lines = ["", *lines[1 : next((i for i, t in enumerate(lines) if "start: " in t), None)]]
    return f"{grammar.field} cannot be compiled: " + "\n".join(lines)


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode_part

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text that is forced. Of a long one its beginning: it is asked for at every
        node, and no step takes more of it.
        """
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        if len(plain) <= 2 * LONG:
            return self._encode(plain, False)
        ids, dropped = self._encode(plain[:LONG], False), 0
        while ids and dropped < LONG // 4:
            dropped += len(self.tokens[ids.pop()])
        return ids or self._encode(plain, False)


class Worker:
    """The compiling process: started when needed, killed when it takes too long. Not locked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """The process's answer; an "error" where it ran out of time or memory.

        Raises EngineError where no process can be started.
        """
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(self._seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # It died before it could listen.
            line = ""
        finally:
            timer.cancel()
        if not line:
            self.close()
            return {"error": f"it takes more than {self._seconds:g} seconds or too much memory"}
        answer: dict[str, str] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(
                    WORKER, stdin=pipe, stdout=pipe, stderr=null, text=True
                )
            except OSError as error:
                raise EngineError(f"no process to compile grammars in: {error}") from error
        return self._process


class _Cache:
    """Least recently used values up to a number of bytes. Not locked."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._values: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: _Key, value: _Value, size: int) -> None:
        self._values[key] = (value, size)
        self._used += size
        while self._used > self._limit and len(self._values) > 1:
            _, (_, freed) = self._values.popitem(last=False)
            self._used -= freed
