"""The common part of conversation dialects: one choice, whose text is parsed as it arrives."""

from forerun.engine.request import Delta, Finish
from forerun.serve.bodies.output_parser import OutputParser
from forerun.serve.bodies.prepare import Generation
from forerun.text.tool_bodies import ParsedDelta


class ChoiceReader:
    """Parses the one choice of a generation."""

    def __init__(self, generation: Generation) -> None:
        make = generation.parser or (lambda: OutputParser(None, None))
        self._parser = make()
        self.finish: Finish | None = None
        self.stop_reason: str | int | None = None

    def push(self, news: Delta) -> ParsedDelta:
        """Return a delta split into reasoning, content and calls. Stores the reason for which the
        choice ended.
        """
        if news.finish is not None:
            self.finish, self.stop_reason = news.finish, news.stop_reason
        cut = news.finish == Finish.LENGTH
        return self._parser.push(news.text, news.finish is not None, cut)

    @property
    def called(self) -> bool:
        """Whether the answer ended with tool calls."""
        return self._parser.called(self.finish, self.stop_reason)

    @property
    def cut(self) -> bool:
        """Whether the token limit, or a stop string inside a call, cut the answer off."""
        inside = self._parser.stopped_inside(self.stop_reason)
        return self.finish == Finish.LENGTH or inside
