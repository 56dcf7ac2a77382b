"""A conversation's settings beyond its text: tools, reasoning, a constraint."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.build.engine import Frontend
from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Calling, Rules, tool_rules, without
from forerun.errors import RequestError
from forerun.options.config import ServeSettings
from forerun.serve.bodies.closing import closed_grammar, closed_rules
from forerun.serve.bodies.messages import left_out
from forerun.serve.bodies.output_parser import OutputParser
from forerun.serve.bodies.schema import NEVER, ChatBody, ConversationFields, SampledBody
from forerun.serve.bodies.thinking import (
    after_analysis,
    after_reasoning,
    enforced_budget,
    stage_behind,
)
from forerun.serve.bodies.tools import Tool, ToolChoice
from forerun.serve.http.errors import ApiError
from forerun.text.chat import ChatTemplate
from forerun.text.harmony import (
    FINAL,
    MESSAGE,
    START,
    THOUGHTS,
    HarmonyReader,
    begun_message,
)
from forerun.text.reasoning import TAIL, Marks, ReasoningReader, Stage
from forerun.text.tokenizer import Tokenizer
from forerun.text.tools import FORMATS, HARMONY, ToolFormat, ToolReader
from forerun.types import Ints

_SWITCHES = re.compile(
    r"(?<![.\w])enable_thinking\b(?! *=[^=])|(?:(?<=if )|(?<=if not ))thinking\b"
)
"""Variables by which chat templates switch reasoning on or off: elsewhere `thinking` is a word. A
name before `=` or behind a point is the template's own.
"""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation, ready to be answered.

    prompt   int32[T]
    rules    the constraint of the answer
    parser   creates the parser of one choice; None if its text needs none
    control  control tokens leave text, because some of them are marks that `parser` reads
    ignored  fields that have no effect
    """

    prompt: Ints
    rules: Rules | None
    parser: Callable[[], OutputParser] | None = None
    control: bool = False
    ignored: tuple[str, ...] = ()


def dialogue(body: ChatBody, loaded: Frontend, settings: ServeSettings) -> Dialogue:
    """Render the conversation, and determine the constraint and the parser of its answer. Raises
    RequestError naming the field, ApiError if the model has no chat template.
    """
    offered, choice = _offered(body)
    if settings.additional_properties == "deny":
        offered = tuple(_closed(tool) for tool in offered)
    template, tokenizer = template_of(loaded), loaded.tokenizer
    format = FORMATS.get(settings.tool_parser) or template.traits.tool_format
    marks = THOUGHTS if format is HARMONY else _marks(settings, template)
    prompt = chat_prompt(body, loaded, offered, marks)
    banned = token_rules(body, tokenizer)
    rules, free = banned or constraint(body, settings), False
    if not offered and marks is None and body.requested_budget[1] is None:
        return Dialogue(prompt, rules)
    tail = tokenizer.decode(prompt[-TAIL:].tolist(), skip_special=False)
    # Of Harmony: what the prompt has of the answer's first message; "" within a long text.
    message = begun_message(tail) or ("" if body.continue_final_message else START)
    if offered and banned is None:
        answer = rules.grammar if rules is not None else None
        inside = not message or MESSAGE in message
        rules = _tool_rules(body, loaded, format, offered, choice, answer, inside)
        free = choice.kind == "auto" and body.rules is None
    plain = [tool.plain for tool in offered]
    room = loaded.context - len(prompt)
    if format is HARMONY:
        known = None if banned or offered else marks
        budget, notice = enforced_budget(body, settings, known, tokenizer, room)
        if known is not None:
            prompt, rules, message = after_analysis(prompt, rules, message, budget, tokenizer)
        apart = _apart(body) and settings.reasoning_end != "off"
        parser = _channels(plain, message or FINAL, apart)
        return Dialogue(prompt, rules, parser, control=True, ignored=notice)

    def tools() -> ToolReader | None:
        return ToolReader(format, plain, body.parallel_tool_calls) if plain else None

    ends = format.ends_thoughts if plain else ()
    known = None if banned else marks
    budget, notice = enforced_budget(body, settings, known, tokenizer, room)
    if budget is not None:
        budget = replace(budget, call="".join(ends))
    if marks is None or (not _apart(body) and rules is banned and budget is None):
        # It stays in the content.
        control = bool(plain) and any(_is_control(loaded, mark) for mark in format.seen)
        made = (lambda: OutputParser(None, tools())) if plain else None
        return Dialogue(prompt, rules, made, control)
    parsed_marks = (marks.opener, marks.closer, *(format.seen if plain else ()))
    control = any(_is_control(loaded, mark) for mark in parsed_marks)
    stage, bare = stage_behind(body, tail, marks)
    if banned is None and not (free and stage == Stage.UNDECIDED and budget is None):
        seen = control or not body.skip_special_tokens or not _apart(body)
        after = after_reasoning(prompt, rules, stage, marks, tokenizer, seen, budget)
        prompt, rules, stage = after
    if not _apart(body) and body.rules is None and not plain:
        return Dialogue(prompt, rules, None, control, notice)

    def reader() -> OutputParser:
        return OutputParser(ReasoningReader(marks, stage, bare, ends), tools())

    return Dialogue(prompt, rules, reader, control, notice)


