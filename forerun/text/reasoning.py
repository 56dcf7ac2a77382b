"""Splits the text of models that reason first: `<think> ... </think>`, then the answer.

The end of the prompt decides whether the reasoning has begun, has ended, or is left to the model:
some models' templates open it, others close it at once when it is disabled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

CLOSERS = ("</think>", "[/THINK]", "</thinking>", "</seed:think>", "<channel|>")
"""Texts that end reasoning, known from chat templates."""

_RESPONSE = ("<response>", "</response>")
TAIL = 64
"""Characters at the end of a prompt that are examined."""


class Stage(StrEnum):
    """The place of an answer: in its reasoning (THINKING), after it (ANSWERING), or not known yet
    (UNDECIDED).
    """

    UNDECIDED = "undecided"
    THINKING = "thinking"
    ANSWERING = "answering"


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts around the reasoning.

    gap    written by this server after the opener
    label  a word after the opener that is not reasoning: Gemma 4's `<|channel>thought`
    shell  texts around an answer after reasoning: Granite 3.3's `<response>`
    """

    opener: str
    closer: str
    gap: str = "\n"
    label: str = ""
    shell: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, closer: str) -> Self:
        """Return the pair of a closer: its opener is the same text without the first slash; for
        Gemma 4, with the bar at the other end.
        """
        if closer == "<channel|>":
            return cls("<|channel>", closer, label="thought")
        return cls(closer.replace("/", "", 1), closer)

    @classmethod
    def found_in(cls, template: str | None) -> Self | None:
        """Return the pair whose closer a chat template contains; None if it contains none, or is
        None.
        """
        known = (closer for closer in CLOSERS if closer in (template or ""))
        closer = next(known, None)
        if closer is None:
            return None
        shelled = "".join(_RESPONSE) in (template or "")
        return replace(cls.of(closer), shell=_RESPONSE) if shelled else cls.of(closer)

    def stage(self, prompt_tail: str) -> Stage:
        """Return the stage of an answer after a prompt with this end (TAIL characters suffice)."""
        tail = prompt_tail.rstrip()
        if tail.endswith((self.opener, self.opener + self.label)):
            return Stage.THINKING
        return Stage.ANSWERING if tail.endswith(self.closer) else Stage.UNDECIDED

    def begun(self, message: Mapping[str, Any]) -> str | None:
        """Return the unfinished reasoning at the end of a model's message, without its opener; None
        if there is none.
        """
        content = str(message.get("content") or "")
        if not content.strip():
            thought = str(message.get("reasoning_content") or "")
            return f"{self.gap}{thought}" if thought.strip() else None
        opens = content.lstrip().startswith(self.opener) and self.closer not in content
        thought = content.lstrip()[len(self.opener) :]
        return thought.removeprefix(self.label) if opens else None

    def going_on(self, prompt: str, thought: str) -> str:
        """Return a prompt for an answer with unfinished reasoning appended, whether the template
        has opened it or not.
        """
        opener = self.opener + self.label
        if not prompt.rstrip().endswith(opener):
            return f"{prompt}{opener}{thought}"
        return prompt + (thought.lstrip("\n") if prompt.endswith("\n") else thought)


