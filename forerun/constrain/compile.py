"""Grammars compiled: strangers' first in a process that can be killed, then here; kept a while."""

import threading
from collections import OrderedDict

from forerun.constrain.automaton import Automaton, Backend
from forerun.constrain.grammar import Grammar
from forerun.constrain.limits import SECONDS
from forerun.constrain.llguidance_backend import Guidance
from forerun.constrain.matcher import Compiled
from forerun.errors import BusyError, ModelError, RequestError
from forerun.sandbox import SandboxProcess
from forerun.text.tokenizer import Tokenizer

MAX_WAITING = 64
"""Grammars that may wait for the compiling process; more are refused for the moment."""

_Key = tuple[str, str, bool, bool]
_Value = Automaton | str

_REFUSED_BYTES = 1024


class Compiler:
    """Compiles grammars for one tokenizer. Safe to share between threads; cheap until first used.

    backend      the library; None = llguidance
    seconds      a grammar that takes longer is refused
    cache_bytes  estimated size of what is kept; the least recently used go first
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        backend: Backend | None = None,
        seconds: float = SECONDS,
        cache_bytes: int = 128 << 20,
    ) -> None:
        if not tokenizer.eos_ids:
            raise ModelError("the model declares no end-of-text token; a grammar could not end")
        self._tokenizer = tokenizer
        self._backend = Guidance(tokenizer) if backend is None else backend
        self._seconds = seconds
        self._worker = SandboxProcess(self._backend.command, seconds, self._backend.init_message())
        self._cache = _Cache(cache_bytes)
        self._lock = threading.Lock()
        self._serial = threading.Lock()
        self._waiting = threading.Semaphore(MAX_WAITING)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile, or find in the cache. Blocks; not for the engine's thread.

        Raises RequestError naming the field and, where it can be told, the place at fault;
        BusyError when too many wait.
        """
        self._backend.check(grammar)
        key = (grammar.kind, grammar.source, grammar.lenient, grammar.one_line)
        with self._lock:
            found = self._cache.get(key)
        if found is None:
            found = self._compile_serially(key, grammar)
        if isinstance(found, str):
            raise RequestError(self._backend.explained(grammar, found), grammar.field)
        return Compiled(found, grammar.start, self._tokenizer.vocab_size)

    def close(self) -> None:
        """End the compiling process."""
        with self._serial:
            self._worker.close()

    def _compile_serially(self, key: _Key, grammar: Grammar) -> _Value:
        """One at a time; whoever waited for the same grammar finds it in the cache."""
        if not self._waiting.acquire(blocking=False):
            raise BusyError("Too many grammars are being compiled; try again later.")
        try:
            with self._serial:
                with self._lock:
                    found = self._cache.get(key)
                if found is None:
                    found = self._compile(grammar)
                    size = _REFUSED_BYTES if isinstance(found, str) else found.size
                    with self._lock:
                        self._cache.put(key, found, size + len(grammar.source))
                return found
        finally:
            self._waiting.release()

    def _compile(self, grammar: Grammar) -> _Value:
        """An automaton at the beginning of the grammar, or why there is none."""
        names = ("kind", "source", "lenient", "one_line")
        request = {name: getattr(grammar, name) for name in names}
        answer = self._worker.ask(request)
        if answer is None:
            return f"it takes more than {self._seconds:g} seconds or too much memory"
        if "error" in answer:
            return answer["error"]
        return self._backend.build(grammar, answer["grammar"])


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
