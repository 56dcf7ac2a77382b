"""The keyword options of LLM and AsyncLLM, for editors and type checkers. A test checks that they
are the fields of EngineConfig, Sampling and make_request.
"""

from collections.abc import Sequence
from typing import Any, TypedDict, cast, get_type_hints

from forerun.constrain.grammar import Grammar
from forerun.engine.request import Speculation
from forerun.errors import RequestError
from forerun.options import sampling_params
from forerun.options.fields import converted

RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 2**31 - 1),
    "max_tokens": (0, 2**31 - 1),
    **sampling_params.RANGES,
}
"""Smallest and greatest value of each numeric option, the same as over HTTP (a test checks
that).
"""


class EngineArgs(TypedDict, total=False):
    """The options of a model: fields of `EngineConfig`, which explains and checks them."""

    revision: str | None
    lora_modules: tuple[str, ...]
    chat_template: str | None
    chat_template_kwargs: str | None
    sampling_defaults: str
    sampling_override: tuple[str, ...]
    executor: str
    device: str
    tp_size: int
    ep_size: int
    replicate_shared_expert: bool
    prefill_attention_backend: str
    dtype: str
    kv_dtype: str
    disable_cuda_graph: bool
    enable_torch_compile: bool
    overlap: bool | None
    threads: int | None
    context: int | None
    page_size: int
    kv_tokens: int | None
    kv_store: str | None
    kv_store_size: int | None
    max_sequences: int
    mem_fraction_static: float | None
    chunked_prefill_size: int | None
    max_waiting: int
    speculative_algorithm: str
    speculative_ngram_capacity: int
    speculative_ngram_text: bool
    speculative_draft_model_path: str | None
    speculative_draft_model_revision: str | None
    speculative_token_map: str | None
    speculative_num_steps: int | None
    speculative_eagle_topk: int | None
    speculative_num_draft_tokens: int | None
    speculative_accept_threshold_single: float
    speculative_accept_threshold_acc: float
    draft_on_error: str
    policy: str


class SamplingOptions(TypedDict, total=False):
    """The options of a request: fields of `Sampling`, and where the text ends. Temperature is 0
    unless given.
    """

    max_tokens: int
    n: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    accept_threshold_single: float | None
    accept_threshold_acc: float | None
    speculation: Speculation | None
    grammar: Grammar | None
    lora_name: str | None


_KINDS = get_type_hints(SamplingOptions)


def checked(options: SamplingOptions) -> SamplingOptions:
    """Return the options in their declared types: NumPy scalars and arrays become plain Python
    values, and numbers given as text become numbers. Raises RequestError naming the first of
    another type or out of RANGES; unknown options are returned unchanged.
    """
    given: dict[str, Any] = {**options}
    for name in given.keys() & _KINDS.keys():
        if isinstance(given[name], Grammar | Speculation):
            continue
        try:
            given[name] = converted(name, given[name], _KINDS[name])
        except ValueError as error:
            raise RequestError(str(error), name) from None
    for name, (low, high) in RANGES.items():
        value = given.get(name, low)
        if not low <= value <= high:
            span = f"at least {low:g}" if high > 2 else f"{low:g} to {high:g}"
            raise RequestError(f"{name} is {value}, but must be {span}.", name)
    return cast("SamplingOptions", given)
