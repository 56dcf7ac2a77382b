"""A target that can be computed by hand, for tests of everything around a model.

The vocabulary is that of `Tokenizer.byte_level`: 256 bytes, then 256 <|im_start|>,
257 <|im_end|> and 258 <|endoftext|>.
With s the sum of all tokens so far, x the last token and y the one before (0 if none):

    best next token   257 (end of turn)                   if s is divisible by 256
                      97 + (x + 3*y + 2*s) mod 16         else: a letter a..p
    logit of token t  -((t - best) mod V) / 2

Worked example, prompt "Hi" = 72, 105:

    s = 177, x = 105, y = 72    97 + (105 + 216 + 354) mod 16 = 97 +  3 = 100 = "d"
    s = 277, x = 100, y = 105   97 + (100 + 315 + 554) mod 16 = 97 +  9 = 106 = "j"
    s = 383, x = 106, y = 100   97 + (106 + 300 + 766) mod 16 = 97 +  4 = 101 = "e"

Greedy text soon repeats with period 24, so n-gram lookup succeeds. At temperature 1 the best token
has probability 1 - exp(-1/2) = 0.393, the next id up 0.239, then 0.145, ...

The hidden state of a token is (256, x, y, s mod 256) / 256, read from the pages.

"Keys" are positions and "values" are tokens, in real pages: s, x and y are read through the page
table, so a wrong page changes the text or is reported.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ConfigError, EngineError
from forerun.executors.host_sampler import HostSampler
from forerun.interface.executor import Capabilities, Executor, ExecutorLimits
from forerun.interface.hidden import hidden_nodes
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Floats, Ints

END, HIDDEN = 257, 4


@dataclass(frozen=True, slots=True)
class ToyPages:
    """PageContents of the toy: positions int32[P,page_size], and tokens."""

    keys: Ints
    values: Ints

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return int(self.keys[0].nbytes + self.values[0].nbytes)

    def read_page(self, page: int) -> bytes:
        """Return a page's positions and tokens as bytes."""
        return bytes(self.keys[page].tobytes() + self.values[page].tobytes())

    def write_page(self, page: int, content: bytes | memoryview) -> None:
        """Write a page's contents, as `read_page` returned them."""
        self.keys[page], self.values[page] = np.frombuffer(content, np.int32).reshape(2, -1)

    def copy_page(self, source: int, target: int) -> bool:
        """Copy the contents of page `source` to page `target`."""
        for part in (self.keys, self.values):
            part[target] = part[source]
        return True


@dataclass(eq=False)
class ToyRound(Round):
    """A step that has been computed.

    best   int32[M] each node's most probable next token, which determines its logits
    state  int64[M,4] each node's hidden state, times 256
    """

    best: Ints = field(kw_only=True)
    state: NDArray[np.int64] = field(kw_only=True)


