"""Sampling parameters, and their effect on one node's logits.

The order is fixed and documented: repetition, frequency and presence penalty, logit bias,
min_tokens, grammar mask, temperature, min_p, top_k, top_p. Each is vLLM's definition, with one
rule added: ties go to the lowest id, also at the cut-offs of top_k and top_p, so that the
surviving tokens never depend on how a machine sorts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.types import AnyArray, Bools, Floats, Ints, Words


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one sequence, already validated.

    temperature         0 = greedy; below 1e-5 becomes 0, as in vLLM (float32 would overflow)
    top_k               0 or less = off
    top_p, min_p        1.0 / 0.0 = off
    seed                64-bit; keys the noise together with the output position
    logit_bias          (token, bias) pairs
    min_tokens          `stop_tokens` are impossible before this many output tokens
    stop_tokens         end-of-text ids plus the request's own (empty with ignore_eos)
    logprobs            None, or how many top alternatives to report per token (0 = chosen only)
    prompt_logprobs     the same for known tokens (echo)
    accept_threshold_single, accept_threshold_acc
                        thresholds.py; 1 = lossless, None = the engine's option
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
    accept_threshold_single: float | None = None
    accept_threshold_acc: float | None = None

    def __post_init__(self) -> None:
        if 0.0 < self.temperature < 1e-5:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def temperature_only(self) -> bool:
        """Whether nothing but the temperature shapes the distribution: no penalty, bias, minimum
        length or cut-off, and no lossy accept threshold. At temperature 0 cut-offs change nothing
        and do not count.
        """
        cut = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        return self.cut_offs_only and not cut

    @property
    def cut_offs_only(self) -> bool:
        """Whether nothing but the temperature and cut-offs (min_p, top_k, top_p) shape the
        distribution.
        """
        return not (self.penalised or self.logit_bias or self.min_tokens or self.lossy)

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        counted = self.frequency_penalty or self.presence_penalty
        return bool(counted) or self.repetition_penalty != 1.0

    @property
    def log_min_p(self) -> np.float32:
        """The logarithm of min_p: tokens whose scaled logit is below the largest plus this are
        excluded. -inf if min_p is off.
        """
        return np.float32(np.log(self.min_p) if self.min_p else -np.inf)

    @property
    def accept_thresholds(self) -> tuple[float, float]:
        """(single, acc) as floats in [0, 1]; 1, which is lossless, if the request sets none."""
        single, acc = self.accept_threshold_single, self.accept_threshold_acc
        return 1.0 if single is None else single, 1.0 if acc is None else acc

    @property
    def lossy(self) -> bool:
        """Whether draft tokens may be accepted that are not the target's choice: a threshold is
        below 1 and the temperature is not 0.
        """
        return self.temperature > 0 and min(self.accept_thresholds) < 1


@dataclass(frozen=True, slots=True)
class History:
    """The tokens decided so far of one sequence, the only input of penalties.

    tokens int32[T], the first prompt_len of them the prompt.
    """

    tokens: Ints
    prompt_len: int

    @property
    def output_len(self) -> int:
        """Output tokens so far, which is the next output position."""
        return len(self.tokens) - self.prompt_len


def process(
    logits: Floats,
    sampling: Sampling,
    history: History,
    ancestors: Sequence[int] = (),
    mask: Words | None = None,
) -> Floats:
    """Apply every sampling parameter to the logits of one node.

    logits     float32[V], left unchanged
    ancestors  the draft tokens from below the root down to this node, treated as emitted
    mask       uint32[ceil(V/32)] from a grammar, or None

    Returns float32[V], -inf for excluded tokens; softmax gives the distribution to sample from. May
    be `logits` itself if no parameter changes them. Cut-offs never exclude everything; a mask can.
    """
    if sampling.temperature_only and mask is None:
        return logits if sampling.temperature in (0.0, 1.0) else _heated(logits, sampling)
    out = logits.copy()
    _penalise(out, sampling, history, ancestors)
    for token, bias in sampling.logit_bias:
        out[token] += np.float32(bias)
    banned: tuple[int, ...] = ()
    if history.output_len + len(ancestors) < sampling.min_tokens:
        banned = sampling.stop_tokens
    _exclude(out, banned, mask)
    if sampling.temperature == 0.0:
        return out  # Cut-offs always keep the best token: greedy needs none of them.
    out = _heated(out, sampling)
    if not np.isfinite(out.max()):
        return out  # Nothing can be chosen from it.
    if sampling.min_p:
        out[out < out.max() + sampling.log_min_p] = -np.inf
    if sampling.top_k > 0:
        _keep_largest(out, sampling.top_k)
    if sampling.top_p < 1.0:
        _keep_largest(out, *_nucleus(out, sampling.top_p))
    return out


def _heated(logits: Floats, sampling: Sampling) -> Floats:
    return logits / np.float32(sampling.temperature)


def _penalise(out: Floats, sampling: Sampling, history: History, ancestors: Sequence[int]) -> None:
    """Apply penalties in place. Repetition counts prompt and output, frequency and presence only
    the output.
    """
    tokens = np.concatenate([history.tokens, np.array(ancestors, np.int32)])
    if sampling.repetition_penalty != 1.0:
        penalty = np.float32(sampling.repetition_penalty)
        seen = out[tokens]
        out[tokens] = np.where(seen > 0, seen / penalty, seen * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.bincount(tokens[history.prompt_len :], minlength=len(out)).astype(np.float32)
        out -= np.float32(sampling.frequency_penalty) * counts
        out -= np.float32(sampling.presence_penalty) * (counts > 0)


def _exclude(out: Floats, banned: Sequence[int], mask: Words | None) -> None:
    """Exclude stop tokens that come too early and what the grammar forbids.

    If the grammar allows stop tokens only, they stay: it takes precedence over min_tokens.
    """
    if mask is None:
        out[list(banned)] = -np.inf
        return
    allowed = unpack(mask, len(out))
    without = allowed.copy()
    without[list(banned)] = False
    out[~(without if without.any() else allowed)] = -np.inf


def unpack(mask: Words, vocab: int) -> Bools:
    """Return bool[V] of grammar bits uint32[ceil(V/32)]: token t has bit t % 32 of word t // 32."""
    octets = np.ascontiguousarray(mask, "<u4").view(np.uint8)
    return np.unpackbits(octets, count=vocab, bitorder="little").view(np.bool_)


