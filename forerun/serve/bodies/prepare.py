"""Converts a checked body to requests for the engine: tokens, and limits that depend on the
model.
"""

import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from forerun.build.engine import Frontend
from forerun.client.engine_client import Constraint
from forerun.constrain.grammar.calls import Rules
from forerun.engine.request import Request, Speculation, Stopping
from forerun.errors import ContextError, RequestError
from forerun.options.config import ServeSettings
from forerun.options.sampling_params import NEUTRAL
from forerun.serve.bodies.dialogue import constraint, dialogue, never, token_rules
from forerun.serve.bodies.output_parser import OutputParser
from forerun.serve.bodies.schema import (
    UNLIMITED,
    USUAL_TOKENS,
    ChatBody,
    CompletionBody,
    Prompt,
    SampledBody,
)
from forerun.speculative.sampling import Sampling
from forerun.text.tokenizer import Tokenizer, as_ids
from forerun.types import Ints, RequestId

MAX_SEQUENCES = 256
"""Most prompts times choices of one request."""
MAX_REPORTED = 1 << 19
"""Most log-probabilities that one request may have reported: some 100 MB of answer."""

THRESHOLDS = ("accept_threshold_single", "accept_threshold_acc")

Cut = Callable[[str, float], str | None]
"""(new text, seconds since the first) -> the part to keep if the answer ends within it, else
None.
"""

