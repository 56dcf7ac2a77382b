"""What a request asks of the sampler, and how it acts on one node's logits.

The order is fixed and documented: repetition, frequency and presence penalty, logit bias,
min_tokens, grammar mask, temperature, min_p, top_k, top_p.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one sequence, already validated.

    temperature         0 = greedy
    top_k               0 = off
    top_p, min_p        1.0 / 0.0 = off
    seed                64-bit; keys the noise together with the output position
    logit_bias          (token, bias) pairs
    min_tokens          `stop_tokens` are impossible before this many output tokens
    stop_tokens         end-of-text ids plus the request's own (empty with ignore_eos)
    logprobs            None, or how many top alternatives to report per token (0 = chosen only)
    prompt_logprobs     the same for known tokens (echo)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
