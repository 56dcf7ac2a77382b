"""Request bodies: one declaration per body, with OpenAI's and vLLM's names.

A field is honoured exactly, rejected by name, or, if it cannot change an answer, ignored: then a
header of the response names it (docs/use/requests.md). Bounds here are those of the field alone;
`prepare` checks what depends on the model or on other fields.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.errors import RequestError
from forerun.options.sampling_params import RANGES
from forerun.serve.bodies.fields import (
    MAX_TEXT,
    Declaration,
    DescribedReader,
    Unused,
    accept,
    body_schema,
    boolean,
    integer,
    items,
    mapping,
    need,
    number,
    one_or_more,
    only,
    part,
    plain_text,
    read,
    shown,
    takes,
    text,
    whatever,
)
from forerun.serve.bodies.messages import NO_MEDIA, USE_TOOLS, content, messages
from forerun.serve.bodies.reasoning import (
    EFFORTS,
    ReasoningOptions,
    reasoning,
    thinking_budget,
)
from forerun.serve.bodies.structure import ConstrainedBody
from forerun.serve.bodies.tools import Tool, ToolChoice, tool_choice, tools
from forerun.serve.bodies.unused import UNUSED

MAX_TOKENS = 2**31 - 1
UNLIMITED = -1
"""Value of max_tokens: as many as the context has room for."""
FORMATS = ("auto", "deepseek", "none")
"""Formats of reasoning, by llama.cpp's names."""
MAX_PROMPTS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 256
MAX_STOP_TEXT = 1024
MAX_ALLOWED = 1 << 16
MAX_ADAPTERS = 256

