"""The sampler's inputs of rows with more than a temperature, and the device's state for them.

    host    a slot's parameters, masks           -> buffers
    device  [slots+1,V] what each token is in a slot's text (shaping.py), and its biases

A history is written whole when its slot takes part in a round for the first time, or has advanced
outside of rounds. From then on rounds add the tokens that they emit, so that nothing has to
be copied, and a carried round counts tokens that the host does not know yet.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forerun.executors.device_choice import Choosing
from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.shaping import COUNT, RULES, SEEN, STOP, Shaping, chosen
from forerun.executors.torch.sizes import Size
from forerun.executors.torch.triton.kernels import Kernels
from forerun.interface.slot_init import SlotInit
from forerun.speculative.sampling import History, Sampling
from forerun.speculative.tree import NodeMasks
from forerun.types import AnyArray, Ints

PLAIN, EDITED, CUT = 0, 1, 2
"""Kinds of sampling parameters of a row: PLAIN, the temperature alone; EDITED, penalties, biases,
early stop tokens or min_p; CUT, top_k or top_p, for which the threshold is searched in the
vocabulary (the reference sorts it).
"""

REPORTS = (1, 5, 20)
"""Numbers of alternatives for which a round can compute log-probabilities; the host computes
more.
"""


class ShapedRows:
    """The sampling parameters and token histories of slots.

    choosing  of the sampler; more slots may be decided by the device here
    """

    def __init__(self, slots: int, vocab: int, device: torch.device, choosing: Choosing) -> None:
        self._history = torch.zeros(slots + 1, vocab, dtype=torch.int32, device=device)
        self._bias = torch.zeros(slots + 1, vocab, device=device)
        self.choosing = replace(choosing, on_device=np.zeros(slots, np.bool_))
        self._rules: dict[str, Ints] = {name: np.zeros(slots, np.int32) for name in RULES}
        self._kind, self._top = np.zeros(slots, np.int32), np.full(slots, -1, np.int32)
        # Of slots with more parameters than a temperature: tokens that their history counts; and
        # all slots that have biases there.
        self._counted: dict[int, int] = {}
        self._biased: set[int] = set()

    # --- the host's half ---------------------------------------------------------------------

    def open(self, slot_init: SlotInit) -> None:
        """Store the parameters of a sequence, replacing those of the slot's previous one. The
        slot's history on the device becomes unknown.
        """
        slot, sampling = slot_init.slot, slot_init.sampling
        self._counted.pop(slot, None)
        # The host applies accept thresholds.
        self.choosing.on_device[slot] = not sampling.lossy
        self._kind[slot] = _kind(sampling)
        self._top[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        for name, bits in _rules(sampling, self._history.shape[1]).items():
            self._rules[name][slot] = bits

    def size(self, size: Size, slots: Ints, masked: bool) -> Size:
        """Return the size extended by the needs of the rows in slots int32[B]: the greatest of
        PLAIN, EDITED, CUT; the least of REPORTS that is enough for all, 0 if a row needs more than
        the last; and `masked`.
        """
        kind, top = int(self._kind[slots].max()), int(self._top[slots].max())
        reports = 0
        if 0 <= top <= REPORTS[-1]:
            reports = next(count for count in REPORTS if count >= top)
        reports = min(reports, self._history.shape[1])
        return size._replace(shaping=kind, masked=int(masked), reports=reports)

    def fill(
        self, buffers: dict[str, AnyArray], size: Size, slots: Ints, masks: NodeMasks | None = None,
        place: Ints | None = None,
    ) -> None:  # fmt: skip
        """Write the parameters of the rows in slots int32[B] to `buffers`. place: int32[M] of every
        flat node, for masks.
        """
        if size.shaping:
            for name, values in self._rules.items():
                buffers[name][: len(slots)] = values[slots]
        if size.masked and masks is not None:
            buffers["mask_row"][place] = masks.row
            buffers["masks"][: len(masks.bits)] = masks.bits.view(np.int32)

    def stale(
        self, slots: Ints, history: Callable[[int], tuple[Sampling, History]]
    ) -> Callable[[], None] | None:
        """Return a function that brings the histories of these slots up to date on the device, to
        be called before their round; None if they are. history: by row, sampling parameters and
        text. The tokens of the round before a carried one were already counted.
        """
        rows: list[tuple[int, AnyArray | None, AnyArray | None]] = []
        for row, slot in enumerate(slots.tolist()):
            if not self._kind[slot]:
                # Its rules ignore the history; biases are always added.
                if slot in self._biased:
                    self._biased.remove(slot)
                    rows.append((slot, None, np.zeros(self._history.shape[1], np.float32)))
                continue
            sampling, text = history(row)
            current = self._counted.get(slot) == len(text.tokens)
            if not current and (slot not in self._counted or sampling.penalised):
                rows.append((slot, self._entries(text, sampling), self._biases(slot, sampling)))
                self._counted[slot] = len(text.tokens)
        return (lambda: self._write(rows)) if rows else None

    def set_counted(self, slot: int, tokens: int) -> None:
        """Record that a round has extended a slot's history to `tokens` tokens."""
        if self._kind[slot]:
            self._counted[slot] = tokens

    def _entries(self, text: History, sampling: Sampling) -> AnyArray:
        vocab = self._history.shape[1]
        counts = np.bincount(text.tokens[text.prompt_len :], minlength=vocab)
        entries = (COUNT * counts).astype(np.int32)
        entries[text.tokens[: text.prompt_len]] |= SEEN
        entries[list(sampling.stop_tokens)] |= STOP
        return entries

    def _biases(self, slot: int, sampling: Sampling) -> AnyArray | None:
        """Return the slot's biases; None if they are unchanged."""
        if not sampling.logit_bias and slot not in self._biased:
            return None
        biases = np.zeros(self._history.shape[1], np.float32)
        for token, value in sampling.logit_bias:
            biases[token] += np.float32(value)
        self._biased.add(slot)
        return biases

    def _write(self, rows: list[tuple[int, AnyArray | None, AnyArray | None]]) -> None:
        for slot, entries, biases in rows:
            if entries is not None:
                self._history[slot].copy_(torch.from_numpy(entries))
            if biases is not None:
                self._bias[slot].copy_(torch.from_numpy(biases))

    # --- asynchronous -----------------------------------------------------------------------

    def choose(
        self,
        size: Size,
        buffers: dict[str, Tensor],
        logits: Tensor,
        noise: NodeNoise,
        kernels: Kernels,
    ) -> Tensor:
        """Return int32[R*N] choices from logits float32[R*N,V]; noise: of every node."""
        shape = size.rows, size.nodes
        shaping = masks = None
        if size.shaping:
            shaping = Shaping(
                slots=buffers["slot"],
                history=self._history,
                bias=self._bias,
                rules={name: buffers[name] for name in RULES},
                tokens=buffers["tokens"].view(shape),
                above=_above(buffers["tree_intervals"].view(2, *shape)),
                positions=noise.positions.view(shape),
                temperatures=buffers["temperature"].view(torch.float32),
                cuts=size.shaping == CUT,
            )
        if size.masked:
            masks = buffers["masks"], buffers["mask_row"].view(shape)

        def of_rows(part: Tensor, begin: int, end: int) -> Tensor:
            nodes = slice(begin * size.nodes, end * size.nodes)
            own = NodeNoise(noise.seeds[nodes], noise.positions[nodes], noise.temperatures[nodes])
            return kernels.choose(part, own)

        return chosen(logits.view(*shape, -1), shaping, masks, kernels.shape, of_rows)

    def add(self, buffers: dict[str, Tensor], choices: Tensor, kept: Tensor) -> None:
        """Count the tokens that a round emits: choices [R*N] of nodes on accepted paths, kept
        bool[R,N].
        """
        vocab = self._history.shape[1]
        where = buffers["slot"].long()[:, None] * vocab + choices.clamp_min(0).view_as(kept)
        self._history.view(-1).index_add_(0, where.flatten(), COUNT * kept.flatten().int())


