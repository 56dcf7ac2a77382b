"""Fields of other servers' bodies that change nothing here."""

from dataclasses import dataclass
from typing import Any

from forerun.serve.fields import (
    boolean,
    ignore,
    integer,
    number,
    only,
    text,
    whatever,
)
from forerun.serve.structure import ConstrainedBody

_MOST = 2**31 - 1
_OFF = "this kind of sampling is not done here; leave it off"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedFields(ConstrainedBody):
    """Fields of other servers that change nothing here: what they ask for happens anyway, or is
    nothing of this server's. Values that would change the text are refused.
    """

    prompt_cache_retention: Any = ignore(whatever)
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
        only(64, -1, why="penalties look at the whole text; use repetition_penalty alone")
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
    reasoning: Any = ignore(whatever)
    include_reasoning: bool | None = ignore(boolean)
    stream_reasoning: bool | None = ignore(boolean)
    think: Any = ignore(whatever)
    extra_key: str | None = ignore(text(_MOST))
    kv_transfer_params: Any = ignore(only({}, why="caches stay where they are"))
