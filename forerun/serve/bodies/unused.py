"""Fields of other servers' bodies that change nothing here."""

from dataclasses import dataclass
from typing import Any

from forerun.errors import RequestError
from forerun.serve.bodies.fields import (
    boolean,
    ignore,
    integer,
    mapping,
    number,
    only,
    shown,
    takes,
    text,
    whatever,
)
from forerun.serve.bodies.structure import ConstrainedBody

_MOST = 2**31 - 1
TIERS = ("auto", "default", "flex", "priority", "scale", "standard", "standard_only", "batch")
"""Service tiers, as OpenAI and others name them; there is one here."""
_OFF = "this kind of sampling is not supported; leave it off"


_OF_BACKENDS = {
    "no-fallback": None,
    "disable-any-whitespace": "use structured_outputs.disable_any_whitespace",
    "no-additional-properties": "use structured_outputs.disable_additional_properties",
}
"""Options behind a backend's name, and what to use for those that change texts."""


@takes({"type": "string"})
def _backend(value: Any, where: str) -> str:
    """Read `guided_decoding_backend` of older vLLM: name:option,option. All backends keep to the
    same constraint. Raises RequestError for an option that changes texts.
    """
    found: str = text(256)(value, where)
    for option in filter(None, found.partition(":")[2].split(",")):
        why = _OF_BACKENDS.get(option, "leave it out")
        if why is not None:
            raise RequestError(f"{where}: {shown(option)} is not supported: {why}.", where)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedFields(ConstrainedBody):
    """Fields of other servers that have no effect here: they request what happens anyway, or what
    this server does not have. Values that would change the text are refused.
    """

    prompt_cache_retention: Any = ignore(whatever)
    prompt_cache_options: Any = ignore(whatever)
    cache_prompt: bool | None = ignore(boolean)
    id_slot: int | None = ignore(integer(-1, _MOST))
    samplers: Any = ignore(whatever)
    mirostat: float | None = ignore(only(0, 0.0, why=_OFF))
    mirostat_tau: float | None = ignore(number(-_MOST, _MOST))
    mirostat_eta: float | None = ignore(number(-_MOST, _MOST))
    typical_p: float | None = ignore(only(1, 1.0, why=_OFF))
    tfs_z: float | None = ignore(only(1, 1.0, why=_OFF))
    top_n_sigma: float | None = ignore(only(-1, -1.0, 0, 0.0, why=_OFF))
    xtc_probability: float | None = ignore(only(0, 0.0, why=_OFF))
    xtc_threshold: float | None = ignore(number(0.0, 1.0))
    dynatemp_range: float | None = ignore(only(0, 0.0, why=_OFF))
    dynatemp_exponent: float | None = ignore(number(-_MOST, _MOST))
    dry_multiplier: float | None = ignore(only(0, 0.0, why=_OFF))
    dry_base: float | None = ignore(number(-_MOST, _MOST))
    dry_allowed_length: int | None = ignore(integer(-1, _MOST))
    dry_penalty_last_n: int | None = ignore(integer(-1, _MOST))
    dry_sequence_breakers: Any = ignore(whatever)
    repeat_last_n: int | None = ignore(
        only(64, -1, why="penalties count the whole text; use repetition_penalty alone")
    )
    min_keep: int | None = ignore(integer(0, _MOST))
    n_keep: int | None = ignore(integer(-1, _MOST))
    t_max_predict_ms: int | None = ignore(only(0, -1, why="answers end by max_tokens"))
    return_progress: bool | None = ignore(only(False, why="prompts are not reported in parts"))
    detokenize: bool | None = ignore(only(True, why="answers are text"))
    spaces_between_special_tokens: bool | None = ignore(boolean)
    ttl: Any = ignore(whatever)
    keep_alive: Any = ignore(whatever)
    provider: Any = ignore(whatever)
    include_reasoning: bool | None = ignore(boolean)
    stream_reasoning: bool | None = ignore(boolean)
    think: Any = ignore(whatever)
    guided_decoding_backend: str | None = ignore(_backend)
    kv_transfer_params: Any = ignore(only({}, why="caches stay where they are"))
    vllm_xargs: Any = ignore(only({}, why="the engine has no further arguments"))
    mm_processor_kwargs: Any = ignore(only({}, why="this server reads and writes text only"))
    length_penalty: float | None = ignore(only(1, 1.0, why="sequences are sampled, not searched"))
    n_indent: int | None = ignore(only(0, why="lines may be indented as the model likes"))
    n_discard: int | None = ignore(integer(0, _MOST))
    penalize_nl: bool | None = ignore(only(False, why="line breaks are tokens like others"))
    backend_sampling: bool | None = ignore(boolean)
    post_sampling_probs: bool | None = ignore(only(False, why="log-probabilities are the model's"))
    response_fields: Any = ignore(only([], why="answers are whole"))
    parse_tool_calls: bool | None = ignore(only(True, why="calls of offered tools are always read"))
    thinking_forced_open: bool | None = ignore(boolean)
    chat_format: Any = ignore(whatever)
    return_hidden_states: bool | None = ignore(only(False, why="ask for logprobs"))
    data_parallel_rank: int | None = ignore(integer(0, _MOST))
    service_tier: str | None = ignore(only(*TIERS, why="it is one of these"))
    store: bool = ignore(boolean, False)
    metadata: dict[str, Any] | None = ignore(mapping)
