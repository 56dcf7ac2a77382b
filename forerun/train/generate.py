"""The author for a GPU: dense decoding of many prompts at once, refilled as they finish.

No pages, no trees, no speculation: a large batch is bound by arithmetic, not by latency. Each row
of the batch owns one line of a static key-value cache; a step advances all rows by one token
inside one captured program, and the host looks only every STEPS steps, one look behind, so that
it works on finished chats while the device works on the next tokens.

    ask -> waiting -> a free row (prefill of all but the last prompt token)
        -> STEPS steps at a time -> look -> finished -> the row is free again

Sampling is Gumbel-max with the device's own random numbers: this text is never compared with
served text, so it need not be reproducible from a request's seed. Greedy rows have no noise.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.errors import MemoryPlanError, RequestError
from forerun.executors.torch.captured.graphs import CapturedPrograms, recorder
from forerun.train.answers import Ask
from forerun.train.target import DenseTarget, masked_attention
from forerun.types import Ints

STEPS = 16
"""Steps between two looks. A finished row idles for 24 of them on average."""

BUCKET = 256
"""The cache is read up to a multiple of this many tokens."""

PREFILL = 1 << 16
"""Prompt tokens of one prefill, counted with padding."""


@dataclass(frozen=True, slots=True)
class _Results:
    """What the host sees of a run of steps: done bool[B], count int64[B], output int32[B,N]."""

    done: Tensor
    count: Tensor
    output: Tensor
    ready: torch.cuda.Event | None


@dataclass(slots=True)
class _Busy:
    """A row at work. `reach` is an upper bound of its tokens, known without asking the device;
    `most` is where it ends at the latest.
    """

    key: int
    reach: int
    most: int
    runs: int = 0


class DenseAuthor:
    """Continues prompts on the target's dense weights. See forerun.train.answers.Author.

    stops    ids that end an output
    width    prompts at once, at most; fewer where the device's memory is small
    context  longest sequence, tokens
    longest  longest output, tokens
    """

    def __init__(
        self,
        target: DenseTarget,
        stops: Iterable[int],
        width: int,
        context: int,
        longest: int,
        seed: int = 0,
    ) -> None:
        self._target, self._longest = target, longest
        self._context = min(context, target.arch.context)
        device = self._device = torch.device(target.device)
        width = self.width = self._affordable(width)
        torch.manual_seed(seed)
        arch = target.arch
        shape = (arch.layers, 2, width, arch.kv_heads, self._context, arch.head_size)
        self._cache = torch.zeros(shape, dtype=target.dtype, device=device)
        self._stops = torch.tensor(sorted(stops), device=device)
        self._token, self._length, self._count, self._limit = (
            torch.zeros(width, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._temperature = torch.zeros(width, device=device)
        self._done = torch.ones(width, dtype=torch.bool, device=device)
        # The last column takes what rows that are done go on writing.
        self._output = torch.zeros(width, longest + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(width, device=device)
        self._places = torch.arange(self._context, device=device)
        records = recorder(device)
        self._programs = CapturedPrograms(self._step, records) if records else None
        self._waiting: deque[tuple[int, Ask]] = deque()
        self._busy: dict[int, _Busy] = {}
        self._free = list(range(width))
        self._results: _Results | None = None

    def ask(self, key: int, ask: Ask) -> None:
        """Queue one continuation. Raises RequestError if the prompt does not leave room for one
        token.
        """
        if len(ask.prompt) >= self._context:
            raise RequestError(
                f"a prompt of {len(ask.prompt)} tokens; at most {self._context - 1} fit"
            )
        self._waiting.append((key, ask))

    @torch.no_grad()
    def finished(self) -> list[tuple[int, Ints]]:
        """Prefill waiting prompts into free rows and launch STEPS steps; returns the (key, output
        int32[.]) that the run before had finished, often none. With nothing queued it only returns
        those.
        """
        self._admit()
        before, self._results = self._results, self._run() if self._busy else None
        return self._collect(before) if before else []

    def _affordable(self, width: int) -> int:
        """Return the rows whose cache fits into 60 % of the device's free memory."""
        arch, item = self._target.arch, self._target.dtype.itemsize
        line = arch.layers * 2 * arch.kv_heads * self._context * arch.head_size * item
        if self._device.type != "cuda":
            return width
        free = torch.cuda.mem_get_info(self._device)[0]
        if not (rows := min(width, int(free * 0.6) // line)):
            raise MemoryPlanError(f"one row of {line:,} bytes does not fit into {free:,} bytes")
        return rows

    def _admit(self) -> None:
        """Give free rows to waiting prompts, prefilled in groups."""
        group: list[tuple[int, Ask]] = []
        longest = 1
        while self._waiting and self._free:
            key, ask = self._waiting.popleft()
            longest = max(longest, len(ask.prompt))
            if group and (len(group) + 1) * longest > PREFILL:
                self._prefill(group)
                group, longest = [], len(ask.prompt)
            row = self._free.pop()
            room = min(ask.max_tokens, self._longest, self._context - len(ask.prompt))
            self._busy[row] = _Busy(key, len(ask.prompt), len(ask.prompt) + room)
            group.append((row, ask))
        if group:
            self._prefill(group)

    def _prefill(self, group: list[tuple[int, Ask]]) -> None:
        """Compute keys and values of all but the last prompt token, and then the rows' own
        state.
        """
        length = max(len(ask.prompt) for _, ask in group) - 1
        padded = np.zeros((len(group), length), np.int64)
        for line, (_, ask) in zip(padded, group, strict=True):
            line[: len(ask.prompt) - 1] = ask.prompt[:-1]
        rows = torch.tensor([row for row, _ in group], device=self._device)
        target = self._target

        def keep(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
        ) -> Tensor:
            self._cache[layer, 0, rows, :, :length] = keys
            self._cache[layer, 1, rows, :, :length, : values.shape[-1]] = values
            return target.causal(layer, queries, keys, values, sinks)

        if length:
            tokens = torch.from_numpy(padded).to(self._device)
            target.forward(tokens, self._places[:length], keep)
        facts = [
            (ask.prompt[-1], len(ask.prompt) - 1, self._busy[row].most - len(ask.prompt))
            for row, ask in group
        ]
        token, before, limit = torch.tensor(facts, device=self._device).T
        self._token[rows], self._length[rows], self._limit[rows] = token, before, limit
        temperature = [ask.temperature for _, ask in group]
        self._temperature[rows] = torch.tensor(
            temperature, dtype=torch.float32, device=self._device
        )
        self._count[rows], self._done[rows] = 0, False

    def _run(self) -> _Results:
        """Launch STEPS steps and the copy of their results; waits for nothing on a GPU."""
        reach = max(busy.reach for busy in self._busy.values()) + STEPS
        size = min(-(-reach // BUCKET) * BUCKET, self._context)
        for _ in range(STEPS):
            if self._programs is None:
                self._step(size)
            else:
                self._programs[size]()
        for busy in self._busy.values():
            busy.reach = min(busy.reach + STEPS, busy.most)
            busy.runs += 1
        return self._copied()

    def _copied(self) -> _Results:
        parts = (self._done, self._count, self._output)
        if self._device.type != "cuda":
            done, count, output = (part.clone() for part in parts)
            return _Results(done, count, output, ready=None)
        copies = [torch.empty_like(part, device="cpu", pin_memory=True) for part in parts]
        for copy, part in zip(copies, parts, strict=True):
            copy.copy_(part, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        done, count, output = copies
        return _Results(done, count, output, ready=ready)

    def _collect(self, results: _Results) -> list[tuple[int, Ints]]:
        """Free the rows that `results` shows done. It is one run old: what it shows of rows begun
        since is their predecessors'.
        """
        if results.ready:
            results.ready.synchronize()
        done, count, output = (t.numpy() for t in (results.done, results.count, results.output))
        found = []
        for row, busy in list(self._busy.items()):
            if done[row] and busy.runs > 1:
                found.append((busy.key, output[row, : count[row]].copy()))
                del self._busy[row]
                self._free.append(row)
        return found

    def _step(self, size: int) -> None:
        """Decode one token for every row, reading `size` tokens of the cache. Works in place,
        without host synchronisation.
        """
        target, groups = self._target, self._target.arch.kv_heads
        specs = [spec.attention for spec in target.arch.layer_specs]
        biases = {
            spec: target.mask(spec, self._length[:, None], self._places[:size])[:, None, None]
            for spec in dict.fromkeys(specs)
        }

        def attend(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
        ) -> Tensor:
            cache, width = self._cache[layer], values.shape[-1]
            cache[0, self._rows, :, self._length] = keys[:, :, 0]
            cache[1, self._rows, :, self._length, :width] = values[:, :, 0]
            # The queries of a group stand side by side, as if they were positions: the keys
            # are read once for all of them.
            grouped = queries.view(self.width, groups, -1, queries.shape[-1])
            mask = biases[specs[layer]].expand(-1, groups, grouped.shape[2], -1)
            seen = cache[0, :, :, :size], cache[1, :, :, :size, :width]
            # As if groups were heads: a sink for each of a group's queries.
            own = None if sinks is None else sinks.view(groups, -1)
            context = masked_attention(grouped, *seen, mask, specs[layer], own)
            return context.reshape(*queries.shape[:-1], width)

        x, _ = target.forward(self._token[:, None], self._length[:, None], attend)
        self._advance(self._chosen(target.logits(target.final_norm(x[:, 0]))))

    def _chosen(self, logits: Tensor) -> Tensor:
        """Choose int64[B] tokens by logits float32[B,V], which are overwritten."""
        hot = self._temperature[:, None] > 0
        logits /= torch.where(hot, self._temperature[:, None], 1.0)
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-30).log_()
        return (logits - noise * hot).argmax(-1)

    def _advance(self, token: Tensor) -> None:
        """Write the tokens of the rows at work, and update which rows have finished."""
        going = ~self._done
        column = torch.where(going, self._count, self._longest)
        self._output.scatter_(1, column[:, None], token[:, None].int())
        self._token.copy_(torch.where(going, token, self._token))
        self._length.add_(going)
        self._count.add_(going)
        stopped = (token[:, None] == self._stops).any(-1)
        over = stopped | (self._count >= self._limit)
        self._done.logical_or_(going & over)