def _above(intervals: Tensor) -> Tensor:
    """Return bool[R,N,N]: whether node j > 0 is node i or one of its ancestors; intervals [2,R,N]:
    geometry.py.
    """
    enter, leave = intervals
    inside = (enter[:, None] <= enter[:, :, None]) & (enter[:, :, None] < leave[:, None])
    above: Tensor = inside & (torch.arange(enter.shape[1], device=enter.device) > 0)
    return above


def _kind(sampling: Sampling) -> int:
    if sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0):
        return CUT
    return PLAIN if sampling.temperature_only else EDITED


def _rules(sampling: Sampling, vocab: int) -> dict[str, int]:
    """Return RULES of a sequence, as int32 bits."""
    floats = {
        "repetition": sampling.repetition_penalty,
        "frequency": sampling.frequency_penalty,
        "presence": sampling.presence_penalty,
        "min_p": np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf,
    }
    rules = {name: int(np.float32(value).view(np.int32)) for name, value in floats.items()}
    low, high = np.array([sampling.top_p], np.float64).view(np.int32).tolist()
    top_k = min(sampling.top_k, vocab) if sampling.top_k > 0 else vocab
    return rules | {
        "top_k": top_k,
        "min_tokens": min(sampling.min_tokens, 2**31 - 1),
        "top_p_low": low,
        "top_p_high": high,
    }