def _keep_largest(out: Floats, count: int, largest: Floats | None = None) -> None:
    """Exclude all but the `count` largest, ties to the lowest id.

    largest  at least the `count` largest values, in any order; None = unknown
    """
    if largest is None:
        largest = out[out > -np.inf]
        if count >= len(largest):
            return
    least = np.partition(largest, -count)[-count]
    ties = np.flatnonzero(out == least)
    spare = len(ties) - (count - np.count_nonzero(largest > least))
    out[out < least] = -np.inf
    out[ties[len(ties) - spare :]] = -np.inf


def _nucleus(logits: Floats, top_p: float) -> tuple[int, Floats]:
    """Return how many of the most probable tokens reach the probability top_p together, as far as
    rounding lets them, and the logits of a set that includes these.
    """
    weights = np.exp(logits - logits.max())
    needed = top_p * float(weights.sum(dtype=np.float64))
    # The V tokens below this floor hold less than (1 - top_p) / 2 of the mass together: all lie
    # beyond the cut, and few are left to sort.
    floor = (1.0 - top_p) / (2 * len(weights))
    likely = weights > floor
    mass = np.cumsum(np.sort(weights[likely])[::-1], dtype=np.float64)
    return min(1 + int(np.searchsorted(mass, needed)), len(mass)), logits[likely]


def largest(logits: Floats, count: int) -> AnyArray:
    """Return int64[.] ids of the `count` largest of float32[V] logits, best first, ties by id.

    Excluded tokens (-inf) and NaN never count, so there may be fewer. `logits` stays unchanged.
    """
    top = logits.copy()
    _keep_largest(top, count)
    ids = np.flatnonzero(top > -np.inf)
    return ids[np.argsort(-top[ids], kind="stable")]


def log_normaliser(logits: Floats) -> float:
    """Return log(sum(exp(logits))) in nats, of float32[V], summed in float64 after subtracting the
    maximum. Not finite if the maximum is not.
    """
    most = float(logits.max())
    return most + float(np.log(np.exp(logits - np.float32(most)).sum(dtype=np.float64)))
