"""Fields of other servers' bodies that have no effect here."""

from typing import Any

from forerun.errors import RequestError
from forerun.serve.bodies.fields import (
    Unused,
    boolean,
    integer,
    mapping,
    number,
    only,
    shown,
    takes,
    text,
    whatever,
)

_MOST = 2**31 - 1
TIERS = ("auto", "default", "flex", "priority", "scale", "standard", "standard_only", "batch")
"""Service tiers of OpenAI and others; this server has one."""
_OFF = "this kind of sampling is not supported; leave it off"


_OF_BACKENDS = {
    "no-fallback": None,
    "disable-any-whitespace": "use structured_outputs.disable_any_whitespace",
    "no-additional-properties": "use structured_outputs.disable_additional_properties",
}
"""Options after a backend's name; for those that change texts, what to use instead."""


@takes({"type": "string"})
def _backend(value: Any, where: str) -> str:
    """Read `guided_decoding_backend` of older vLLM: name:option,option. All backends enforce the
    same constraint. Raises RequestError for an option that changes texts.
    """
    found = text(256)(value, where)
    for option in filter(None, found.partition(":")[2].split(",")):
        why = _OF_BACKENDS.get(option, "leave it out")
        if why is not None:
            raise RequestError(f"{where}: {shown(option)} is not supported: {why}.", where)
    return found


UNUSED: dict[str, Unused] = {
    "prompt_cache_retention": Unused(whatever),
    "prompt_cache_options": Unused(whatever),
    "cache_prompt": Unused(boolean),
    "id_slot": Unused(integer(-1, _MOST)),
    "samplers": Unused(whatever),
    "mirostat": Unused(only(0, 0.0, why=_OFF)),
    "mirostat_tau": Unused(number(-_MOST, _MOST)),
    "mirostat_eta": Unused(number(-_MOST, _MOST)),
    "typical_p": Unused(only(1, 1.0, why=_OFF)),
    "tfs_z": Unused(only(1, 1.0, why=_OFF)),
    "top_n_sigma": Unused(only(-1, -1.0, 0, 0.0, why=_OFF)),
    "xtc_probability": Unused(only(0, 0.0, why=_OFF)),
    "xtc_threshold": Unused(number(0.0, 1.0)),
    "dynatemp_range": Unused(only(0, 0.0, why=_OFF)),
    "dynatemp_exponent": Unused(number(-_MOST, _MOST)),
    "dry_multiplier": Unused(only(0, 0.0, why=_OFF)),
    "dry_base": Unused(number(-_MOST, _MOST)),
    "dry_allowed_length": Unused(integer(-1, _MOST)),
    "dry_penalty_last_n": Unused(integer(-1, _MOST)),
    "dry_sequence_breakers": Unused(whatever),
    "repeat_last_n": Unused(
        only(64, -1, why="penalties count the whole text; use repetition_penalty alone")
    ),
    "min_keep": Unused(integer(0, _MOST)),
    "n_keep": Unused(integer(-1, _MOST)),
    "t_max_predict_ms": Unused(only(0, -1, why="answers end by max_tokens")),
    "return_progress": Unused(only(False, why="prompts are not reported in parts")),
    "detokenize": Unused(only(True, why="answers are text")),
    "spaces_between_special_tokens": Unused(boolean),
    "ttl": Unused(whatever),
    "keep_alive": Unused(whatever),
    "provider": Unused(whatever),
    "include_reasoning": Unused(boolean),
    "stream_reasoning": Unused(boolean),
    "guided_decoding_backend": Unused(_backend),
    "kv_transfer_params": Unused(only({}, why="caches stay where they are")),
    "vllm_xargs": Unused(only({}, why="the engine has no further arguments")),
    "mm_processor_kwargs": Unused(only({}, why="this server reads and writes text only")),
    "length_penalty": Unused(only(1, 1.0, why="sequences are sampled, not searched")),
    "n_indent": Unused(only(0, why="lines may be indented as the model likes")),
    "n_discard": Unused(integer(0, _MOST)),
    "penalize_nl": Unused(only(False, why="line breaks are tokens like others")),
    "backend_sampling": Unused(boolean),
    "post_sampling_probs": Unused(only(False, why="log-probabilities are the model's")),
    "response_fields": Unused(only([], why="answers are whole")),
    "parse_tool_calls": Unused(only(True, why="calls of offered tools are always read")),
    "thinking_forced_open": Unused(boolean),
    "chat_format": Unused(whatever),
    "return_hidden_states": Unused(only(False, why="ask for logprobs")),
    "data_parallel_rank": Unused(integer(0, _MOST)),
    "service_tier": Unused(only(*TIERS, why="it is one of these")),
    "store": Unused(boolean, False),
    "metadata": Unused(mapping),
}
"""Fields of other servers that have no effect here: they request the default behaviour, or
something this server does not have. Values that would change the text are rejected.
"""