def _channels(tools: list[dict[str, Any]], begun: str, apart: bool) -> Callable[[], OutputParser]:
    """Return a factory of parsers for answers in Harmony whose prompt already contains `begun`."""
    names = [tool["function"]["name"] for tool in tools]
    return lambda: OutputParser(None, None, HarmonyReader(names, begun, apart))


def _apart(body: ChatBody) -> bool:
    """Return whether reasoning is separate from the content."""
    return body.separate_reasoning and body.reasoning_format != "none"


def constraint(body: SampledBody, settings: ServeSettings) -> Rules | None:
    """Return the constraint of an answer without tools: the body's rules, with closed schemas
    unless `settings` allow more keys; None if there are none.
    """
    rules = body.rules
    if rules is None or settings.additional_properties == "allow":
        return rules
    return closed_rules(rules)


def token_rules(body: SampledBody, tokenizer: Tokenizer) -> Rules | None:
    """Return the rules of vLLM's bad_words or allowed_token_ids; None without either. They apply
    from the first token on, also during reasoning. Raises RequestError if there is another
    constraint too, or an id that does not exist.
    """
    names = [name for name in ("bad_words", "allowed_token_ids") if getattr(body, name)]
    if not names:
        return None
    name = names[-1]
    other = names[0] if len(names) > 1 else "tools" if getattr(body, "tools", ()) else ""
    other = body.rules.grammar.field if body.rules is not None else other
    if other:
        raise RequestError(
            f"{name} and {other} cannot be honoured at once: an answer has one constraint.", name
        )
    if name == "bad_words":
        return _without_words(body.bad_words, tokenizer)
    return _allowed_tokens(body.allowed_token_ids, tokenizer.vocab_size)


def never(body: SampledBody, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return the biases for allowed_token_ids, which exclude the end-of-text ids that are not
    listed: a grammar would allow them.
    """
    allowed = body.allowed_token_ids
    return tuple((id, NEVER) for id in tokenizer.eos_ids if id not in allowed) if allowed else ()


def _without_words(words: Sequence[str], tokenizer: Tokenizer) -> Rules:
    """Return the rules of texts and control tokens in which no text contains one of `words`."""
    special = sorted(tokenizer.control_within.values())
    between = f"(<[{','.join(map(str, special))}]> TEXT)*" if special else ""
    source = f"start: TEXT {between}\nTEXT: {without(words)}"
    return Rules(Grammar.grammar(source, "bad_words"))


def _allowed_tokens(ids: Sequence[int], vocab: int) -> Rules:
    wrong = [id for id in ids if id >= vocab]
    if wrong:
        message = f"allowed_token_ids has the token id {wrong[0]}, but ids are 0 to {vocab - 1}."
        raise RequestError(message, "allowed_token_ids")
    source = f"start: (<[{','.join(map(str, sorted(set(ids))))}]>)*"
    return Rules(Grammar.grammar(source, "allowed_token_ids"))


def chat_prompt(
    body: ConversationFields,
    loaded: Frontend,
    offered: tuple[Tool, ...] = (),
    marks: Marks | None = None,
) -> Ints:
    """Encode a conversation by the model's template: int32[T]. Raises ApiError if there is none.

    marks  around reasoning: a message that is continued may end inside it
    """
    template, opens = template_of(loaded), _opens(body)
    extra, max_tokens = dict(body.chat_template_kwargs or {}), None
    continues = body.continue_final_message
    if isinstance(body, ChatBody):
        extra = effort_names(body, template) | budget_name(body, template.source) | extra
        max_tokens = loaded.context if body.truncate_prompt_tokens is None else None
    return template.encode(
        list(body.messages or ()),
        [tool.plain for tool in offered] or None,
        add_generation_prompt=opens,
        extra=extra,
        continues=continues,
        max_tokens=max_tokens,
        marks=marks,
    )


def _opens(body: ConversationFields) -> bool:
    """Return whether the prompt ends where an answer begins. Raises RequestError if the request
    has two different limits.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message cannot both be true: the answer "
            "either begins a message or continues the last one.",
            "continue_final_message",
        )
    return body.add_generation_prompt is not False


def _effort(body: ChatBody) -> str | None:
    """Return the request's reasoning effort; None = the template's default. A switch that is off
    takes precedence over an effort.
    """
    effort = None if body.reasoning is None else body.reasoning.requested_effort
    return effort if effort == "none" else body.reasoning_effort or effort