NO_MODERATION = "there is no moderation"
_SAFE = "a message's text never becomes a control token; use /v1/completions"
_NO_BEAMS = "sequences are sampled, not searched"
_NO_CODE = "the server runs no code from requests"
NEVER = -1e9
"""A bias that makes a token impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(Declaration):
    """`stream_options`. include_usage: a last chunk with token counts; continuous_usage_stats:
    counts in every chunk (vLLM).
    """

    include_usage: bool = accept(boolean, False)
    continuous_usage_stats: bool = accept(boolean, False)
    include_obfuscation: bool = accept(only(False, why="chunks are not padded"), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions(Declaration):
    """`speculative`: control and statistics of speculation, Forerun's own field.

    max_nodes and max_depth bound the draft tokens of a step and the longest path of them, within
    the server's own bounds. stats: counts at the end; trace: a report of every step, as it happens
    (docs/reference/trace.md). None of these changes the text; accept thresholds below 1 do if the
    temperature is not 0, and the answer reports that.
    """

    enabled: bool = accept(boolean, True)
    max_nodes: int | None = accept(integer(0, MAX_TOKENS))
    max_depth: int | None = accept(integer(0, MAX_TOKENS))
    stats: bool = accept(boolean, False)
    trace: bool = accept(boolean, False)
    accept_threshold_single: float | None = accept(number(0.0, 1.0))
    accept_threshold_acc: float | None = accept(number(0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prediction(Declaration):
    type: str = accept(only("content", why="it is the only kind of prediction"), "content")
    content: str = need(content)


@takes(body_schema(_Prediction))
def prediction(value: Any, where: str) -> str:
    """Read `prediction` (OpenAI): the expected text of the answer, or most of it."""
    return read(_Prediction, value, where).content


@takes({"type": ["object", "array"], "maxProperties": MAX_LOGIT_BIAS})
def token_biases(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    """Read `logit_bias`: {"token id": bias}, or [[token id, bias], ...] (llama.cpp), where false
    means never. The engine checks whether the ids exist.
    """
    if isinstance(value, list):
        value = _bias_pairs(value, where)
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be a JSON object, not {shown(value)}.", where)
    if len(value) > MAX_LOGIT_BIAS:
        message = f"{where} has {len(value)} entries, but may have {MAX_LOGIT_BIAS}."
        raise RequestError(message, where)
    bias = number(-100.0, 100.0)
    found: dict[int, float] = {}
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            message = f"{where}: {shown(key)} is not a token id, which is a whole number from 0 on."
            raise RequestError(message, where)
        found[int(key)] = NEVER if amount is False else bias(amount, f"{where}.{key}")
    return tuple(found.items())


def _bias_pairs(pairs: list[Any], where: str) -> dict[str, Any]:
    found = {}
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int:
            place = f"{where}[{index}]"
            raise RequestError(f"{place} must be [token id, bias], not {shown(pair)}.", place)
        found[str(pair[0])] = pair[1]
    return found


@takes({"type": "integer", "minimum": -1, "not": {"const": 0}})
def truncation(value: Any, where: str) -> int:
    """Read `truncate_prompt_tokens`: how many of a prompt's last tokens to keep; -1: as many as
    fit.
    """
    found = integer(-1, MAX_TOKENS)(value, where)
    if found == 0:
        raise RequestError(f"{where} must be -1 or at least 1: a prompt has a token.", where)
    return found


_length = integer(1, MAX_TOKENS)


@takes({"type": "integer", "minimum": -1, "not": {"const": 0}})
def _answer_length(value: Any, where: str) -> int | None:
    """Read `max_tokens` of a conversation; -1 (llama.cpp) counts as absent."""
    if type(value) is int and value == UNLIMITED:
        return None
    return _length(value, where)


@takes(body_schema(SpeculativeOptions))
def untraced(value: Any, where: str) -> SpeculativeOptions:
    """Read `speculative` for routes whose answers have no field for a trace. Raises RequestError
    for a trace.
    """
    found = read(SpeculativeOptions, value, where)
    if found.trace:
        place = f"{where}.trace"
        message = f"{place} is for /v1/chat/completions and /v1/completions."
        raise RequestError(message, place)
    return found


@dataclass(frozen=True, kw_only=True)
class RequestBody(Declaration):
    """A body that may name the model; without slots, so that it can be one of several bases."""

    model: str | None = accept(text(256, 1))


@dataclass(frozen=True, kw_only=True)
class SamplingFields(Declaration):
    """Sampling parameters that all dialects have. Absent ones get the model's recommended
    values.
    """

    temperature: float | None = accept(number(*RANGES["temperature"]))
    top_p: float | None = accept(number(*RANGES["top_p"]))
    top_k: int | None = accept(integer(-1, MAX_TOKENS))
    min_p: float | None = accept(number(*RANGES["min_p"]))


@dataclass(frozen=True, kw_only=True)
class PenaltyFields(SamplingFields):
    """Sampling parameters that most dialects have in addition."""

    frequency_penalty: float | None = accept(number(*RANGES["frequency_penalty"]))
    presence_penalty: float | None = accept(number(*RANGES["presence_penalty"]))
    stop: tuple[str, ...] = accept(one_or_more(text(MAX_STOP_TEXT, 1), MAX_STOP_TOKENS), ())


@dataclass(frozen=True, kw_only=True)
class TokenFields(PenaltyFields):
    """Sampling parameters that vLLM and SGLang have in addition."""

    n: int = accept(integer(1, MAX_TOKENS), 1)
    repetition_penalty: float | None = accept(number(*RANGES["repetition_penalty"]))
    logit_bias: tuple[tuple[int, float], ...] = accept(token_biases, ())
    stop_token_ids: tuple[int, ...] = accept(items(integer(0, MAX_TOKENS), MAX_STOP_TOKENS), ())
    ignore_eos: bool = accept(boolean, False)
    skip_special_tokens: bool = accept(boolean, True)


cache_salt = text(1024, 1)
"""Reads `cache_salt` of vLLM, `extra_key` of SGLang. Not empty: "" is probably a client's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled(Declaration):
    """An entry of llama.cpp's `lora`."""

    id: int = need(integer(0, MAX_TOKENS))
    scale: float = accept(number(-1e6, 1e6), 0.0)


