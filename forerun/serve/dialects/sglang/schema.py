"""The request body of /generate: texts or token ids, and one set of sampling parameters for all."""

from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.constrain.grammar.calls import Rules
from forerun.errors import RequestError
from forerun.serve.bodies.fields import (
    DescribedReader,
    Reader,
    Unused,
    accept,
    boolean,
    integer,
    items,
    mapping,
    one_or_more,
    only,
    part,
    plain_text,
    schema_of,
    takes,
    text,
)
from forerun.serve.bodies.messages import NO_MEDIA
from forerun.serve.bodies.schema import (
    MAX_PROMPTS,
    MAX_STOP_TOKENS,
    MAX_TOKENS,
    RequestBody,
    SpeculativeOptions,
    TokenFields,
    cache_salt,
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
class SamplingParams(TokenFields):
    """`sampling_params` of /generate, by SGLang's names."""

    max_new_tokens: int | None = accept(integer(0, MAX_TOKENS))
    min_new_tokens: int = accept(integer(0, MAX_TOKENS), 0)
    sampling_seed: int | None = accept(integer(-(2**63), 2**63 - 1))
    no_stop_trim: bool = accept(boolean, False)
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
        """The constraint, None without one. Raises RequestError if there are several."""
        kinds = ("json_schema", "regex", "ebnf", "structural_tag")
        return one_of(self, kinds, "sampling_params.")


@dataclass(frozen=True, slots=True)
class PerText:
    """The values of a field for the texts of a request. several: there is a value for each text."""

    values: tuple[Any, ...]
    several: bool = False

    def of(self, count: int, where: str) -> tuple[Any, ...]:
        """Return a value for each of `count` texts. Raises RequestError, naming `where`, if the
        number differs.
        """
        if not self.several:
            return self.values * count
        if len(self.values) != count:
            message = f"{where} has {len(self.values)} entries for {count} texts."
            raise RequestError(message, where)
        return self.values


def per_list(each: DescribedReader[tuple[int, ...]]) -> DescribedReader[PerText]:
    """Return a reader of a list that `each` accepts, or a list of such lists, one for each text, as
    a PerText.
    """
    several = items(each, MAX_PROMPTS, 1)

    @takes({"anyOf": [each.schema, several.schema]})
    def reader(value: Any, where: str) -> PerText:
        if isinstance(value, list) and value and isinstance(value[0], list):
            return PerText(several(value, where), True)
        return PerText((each(value, where),))

    return reader


_some_texts = one_or_more(plain_text, MAX_PROMPTS)


@takes(_some_texts.schema)
def _texts(value: Any, where: str) -> PerText:
    """Read `text`: one, or a list, for which the answer is a list, too."""
    found = _some_texts(value, where)
    if not found:
        raise RequestError(f"{where} is an empty list.", where)
    return PerText(found, isinstance(value, list))


def each(reader: Reader) -> DescribedReader[PerText]:
    """Return a reader of one value for all texts of a request, or a list with one for each, as a
    PerText.
    """
    several = items(reader, MAX_PROMPTS, 1)

    @takes({"anyOf": [schema_of(reader), several.schema]})
    def per_text(value: Any, where: str) -> PerText:
        listed = isinstance(value, list)
        return PerText(several(value, where) if listed else (reader(value, where),), listed)

    return per_text


def _same(value: Any) -> PerText:
    return PerText((value,))


_name, _adapter = text(2**16, 1), text(256)
_reported_ids = per_list(items(integer(0, MAX_TOKENS), MAX_STOP_TOKENS))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody(RequestBody):
    """POST /generate. speculative is Forerun's own field. A list in a field that also accepts a
    single value has a value for each text.
    """

    text: PerText | None = accept(_texts)
    input_ids: PerText | None = accept(per_list(token_ids))
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
