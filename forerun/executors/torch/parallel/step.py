"""The steps in rank 0's messages, as every rank runs them: first the changes made outside of passes
since the previous message, then a pass. All decisions are made on rank 0.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.executors.device_choice import DeviceNodes
from forerun.executors.torch.attention.geometry import StepNodes
from forerun.executors.torch.attention.kv import Slots, indices
from forerun.executors.torch.attention.states import TorchStateStep
from forerun.executors.torch.attention.window_cache import window_cache
from forerun.executors.torch.group import Group
from forerun.executors.torch.model_runner import ModelRunner, TorchRound
from forerun.interface.plan import Plan, TokenLogprobs
from forerun.speculative.sampling import largest
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Floats, Ints

Arrays = dict[str, AnyArray]
"""The arrays of a message, by name."""


def _empty(width: int) -> Ints:
    return np.zeros((0, width), np.int32)


@dataclass(frozen=True, slots=True)
class Since:
    """The changes that rank 0 has made outside of passes since its previous message.

    copies   int64[n,3] copies within the cache: number of the call, source slot (kv.py) and target
             slot
    changes  int32[n,4] of recurrent states (StateChanges)
    links    int32[n,2] pages whose window page has changed, and the new ones; applied after the
             copies
    """

    copies: Slots
    changes: Ints
    links: Ints

    def arrays(self) -> Arrays:
        """Return the arrays from which `of` restores this object."""
        return {f"since_{name}": getattr(self, name) for name in self.__slots__}

    @staticmethod
    def of(arrays: Arrays) -> "Since":
        """Return the changes in a message's arrays."""
        return Since(*(arrays[f"since_{name}"] for name in Since.__slots__))

    @torch.inference_mode()
    def follow(self, runner: ModelRunner, last: TorchStateStep | None) -> None:
        """Apply the changes on this rank. last: the states of the previous step."""
        for number in np.unique(self.copies[:, 0]):
            of_call = self.copies[self.copies[:, 0] == number, 1:]
            runner.move(*np.ascontiguousarray(of_call.T))
        if len(self.links):
            window_cache(runner.cache).link(self.links)
        if runner.states is not None:
            runner.states.change(last, self.changes)


@dataclass(frozen=True, slots=True)
class SharedStep:
    """The inputs of all ranks in a step. Of the plan only the fields that ModelRunner.run reads are
    sent.

    wide     int32[w] choosing nodes whose whole logits rank 0 needs
    ends     int32[m,2] rows of states, and the known nodes whose states are copied to them
             (StateStep)
    reports  int32[n,2] known nodes that report log-probabilities, and the tokens that follow them
    top      alternatives of each
    """

    plan: Plan
    trees: TreeBatch
    nodes: StepNodes
    wide: Ints
    ends: Ints = field(default_factory=lambda: _empty(2))
    reports: Ints = field(default_factory=lambda: _empty(2))
    top: int = 0

    def arrays(self) -> Arrays:
        """Return the arrays from which `of` restores the step on another rank."""
        plan, trees, nodes, on_device = self.plan, self.trees, self.nodes, self.nodes.on_device
        return {
            "kv_len": plan.kv_len, "samples": plan.samples, "page_table": plan.page_table,
            "tokens": trees.tokens, "parents": trees.parents, "start": trees.start,
            "known": trees.known, "depth": trees.depth,
            "choosing": nodes.choosing, "reported": nodes.reported, "places": nodes.places,
            "on_device": on_device.nodes, "seeds": on_device.seeds,
            "positions": on_device.positions, "temperatures": on_device.temperatures,
            "wide": self.wide, "slots": plan.slots, "ends": self.ends, "reports": self.reports,
        }  # fmt: skip

    @staticmethod
    def of(found: Arrays, top: int) -> "SharedStep":
        """Return the step in a message's arrays. Of its plan only slots, kv_len, samples and
        page_table are valid: ranks read nothing else.
        """
        trees = TreeBatch(
            *(found["tokens"], found["parents"], found["start"]), found["known"], found["depth"]
        )
        none = np.zeros(len(trees.known), np.int32)
        known = tuple(
            trees.tokens[begin : begin + count]
            for begin, count in zip(trees.start.tolist(), trees.known.tolist(), strict=False)
        )
        plan = Plan(
            *(found["slots"], found["kv_len"], known, found["samples"], none, none),
            found["page_table"],
            constrained=np.zeros(len(none), np.bool_),
        )
        on_device = DeviceNodes(
            *(found[name] for name in ("on_device", "seeds", "positions", "temperatures"))
        )
        nodes = StepNodes(found["choosing"], found["reported"], on_device, found["places"])
        return SharedStep(plan, trees, nodes, found["wide"], found["ends"], found["reports"], top)


