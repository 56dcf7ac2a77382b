"""Every sampling parameter on the device: forerun.speculative.sampling.process, and the
log-probabilities of the choices, in fixed shapes and without synchronisation.

The arithmetic is the host's, operation by operation in float32, so that the choices are the same.
Exponentials may differ in their last bit: a token differs only if the mass at top_p's cut, or the
difference of two scores, is within such an error.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from forerun.executors.device_choice import LEAST_TOP_P

COUNT, SEEN, STOP = 4, 1, 2
"""Parts of a history entry: COUNT for each occurrence of the token in the output, SEEN if the
prompt has it, STOP if it is a stop token.
"""

CHUNK = 64
"""Nodes that are processed at once, unless a row has more: about 40 bytes per node and token of the
vocabulary.
"""

_LOW = 0xFFFFFFFF

RULES = (
    *("repetition", "frequency", "presence", "min_p"),
    *("top_k", "min_tokens", "top_p_low", "top_p_high"),
)
"""Sampling parameters of rows other than the temperature, by the names in Shaping.rules."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """Sampling parameters of R rows of N nodes; vectors are [R] and contain the bits of numbers as
    int32.

    slots      int32[R] each row's index in histories and biases
    history    int32[S,V], see COUNT; of the decided tokens
    bias       float32[S,V]
    rules      by name: repetition, frequency, presence, min_p (the logarithm), top_k, min_tokens,
               top_p_low and top_p_high (halves of a float64)
    tokens     int32[R,N] of the nodes
    above      bool[R,N,N] whether node j is draft token i or one of its ancestors, [r,i,j]
    positions  int32[R,N] output position that each node decides
    temperatures  float32[R]
    cuts       whether some row has top_k or top_p
    """

    slots: Tensor
    history: Tensor
    bias: Tensor
    rules: dict[str, Tensor]
    tokens: Tensor
    above: Tensor
    positions: Tensor
    temperatures: Tensor
    cuts: bool

    def number(self, name: str) -> Tensor:
        """Return float32[R,1,1], the parameter of that name in RULES, whose vector has the bits of
        float32.
        """
        return self.rules[name].view(torch.float32)[:, None, None]

    def part(self, begin: int, end: int) -> "Shaping":
        """Return the rows from `begin` to before `end` as views, with the histories and biases of
        all slots.
        """
        rows = slice(begin, end)
        rules = {name: values[rows] for name, values in self.rules.items()}
        mine = self.tokens[rows], self.above[rows], self.positions[rows], self.temperatures[rows]
        return Shaping(self.slots[rows], self.history, self.bias, rules, *mine, self.cuts)


Shape = Callable[[Tensor, Shaping | None, Tensor | None], Tensor]
"""(logits float32[R,N,V], contiguous, sampling parameters of the rows, bool[R,N,V] allowed by
grammars) -> as `shaped`; a node whose logits are not finite gets at least one NaN or only -inf, so
that no token is chosen.
"""


def unpacked(words: Tensor, which: Tensor, vocab: int) -> Tensor:
    """Return bool[...,V], the tokens that masks allow. words: int32[R,ceil(V/32)]; which:
    int32[...], the row of each node, -1 = everything is allowed.
    """
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    mine = words[which.clamp_min(0).long()]
    found = ((mine[..., None] >> bits) & 1).flatten(-2)[..., :vocab] > 0
    return found | (which < 0)[..., None]


def shaped(logits: Tensor, shaping: Shaping | None, allowed: Tensor | None) -> Tensor:
    """Return float32[R,N,V]: logits of R rows of N nodes, before the temperature, with -inf for
    excluded tokens; allowed: bool[R,N,V] by the grammars. NaN for a node whose logits are not
    finite.
    """
    finite = logits.max(-1, keepdim=True).values.isfinite()
    out = logits
    if shaping is not None:
        history = shaping.history.index_select(0, shaping.slots)[:, None]
        out = _edited(logits, shaping, history)
        early = shaping.positions[..., None] < shaping.rules["min_tokens"][:, None, None]
        allowed = without((history & STOP > 0) & early, allowed)
    if allowed is not None:
        out = torch.where(allowed, out, -torch.inf)
    if shaping is not None:
        out = cut(out, shaping)
    return torch.where(finite, out, torch.nan)


def without(banned: Tensor, allowed: Tensor | None) -> Tensor:
    """Return bool[R,N,V], the tokens that are allowed and not banned; banned ones too if nothing
    else is allowed.

    banned   bool[R,N,V]
    allowed  bool[R,N,V]; None = all
    """
    if allowed is None:
        return ~banned
    left = allowed & ~banned
    return torch.where(left.any(-1, keepdim=True), left, allowed)


def _edited(logits: Tensor, shaping: Shaping, history: Tensor) -> Tensor:
    """Apply penalties and biases; history: int32[R,1,V]."""
    _, nodes, _ = logits.shape
    drafted = torch.zeros_like(logits, dtype=torch.int32)
    where = shaping.tokens[:, None].expand(-1, nodes, -1).long()
    drafted = drafted.scatter_add(2, where, shaping.above.int())
    counts = history // COUNT + drafted
    seen = (history & SEEN > 0) | (counts > 0)
    repetition = shaping.number("repetition")
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    edited = torch.where(seen, repeated, logits)
    edited = edited - shaping.number("frequency") * counts.float()
    edited = edited - shaping.number("presence") * (counts > 0).float()
    return edited + shaping.bias.index_select(0, shaping.slots)[:, None]


def cut(out: Tensor, shaping: Shaping) -> Tensor:
    """Return float32[R,N,V], the logits with -inf for tokens removed by min_p, top_k and top_p; a
    greedy row keeps all.
    """
    hot = (shaping.temperatures > 0)[:, None, None]
    heated = out / torch.where(shaping.temperatures > 0, shaping.temperatures, 1.0)[:, None, None]
    likely = heated >= heated.max(-1, keepdim=True).values + shaping.number("min_p")
    kept = likely
    if shaping.cuts:
        heated = torch.where(likely, heated, -torch.inf)
        values, order = heated.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(out.shape[-1], device=out.device)
        best = rank < shaping.rules["top_k"][:, None, None]
        weights = torch.where(best, (values - values[..., :1]).exp(), 0.0).double()
        mass = weights.cumsum(-1)
        least = _double(shaping.rules)[:, None, None] * mass[..., -1:]
        best = best & (F.pad(mass[..., :-1], (1, 0)) < least)
        kept = likely & torch.zeros_like(best).scatter(-1, order, best)
    return torch.where(kept | ~hot, out, -torch.inf)


def _double(rules: dict[str, Tensor]) -> Tensor:
    """Return float64[R], top_p: a greater number if it is 1, so that rounding does not cut; a
    number large enough for the most probable token if it is 0, since that always stays.
    """
    low, high = (rules[name].long() for name in ("top_p_low", "top_p_high"))
    top_p = ((high << 32) | (low & _LOW)).view(torch.float64)
    return torch.where(top_p < 1.0, top_p.clamp_min(LEAST_TOP_P), 2.0)


def chosen(
    logits: Tensor,
    shaping: Shaping | None,
    masks: tuple[Tensor, Tensor] | None,
    shape: Shape,
    choose: Callable[[Tensor, int, int], Tensor],
) -> Tensor:
    """Return int32[R*N]: choices of R rows of N nodes from logits float32[R,N,V], computed in
    groups of rows.

    shape   (logits, sampling parameters, allowed) -> logits to choose from
    masks   words int32[.,ceil(V/32)] and int32[R,N] the mask of each node
    choose  (logits float32[n,V], first and last but one row) -> int32[n]
    """
    rows, nodes, vocab = logits.shape
    found = []
    for begin, end in _chunks(rows, max(1, CHUNK // nodes)):
        part = shaping.part(begin, end) if shaping is not None else None
        allowed = None if masks is None else unpacked(masks[0], masks[1][begin:end], vocab)
        left = shape(logits[begin:end], part, allowed)
        found.append(choose(left.flatten(0, 1), begin, end))
    return torch.cat(found)


def _chunks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + size, rows)) for begin in range(0, rows, size))


def reported(logits: Tensor, choices: Tensor, top: int) -> Tensor:
    """Return int32[M,1+2K] for M nodes with logits float32[M,V]: the log-probability of the choice,
    the ids of the K = `top` best tokens, ties by lowest id, and their log-probabilities; these in
    nats, as the bits of float32.
    """
    vocab = logits.shape[-1]
    most = logits.max(-1, keepdim=True).values
    mass = (logits - most).exp().sum(-1, keepdim=True, dtype=torch.float64)
    normaliser = most.double() + mass.log()
    # Keys order by larger logit, then lower id. Both zeros are equal.
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    keys = ordered * vocab + (vocab - 1 - torch.arange(vocab, device=logits.device))
    ids = keys.topk(top, -1).indices
    which = torch.cat([choices.clamp_min(0).long()[:, None], ids], 1)
    found = (logits.gather(1, which).double() - normaliser).float().view(torch.int32)
    return torch.cat([found[:, :1], ids.int(), found[:, 1:]], 1)