@takes({"type": "array", "items": {"type": "object"}})
def _one_adapter(value: Any, where: str) -> tuple[int, ...]:
    """Read llama.cpp's list of adapters with scales: the number of the one with scale 1, if any.
    Raises RequestError for other scales, and for several adapters.
    """
    entries = items(part(_Scaled), MAX_ADAPTERS)(value, where)
    chosen = tuple(one.id for one in entries if one.scale)
    if len(chosen) > 1 or any(one.scale not in (0, 1) for one in entries):
        message = f"{where}: a request runs with one adapter at most, at a scale of 1."
        raise RequestError(message, where)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBody(ConstrainedBody, TokenFields, RequestBody):
    """The common part of /v1/chat/completions and /v1/completions. Missing sampling parameters get
    the model's recommended values. id_prefix: the beginning of the answer's id.

    return_token_ids  the answer has its tokens and the prompt's (vLLM)
    return_tokens_as_token_ids  log-probabilities name tokens as `token_id:N` (vLLM)
    prompt_logprobs  alternatives to report of each token of the prompt (vLLM)
    bad_words  texts that no answer contains (vLLM)
    allowed_token_ids  the only tokens that an answer may have (vLLM)
    timings_per_token  the answer has the times of prompt and answer (llama.cpp)
    prediction  the expected text of the answer, for draft tokens (OpenAI)
    cache_salt  cached prefixes are shared only with requests of the same salt (vLLM)
    lora_path  name of the adapter that answers (SGLang); "" = as the model's name says
    lora  numbers of the adapters that answer (llama.cpp), at most one; () = as lora_path
    """

    id_prefix: ClassVar[str] = ""

    lora_path: str = accept(text(256), "")
    lora: tuple[int, ...] = accept(_one_adapter, ())
    stream: bool = accept(boolean, False)
    stream_options: StreamOptions | None = accept(part(StreamOptions))
    min_tokens: int = accept(integer(0, MAX_TOKENS), 0)
    seed: int | None = accept(integer(-(2**63), 2**63 - 1))
    include_stop_str_in_output: bool = accept(boolean, False)
    speculative: SpeculativeOptions = accept(part(SpeculativeOptions), SpeculativeOptions())
    user: str = accept(text(MAX_TEXT), "")
    truncate_prompt_tokens: int | None = accept(truncation)
    return_token_ids: bool = accept(boolean, False)
    return_tokens_as_token_ids: bool = accept(boolean, False)
    prompt_logprobs: int | None = accept(integer(0, MAX_TOKENS))
    bad_words: tuple[str, ...] = accept(items(text(MAX_STOP_TEXT, 1), MAX_STOP_TOKENS), ())
    allowed_token_ids: tuple[int, ...] = accept(items(integer(0, MAX_TOKENS), MAX_ALLOWED, 1), ())
    cache_salt: str | None = accept(cache_salt)
    timings_per_token: bool = accept(boolean, False)
    request_id: str | None = accept(text(256, 1))
    prediction: str | None = accept(prediction)

    renamed: ClassVar[dict[str, str]] = {
        "repeat_penalty": "repetition_penalty",
        "n_predict": "max_tokens",
        "rid": "request_id",
        "extra_key": "cache_salt",
        "no_stop_trim": "include_stop_str_in_output",
    }
    refused: ClassVar[dict[str, str]] = {
        "use_beam_search": _NO_BEAMS,
        "early_stopping": _NO_BEAMS,
        "stop_regex": "use stop",
        "custom_logit_processor": _NO_CODE,
        "custom_params": _NO_CODE,
        "return_tokens": "use return_token_ids",
        "logits_processors": _NO_CODE,
        "speculative_accept_threshold_single": "use speculative.accept_threshold_single",
        "speculative_accept_threshold_acc": "use speculative.accept_threshold_acc",
    }
    unused: ClassVar[dict[str, Unused]] = {
        **UNUSED,
        "priority": Unused(integer(-(2**63), 2**63 - 1), 0),
    }


@takes({"type": "object", "maxProperties": 64})
def template_options(value: Any, where: str) -> dict[str, Any]:
    """Read `chat_template_kwargs`: variables for the template, which checks their depth."""
    if not isinstance(value, dict) or len(value) > 64:
        raise RequestError(f"{where} must be an object of at most 64 entries.", where)
    return value


