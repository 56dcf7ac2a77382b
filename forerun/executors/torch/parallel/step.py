"""A step that every rank runs: the shape is the message's, and nothing is decided anywhere but on
rank 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.executors.device_choice import DeviceNodes
from forerun.executors.torch.accept import best
from forerun.executors.torch.attention.kv import Slots, indices
from forerun.executors.torch.attention.plan_geometry import StepNodes
from forerun.executors.torch.attention.window_cache import window_cache
from forerun.executors.torch.group import Group
from forerun.executors.torch.model_runner import ModelRunner, TorchRound
from forerun.executors.torch.parallel.channel import RankMessage
from forerun.interface.plan import Plan, Reports, TokenLogprobs
from forerun.speculative.accept import NOTHING
from forerun.speculative.sampling import largest
from forerun.speculative.tree import TreeBatch
from forerun.types import Floats, Ints

Moves = tuple[Slots, Slots]
"""int64[n] places in the cache (kv.py) that were copied, and where to."""


@dataclass(frozen=True, slots=True)
class SharedStep:
    """What all ranks do in a step. Only what ModelRunner.run reads of the plan is sent.

    wide   int32[w] choosing nodes whose whole logits rank 0 needs
    moves  rank 0's copies within its cache since the step before
    changes  int32[n,4] likewise of recurrent states (StateChanges)
    ends   int32[m,2] rows of states, and the known nodes whose states they get (StateStep)
    links  int32[k,2] pages whose window page has changed since the step before, and these: after
           its copies
    """

    plan: Plan
    trees: TreeBatch
    nodes: StepNodes
    wide: Ints
    moves: Moves
    changes: Ints = field(default_factory=lambda: np.zeros((0, 4), np.int32))
    ends: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    links: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int32))

    def message(self) -> RankMessage:
        """Return the message from which `of` makes the step on another rank."""
        plan, trees, nodes, on_device = self.plan, self.trees, self.nodes, self.nodes.on_device
        return RankMessage("step", arrays={
            "kv_len": plan.kv_len, "samples": plan.samples, "page_table": plan.page_table,
            "tokens": trees.tokens, "parents": trees.parents, "start": trees.start,
            "known": trees.known, "depth": trees.depth,
            "choosing": nodes.choosing, "reported": nodes.reported, "places": nodes.places,
            "on_device": on_device.nodes, "seeds": on_device.seeds,
            "positions": on_device.positions, "temperatures": on_device.temperatures,
            "wide": self.wide, "source": self.moves[0], "target": self.moves[1],
            "slots": plan.slots, "changes": self.changes, "ends": self.ends, "links": self.links,
        })  # fmt: skip

    @staticmethod
    def of(message: RankMessage) -> "SharedStep":
        """Return the step of this `message`. Of its plan only slots, kv_len, samples and page_table
        are real: ranks read nothing else.
        """
        found = message.arrays
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
        moves = found["source"], found["target"]
        since = {name: found[name] for name in ("changes", "ends", "links")}
        return SharedStep(plan, trees, nodes, found["wide"], moves, **since)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rank 0's results from all ranks' logits.

    tokens  int32[n] the choice at every node that the device decides
    rows    float32[w,V] logits of the step's wide nodes
    """

    tokens: Ints
    rows: Floats


@torch.inference_mode()
def follow(runner: ModelRunner, moves: Moves, links: Ints | None = None) -> None:
    """Do what rank 0 has done outside of steps: its copies, then its changes of window pages."""
    if len(moves[0]):
        runner.move(*moves)
    if links is not None and len(links):
        window_cache(runner.cache).link(links)


@torch.inference_mode()
def gathered(runner: ModelRunner, group: Group, round: TorchRound, wide: Ints) -> Gathered | None:
    """Return what rank 0 needs of a round to decide it; None on the others. Collective."""
    tokens: Ints | None = np.zeros(0, np.int32)
    on_device, vocab = round.on_device, runner.limits.vocab
    if len(on_device.nodes):
        logits = round.logits[indices(round.row_of[on_device.nodes], runner.device)]
        tokens = _choices(group, logits, on_device, group.tp.span(vocab).start)
    rows: Floats | None = np.zeros((0, vocab), np.float32)
    if len(wide):
        rows = _rows(group, round.logits[indices(round.row_of[wide], runner.device)], vocab)
    return None if tokens is None or rows is None else Gathered(tokens, rows)


def _choices(group: Group, logits: Tensor, on_device: DeviceNodes, first: int) -> Ints | None:
    """Return the best of each rank's best, with the noise of the position: ties go to the lowest
    id, NaN anywhere is NOTHING. Collective.
    """
    scores, tokens = best(logits, on_device, first)
    parts = group.gathered(torch.stack([scores.double(), (tokens + first).double()]))
    if not parts:
        return None
    most, token = parts[0]
    for score, other in parts[1:]:
        better = (score > most) | score.isnan()
        most, token = torch.where(better, score, most), torch.where(better, other, token)
    found: Ints = torch.where(most.isfinite(), token, NOTHING).int().cpu().numpy()
    return found


def _rows(group: Group, logits: Tensor, vocab: int) -> Floats | None:
    """Return float32[w,V] of parts [w,V/N], which may differ by one token. Collective."""
    longest = -(-vocab // group.tp.size)
    padded = torch.nn.functional.pad(logits, (0, longest - logits.shape[1]))
    parts = group.gathered(padded)
    if not parts:
        return None
    spans = [TensorParallel(rank, group.tp.size).span(vocab) for rank in range(group.tp.size)]
    cut = [part[:, : s.stop - s.start] for part, s in zip(parts, spans, strict=True)]
    found: Floats = torch.cat(cut, 1).cpu().numpy()
    return found


def reports(
    runner: ModelRunner,
    group: Group,
    round: TorchRound,
    top: int,
    pairs: Sequence[tuple[int, int]],
) -> Reports | None:
    """Return raw log-probabilities of (flat node, token that follows it) pairs, from each rank's
    part of the logits; None on the others than rank 0. Collective.

    A row of what is gathered: the token's logit where the rank has it, the greatest logit, the sum
    of exp(logit - greatest), and the `top` best logits and their ids.
    """
    first = group.tp.span(runner.limits.vocab).start
    logits, rows = runner.logits_of(round), np.full((len(pairs), 3 + 2 * top), -np.inf)
    for row, (node, token) in zip(rows, pairs, strict=True):
        own = logits(node)
        if first <= token < first + len(own):
            row[0] = own[token - first]
        most = own.max()
        row[1], row[2] = most, np.exp(own - most).sum(dtype=np.float64)
        ids = largest(own, top) if top else np.zeros(0, np.int64)
        row[3 : 3 + len(ids)], row[3 + top : 3 + top + len(ids)] = own[ids], ids + first
    parts = group.gathered(torch.from_numpy(rows).to(runner.device))
    if not parts:
        return None
    found = np.stack([part.cpu().numpy() for part in parts])
    return tuple(_merged(found[:, place], token, top) for place, (_, token) in enumerate(pairs))


def _merged(parts: Floats, token: int, top: int) -> TokenLogprobs:
    """Merge the ranks' parts float64[N, 3 + 2 top] into one report."""
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
    """Agree on row counts at which products keep their bits on every rank. Each has tried its own
    (layers.py), and ranks that padded differently would wait for ever. Collective.
    """
    known = torch.zeros(256, device=runner.device)
    known[list(runner.decoder.row_sizes)] = 1
    both = torch.stack(group.everywhere(known)).amin(0).nonzero().flatten()
    runner.decoder.row_sizes = tuple(both.tolist())
