"""What a request must satisfy before anything is allocated for it."""

from collections.abc import Sequence

import numpy as np

from forerun.engine.request import Request
from forerun.errors import ContextError, RequestError
from forerun.types import Ints


def validate(request: Request, vocab: int, context: int, max_choices: int) -> None:
    """Raise RequestError, with the field at fault, where the engine cannot honour `request`.

    vocab        V
    context      longest sequence, tokens
    max_choices  largest n
    """
    prompt, max_tokens = request.prompt, request.stopping.max_tokens
    if len(prompt) == 0:
        raise RequestError("The prompt is empty; it needs at least one token.", "prompt")
    _within(prompt, vocab, "prompt")
    _within([token for token, _ in request.sampling.logit_bias], vocab, "logit_bias")
    _within(request.stopping.stop_tokens, vocab, "stop_token_ids")
    if not 1 <= request.n <= max_choices:
        raise RequestError(f"n is {request.n}, but must be 1 to {max_choices}.", "n")
    if max_tokens < 0:
        raise RequestError(f"max_tokens is {max_tokens}, but must not be negative.", "max_tokens")
    if request.sampling.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {request.sampling.min_tokens}, more than max_tokens {max_tokens}.",
            "min_tokens",
        )
    if not 0 <= request.sampling.seed < 2**64:
        raise RequestError("seed must be an unsigned 64-bit number.", "seed")
    if len(prompt) + max_tokens > context:
        raise ContextError(
            f"The prompt has {len(prompt)} tokens and {max_tokens} more are asked, but the "
            f"context is {context} tokens. Shorten the prompt or lower max_tokens.",
            "prompt" if len(prompt) >= context else "max_tokens",
        )


def _within(tokens: Sequence[int] | Ints, vocab: int, name: str) -> None:
    """Every id is one of the vocabulary."""
    ids = np.asarray(tokens, np.int64)
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if len(wrong):
        raise RequestError(
            f"{name} has the token id {int(wrong[0])}, but ids are 0 to {vocab - 1}.", name
        )