@dataclass(frozen=True, kw_only=True)
class ConversationFields(Declaration):
    """A conversation that a template renders, if the request has one, and the template's
    variables.
    """

    tools: tuple[Tool, ...] = accept(tools, ())
    add_generation_prompt: bool | None = accept(boolean)
    chat_template_kwargs: dict[str, Any] | None = accept(template_options)
    messages: tuple[dict[str, Any], ...] | None = accept(messages)
    continue_final_message: bool = accept(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody(SampledBody, ConversationFields):
    """POST /v1/chat/completions. The conversations of other dialects are converted to this body."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    budget_is_target: ClassVar[bool] = False
    """Whether a thinking budget that cannot be enforced is ignored, instead of rejected."""

    messages: tuple[dict[str, Any], ...] = need(messages)
    max_tokens: int | None = accept(_answer_length)
    max_completion_tokens: int | None = accept(_answer_length)
    logprobs: bool = accept(boolean, False)
    top_logprobs: int | None = accept(integer(0, MAX_TOKENS))
    n_probs: int = accept(integer(0, MAX_TOKENS), 0)
    separate_reasoning: bool = accept(boolean, True)
    reasoning_format: str | None = accept(
        only(*FORMATS, why="reasoning is separate from the content, or not")
    )
    reasoning_effort: str | None = accept(only(*EFFORTS, why="these are the efforts"))
    reasoning: ReasoningOptions | None = accept(reasoning)
    thinking_token_budget: int | None = accept(thinking_budget)
    thinking_budget_message: str | None = accept(text(MAX_STOP_TEXT))
    modalities: list[str] | None = accept(only(["text"], why=NO_MEDIA))
    tool_choice: ToolChoice | None = accept(tool_choice)
    parallel_tool_calls: bool = accept(boolean, True)
    safety_identifier: str = accept(text(MAX_TEXT), "")
    prompt_cache_key: str = accept(text(MAX_TEXT), "")
    parse_special: bool = accept(only(False, why=_SAFE), False)
    add_special_tokens: bool = accept(only(False, why="the template writes them"), False)

    renamed: ClassVar[dict[str, str]] = {
        **SampledBody.renamed,
        "enable_thinking": "reasoning",
        "think": "reasoning",
        "thinking": "reasoning",
        "thinking_budget": "thinking_token_budget",
        "thinking_budget_tokens": "thinking_token_budget",
        "reasoning_budget_tokens": "thinking_token_budget",
        "reasoning_budget_message": "thinking_budget_message",
    }
    refused: ClassVar[dict[str, str]] = {
        **SampledBody.refused,
        "audio": NO_MEDIA,
        "chat_template": "the template cannot be replaced by requests",
        "documents": "put them into a message",
        "echo": "it exists on /v1/completions only",
        "function_call": USE_TOOLS,
        "functions": USE_TOOLS,
        "moderation": NO_MODERATION,
        "web_search_options": "the server fetches nothing",
    }
    unused: ClassVar[dict[str, Unused]] = {
        **SampledBody.unused,
        "best_of": Unused(only(1, why="all choices are returned; use n")),
        "verbosity": Unused(only("low", "medium", "high", why="it is one of these")),
        "cache_control": Unused(mapping),
    }

    @property
    def requested_budget(self) -> tuple[str, int | None]:
        """(field that sets a thinking budget, its tokens); tokens None: no field does. Raises
        RequestError if two fields disagree.
        """
        name, in_kwargs = "thinking_token_budget", "chat_template_kwargs.thinking_budget"
        of_template = (self.chat_template_kwargs or {}).get("thinking_budget")
        given = {
            name: self.thinking_token_budget,
            "reasoning.max_tokens": None if self.reasoning is None else self.reasoning.max_tokens,
            in_kwargs: None if of_template is None else thinking_budget(of_template, in_kwargs),
        }
        found = {name: tokens for name, tokens in given.items() if tokens is not None}
        if len(set(found.values())) > 1:
            raise RequestError(f"{' and '.join(found)} disagree; send one of them.", name)
        return next(iter(found.items()), (name, None))


Prompt = str | tuple[int, ...]


@takes({"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}})
def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Read a prompt as token ids, at least one. Raises RequestError for other values; whether ids
    exist is checked in `prepare`.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where} must be a list of token ids, not {shown(value)}.", where)
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKENS:
            place = f"{where}[{index}]"
            raise RequestError(f"{place} must be a token id, not {shown(token)}.", place)
    return tuple(value)


def prompts(max_prompts: int) -> DescribedReader[tuple[Prompt, ...]]:
    """Return a reader of at most `max_prompts` prompts: a text, a list of texts, token ids, or a
    list of lists of token ids.
    """
    texts, lists = items(plain_text, max_prompts, 1), items(token_ids, max_prompts, 1)

    @takes({"anyOf": [each.schema for each in (plain_text, token_ids, texts, lists)]})
    def reader(value: Any, where: str) -> tuple[Prompt, ...]:
        if isinstance(value, str):
            return (plain_text(value, where),)
        if not isinstance(value, list) or not value:
            raise RequestError(
                f"{where} must be a text, a list of texts, a list of token ids or a list of such "
                f"lists, not {shown(value)}.",
                where,
            )
        if isinstance(value[0], str):
            return texts(value, where)
        return lists(value, where) if isinstance(value[0], list) else (token_ids(value, where),)

    return reader


USUAL_TOKENS = 16
"""Most tokens of a completion where max_tokens is left out (OpenAI)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBody(SampledBody):
    """POST /v1/completions.

    suffix  the text after the answer, which is filled in between; "" = the prompt is continued
    max_tokens  None = USUAL_TOKENS, or as many as the context has room for if that is fewer
    parse_special  control strings in a text prompt are their tokens, if there is no suffix
    """

    id_prefix: ClassVar[str] = "cmpl-"

    prompt: tuple[Prompt, ...] = need(prompts(MAX_PROMPTS))
    suffix: str = accept(plain_text, "")
    max_tokens: int | None = accept(integer(UNLIMITED, MAX_TOKENS))
    echo: bool = accept(boolean, False)
    logprobs: int | None = accept(integer(0, MAX_TOKENS))
    best_of: int | None = accept(integer(1, MAX_TOKENS))
    add_special_tokens: bool = accept(boolean, True)
    parse_special: bool = accept(boolean, True)

    renamed: ClassVar[dict[str, str]] = {**SampledBody.renamed, "n_probs": "logprobs"}
    unused: ClassVar[dict[str, Unused]] = {
        **SampledBody.unused,
        "separate_reasoning": Unused(boolean),
        **dict.fromkeys(("reasoning", "think", "thinking", "enable_thinking"), Unused(whatever)),
    }
