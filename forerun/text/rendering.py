"""Chooses where chat templates run: known ones in this process, others in one with limited
memory.
"""

import hashlib
import json
import sys
import threading
from typing import Any, Protocol

from forerun.errors import ModelError, RequestError, WorkerError
from forerun.sandbox import Fault, SandboxProcess
from forerun.text.template import Template

BYTE_LEVEL_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for the byte-level tokenizer."""

KNOWN = frozenset({"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"})
"""SHA-256 of templates that were read and found harmless: that of the default model."""

SECONDS = 10.0
"""A rendering that takes longer is ended; nearly all use up their fuel sooner."""

COMMAND = (sys.executable, "-m", "forerun.text.render_worker")


LARGE = 1 << 15
"""Characters of JSON above which a conversation counts as large: twice the bytes of a small body
(serve.workers), because control strings in it are marked.
"""


class Renderer(Protocol):
    """Renders one template.

    waits  rendering waits for another process, so it must not run on an event loop
    """

    waits: bool

    def render(self, names: dict[str, Any]) -> str:
        """Return the template's text for these names; blocks. Raises RequestError if they cannot be
        rendered, ModelError if the template takes too much time or memory, WorkerError if its
        process was ended from outside.
        """
        ...

    def close(self) -> None:
        """End its processes, if it has any; they start again when needed."""
        ...


def renderer(source: str) -> Renderer:
    """Return the renderer of a template: in this process if it is known to be harmless, else in
    processes with limited memory. Raises ModelError if it does not parse.
    """
    known = source == BYTE_LEVEL_TEMPLATE or hashlib.sha256(source.encode()).hexdigest() in KNOWN
    return Template(source) if known else BySize(source)


class BySize:
    """Renders in two processes, one of them for large conversations, so that small ones never wait
    for these. Safe to share between threads. Raises ModelError if the template does not parse.
    """

    waits = True

    def __init__(self, source: str) -> None:
        self.small, self.large = Apart(source), Apart(source)
        self.small.check()

    def render(self, names: dict[str, Any]) -> str:
        """Render in the process for large conversations or in that for small ones; blocks. Raises
        RequestError, ModelError or WorkerError, as Renderer.render.
        """
        return (self.large if is_large(names) else self.small).render(names)

    def close(self) -> None:
        """End both processes; they start again when needed."""
        self.small.close()
        self.large.close()


def is_large(names: dict[str, Any]) -> bool:
    """Return whether names for a template have more than LARGE characters of JSON: then only this
    conversation is affected if its rendering fails.
    """
    return len(json.dumps(names, ensure_ascii=False, separators=(",", ":"))) > LARGE


class Apart:
    """Renders in a process of its own, one text at a time. Safe to share between threads. It takes
    half a millisecond per text, and a quarter of a second at first. Compiling also happens there,
    because minijinja evaluates constants then.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._child = SandboxProcess(COMMAND, SECONDS)
        self._turn = threading.Lock()

    def check(self) -> None:
        """Compile the template in the process. Raises ModelError if it does not parse."""
        self._asked({})

    def render(self, names: dict[str, Any]) -> str:
        """Render the template with variables `names`; return the text. Blocks; retries once if the
        process may have been killed from outside. Raises RequestError, ModelError or WorkerError,
        as Renderer.render.
        """
        return self._asked({"names": names})

    def close(self) -> None:
        """Wait for a running rendering, and end the process; it starts again when needed."""
        with self._turn:
            self._child.close()

    def _asked(self, request: dict[str, Any]) -> str:
        asked = {"source": self._source, **request}
        with self._turn:
            answer = self._child.ask(asked)
            if answer is None and self._child.fault not in (Fault.TIME, Fault.TOTAL):
                # It may have been ended or stopped from outside.
                answer = self._child.ask(asked)
            fault = self._child.fault
        if answer is None and fault is not None and fault.ours:
            raise WorkerError(f"The messages cannot be rendered: {fault.words(SECONDS)}.")
        if answer is None:
            raise ModelError("the chat template takes too much memory or time")
        if "refused" in answer:
            raise RequestError(answer["refused"], "messages")
        if "unusable" in answer:
            raise ModelError(answer["unusable"])
        return str(answer["text"])
