"""Answers in OpenAI's format: in one piece, as chunks of a stream, log-probabilities, counts."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.constrain.grammar import ThinkingBudget
from forerun.engine.request import Delta, Finish, SpeculationStats
from forerun.interface.plan import TokenLogprobs
from forerun.serve.bodies.output_parser import OutputParser, streamed_calls, whole_calls
from forerun.serve.bodies.thinking import BudgetWatch
from forerun.serve.observe import trace
from forerun.text.tokenizer import Tokenizer
from forerun.text.tool_bodies import ParsedDelta

LEAST_LOGPROB = -9999.0
"""The JSON value for minus infinity."""

Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """Optional parts of a choice besides its text.

    ids     its tokens
    as_ids  log-probabilities name tokens by their ids
    top     most alternatives of each token of an answer
    prompt  alternatives of each token of the prompt; None = no prompt log-probabilities
    """

    ids: bool = False
    as_ids: bool = False
    top: int | None = None
    prompt: int | None = None


class ChatFormat:
    """Formats the choices of /v1/chat/completions. Belongs to one request, because it keeps counts
    along a stream.

    unseen  stop tokens without text, for which no log-probabilities are reported either
    parser  creates the parser of one choice's text; None if all of it is content
    budget  of the reasoning: a choice reports it if the budget ended its reasoning
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        unseen: frozenset[int],
        parser: Callable[[], OutputParser] | None = None,
        shown: Shown | None = None,
        budget: ThinkingBudget | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown or Shown()
        self._unseen = unseen
        self._budget, self._watches = budget, dict[int, BudgetWatch]()
        self._thoughts: dict[int, str] = {}
        self._new_parser = parser
        self._speeches: dict[int, OutputParser | None] = {}

    def choice(self, index: int, news: Delta) -> Choice:
        """Return the JSON of a finished choice with the merged delta `news`: a message with
        reasoning, content and calls, and the finish reason. index: its number in the answer.
        """
        parsed = self._parse(index, news)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning:
            message |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
        if parsed.calls:
            message |= {"content": parsed.content or None, "tool_calls": whole_calls(parsed.calls)}
        choice: Choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(news),
            "finish_reason": self._finish(index, news),
            "stop_reason": news.stop_reason,
            "matched_stop": matched_stop(news, self._unseen),
            **self._thinking(index),
        }
        if news.trace:
            choice[trace.FIELD] = trace.traced(news.trace, self._tokenizer)
        return choice | _token_ids(news, self._shown.ids)

    def chunks(self, index: int, news: Delta) -> list[Choice]:
        """Return the chunks of a choice for `news`, possibly none: the role first, the finish
        reason last, between them reasoning, content and calls.
        """
        found: list[Choice] = []
        if index not in self._speeches:
            found.append(_chat_chunk(index, {"role": "assistant", "content": "", "refusal": None}))
        parsed, logprobs = self._parse(index, news), self._logprobs(news)
        deltas: list[dict[str, Any]] = []
        if parsed.reasoning:
            deltas.append({"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning})
        if parsed.content:
            deltas.append({"content": parsed.content})
        if parsed.calls:
            deltas += [{"tool_calls": [piece]} for piece in streamed_calls(parsed.calls)]
        if logprobs and logprobs["content"]:
            # They belong to all of the deltas: the first one carries them.
            first = deltas.pop(0) if deltas else {"content": ""}
            found.append(_chat_chunk(index, first, logprobs))
        found += [_chat_chunk(index, delta) for delta in deltas]
        if news.finish is not None:
            ended = _chat_chunk(index, {}, finish=self._finish(index, news))
            ended |= {
                "stop_reason": news.stop_reason,
                "matched_stop": matched_stop(news, self._unseen),
            }
            found.append(ended | self._thinking(index))
        if news.trace or (self._shown.ids and news.tokens):
            found = found or [_chat_chunk(index, {})]
            found[0] |= _token_ids(news, self._shown.ids)
        if news.trace:
            found[0][trace.FIELD] = trace.traced(news.trace, self._tokenizer)
        return found

    def _parse(self, index: int, news: Delta) -> ParsedDelta:
        if self._budget is not None:
            self._watches.setdefault(index, BudgetWatch(self._budget)).push(news.tokens)
        if index not in self._speeches:
            self._speeches[index] = None if self._new_parser is None else self._new_parser()
        if (parser := self._speeches[index]) is None:
            return ParsedDelta(content=news.text)
        parsed = parser.push(news.text, news.finish is not None, news.finish == Finish.LENGTH)
        if parsed.reasoning:
            self._thoughts[index] = self._thoughts.get(index, "") + parsed.reasoning
        return parsed

    def _thinking(self, index: int) -> dict[str, str]:
        """Return Forerun's `thinking` of a choice; {} unless a budget ended its reasoning."""
        watch = self._watches.get(index)
        return {"thinking": "budget"} if watch is not None and watch.cut else {}

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all choices so far; each text is encoded again for this."""
        return sum(reasoning_tokens(text, self._tokenizer) for text in self._thoughts.values())

    def _finish(self, index: int, news: Delta) -> str | None:
        parser = self._speeches[index]
        called = parser is not None and parser.called(news.finish, news.stop_reason)
        return "tool_calls" if called else news.finish

    def _logprobs(self, news: Delta) -> dict[str, Any] | None:
        if not news.logprobs:
            return None
        entries = logprob_entries(news, self._unseen, self._tokenizer, self._shown.as_ids)
        return {"content": entries, "refusal": None}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that precedes its answer. tokens: () = none of them is reported."""

    text: str
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Offsets:
    """Computes the position of each token of one choice in its text, in characters.

    lead  spaces that the first token may begin with and the text does not (SentencePiece)
    """

    at: int = 0
    lead: int = 0
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def next(self, piece: bytes) -> int:
        """Return the position of a token with these bytes; a partial character has the position
        where it begins.
        """
        place = self.at
        if piece and self.lead:
            spaces = len(piece) - len(piece.lstrip(b" "))
            piece, self.lead = piece[min(spaces, self.lead) :], 0
        self.at += len(self.decoder.decode(piece))
        return place


class CompletionFormat:
    """Formats the choices of /v1/completions; belongs to one request, as ChatFormat.

    unseen  as in ChatFormat
    silent  tokens whose text is skipped
    echoes  one per prompt, or none
    n       choices of one prompt
    """

    reasoning_tokens = 0

    def __init__(
        self,
        tokenizer: Tokenizer,
        unseen: frozenset[int],
        silent: frozenset[int],
        echoes: Sequence[Echo] = (),
        n: int = 1,
        shown: Shown | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown or Shown()
        self._unseen = unseen
        self._silent = silent
        self._echoes = echoes
        self._n = n
        self._offsets: dict[int, Offsets] = {}

    def choice(self, index: int, news: Delta) -> Choice:
        """Return the JSON of a finished choice with the merged delta `news`: the text, after the
        prompt if it is echoed, and the finish reason.
        """
        return self.chunks(index, news)[0]

    def chunks(self, index: int, news: Delta) -> list[Choice]:
        """Return one chunk of the choice; its first has the echo of the prompt, if requested."""
        if begins := index not in self._offsets:
            self._offsets[index] = Offsets()
        offsets = self._offsets[index]
        echo = self._echoes[index // self._n] if begins and self._echoes else None
        chunk = {
            "index": index,
            "text": (echo.text if echo else "") + news.text,
            "logprobs": self._logprobs(news, echo, offsets),
            "finish_reason": news.finish,
            "stop_reason": news.stop_reason,
            "matched_stop": matched_stop(news, self._unseen),
        }
        if news.trace:
            chunk[trace.FIELD] = trace.traced(news.trace, self._tokenizer)
        if self._shown.prompt is not None and begins:
            chunk["prompt_logprobs"] = prompt_entries(news, self._shown.prompt, self._tokenizer)
        return [chunk | _token_ids(news, self._shown.ids)]

    def _logprobs(self, news: Delta, echo: Echo | None, offsets: Offsets) -> dict[str, Any] | None:
        """Return the log-probabilities in the legacy format, as parallel lists. The first token of
        a prompt has none.
        """
        if not news.logprobs and (echo is None or not echo.tokens):
            return None
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        parts: dict[str, list[Any]] = {name: [] for name in names}
        if echo is not None:
            offsets.lead = self._tokenizer.leading_spaces
            self._add(parts, echo.tokens[0], None, offsets)
            for entry in news.prompt_logprobs:
                self._add(parts, entry.token, entry, offsets)
            offsets.at, offsets.lead = len(echo.text), 0
        for entry in visible(news, self._unseen):
            self._add(parts, entry.token, entry, offsets)
        return parts

    def _add(
        self, parts: dict[str, list[Any]], token: int, entry: TokenLogprobs | None, offsets: Offsets
    ) -> None:
        piece = self._tokenizer.token_bytes(token)
        parts["tokens"].append(self._named(token))
        parts["text_offset"].append(offsets.next(b"" if token in self._silent else piece))
        parts["token_logprobs"].append(entry and max(entry.logprob, LEAST_LOGPROB))
        parts["top_logprobs"].append(entry and self._top(entry))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the top tokens; the chosen one is always among them, so there may be one more than
        requested.
        """
        pairs = (*entry.top[: self._shown.top], (entry.token, entry.logprob))
        return {self._named(id): max(logprob, LEAST_LOGPROB) for id, logprob in pairs}

    def _named(self, token: int) -> str:
        return f"token_id:{token}" if self._shown.as_ids else text_of(token, self._tokenizer)


def matched_stop(news: Delta, unseen: frozenset[int]) -> str | int | None:
    """Return the stop string, or the id of the stop token, that ended an answer (SGLang's format);
    None if none did.
    """
    if news.finish != Finish.STOP or news.stop_reason is not None:
        return news.stop_reason
    return news.tokens[-1] if news.tokens and news.tokens[-1] in unseen else None


def visible(news: Delta, unseen: frozenset[int]) -> Sequence[TokenLogprobs]:
    """Return the log-probabilities of the tokens with text: all but a stop token, one of `unseen`,
    at the end.
    """
    ends = news.finish == Finish.STOP and news.tokens and news.tokens[-1] in unseen
    return news.logprobs[:-1] if ends else news.logprobs


def logprob_entries(
    news: Delta, unseen: frozenset[int], tokenizer: Tokenizer, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the log-probabilities of the tokens with text, and their alternatives."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.token_bytes(token)
        finite = max(logprob, LEAST_LOGPROB)
        name = f"token_id:{token}" if as_ids else token_text(piece)
        return {"token": name, "logprob": finite, "bytes": list(piece)}

    return [
        {
            **one(entry.token, entry.logprob),
            "top_logprobs": [one(token, logprob) for token, logprob in entry.top],
        }
        for entry in visible(news, unseen)
    ]


def prompt_entries(news: Delta, top: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt_logprobs: for each token of the prompt, its log-probability and its
    alternatives by id; None for the first. A token that is not among the alternatives has no rank.
    """

    def one(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = text_of(token, tokenizer)
        return {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": text}

    found: list[dict[str, Any] | None] = [None]
    for entry in news.prompt_logprobs:
        ranked = enumerate(entry.top[:top], 1)
        others = {str(token): one(token, logprob, rank) for rank, (token, logprob) in ranked}
        own = {str(entry.token): one(entry.token, entry.logprob, None)}
        found.append(own | others)
    return found


def reasoning_tokens(text: str, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of a reasoning text, encoded again; 0 if it is empty."""
    return len(tokenizer.encode(text, False, bos=False)) if text else 0


def text_of(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token id, with invalid bytes as in `token_text`."""
    return token_text(tokenizer.token_bytes(token))


def token_text(piece: bytes) -> str:
    """Return a token's bytes as text; if they are not whole characters, as OpenAI writes bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def usage(prompt: int, completion: int, cached: int, reasoning: int = 0) -> dict[str, Any]:
    """Return token counts. Every decided token counts, including the one that ended the text."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def predicted(stats: Iterable[SpeculationStats]) -> dict[str, int]:
    """Return the counts of a prediction: its verified tokens that are in the text, and those that
    are not.
    """
    counts = [item.predicted for item in stats]
    right = sum(accepted for _, accepted in counts)
    wrong = sum(tried for tried, _ in counts) - right
    return {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}


def speculation_metrics(stats: Iterable[SpeculationStats]) -> dict[str, Any]:
    """Return vLLM's `metrics`, summed over the choices of an answer, and Forerun's reasons: for
    each choice, the reason for its last number of draft tokens.
    """
    found = list(stats)
    steps, draft_tokens = sum(s.steps for s in found), sum(s.draft_tokens for s in found)
    accepted = sum(s.accepted for s in found)
    longest = max((len(s.histogram) for s in found), default=0)
    padded = ([*s.histogram, *[0] * (longest - len(s.histogram))] for s in found)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else None,
            "draft_acceptance_rate": accepted / draft_tokens if draft_tokens else None,
            "acceptance_histogram": [sum(column) for column in zip(*padded, strict=True)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": draft_tokens,
            "reasons": [s.reason for s in found],
        }
    }


def timings(prompt: int, cached: int, prompt_seconds: float, n: int, seconds: float) -> Choice:
    """Return llama.cpp's `timings`: tokens of the prompt and of the answer, and their times."""
    prompt_ms, predicted_ms, new = 1000.0 * prompt_seconds, 1000.0 * seconds, prompt - cached
    return {
        "cache_n": cached,
        "prompt_n": new,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": round(prompt_ms / max(new, 1), 3),
        "prompt_per_second": round(new / max(prompt_seconds, 1e-6), 3),
        "predicted_n": n,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": round(predicted_ms / max(n, 1), 3),
        "predicted_per_second": round(n / max(seconds, 1e-6), 3),
    }


def _token_ids(news: Delta, shown: bool) -> Choice:
    return {"token_ids": list(news.tokens)} if shown else {}


def _chat_chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish: str | None = None,
) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
