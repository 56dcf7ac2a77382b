"""A conversation with a model: its turns, the dropping of old turns that do not fit, its
statistics.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forerun.build.engine import Loaded, encode_chat
from forerun.client.adapters import only_adapter
from forerun.client.completion import Completion, acceptance_length, make_request, stream
from forerun.errors import RequestError
from forerun.options.config import SamplingConfig
from forerun.types import Ints

Turn = dict[str, Any]
ROOM = 64
"""Tokens that an answer should have room for; old turns are dropped to make it."""


class Conversation:
    """The turns so far and their statistics.

    sampling  the options; they may be replaced between two turns. Without a seed the session gets a
         random one; each answer uses the next seed.
    """

    def __init__(
        self,
        loaded: Loaded,
        sampling: SamplingConfig,
        system: str | None,
        write: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """Begin a conversation. write: called with the text of answers as it arrives. tell: called
        with messages for the user.
        """
        self.loaded, self.system = loaded, system
        self.sampling = (
            sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(32))
        )
        self.turns: list[Turn] = []
        self.done: list[Completion] = []
        self._write, self._tell, self._asked = write, tell, 0

    def reset(self) -> None:
        """Forget all turns but the system message."""
        self.turns.clear()
        self.done.clear()

    def say(self, text: str) -> Completion:
        """Send one user turn, write the answer as it arrives, and keep both. Ctrl-C ends the answer
        early and keeps its text so far. Raises RequestError, with the turn removed, if the turn
        does not fit even alone.
        """
        return self._answer([*self.turns, {"role": "user", "content": text}])

    def regenerate(self) -> Completion:
        """Answer the last turn again, with another seed. Raises RequestError if there is none."""
        if not self.turns:
            raise RequestError("There is no answer to regenerate.")
        return self._answer(self.turns[:-1])

    def stats(self) -> dict[str, Any]:
        """Return totals of the conversation: answers, tokens, and tokens per step."""
        tokens = sum(len(item.tokens) for item in self.done)
        steps = acceptance_length([item.stats for item in self.done])
        return {"answers": len(self.done), "tokens": tokens, "tokens_per_step": steps}

    def messages(self) -> list[Turn]:
        """Return all turns, the system message first."""
        return self._messages(self.turns)

    def _messages(self, turns: list[Turn]) -> list[Turn]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *turns]

    def _answer(self, turns: list[Turn]) -> Completion:
        prompt, fitted = self._fitted(turns)
        if len(fitted) < len(turns):
            dropped = len(turns) - len(fitted)
            self._tell(f"the context is full: the oldest {dropped} messages are dropped")
        options = self.sampling.options(self.loaded.target.sampling)
        options["seed"] = (options["seed"] + self._asked) % 2**63
        left = max(self.loaded.context - len(prompt), 1)
        options["max_tokens"] = min(options["max_tokens"], left)
        self._asked += 1
        answer = Completion()
        self._stream(answer, prompt, options)
        self.turns = [*fitted, {"role": "assistant", "content": answer.text}]
        self.done.append(answer)
        return answer

    def _fitted(self, turns: list[Turn]) -> tuple[Ints, list[Turn]]:
        """Return int32[T], the prompt of the latest turns that leave room for an answer, and these
        turns. A question is never separated from its answer, and the last question is always
        included.
        """
        while True:
            prompt = encode_chat(self.loaded, self._messages(turns))
            room = min(self.sampling.max_tokens, ROOM)
            if len(turns) < 3 or len(prompt) + room <= self.loaded.context:
                return prompt, turns
            turns = turns[2:]

    def _stream(self, answer: Completion, prompt: Ints, options: dict[str, Any]) -> None:
        request = make_request(prompt, self.loaded.tokenizer.eos_ids, **options)
        request = replace(request, adapter=only_adapter(self.loaded.config))
        deltas = stream(self.loaded.engine, request)
        try:
            for delta in deltas:
                answer.add(delta)
                self._write(delta.text)
        except KeyboardInterrupt:
            self._write(" ...")
        finally:
            deltas.close()
        self._write("\n")