def effort_names(body: ChatBody, template: ChatTemplate) -> dict[str, Any]:
    """Return the template's variables for `reasoning_effort`; {} if it has none. The effort "none"
    is only the switch where the template has one.
    """
    effort = _effort(body)
    if effort is None:
        return {}
    found = (
        one for one in _SWITCHES.findall(template.source) if _reads_value(one, template.source)
    )
    names: dict[str, Any] = dict.fromkeys(found, effort != "none")
    grades = "reasoning_effort" in template.source and not (names and effort == "none")
    return names | ({"reasoning_effort": effort} if grades else {})


def _reads_value(name: str, template: str) -> bool:
    """Return whether a template reads a request's value of a variable. A variable that it sets
    without reading it first is its own (Nemotron).
    """
    own = f"set {name} =" in template
    return not own or re.search(rf"\b{name} (?:is|\|)", template) is not None


def budget_name(body: ChatBody, template: str) -> dict[str, Any]:
    """Return the variable for a thinking budget in a template's source (Seed-OSS); {} if the
    template has none, or the request no budget.
    """
    _, tokens = body.requested_budget
    if tokens is None or tokens < 0 or "thinking_budget" not in template:
        return {}
    return {"thinking_budget": tokens}


def ignored_fields(body: SampledBody, loaded: Frontend) -> tuple[str, ...]:
    """Return the names of the fields that the request has and that have no effect with this
    model.
    """
    found = tuple(body.ignored)
    if isinstance(body, ChatBody):
        found += left_out(body.messages)
    if isinstance(body, ChatBody) and _effort(body) is not None:
        has_efforts = loaded.chat is not None and effort_names(body, loaded.chat)
        found += () if has_efforts else ("reasoning_effort",)
    return found


def _closed(tool: Tool) -> Tool:
    arguments = closed_grammar(tool.signature.arguments)
    return replace(tool, signature=replace(tool.signature, arguments=arguments))


def template_of(loaded: Frontend) -> ChatTemplate:
    """Return the model's chat template. Raises ApiError (400) if it has none."""
    if loaded.chat is None:
        raise ApiError(
            400,
            f"{loaded.name} has no chat template; use /v1/completions, or start the server with "
            "--chat-template chatml, for example.",
            "no_chat_template",
            "messages",
        )
    return loaded.chat


def _offered(body: ChatBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the model may call, and the tool choice."""
    tools = body.tools
    choice = body.tool_choice or ToolChoice("auto")
    if choice.kind == "none":
        return (), choice
    if not tools and choice.kind != "auto":
        raise RequestError("tool_choice asks for a call, but there are no tools.", "tool_choice")
    if choice.names:
        found = tuple(tool for tool in tools if tool.signature.name in choice.names)
        for name in {*choice.names}.difference(tool.signature.name for tool in found):
            raise RequestError(
                f"tool_choice: there is no tool {name!r} in tools.",
                "tool_choice.function.name" if choice.kind == "named" else "tool_choice",
            )
        return found, choice
    return tools, choice


def _tool_rules(
    body: ChatBody,
    loaded: Frontend,
    format: ToolFormat,
    offered: tuple[Tool, ...],
    choice: ToolChoice,
    answer: Grammar | None,
    inside: bool,
) -> Rules:
    """Return the grammar of an answer with calls.

    answer  of an answer without calls
    inside  as in Calling
    """
    required = choice.kind != "auto"
    if required and answer is not None:
        raise RequestError(
            f"{answer.field} and tool_choice cannot be honoured at once: an answer has one "
            "constraint. Leave tool_choice to auto.",
            "tool_choice",
        )
    tokenizer = loaded.tokenizer
    marks = [mark for mark in format.marks if _is_control(loaded, mark)]
    special = {mark: tokenizer.added[mark].id for mark in marks}
    others = set(tokenizer.control_within.values()) - set(special.values())
    several = body.parallel_tool_calls and choice.kind != "named"
    signatures = [tool.signature for tool in offered]
    calling = Calling(required, several, special, others, inside)
    return tool_rules(format, signatures, calling, answer)


def keeps_budgets(loaded: Frontend, settings: ServeSettings) -> bool:
    """Return whether the model's reasoning can have a budget: the marks around it are known."""
    if loaded.chat is None:
        return False
    format = FORMATS.get(settings.tool_parser) or loaded.chat.traits.tool_format
    return format is HARMONY or _marks(settings, loaded.chat) is not None


def _marks(settings: ServeSettings, template: ChatTemplate) -> Marks | None:
    end = settings.reasoning_end.strip()
    if end in ("", "off"):
        return None
    return template.traits.marks if end == "auto" else Marks.of(end)


def _is_control(loaded: Frontend, mark: str) -> bool:
    token = loaded.tokenizer.added.get(mark)
    return token is not None and token.control