class ToyExecutor(Executor):
    """The toy target, an `interface.executor.Executor`.

    delay  seconds added to every step, for tests of cancellation and time-outs
    """

    name = "toy"
    capabilities = Capabilities()

    def __init__(self, limits: ExecutorLimits, delay: float = 0.0) -> None:
        if limits.vocab <= END:
            raise ConfigError(f"the toy needs a vocabulary of 258 or more, not {limits.vocab}.")
        self.limits = limits
        self.delay = delay
        shape = (limits.pages, limits.page_size)
        self._keys = np.full(shape, -1, np.int32)
        self._values = np.zeros(shape, np.int32)
        self.pages = ToyPages(self._keys, self._values)
        self._sampler = HostSampler(limits.slots, limits.vocab)
        ramp = -np.arange(limits.vocab, dtype=np.float32) / np.float32(2)
        self._ramps = np.concatenate([ramp, ramp])

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot. Raises EngineError if the slot is open or a token is out of
        range.
        """
        self._sampler.open(slot_init)

    def close(self, slot: int) -> None:
        """Discard the slot's sequence, if it has one."""
        self._sampler.close(slot)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> ToyRound:
        """Compute the best next token of every node. Writes no page and drafts nothing. Raises
        EngineError if there are more nodes than a step may have, or a page does not have the
        expected positions.
        """
        if len(trees.tokens) > self.limits.max_nodes:
            raise EngineError(f"{len(trees.tokens)} nodes, room for {self.limits.max_nodes}")
        if self.delay:
            time.sleep(self.delay)
        best = np.zeros(len(trees.tokens), np.int32)
        state = np.full((len(best), HIDDEN), 256)
        for row in range(plan.rows):
            self._verify_row(self._read(plan, row), trees, row, best, state)
        return ToyRound(plan, trees, best=best, state=state)

    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Accept on the host with the reference implementation; write only the accepted paths to
        pages. Raises EngineError if a committed position has no page.
        """
        assert isinstance(round, ToyRound)
        best = round.best.tolist()
        if round.plan.hidden is not None:
            nodes = hidden_nodes(round.plan, round.trees)
            round.hidden = round.state[nodes].astype(np.float32) / np.float32(256)
        outcome = self._sampler.finish(round, lambda node: self._logits(best[node]), masks)
        for row in range(round.plan.rows):
            self._write(round.plan, round.trees, row, outcome.permanent(round.trees, row))
        return outcome

    def _write(self, plan: Plan, trees: TreeBatch, row: int, nodes: Ints) -> None:
        """Write the tokens of these nodes to their positions in the row's pages."""
        size = self.limits.page_size
        positions = plan.kv_len[row] + trees.depth[nodes]
        pages = plan.page_table[row, positions // size]
        if (pages < 0).any():
            raise EngineError(f"row {row}: no page was reserved for an accepted position")
        self._keys[pages, positions % size] = positions
        self._values[pages, positions % size] = trees.tokens[nodes]

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: executor, device, kv_bytes, weights_bytes."""
        cache = self._keys.nbytes + self._values.nbytes
        return {"executor": "toy", "device": "cpu", "kv_bytes": cache, "weights_bytes": 0}

    def _logits(self, best: int) -> Floats:
        """Return logits float32[V] with their maximum at `best`; a view."""
        start = self.limits.vocab - best
        return self._ramps[start : start + self.limits.vocab]

    def _read(self, plan: Plan, row: int) -> Ints:
        """Return int32[kv_len], the row's prefix, read through its page table. Raises EngineError
        if a page has other positions than expected.
        """
        length, size = int(plan.kv_len[row]), self.limits.page_size
        pages = plan.page_table[row, : -(-length // size)]
        if (pages < 0).any() or (self._keys[pages].ravel()[:length] != np.arange(length)).any():
            raise EngineError(f"row {row}: its pages do not hold the positions 0..{length - 1}")
        prefix: Ints = self._values[pages].ravel()[:length]
        return prefix

    def _verify_row(
        self, prefix: Ints, trees: TreeBatch, row: int, best: Ints, state: NDArray[np.int64]
    ) -> None:
        """Write best[node] and state[node] for the nodes of `row`."""
        nodes, first_draft_token = trees.nodes(row), trees.root(row) + 1
        chain = np.concatenate([prefix[-1:], trees.tokens[nodes.start : first_draft_token]])
        if not len(prefix):
            chain = np.concatenate([np.zeros(1, np.int32), chain])
        sums = np.zeros(len(nodes), np.int64)
        sums[: len(chain) - 1] = int(prefix.sum()) + np.cumsum(chain[1:])
        before = np.zeros(len(nodes), np.int64)
        before[: len(chain) - 1] = chain[:-1]
        for node in range(first_draft_token, nodes.stop):
            parent = int(trees.parents[node])
            sums[node - nodes.start] = sums[parent - nodes.start] + trees.tokens[node]
            before[node - nodes.start] = trees.tokens[parent]
        last = trees.tokens[nodes.start : nodes.stop]
        letters = 97 + (last + 3 * before + 2 * sums) % 16
        best[nodes.start : nodes.stop] = np.where(sums % 256 == 0, END, letters)
        state[nodes.start : nodes.stop, 1:] = np.stack([last, before, sums % 256], -1)
