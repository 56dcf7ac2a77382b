"""The engine's requests for the texts of /generate."""

from dataclasses import dataclass, replace

from forerun.build.engine import Frontend
from forerun.errors import RequestError
from forerun.options.config import ServeSettings
from forerun.serve.bodies.prepare import (
    MAX_REPORTED,
    MAX_SEQUENCES,
    Generation,
    completion_generation,
    within,
)
from forerun.serve.bodies.schema import CompletionBody, Prompt
from forerun.serve.dialects.sglang.schema import GenerateBody, PerText, SamplingParams

USUAL_TOKENS = 128
"""Most tokens of an answer where max_new_tokens is left out (SGLang)."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """The settings of one text.

    logprobs  report log-probabilities
    start     first token of the prompt to report them for; -1 = for the answer only
    top       alternatives of each token
    ids       tokens whose log-probabilities are reported at every position
    """

    prompt: Prompt
    params: SamplingParams
    logprobs: bool
    start: int
    top: int
    ids: tuple[int, ...]
    rid: str | None


_LISTS = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
          "token_ids_logprob", "rid")  # fmt: skip


def text_requests(body: GenerateBody, prompts: PerText) -> tuple[TextRequest, ...]:
    """Return the settings of each text. Raises RequestError if lists have other lengths, or texts
    of one request differ in a setting that they must share.
    """
    count = len(prompts.values)
    columns = [getattr(body, name).of(count, name) for name in _LISTS]
    found = tuple(TextRequest(*row) for row in zip(prompts.values, *columns, strict=True))
    first = found[0].params
    for place, one in enumerate(found):
        for name, same in (
            ("n", one.params.n == first.n),
            ("a constraint", one.params.rules == first.rules),
        ):
            if not same:
                where = f"sampling_params[{place}]"
                raise RequestError(f"{where}: all texts of a request share {name}.", where)
    if count * first.n > MAX_SEQUENCES:
        message = f"{count} texts with n = {first.n} are more than {MAX_SEQUENCES} answers."
        raise RequestError(message, "sampling_params.n")
    return found


def unused_reports(body: GenerateBody, texts: tuple[TextRequest, ...]) -> tuple[str, ...]:
    """Return the fields about log-probabilities that have no effect because none are requested."""
    if any(one.logprobs for one in texts):
        return ()
    names = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob")
    idle = tuple(name for name in names if any(value not in (0, -1, ()) for value in
                                               getattr(body, name).values))  # fmt: skip
    return (*idle, "return_text_in_logprobs") if body.return_text_in_logprobs else idle


def generation_of(
    text: TextRequest, body: GenerateBody, loaded: Frontend, settings: ServeSettings
) -> Generation:
    """Return the generation for one text. Raises RequestError naming the field, also for an unknown
    id in token_ids_logprob.
    """
    found = completion_generation(_plain(text, body), loaded, settings)
    if text.params.max_new_tokens is None:
        found = within(found, loaded.context)
    if not (text.logprobs and text.ids):
        return found
    vocab = loaded.tokenizer.vocab_size
    wrong = [id for id in text.ids if id >= vocab]
    if wrong:
        message = f"token_ids_logprob has the id {wrong[0]}, but ids are 0 to {vocab - 1}."
        raise RequestError(message, "token_ids_logprob")
    # The engine reports the best tokens: to include a certain one, it has to report all.
    request = found.requests[0]
    sampling = replace(
        request.sampling, logprobs=vocab, prompt_logprobs=None if text.start < 0 else vocab
    )
    echoed = len(request.prompt) if text.start >= 0 else 0
    places = text.params.n * (request.stopping.max_tokens + echoed)
    if places * vocab > MAX_REPORTED:
        raise RequestError(
            f"token_ids_logprob looks at all {vocab} tokens at each of {places} places, more than "
            f"{MAX_REPORTED} log-probabilities; lower max_new_tokens to "
            f"{max(MAX_REPORTED // vocab // text.params.n - echoed, 0)}.",
            "token_ids_logprob",
        )
    return replace(found, requests=(replace(request, sampling=sampling),))


def together(parts: list[Generation], rids: tuple[str, ...]) -> Generation:
    """Merge the generations of several texts into one. Raises RequestError if it would report too
    many log-probabilities.
    """
    entries = sum(
        part.n
        * (request.stopping.max_tokens + len(request.prompt))
        * (request.sampling.logprobs + 1)
        for part in parts
        for request in part.requests
        if request.sampling.logprobs is not None
    )
    if len(parts) > 1 and entries > MAX_REPORTED:
        message = f"{entries} log-probabilities are more than the {MAX_REPORTED} of one answer."
        raise RequestError(f"{message} Lower max_new_tokens.", "return_logprob")
    first = parts[0]
    return replace(
        first,
        requests=tuple(request for part in parts for request in part.requests),
        lossy=next((part.lossy for part in parts if part.lossy), None),
        ignored=tuple(dict.fromkeys(name for part in parts for name in part.ignored)),
        client_ids=rids,
    )


def _plain(text: TextRequest, body: GenerateBody) -> CompletionBody:
    """Convert the settings to a CompletionBody."""
    given = text.params
    return CompletionBody(
        prompt=(text.prompt,),
        n=given.n,
        stream=body.stream,
        max_tokens=USUAL_TOKENS if given.max_new_tokens is None else given.max_new_tokens,
        min_tokens=given.min_new_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=given.sampling_seed,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias=given.logit_bias,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        include_stop_str_in_output=given.no_stop_trim,
        skip_special_tokens=given.skip_special_tokens,
        regex=given.rules,
        logprobs=text.top if text.logprobs else None,
        echo=text.logprobs and text.start >= 0,
        speculative=body.speculative,
        cache_salt=body.extra_key,
    )