MAX_TRACED = 8
"""Most choices of a traced request: some 20 MB of traces of the greatest length."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request for text, ready for the engine.

    requests    one per prompt; choice c of prompt p has the index p * n + c in the answer
    created     seconds since 1970
    stream      the answer is streamed
    rules       the constraint of the answers, not yet compiled
    unseen      stop tokens without text, for which no log-probabilities are reported either
    parser      creates the parser of one choice's text; None if all of it is content
    lossy       the accept thresholds, if they may change the answer
    ignored     fields that have no effect together with others
    client_ids  the client's own names for it: it can be aborted by these and by its id
    cut         creates a function that may end the one text before the engine does
    unenforced  keywords of its schemas that its compiled rules do not enforce
    at_once     most of its requests in flight; None = all
    """

    id: str
    created: int
    requests: tuple[Request, ...]
    n: int
    stream: bool
    unseen: frozenset[int]
    rules: Rules | None = None
    parser: Callable[[], OutputParser] | None = None
    lossy: dict[str, float] | None = None
    ignored: tuple[str, ...] = ()
    client_ids: tuple[str, ...] = ()
    cut: Callable[[], Cut] | None = None
    unenforced: tuple[str, ...] = ()
    at_once: int | None = None

    def under(self, grammar: Constraint) -> "Generation":
        """Return a copy whose requests are all constrained by `grammar`, its compiled rules."""
        requests = tuple(replace(request, grammar=grammar) for request in self.requests)
        return replace(self, requests=requests, rules=None, unenforced=grammar.unenforced)

    def sent_by(self, client: str, tenant: str, adapter: int) -> "Generation":
        """Return a copy with the client, tenant and adapter of its HTTP request
        (engine.request.Request).
        """
        requests = tuple(
            replace(request, client=client, tenant=tenant, adapter=adapter)
            for request in self.requests
        )
        return replace(self, requests=requests)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in all its prompts together."""
        return sum(len(request.prompt) for request in self.requests)


def chat_generation(body: ChatBody, loaded: Frontend, settings: ServeSettings) -> Generation:
    """Return the generation for a conversation. Raises RequestError and ApiError."""
    logprobs = _alternatives(body)
    built = dialogue(body, loaded, settings)
    prompt = truncated(built.prompt, body, loaded.context)
    limit = body.max_completion_tokens or body.max_tokens
    if body.max_tokens not in (None, limit):
        raise RequestError(
            f"max_tokens is {body.max_tokens}, but max_completion_tokens is {limit}.", "max_tokens"
        )
    if limit is None:
        # At least one, so that a prompt that fills the context gets the error for that.
        room = min(loaded.context - len(prompt), loaded.sampling.get("max_tokens", 2**31))
        limit = max(int(room), 1)
    sampling = _sampling(body, loaded, logprobs, body.prompt_logprobs)
    stopping = _stopping(body, sampling, limit)
    # The first space of a grammar's text must not be lost either.
    exact = built.rules is not None and built.rules.grammar.start is None and body.rules is not None
    continues_text = body.continue_final_message or exact
    made = _generation(body, loaded, (prompt,), stopping, sampling, settings, continues_text)
    ignored = *made.ignored, *built.ignored
    made = replace(made, rules=built.rules, parser=built.parser, ignored=ignored)
    if built.control:
        requests = tuple(replace(request, skip_special_tokens=False) for request in made.requests)
        made = replace(made, requests=requests)
    return made


def completion_generation(
    body: CompletionBody, loaded: Frontend, settings: ServeSettings
) -> Generation:
    """Return the generation for plain prompts; ignores a suffix (see infill.filling). Raises
    RequestError naming the field, ContextError for a prompt that is longer than the context.
    """
    if body.best_of not in (None, body.n):
        raise RequestError("best_of must equal n: all choices are returned.", "best_of")
    prompts = tuple(
        _plain_prompt(prompt, body, loaded, place)
        for prompt, place in zip(body.prompt, places_of(body.prompt), strict=True)
    )
    echoed = body.logprobs if body.echo else None
    told = [top for top in (echoed, body.prompt_logprobs) if top is not None]
    sampling = _sampling(body, loaded, body.logprobs, max(told, default=None))
    limit = (
        int(loaded.sampling.get("max_tokens", USUAL_TOKENS))
        if body.max_tokens is None
        else body.max_tokens
    )
    room = max(loaded.context - max(map(len, prompts)), 1)
    stopping = _stopping(body, sampling, room if limit == UNLIMITED else limit)
    generation = _generation(
        body, loaded, prompts, stopping, sampling, settings, continues_text=True
    )
    rules = token_rules(body, loaded.tokenizer) or constraint(body, settings)
    return replace(
        within(generation, loaded.context) if body.max_tokens is None else generation, rules=rules
    )


def within(generation: Generation, context: int) -> Generation:
    """Return a copy with each request's max_tokens lowered to what the context has room for, at
    least one.
    """
    cut = []
    for request in generation.requests:
        room = max(context - len(request.prompt), 1)
        stopping = replace(request.stopping, max_tokens=min(request.stopping.max_tokens, room))
        cut.append(replace(request, stopping=stopping))
    return replace(generation, requests=tuple(cut))


def _alternatives(body: ChatBody) -> int | None:
    """Return how many alternatives of each token to report; None = no log-probabilities. Raises
    RequestError for alternatives without log-probabilities. `n_probs` sets both.
    """
    if body.logprobs:
        return body.n_probs if body.top_logprobs is None else body.top_logprobs
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    return body.n_probs or None


def _generation(
    body: SampledBody,
    loaded: Frontend,
    prompts: tuple[Ints, ...],
    stopping: Stopping,
    sampling: Sampling,
    settings: ServeSettings,
    continues_text: bool,
) -> Generation:
    """Return the generation of these prompts; `continues_text` as in Request. Raises RequestError
    if a field contradicts another, or exceeds a limit.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    _check_limits(body, prompts, stopping, sampling, settings)
    options = body.speculative
    speculation = Speculation(options.enabled, options.max_nodes, options.max_depth, options.trace)
    predicted = _predicted(body, loaded)
    name = body.id_prefix + uuid.uuid4().hex
    id = name if body.request_id is None else body.id_prefix + body.request_id
    requests = tuple(
        Request(
            id=RequestId(f"{name}-{index}"),
            prompt=prompt,
            sampling=sampling,
            stopping=stopping,
            n=body.n,
            speculation=speculation,
            skip_special_tokens=body.skip_special_tokens,
            continues_text=continues_text,
            prediction=predicted,
            cache_salt=body.cache_salt or "",
        )
        for index, prompt in enumerate(prompts)
    )
    lossy, idle = _thresholds(body, sampling, loaded)
    return Generation(
        id=id,
        created=int(time.time()),
        requests=requests,
        n=body.n,
        stream=body.stream,
        unseen=_unseen(body, loaded.tokenizer),
        lossy=lossy,
        ignored=idle,
        client_ids=() if body.request_id is None else (body.request_id,),
    )