@torch.inference_mode()
def complete_round(runner: ModelRunner, group: Group, round: TorchRound, step: SharedStep) -> None:
    """Add to a round, on rank 0, the parts of all ranks' results that it needs for its decisions:
    the whole logits of wide nodes, and log-probabilities. Collective.
    """
    vocab = runner.limits.vocab
    if len(step.reports):
        _report(runner, group, round, step)
    logits = round.logits[indices(round.row_of[step.wide], runner.device)]
    round.row_of[:] = -1
    if len(step.wide):
        round.logits = _rows(group, logits, vocab)
        round.row_of[step.wide] = np.arange(len(step.wide), dtype=np.int32)


def _rows(group: Group, logits: Tensor, vocab: int) -> Tensor:
    """Return float32[w,V], on rank 0, concatenated from parts [w,V/N], whose sizes may differ by
    one token. Collective.
    """
    longest = -(-vocab // group.tp.size)
    padded = torch.nn.functional.pad(logits, (0, longest - logits.shape[1]))
    parts = group.gathered(padded)
    if not parts:
        return logits
    spans = [TensorParallel(rank, group.tp.size).span(vocab) for rank in range(group.tp.size)]
    return torch.cat([part[:, : s.stop - s.start] for part, s in zip(parts, spans, strict=True)], 1)


def _report(runner: ModelRunner, group: Group, round: TorchRound, step: SharedStep) -> None:
    """Compute the step's log-probabilities, on rank 0, from each rank's part of the logits.
    Collective. A gathered row has: the token's logit, if the rank has it, the greatest logit, the
    sum of exp(logit - greatest), and the `top` best logits and their ids.
    """
    first, top = group.tp.span(runner.limits.vocab).start, step.top
    logits, rows = runner.logits_of(round), np.full((len(step.reports), 3 + 2 * top), -np.inf)
    for row, (node, token) in zip(rows, step.reports.tolist(), strict=True):
        own = logits(node)
        if first <= token < first + len(own):
            row[0] = own[token - first]
        most = own.max()
        row[1], row[2] = most, np.exp(own - most).sum(dtype=np.float64)
        ids = largest(own, top) if top else np.zeros(0, np.int64)
        row[3 : 3 + len(ids)], row[3 + top : 3 + top + len(ids)] = own[ids], ids + first
    parts = group.gathered(torch.from_numpy(rows).to(runner.device))
    if parts:
        found = np.stack([part.cpu().numpy() for part in parts])
        for place, (node, token) in enumerate(step.reports.tolist()):
            round.reports[node] = _merged(found[:, place], token, top)


def _merged(parts: Floats, token: int, top: int) -> TokenLogprobs:
    """Return the log-probabilities merged from the ranks' parts float64[N, 3 + 2 top]."""
    most = parts[:, 1].max()
    normaliser = float(most + np.log((parts[:, 2] * np.exp(parts[:, 1] - most)).sum()))
    values, ids = parts[:, 3 : 3 + top].ravel(), parts[:, 3 + top :].ravel()
    order = np.lexsort((ids, -values))[:top]
    best_ones = tuple(
        (int(ids[place]), float(values[place]) - normaliser)
        for place in order
        if values[place] > -np.inf
    )
    return TokenLogprobs(token, float(parts[:, 0].max()) - normaliser, best_ones)


def agree(runner: ModelRunner, group: Group) -> None:
    """Agree on the row counts at which products keep their bits on every rank. Each rank has tested
    its own (layers.py), and ranks with different padding would wait for each other for ever.
    Collective.
    """
    known = torch.zeros(256, device=runner.device)
    known[list(runner.decoder.row_sizes)] = 1
    both = torch.stack(group.everywhere(known)).amin(0).nonzero().flatten()
    runner.decoder.row_sizes = tuple(both.tolist())