class ReasoningReader:
    """Splits the text of one answer, in pieces of any size, into reasoning and answer.

    White space next to the marks belongs to neither; a closer that is repeated at once is dropped.
    Models with a label after their opener (Gemma 4) also repeat marks later: a closer is dropped
    anywhere, and an opener begins more reasoning.

    bare  the text begins directly after a mark, not within text that the prompt has begun
    ends  texts of an answer that end reasoning without its closer, such as the opener of a call
    """

    def __init__(
        self, marks: Marks, stage: Stage, bare: bool = True, ends: tuple[str, ...] = ()
    ) -> None:
        self._marks, self._ends = marks, ends
        self._stage = stage
        self._held = ""
        self._bare = bare
        self._label = marks.label if bare else ""
        self._unclosed: list[str] = []
        self._again = self._inside = False

    def push(self, text: str) -> tuple[str, str]:
        """Return the (reasoning, answer) text that is certain with the next piece of text, either
        possibly empty; text that may be part of a mark is held back.
        """
        reads = self._bare or self._inside or self._marks.label
        if self._stage == Stage.ANSWERING and not reads:
            return "", text
        self._held += text
        if self._stage == Stage.UNDECIDED:
            self._decide()
        reasoning = answer = ""
        begun = True
        while begun:
            reasoning += self._thought() if self._stage == Stage.THINKING else ""
            answers = self._stage == Stage.ANSWERING
            answer += self._answer() if answers else ""
            begun = answers and self._stage == Stage.THINKING
        self._unclosed.append(reasoning)
        return reasoning, answer

    def finish(self, cut: bool = False) -> tuple[str, str]:
        """Return the (reasoning, answer) text that was held back, at the end of the text. If the
        model stopped within reasoning, the reasoning is the answer as well; not if it was cut off
        (`cut`), since there is no answer then.
        """
        held, self._held = self._held, ""
        if self._stage == Stage.THINKING:
            held = held.rstrip()
            return held, "" if cut or self._again else "".join([*self._unclosed, held]).lstrip()
        return "", "" if self._inside and held.strip() == self._marks.shell[1] else held

    def _decide(self) -> None:
        """Switch to reasoning if the text begins with the opener, to the answer once it cannot."""
        begun, opener = self._held.lstrip(), self._marks.opener
        if begun.startswith(opener):
            self._stage, self._held = Stage.THINKING, begun[len(opener) :]
        elif not opener.startswith(begun):
            self._stage, self._bare = Stage.ANSWERING, False

    def _thought(self) -> str:
        """Return the reasoning that is certain; hold back white space and a possible beginning of
        the closer.
        """
        text = self._held.lstrip() if self._bare else self._held
        if self._label:
            text = text.removeprefix(self._marks.opener)
            if self._label.startswith(text) or self._marks.opener.startswith(text):
                self._held = text
                return ""
            text, self._label = text.removeprefix(self._label).lstrip(), ""
        marks = (self._marks.closer, *self._ends)
        found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._stage, self._bare = Stage.ANSWERING, mark not in self._ends
            self._held = text[at + len(mark) * self._bare :]
            return text[:at].rstrip()
        cut = len(text[: len(text) - max(overlap(text, mark) for mark in marks)].rstrip())
        self._held = text[cut:]
        self._bare = self._bare and not cut
        return text[:cut]

    def _answer(self) -> str:
        text, self._held = self._held, ""
        while self._bare:
            text = text.lstrip()
            if not text.startswith(self._marks.closer):
                break
            text = text.removeprefix(self._marks.closer)
        if self._bare and self._marks.closer.startswith(text):
            self._held = text
            return ""
        begin = self._marks.shell[0]
        if self._bare and begin.startswith(text) and begin:
            self._held = text
            return ""
        if self._bare and begin:
            self._inside, text = text.startswith(begin), text.removeprefix(begin)
        self._bare = False
        if self._inside:
            return self._within_shell(text)
        return self._without_marks(text) if self._marks.label else text

    def _within_shell(self, text: str) -> str:
        """Return a text without a possible end of the answer's shell, which is held back."""
        end = self._marks.shell[1]
        at = text.rfind(end)
        if at < 0 or text[at + len(end) :].strip():
            at = len(text) - overlap(text, end)
        self._held = text[at:]
        return text[:at]

    def _without_marks(self, text: str) -> str:
        """Return a text of the answer without marks that models with labels repeat; hold back a
        possible beginning of one, or what follows an opener.
        """
        opener, closer = self._marks.opener, self._marks.closer
        answer, found, thought = text.partition(opener)
        answer = answer.replace(closer, "")
        if found:
            self._stage, self._bare, self._again = Stage.THINKING, True, True
            self._label, self._held = self._marks.label, thought
            return answer
        cut = len(answer) - max(overlap(answer, mark) for mark in (opener, closer))
        self._held = answer[cut:]
        return answer[:cut]


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` with which `text` ends; 0 if there
    is none.
    """
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
