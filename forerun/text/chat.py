"""Chat templates: convert messages to one prompt, with the meaning of Hugging Face templates.

The template is part of the model, not of Forerun: it runs in the place that `rendering` chooses,
and text of users cannot imitate its control strings (see `escape`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np

from forerun.errors import ContextError, ModelError, RequestError
from forerun.text.conversation import TemplateTraits, adapted
from forerun.text.escape import ControlStrings, Escape, check_json, free_marker
from forerun.text.json_text import JsonFault, read_json
from forerun.text.reasoning import Marks
from forerun.text.rendering import is_large, renderer
from forerun.text.tokenizer import Tokenizer, matcher
from forerun.types import Ints

_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_OWN_WORDS = ("content", "reasoning_content", "reasoning", "thinking")
_END_OF_MESSAGE = "\ue0f1end-of-message\ue0f1"
"""Marks the end of a message to be continued: private-use characters, which no text contains."""
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""Variables that neither requests nor options set."""


class ChatTemplate:
    """A compiled chat template. Safe to share between threads.

    traits    the form of conversations that it accepts; conversations are converted to that form
              before they are rendered
    defaults  variables where `extra` does not have them

    Raises ModelError if there is no template or it does not parse.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        if not source:
            raise ModelError(
                "this model has no chat template; use /v1/completions, or a model that has one"
            )
        self._source: str = source
        self._defaults = defaults or {}
        self._tokenizer = tokenizer
        self._renderer = renderer(source)
        self.traits = TemplateTraits(source, self._probe)
        added = [token for token in tokenizer.added.values() if len(token.text) > 1]
        self._special = [token.text for token in added if token.control]
        # Some models do not mark `<｜User｜>` and the like: strings of the template count as well.
        self._written = [t.text for t in added if not t.control and t.text in source]
        self._unmarked = matcher(self._written)

    @cached_property
    def _controls(self) -> ControlStrings:
        """All control strings; computed on first use, since an engine behind a server needs
        none.
        """
        return ControlStrings([*self._special, *self._written])

    @cached_property
    def _marked_controls(self) -> ControlStrings:
        """The control strings that the tokenizer's files mark as such."""
        return ControlStrings(self._special) if self._written else self._controls

    def warmed_up(self) -> Self:
        """Compute what the first conversation would have to wait for. Returns this template."""
        for controls in (self._controls, self._marked_controls):
            controls.whole.search("")
        return self

    @property
    def waits(self) -> bool:
        """Whether rendering waits for another process, so that it must not be called on an event
        loop.
        """
        return self._renderer.waits

    @property
    def source(self) -> str:
        """The template's text, by which the formats of tool calls and reasoning are recognised."""
        return self._source

    def close(self) -> None:
        """End the processes that render, if there are any; they start again when needed."""
        self._renderer.close()

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continues: bool = False,
        max_tokens: int | None = None,
        marks: Marks | None = None,
    ) -> Ints:
        """Return int32[T], the prompt's ids. Control strings in users' texts are encoded as
        ordinary text.

        messages   OpenAI's, with role and content
        tools      OpenAI's; None = none are offered
        add_generation_prompt  end with the beginning of an answer
        extra      further variables for the template (chat_template_kwargs)
        continues  the prompt ends within the last message, which the model continues
        max_tokens  tokens that there is room for: a text that certainly has more is not encoded;
                   None = no limit
        marks      around reasoning: a message to be continued may end inside it

        Raises RequestError naming the field if the messages cannot be rendered, ContextError if
        they certainly do not fit, WorkerError if the rendering process was ended from outside.
        """
        if not continues:
            text, marker = self._render(messages, tools, add_generation_prompt, extra)
            return self._encode(text, marker, max_tokens)
        last, place = messages[-1] if messages else {}, f"messages[{len(messages) - 1}]"
        begun = marks.begun(last) if marks and last.get("role") == "assistant" else None
        if marks is not None and begun is not None:
            text, marker = self._render(messages[:-1], tools, True, extra, begun)
            thought = Escape(self._controls, marker).text(begun)
            return self._encode(marks.going_on(text, thought), marker, max_tokens)
        if last.get("role") != "assistant" or not str(last.get("content") or "").strip():
            raise RequestError(
                f"continue_final_message: {place} must be the assistant's text so far.", place
            )
        # A marker of its own at the end of the message shows where the template closes it.
        marked = [*messages[:-1], {**last, "content": f"{last['content']}{_END_OF_MESSAGE}"}]
        text, marker = self._render(marked, tools, False, extra)
        text, found, _ = text.rpartition(_END_OF_MESSAGE)
        if not found:
            raise RequestError(
                "continue_final_message: this model's template leaves the last message out.", place
            )
        return self._encode(text, marker, max_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt as text, for display. Parameters and errors as in `encode`."""
        text, marker = self._render(messages, tools, add_generation_prompt, extra)
        return text.replace(marker, "")

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None,
        more: str = "",
    ) -> tuple[str, str]:
        """Return the prompt with markers in the control strings of users' texts, and the marker,
        which does not occur in `more`.
        """
        clean = [clean_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        options = {**self._defaults, **(extra or {})}
        if RESERVED & options.keys():
            name = min(RESERVED & options.keys())
            raise RequestError(f"{name!r} cannot be set by requests", "chat_template_kwargs")
        offered = None if tools is None else [dict(tool) for tool in tools]
        check_json(offered, "tools")
        check_json(options, "chat_template_kwargs")
        clean, offered = adapted(clean, offered, self.traits)
        marker = free_marker([self._source, clean, offered, options, more])
        escape, own = Escape(self._controls, marker), Escape(self._marked_controls, marker)
        names = self._tokenizer.names | escape.value(options)
        names["messages"] = [_escaped(message, escape, own) for message in clean]
        names["tools"] = escape.value(offered)
        names["add_generation_prompt"] = add_generation_prompt
        try:
            return self._renderer.render(names), marker
        except ModelError as error:
            if not is_large(names):
                raise
            message = f"The model's chat template cannot render these messages: {error}."
            raise RequestError(message, "messages") from error

    def _probe(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """Return the template's rendering of a small test conversation. See TemplateTraits."""
        names = {"messages": list(messages), "tools": tools and list(tools)}
        return self._renderer.render(
            self._tokenizer.names | names | {"add_generation_prompt": True}
        )

    def _encode(self, text: str, marker: str, max_tokens: int | None) -> Ints:
        if (
            max_tokens is not None and len(text) > max_tokens // 4
        ):  # A character counts as four at most.
            self._check_length(text.replace(marker, ""), max_tokens)
        ids: list[int] = []
        for part in self._tokenizer.split(text, self._controls.whole):
            if isinstance(part, int):
                ids.append(part)
                continue
            first, *more = self._cut_unmarked(part.replace(marker, "")) or [""]
            ids += self._tokenizer.encode_part(first, not ids) if first else []
            for piece in more:
                ids += self._tokenizer.encode_within(piece)
        return np.array(ids, np.int32)

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Raise ContextError if a text certainly has more than `max_tokens` tokens, without
        encoding it.
        """
        lower_bound = self._tokenizer.least_tokens(text)
        if lower_bound > max_tokens:
            raise ContextError(
                f"This model's maximum context length is {max_tokens} tokens, but the conversation "
                f"has at least {lower_bound} tokens. Shorten the messages.",
                "messages",
                lower_bound,
                context=max_tokens,
            )

    def _cut_unmarked(self, text: str) -> list[str]:
        """Cut a user's text at strings that the encoder would still encode as one token."""
        cuts = [match.start() + 1 for match in self._unmarked.finditer(text)]
        edges = [0, *cuts, len(text)]
        return [text[a:b] for a, b in pairwise(edges) if a < b]


def clean_message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a copy of one message in the form of templates: text content, tool arguments as
    objects. Raises RequestError naming the field below `path` that cannot be used.
    """
    clean = dict(message)
    check_json(clean, path)
    if not isinstance(clean.get("role"), str):
        raise RequestError(f"{path}.role is missing or is not a string", f"{path}.role")
    content = clean.get("content")
    if isinstance(content, list):
        clean["content"] = _joined_parts(content, f"{path}.content")
    elif content is None:
        clean["content"] = ""
    elif not isinstance(content, str):
        raise RequestError(f"{path}.content must be a string or a list", f"{path}.content")
    if clean.get("tool_calls") is not None:
        clean["tool_calls"] = _parsed_calls(clean["tool_calls"], f"{path}.tool_calls")
    return clean


def _joined_parts(parts: list[Any], path: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        here = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(
                f"{here}.type is {kind!r}; this model takes only 'text' parts", f"{here}.type"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{here}.text is missing or is not a string", f"{here}.text")
        texts.append(part["text"])
    return "\n".join(texts)


def _parsed_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, which templates expect instead of JSON
    text.
    """
    if not isinstance(calls, list):
        raise RequestError(f"{path} must be a list", path)
    return [_parsed_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _parsed_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path}.function.name is missing", f"{path}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        where = f"{path}.function.arguments"
        try:
            arguments = read_json(arguments, repeated=True) if arguments.strip() else {}
        except JsonFault as error:
            raise RequestError(f"{where} is not JSON: {error}", where) from error
        check_json(arguments, where)
    return {**call, "function": {**function, "arguments": arguments}}


def _escaped(message: dict[str, Any], escape: Escape, own: Escape) -> dict[str, Any]:
    """Return a message with its texts escaped. The model's own output keeps strings that only look
    like control strings, because templates parse `</think>` out of it.
    """
    role = message["role"]
    escaped: dict[str, Any] = escape.value(message)
    escaped["role"] = role if role in _KNOWN_ROLES else escape.name(role)
    if role == "assistant":
        own_words = {name: message[name] for name in _OWN_WORDS if name in message}
        escaped |= own.value(own_words)
    return escaped