def _predicted(body: SampledBody, loaded: Frontend) -> Ints:
    """Encode the expected text of the answer: int32[T], often empty. Raises ContextError beyond the
    context.
    """
    if not body.prediction:
        return np.zeros(0, np.int32)
    place = "prediction.content"
    check_length(body.prediction, loaded, place)
    ids = np.array(loaded.tokenizer.encode_part(body.prediction, False), np.int32)
    if len(ids) > loaded.context:
        raise too_long(len(ids), loaded, place)
    return ids


def _thresholds(
    body: SampledBody, sampling: Sampling, loaded: Frontend
) -> tuple[dict[str, float] | None, tuple[str, ...]]:
    """Return (the accept thresholds if they may change the answer, else None; their field names if
    the request sets them without effect).
    """
    options = body.speculative
    if sampling.lossy and options.enabled and loaded.config.speculates:
        return dict(zip(THRESHOLDS, sampling.accept_thresholds, strict=True)), ()
    given = {name: getattr(options, name) for name in THRESHOLDS}
    idle = (f"speculative.{name}" for name, value in given.items() if (value or 1.0) < 1)
    return None, tuple(idle)


def _sampling(
    body: SampledBody,
    loaded: Frontend,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Sampling:
    """Return the sampling parameters. Without a seed from the client, a request gets the server's
    (--sampling-override), else a random one.
    """
    tokenizer = loaded.tokenizer
    eos = () if body.ignore_eos else tokenizer.eos_ids
    given = {name: getattr(body, name) for name in NEUTRAL}
    requested = {name: value for name, value in given.items() if value is not None}
    usual = {**NEUTRAL, "seed": secrets.randbits(64), **loaded.sampling, **requested}
    single, acc = body.speculative.accept_threshold_single, body.speculative.accept_threshold_acc
    config = loaded.config
    return Sampling(
        temperature=usual["temperature"],
        top_k=max(int(usual["top_k"]), 0),
        top_p=usual["top_p"],
        min_p=usual["min_p"],
        seed=int(usual["seed"] if body.seed is None else body.seed) % 2**64,
        repetition_penalty=usual["repetition_penalty"],
        frequency_penalty=usual["frequency_penalty"],
        presence_penalty=usual["presence_penalty"],
        logit_bias=(*body.logit_bias, *never(body, tokenizer)),
        min_tokens=body.min_tokens,
        stop_tokens=tuple(dict.fromkeys((*eos, *body.stop_token_ids))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        accept_threshold_single=config.speculative_accept_threshold_single
        if single is None
        else single,
        accept_threshold_acc=config.speculative_accept_threshold_acc if acc is None else acc,
    )


def _stopping(body: SampledBody, sampling: Sampling, max_tokens: int) -> Stopping:
    return Stopping(
        max_tokens=max_tokens,
        stop=body.stop,
        stop_tokens=sampling.stop_tokens,
        include_stop=body.include_stop_str_in_output,
    )


def _unseen(body: SampledBody, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the stop tokens whose text, and so their log-probabilities, an answer leaves out."""
    if body.include_stop_str_in_output:
        return frozenset()
    return frozenset(body.stop_token_ids) | frozenset(() if body.ignore_eos else tokenizer.eos_ids)


def places_of(prompts: tuple[Prompt, ...]) -> list[str]:
    """Return the path of each prompt in the body: a single one may be the field itself."""
    if len(prompts) == 1:
        return ["prompt"]
    return [f"prompt[{index}]" for index in range(len(prompts))]


def _plain_prompt(prompt: Prompt, body: CompletionBody, loaded: Frontend, place: str) -> Ints:
    """Encode a prompt of /v1/completions: int32[T]. Raises RequestError, ContextError."""
    if isinstance(prompt, str):
        if body.truncate_prompt_tokens is None:
            check_length(prompt, loaded, place)
        ids = loaded.tokenizer.encode(prompt, body.parse_special, body.add_special_tokens)
    else:
        ids = known_tokens(prompt, loaded, place)
    ids = truncated(ids, body, loaded.context)
    if len(ids) > loaded.context:
        raise too_long(len(ids), loaded, place)
    return ids


def too_long(count: int, loaded: Frontend, place: str, qualifier: str = "") -> ContextError:
    """Return the error for a text with more tokens than the context. qualifier: words before their
    number, such as "at least ".
    """
    return ContextError(
        f"This model's maximum context length is {loaded.context} tokens, but {place} has "
        f"{qualifier}{count} tokens. Shorten it.",
        place,
        count,
        context=loaded.context,
    )


def check_length(text: str, loaded: Frontend, place: str) -> None:
    """Raise ContextError if a text certainly has more tokens than the context, without encoding
    it.
    """
    lower_bound = loaded.tokenizer.least_tokens(text)
    if lower_bound > loaded.context:
        raise too_long(lower_bound, loaded, place, "at least ")


def truncated(prompt: Ints, body: SampledBody, room: int) -> Ints:
    """Return the last tokens of a prompt, truncate_prompt_tokens of them; -1: as many as
    leave one of `room` positions free.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    kept = max(room - 1, 0) if most == -1 else most
    return prompt[max(len(prompt) - kept, 0) :]


def known_tokens(tokens: tuple[int, ...], loaded: Frontend, place: str) -> Ints:
    """Check a client's token ids; return int32[T]. Raises RequestError, naming `place`, for an id
    outside the vocabulary.
    """
    ids, vocab = as_ids(tokens, np.int64), loaded.tokenizer.vocab_size
    unknown = np.flatnonzero(ids >= vocab)
    if len(unknown):
        first = int(unknown[0])
        raise RequestError(
            f"{place}[{first}] is the token id {tokens[first]}, but ids are 0 to {vocab - 1}.",
            f"{place}[{first}]",
        )
    return ids.astype(np.int32)


def _check_limits(
    body: SampledBody,
    prompts: tuple[Ints, ...],
    stopping: Stopping,
    sampling: Sampling,
    settings: ServeSettings,
) -> None:
    """Raise RequestError if a limit of the server is exceeded, before anything is allocated."""
    if body.n > settings.max_choices:
        raise RequestError(f"n is {body.n}, but this server allows {settings.max_choices}.", "n")
    if body.n * len(prompts) > MAX_SEQUENCES:
        message = f"{len(prompts)} prompts with n = {body.n} are more than {MAX_SEQUENCES} texts."
        raise RequestError(message, "n")
    if len(body.stop) > settings.max_stop:
        message = f"stop has {len(body.stop)} strings, but this server allows {settings.max_stop}."
        raise RequestError(message, "stop")
    if body.speculative.trace and body.n * len(prompts) > MAX_TRACED:
        message = f"speculative.trace shows {MAX_TRACED} texts at most; lower n."
        raise RequestError(message, "speculative.trace")
    field = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    of_prompt = field if body.prompt_logprobs is None else "prompt_logprobs"
    kinds = (
        (field, sampling.logprobs, stopping.max_tokens),
        (of_prompt, sampling.prompt_logprobs, max(map(len, prompts))),
    )
    entries = 0
    for name, top, length in kinds:
        if top is None:
            continue
        if top > settings.max_logprobs:
            message = f"{name} is {top}, but this server allows {settings.max_logprobs}."
            raise RequestError(message, name)
        entries += body.n * len(prompts) * length * (top + 1)
        if entries > MAX_REPORTED:
            raise RequestError(
                f"{entries} log-probabilities are more than the {MAX_REPORTED} that one answer may "
                f"hold; lower {name}, n or max_tokens.",
                name,
            )
