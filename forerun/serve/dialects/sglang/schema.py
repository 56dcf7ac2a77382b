"""The request body of /generate: texts or token ids, and one set of sampling parameters for all."""

from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.constrain.grammar.calls import Rules
from forerun.errors import RequestError
from forerun.serve.bodies.fields import (
    Declaration,
    DescribedReader,
    Reader,
    Unused,
    accept,
    boolean,
    integer,
    items,
    mapping,
    number,
    one_or_more,
    only,
    part,
    schema_of,
    takes,
    text,
)
from forerun.serve.bodies.messages import NO_MEDIA, plain_text
from forerun.serve.bodies.schema import (
    MAX_PROMPTS,
    MAX_STOP_TEXT,
    MAX_STOP_TOKENS,
    MAX_TOKENS,
    Prompt,
    SpeculativeOptions,
    cache_salt,
    token_biases,
    token_ids,
    untraced,
)
from forerun.serve.bodies.structure import (
    grammar_rules,
    json_rules,
    one_of,
    regex_rules,
    structural_rules,
)

_NO_SESSIONS = "requests stand alone; prefixes are cached automatically"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Declaration):
    """`sampling_params`."""

    max_new_tokens: int = accept(integer(0, MAX_TOKENS), 128)
    min_new_tokens: int = accept(integer(0, MAX_TOKENS), 0)
    n: int = accept(integer(1, MAX_TOKENS), 1)
    temperature: float | None = accept(number(0.0, 2.0))
    top_p: float | None = accept(number(0.0, 1.0))
    top_k: int | None = accept(integer(-1, MAX_TOKENS))
    min_p: float | None = accept(number(0.0, 1.0))
    frequency_penalty: float = accept(number(-2.0, 2.0), 0.0)
    presence_penalty: float = accept(number(-2.0, 2.0), 0.0)
    repetition_penalty: float | None = accept(number(0.0, 2.0, above_low=True))
    sampling_seed: int | None = accept(integer(-(2**63), 2**63 - 1))
    logit_bias: tuple[tuple[int, float], ...] = accept(token_biases, ())
    stop: tuple[str, ...] = accept(one_or_more(text(MAX_STOP_TEXT, 1), MAX_STOP_TOKENS), ())
    stop_token_ids: tuple[int, ...] = accept(items(integer(0, MAX_TOKENS), MAX_STOP_TOKENS), ())
    ignore_eos: bool = accept(boolean, False)
    no_stop_trim: bool = accept(boolean, False)
    skip_special_tokens: bool = accept(boolean, True)
    spaces_between_special_tokens: bool = accept(only(True, why="text is left as it is"), True)
    json_schema: Rules | None = accept(json_rules)
    regex: Rules | None = accept(regex_rules)
    ebnf: Rules | None = accept(grammar_rules)
    structural_tag: Rules | None = accept(structural_rules)

    refused: ClassVar[dict[str, str]] = {
        "stop_regex": "use stop",
        "custom_params": "the server runs no code from requests",
    }
    unused: ClassVar[dict[str, Unused]] = {"stream_interval": Unused(integer(1, MAX_TOKENS))}

    @property
    def rules(self) -> Rules | None:
        """The one constraint. Raises RequestError naming two where there are more."""
        kinds = ("json_schema", "regex", "ebnf", "structural_tag")
        return one_of(self, kinds, "sampling_params.")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts. several: they came as a list, and the answer is one, too."""

    prompts: tuple[Prompt, ...]
    several: bool


@takes(one_or_more(plain_text, MAX_PROMPTS).schema)
def _texts(value: Any, where: str) -> Prompts:
    found = one_or_more(plain_text, MAX_PROMPTS)(value, where)
    if not found:
        raise RequestError(f"{where} is an empty list.", where)
    return Prompts(found, isinstance(value, list))


@takes({"anyOf": [token_ids.schema, items(token_ids, MAX_PROMPTS, 1).schema]})
def _ids(value: Any, where: str) -> Prompts:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return Prompts(items(token_ids, MAX_PROMPTS)(value, where), True)
    return Prompts((token_ids(value, where),), False)


def each(reader: Reader) -> DescribedReader:
    """Make a reader of a value for all texts of a request, or a list with one for each, as
    PerText.
    """
    several = items(reader, MAX_PROMPTS, 1)

    @takes({"anyOf": [schema_of(reader), several.schema]})
    def per_text(value: Any, where: str) -> PerText:
        listed = isinstance(value, list)
        return PerText(several(value, where) if listed else (reader(value, where),), listed)

    return per_text


@dataclass(frozen=True, slots=True)
class PerText:
    """A field for the texts of a request. several: there is a value for each."""

    values: tuple[Any, ...]
    several: bool = False

    def of(self, count: int, where: str) -> tuple[Any, ...]:
        """Return a value for each of `count` texts. Raises RequestError if there are not as
        many.
        """
        if not self.several:
            return self.values * count
        if len(self.values) != count:
            message = f"{where} has {len(self.values)} entries for {count} texts."
            raise RequestError(message, where)
        return self.values


def _same(value: Any) -> PerText:
    return PerText((value,))


_name, _adapter = text(2**16, 1), text(256)
_token_ids = items(integer(0, MAX_TOKENS), MAX_STOP_TOKENS)


@takes({"type": "array"})
def _reported_ids(value: Any, where: str) -> PerText:
    """Read `token_ids_logprob`: token ids, or a list of such lists, one for each text."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return PerText(items(_token_ids, MAX_PROMPTS)(value, where), True)
    return _same(_token_ids(value, where))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody(Declaration):
    """POST /generate. speculative is Forerun's own field. Fields that are lists where they need not
    be hold a value for each text.
    """

    model: str | None = accept(text(256, 1))
    text: Prompts | None = accept(_texts)
    input_ids: Prompts | None = accept(_ids)
    sampling_params: PerText = accept(each(part(SamplingParams)), _same(SamplingParams()))
    stream: bool = accept(boolean, False)
    return_logprob: PerText = accept(each(boolean), _same(False))
    logprob_start_len: PerText = accept(each(integer(-1, MAX_TOKENS)), _same(-1))
    top_logprobs_num: PerText = accept(each(integer(0, MAX_TOKENS)), _same(0))
    token_ids_logprob: PerText = accept(_reported_ids, _same(()))
    return_text_in_logprobs: bool = accept(boolean, False)
    rid: PerText = accept(each(_name), _same(None))
    lora_path: PerText = accept(each(_adapter), _same(""))
    return_hidden_states: bool = accept(only(False, why="ask for logprobs"), False)
    speculative: SpeculativeOptions = accept(untraced, SpeculativeOptions())
    extra_key: str | None = accept(cache_salt)

    def adapter(self) -> str:
        """Return the adapter that all texts name; "" = none. Raises RequestError for several."""
        names = set(self.lora_path.values)
        if len(names) > 1:
            message = "lora_path: all texts of a request run with one adapter; send one for each."
            raise RequestError(message, "lora_path")
        return str(*names)

    refused: ClassVar[dict[str, str]] = {
        "input_embeds": "send text or input_ids",
        "image_data": NO_MEDIA,
        "video_data": NO_MEDIA,
        "audio_data": NO_MEDIA,
        "modalities": NO_MEDIA,
        "session_params": _NO_SESSIONS,
        "custom_logit_processor": "the server runs no code from requests",
    }
    unused: ClassVar[dict[str, Unused]] = {
        "log_metrics": Unused(boolean, True),
        "bootstrap_room": Unused(integer(0, 2**63 - 1)),
        "priority": Unused(integer(-(2**63), 2**63 - 1)),
        "custom_labels": Unused(mapping),
    }
