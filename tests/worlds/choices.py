"""Nodes that choose, each by a seed, an output position and a temperature: as the host's rule, the
compiled core and the programs of torch take them.
"""

from dataclasses import dataclass

import numpy as np
import torch

from forerun.executors.cpu import native
from forerun.executors.cpu.executor import StepBuffers
from forerun.executors.device_choice import DeviceNodes
from forerun.executors.host_sampler import HostSampler
from forerun.executors.torch.accept import NodeNoise, best, greatest
from forerun.interface.plan import Plan, Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.accept import NOTHING, choose
from forerun.speculative.sampling import History, Sampling, process
from forerun.speculative.tree import Draft, NodeMasks, TreeBatch, batch
from tests.parity.driver import Driver, Row, chain_draft

CPU = torch.device("cpu")
SEEDS = [0, 1, 0xFFFFFFFF, 1 << 32, 0x123456789ABCDEF0, (1 << 64) - 1]
POSITIONS = np.array([0, 1, 7, 4095, 131071, 2], np.int32)


def nodes(cases):
    """DeviceNodes of (seed, position, temperature)."""
    seeds, positions, heats = zip(*cases, strict=True)
    return DeviceNodes(
        np.arange(len(cases), dtype=np.int32),
        np.array(seeds, np.uint64),
        np.array(positions, np.int32),
        np.array(heats, np.float32),
    )


def noise_of(cases, device=CPU):
    return NodeNoise.of(nodes(cases), device)


def expected(logits, cases, allowed=None, cuts=None):
    """The tokens that the host's rule chooses of logits [n,V], each by its case: see
    `native_choices`.
    """
    empty, result = History(np.zeros(1, np.int32), 1), []
    for n, (line, (seed, position, temperature)) in enumerate(zip(logits, cases, strict=True)):
        sampling = Sampling(temperature=temperature, seed=seed, **(cuts[n] if cuts else {}))
        if not np.isfinite(line.max()):  # Even where a mask hides it.
            result.append(NOTHING)
            continue
        bits = None if allowed is None else packed(allowed[n])
        result.append(choose(process(line, sampling, empty, (), bits), sampling, position))
    return result


def packed(allowed):
    """uint32[...,W] of bool[...,V], as NodeMasks has them."""
    room = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    return np.packbits(np.pad(allowed, room), axis=-1, bitorder="little").view(np.uint32)


@dataclass
class Case:
    """A step whose logits float32[M,V] are given instead of computed."""

    plan: Plan
    trees: TreeBatch
    logits: np.ndarray
    sampler: HostSampler

    def accept(self, choice=None, masks=None):
        """(choices of all nodes, outcome) by the sampler, which completes `choice`."""
        if choice is None:
            choice = np.full(len(self.trees.tokens), NOTHING, np.int32)
        round, logits = Round(self.plan, self.trees), self.logits.__getitem__
        return choice, self.sampler.finish(round, logits, masks, choice)

    def native(self, executor, masks=None):
        """`choice` of the rows that the core decides, -1 in the others."""
        scored = self.sampler.scored(self.plan, self.trees)
        box, logits = (
            StepBuffers(len(self.trees.tokens), self.sampler.choosing),
            np.ascontiguousarray(self.logits[scored]),
        )
        box.fill(self.plan, self.trees, scored, logits)
        box.step.logits_row = None
        box.put_masks(masks)
        assert native.load().forerun_accept(executor.native_model(), box.step, box.walk) == 0
        return box.choice


def case(rows: list[tuple[int, Draft, Sampling]], logits, samples=None) -> Case:
    """rows: (length of the known chain, draft, sampling), each in a slot of its own."""
    known = [np.arange(length, dtype=np.int32) for length, _, _ in rows]
    sampler = HostSampler(len(rows), logits.shape[1], cut_offs=True)
    for slot, (chain, (_, _, sampling)) in enumerate(zip(known, rows, strict=True)):
        sampler.open(SlotInit(slot, TokenText(chain), 1, sampling))
    count = len(rows)
    zeros = np.zeros(count, np.int32)
    plan = Plan(
        slots=np.arange(count, dtype=np.int32),
        kv_len=zeros,
        known=tuple(known),
        samples=np.ones(count, np.bool_) if samples is None else samples,
        max_nodes=zeros,
        max_depth=zeros,
        page_table=np.zeros((count, 1), np.int32),
        constrained=np.zeros(count, np.bool_),
    )
    return Case(plan, batch(known, [draft for _, draft, _ in rows]), logits, sampler)


def native_choices(executor, logits, cases, allowed=None, cuts=None):
    """What the core chooses; -1 where it leaves a node to the specification. cuts: a dictionary of
    cut-offs of each.
    """
    seeds, positions, temperatures = zip(*cases, strict=True)
    each = zip(temperatures, seeds, cuts or [{}] * len(cases), strict=True)
    samplings = [Sampling(temperature=t, seed=s, **cut) for t, s, cut in each]
    one = case([(1, Draft(), sampling) for sampling in samplings], logits)
    one.plan.kv_len[:] = positions
    masks = None
    if allowed is not None:
        masks = NodeMasks(np.arange(len(cases), dtype=np.int32), packed(allowed))
    return one.native(executor, masks)


def choices(logits, cases, device=CPU):
    """int32[n] as a step without kernels makes them, of (seed, position, temperature) of each."""
    noise, logits = noise_of(cases, device), torch.as_tensor(logits).to(device)
    score, tokens = best(logits, noise, 0)
    if not noise.temperatures.any():
        for one, other in zip(greatest(logits, noise, 0), (score, tokens), strict=True):
            assert torch.equal(one.nan_to_num(9e9), other.nan_to_num(9e9))
    return torch.where(score.isfinite(), tokens, NOTHING)


def text(executor, samplings, count=14):
    """Tokens of several rows with chains of partly right draft tokens, all in one batch."""
    prompt = list(range(20, 33))
    with Driver(executor) as driver:
        for slot, sampling in enumerate(samplings):
            driver.open(slot, prompt[slot:], sampling)
        draft_tokens = {slot: [] for slot in range(len(samplings))}
        while min(len(s.tokens) for s in driver.sequences.values()) < len(prompt) + count:
            rows = [
                Row(s, draft=chain_draft(np.array(g, np.int32))) for s, g in draft_tokens.items()
            ]
            driver.step(rows)
            last = {slot: s.tokens[-1] for slot, s in driver.sequences.items()}
            draft_tokens = {slot: [last[slot], 40, 41] for slot in draft_tokens}
        return [s.tokens[: len(prompt) + count] for s in driver.sequences.values()]


MIXED = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=5),
    Sampling(temperature=1.3, seed=(1 << 63) + 9),
    Sampling(temperature=0.8, seed=5, top_k=20),
]
