"""A load generator for any server with OpenAI's chat or completions API and streaming."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import httpx
import numpy as np

from forerun.errors import ConfigError
from forerun.measure.workload import Prompt
from forerun.options.config import SamplingConfig

TIMEOUT = httpx.Timeout(600.0, connect=10.0)

EXTENSIONS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}
"""Fields that OpenAI's API does not have, and their defaults; sent only if they differ from
these.
"""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server and model to send requests to.

    url     base of the API, without /chat/completions, e.g. http://127.0.0.1:8000/v1
    """

    url: str
    model: str
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers: the key as a bearer token, or none without a key."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Timing:
    """One request as its client observed it; times in seconds since it was sent.

    arrivals  when each piece of text came (a piece may have several tokens)
    tokens    output tokens, by the server's own count if it gives one
    prompt_tokens  by the server's own count; 0 without one
    total     when the answer ended
    error     the failure, or None
    """

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    total: float = 0.0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first piece of text. Raises IndexError if there was none (then `error` is
        set).
        """
        return self.arrivals[0]

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token after the first piece (time per output token); None for answers of
        one token or one piece. Raises IndexError without a piece.
        """
        span = self.arrivals[-1] - self.arrivals[0]
        return span / (self.tokens - 1) if self.tokens > 1 and span > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces of text (inter-token latency, by piece)."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def body_of(
    prompt: Prompt,
    model: str,
    sampling: SamplingConfig,
    speculative: dict[str, Any] | None,
    completions: bool = False,
) -> dict[str, Any]:
    """Return the JSON body of one streaming request, greedy unless `sampling` has a temperature;
    requests usage counts.

    sampling     options; those that OpenAI does not know are sent only if they have an
                 effect
    speculative  Forerun's own field; None omits it
    completions  for /completions, as base models need it: the text of the last message
    """
    body: dict[str, Any] = {
        "model": model,
        **({"prompt": prompt.text} if completions else {"messages": list(prompt.messages)}),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature or 0.0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "seed": sampling.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    for name, usual in EXTENSIONS.items():
        value = getattr(sampling, name)
        if value is not None and value != usual:
            body[name] = value
    if speculative is not None:
        body["speculative"] = speculative
    return body


async def _ask_once(client: httpx.AsyncClient, endpoint: Endpoint, body: dict[str, Any]) -> Timing:
    """Send one request and read its stream to the end. Errors are recorded, not raised."""
    timing, started, pieces, finish = Timing(), perf_counter(), 0, ""
    route = "completions" if "prompt" in body else "chat/completions"
    url = f"{endpoint.url.rstrip('/')}/{route}"
    try:
        async with client.stream("POST", url, json=body, headers=endpoint.headers) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                timing.error = f"HTTP {response.status_code}: {response.text[:200]}"
                return timing
            async for event in _events(response):
                if event.get("error"):
                    timing.error = str(event["error"])[:200]
                if any(map(_text, _choices(event))):
                    timing.arrivals.append(perf_counter() - started)
                    pieces += 1
                finish = next((str(c["finish_reason"]) for c in _choices(event)
                               if c.get("finish_reason")), finish)  # fmt: skip
                if event.get("usage"):
                    timing.tokens = int(event["usage"]["completion_tokens"])
                    timing.prompt_tokens = int(event["usage"].get("prompt_tokens") or 0)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        timing.error = f"{type(error).__name__}: {error}"[:200]
    timing.total = perf_counter() - started
    timing.tokens = timing.tokens or pieces
    if timing.error is None and not timing.arrivals:
        timing.error = _without_text(timing.tokens, finish)
    return timing


def _without_text(tokens: int, finish: str) -> str:
    """Return why an answer without text cannot be timed: it ended at once, or consists of special
    tokens or half a character.
    """
    ended = f"{tokens} token{'s' * (tokens != 1)} without text, finish_reason {finish or 'missing'}"
    advice = "--ignore-eos goes on where a model stops at once" if finish == "stop" else ""
    return f"the answer was empty ({ended})" + (f"; {advice}" if advice else "")


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a stream event, of the answer or of the reasoning: usage counts the tokens
    of both.
    """
    delta = choice.get("delta") or {}
    pieces = (choice.get("text"), *map(delta.get, ("content", "reasoning_content", "reasoning")))
    return next(filter(None, pieces), "")


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    return list(event.get("choices") or [])


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            event = json.loads(line[5:])
            if isinstance(event, dict):
                yield event


async def load_level(
    endpoint: Endpoint,
    bodies: Sequence[dict[str, Any]],
    at_once: int,
    finished: Callable[[int], None] = lambda _: None,
    rate: float = inf,
) -> tuple[list[Timing], float]:
    """Send all requests, keeping `at_once` in flight, or fewer if they arrive at a `rate`.

    bodies    the JSON of each request
    finished  called with the number of answers so far
    rate      requests per second of a Poisson process, with the same arrival times for the same
              number of bodies

    Returns timings in the order of completion, failed requests included, and the wall time in
    seconds. A failed request raises nothing: its Timing has the error.
    """
    gaps = np.random.default_rng(len(bodies)).exponential(1.0 / rate, len(bodies))
    waiting = iter(list(zip(np.cumsum(gaps).tolist(), bodies, strict=True)))
    done: list[Timing] = []
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as client:

        async def worker() -> None:
            for arrives, body in waiting:
                await asyncio.sleep(max(0.0, started + arrives - perf_counter()))
                done.append(await _ask_once(client, endpoint, body))
                finished(len(done))

        started = perf_counter()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        return done, perf_counter() - started


def find_model(url: str, api_key: str, name: str | None) -> str:
    """Return the name of the model to measure: `name`, or the first that GET {url}/models lists
    (10 s timeout). Raises ConfigError if the address is invalid, or the server does not answer, is
    not ready or lists none.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"The address begins with http:// or https://, not as {url!r} does.")
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is no address: {error}.") from error
    if name:
        return name
    endpoint = Endpoint(url, "", api_key)
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/models", headers=endpoint.headers, timeout=10.0, trust_env=False
        )
        if answer.status_code == 503:  # Forerun's says why: loading or shutting down.
            raise ConfigError(f"{url} answers nothing yet: {answer.json()['error']['message']}")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{url} does not list its models ({reason}). Is a server running there, and does the "
            "address end in /v1?"
        ) from error
