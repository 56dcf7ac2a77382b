"""ParallelExecutor: the executor contract where a model is shared by several ranks, of which this
process is rank 0. Slots, acceptance, grammars, policy and draft models are here alone; of a step
one message goes to the others, and the outcome is made of what they gather.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from forerun.checkpoints.adapter import LoraAdapter
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.tensor_parallel import RankCheckpoint, TensorParallel, check_divides
from forerun.errors import ConfigError
from forerun.executors.host_choice import Logits, ReportsOf
from forerun.executors.host_sampler import HostSampler
from forerun.executors.torch.attention.kv import Slots
from forerun.executors.torch.attention.states import StateChanges
from forerun.executors.torch.decoder.decoder import Ends
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.weights import Weights
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.group import Processes
from forerun.executors.torch.model_runner import ModelRunner, TorchOptions, TorchRound
from forerun.executors.torch.page_contents import TorchPages
from forerun.executors.torch.parallel.channel import RankMessage
from forerun.executors.torch.parallel.processes import COMMAND, Ranks
from forerun.executors.torch.parallel.start import RankStart, difference
from forerun.executors.torch.parallel.step import Gathered, SharedStep, agree, gathered, reports
from forerun.executors.torch.triton.kernels import Kernels, parts_of
from forerun.executors.torch.windowed import WindowedTorchExecutor
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan, Reports
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Floats, Ints


@dataclass(eq=False)
class SharedRound(TorchRound):
    """A round of all ranks.

    logits  of this rank's tokens alone
    wide    int32[w] nodes whose whole logits rank 0 has
    found   the gathered results
    """

    wide: Ints = field(kw_only=True)
    found: Gathered = field(kw_only=True)


class ParallelExecutor(TorchExecutor):
    """Rank 0 of the ranks of `tp`, the others of which it starts, watches and ends.

    port   where they meet, on the loopback interface
    ranks  the others
    whole  the checkpoint of which each has a part

    Raises what the ranks raise, ConfigError if the model cannot be shared by so many, RankError
    if a rank is gone or is not like the others. There are as many devices (build/with_torch.py).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        options: TorchOptions,
        tp: TensorParallel,
        threads: int | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        check_divides(checkpoint.architecture, tp)
        devices = _devices(options.device, tp.size)
        self.whole = checkpoint
        # Its port is the system's choice, and free again when this process ends.
        store = TCPStore("127.0.0.1", 0, tp.size, is_master=True, wait_for_workers=False)
        starts = [
            RankStart(
                replace(tp, rank=rank),
                str(checkpoint.path),
                limits,
                replace(options, device=device),
                threads,
                store.port,
            )
            for rank, device in enumerate(devices)
        ]
        own, others = starts[0], starts[1:]
        self.port = store.port
        self.ranks = Ranks(others, command)
        self._moves: list[tuple[Slots, Slots]] = []
        # WindowCache.of, as the other ranks have it.
        self._linked: Ints = np.full(limits.pages, -1, np.int32)
        self._last: SharedRound | None = None
        try:
            self._ranks_are_like(own)
            self.ranks.send(RankMessage("meet"))
            group = Processes(
                *(store, own.tp, torch.device(devices[0])),
                waits=self.ranks.waits,
                check=self.ranks.check_waits,
            )
            part = RankCheckpoint(checkpoint, own.tp)
            ModelRunner.__init__(self, part, limits, own.options, group)
            self.shared = group
            if self.states is not None:
                self.states.changes = StateChanges()
            self._devices = [message.facts["device"] for message in self.ranks.answers("ready")]
            with self.together():
                self.ranks.send(RankMessage("agree"))
                agree(self, group)
        except BaseException:
            self.ranks.close()
            raise
        self.sampler = HostSampler(limits.slots, limits.vocab)
        self.drafts = []

    def adapt(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Raise ConfigError: ranks run no adapters."""
        raise ConfigError(
            f"lora-modules needs tp-size 1, not {self.shared.tp.size}: ranks run no adapters; "
            "merge them into the weights."
        )

    def watch(self, failed: Callable[[str], None]) -> None:
        """Have `failed` called with a sentence, once, from some thread, when a rank is gone."""
        self.ranks.watch(failed)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> SharedRound:
        """Begin a step as TorchExecutor.begin, on all ranks at once. Raises RankError if one is
        gone: then no step can be run any more.
        """
        nodes = self.nodes_of(plan, trees)
        wide = np.setdiff1d(nodes.choosing, nodes.on_device.nodes)
        step = SharedStep(plan, trees, nodes, wide, self.moved(), links=self.linked())
        way = None if self.states is None else self.states.begin(plan, trees)
        if way is not None:
            ends = np.array(list(way.ends.items()), np.int32).reshape(-1, 2)
            step = replace(step, changes=self.changed(), ends=ends)
        self.ranks.send(step.message())
        with self.together():
            round = self.run(plan, trees, nodes, masks, way)
            found = gathered(self, self.shared, round, wide)
        assert found is not None
        if self.states is not None and way is not None:
            self.states.known(way)
        self._last = SharedRound(**vars(round), wide=wide, found=found)
        return self._last

    def choices_of(self, round: TorchRound) -> list[int]:
        """Return the choices that all ranks have made together at the nodes of a round that the
        device decides, in their order.
        """
        assert isinstance(round, SharedRound)
        found: list[int] = round.found.tokens.tolist()
        return found

    def whole_logits(self, round: TorchRound) -> Logits:
        """Return float32[V] of a wide node. Others are needed only for a row without finite
        logits.
        """
        assert isinstance(round, SharedRound)
        rows, place = round.found.rows, {int(n): row for row, n in enumerate(round.wide)}

        def of_node(node: int) -> Floats:
            row = place.get(node)
            return np.full(self.limits.vocab, np.nan, np.float32) if row is None else rows[row]

        return of_node

    def reports_of(self, round: TorchRound) -> ReportsOf | None:
        """Return a way to log-probabilities of a round's nodes, of which each rank computes its
        part. Calling it sends a message to all ranks; it raises RankError if one is gone.
        """

        def report(top: int, pairs: list[tuple[int, int]]) -> Reports:
            if not pairs:
                return ()
            nodes, tokens = np.array(pairs, np.int32).T
            message = RankMessage("reports", {"top": top}, {"nodes": nodes, "tokens": tokens})
            self.ranks.send(message)
            with self.together():
                found = reports(self, self.shared, round, top, pairs)
            assert found is not None
            return found

        return report

    def move(self, source: Slots, target: Slots) -> None:
        """Copy keys and values between slots int64[n]: here now, on the other ranks before their
        next step.
        """
        super().move(source, target)
        self._moves.append((source, target))

    def copy_page(self, source: int, target: int) -> bool:
        """Copy a page as TorchPages does, on all ranks behind the copies before it: what it reads
        may be what they write.
        """
        self._send_moves()
        copied = TorchPages(self).copy_page(source, target)
        self._send_moves()
        return copied

    def _send_moves(self) -> None:
        """Have the other ranks do what was copied here, if anything was since the last message."""
        if self._moves:
            source, target = self.moved()
            self.ranks.send(RankMessage("move", arrays={"source": source, "target": target}))

    def moved(self) -> tuple[Slots, Slots]:
        """Return the places copied since the last call, and their targets: for the next message."""
        moves, self._moves = self._moves, []
        none = np.zeros(0, np.int64)
        source, target = zip(*moves, strict=True) if moves else ((none,), (none,))
        return np.concatenate(source), np.concatenate(target)

    def linked(self) -> Ints:
        """Return int32[n,2], the pages whose window page has changed since the last call, and
        these: for the next message.
        """
        if self.windows is None:
            return np.zeros((0, 2), np.int32)
        of = self.windows.of
        changed = np.flatnonzero(of != self._linked)
        self._linked[changed] = of[changed]
        links: Ints = np.stack([changed, of[changed]], 1).astype(np.int32)
        return links

    def changed(self) -> Ints:
        """Return what was done to recurrent states since the last call: for the next message."""
        changes = None if self.states is None else self.states.changes
        return np.zeros((0, 4), np.int32) if changes is None else changes.taken()

    @property
    def draft_target(self) -> TorchTarget:
        """For draft models, which run here alone: with whole embedding and head."""
        return DraftTarget(self, self.whole, self)

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: of this rank, and of the others' devices."""
        ranks = [
            {"rank": number + 1, "pid": pid, "device": device}
            for number, (pid, device) in enumerate(
                zip(self.ranks.pids, self._devices, strict=False)
            )
        ]
        tp = self.shared.tp
        return super().describe() | {"tp_size": tp.size, "ep_size": tp.experts, "ranks": ranks}

    def shutdown(self) -> None:
        """End the other ranks' processes and release memory. Idempotent."""
        self.ranks.close()
        self.shared.close()
        self._last = None
        super().shutdown()

    def _ranks_are_like(self, own: RankStart) -> None:
        """Raise RankError if one is not."""
        mine = own.identity()
        for number, message in enumerate(self.ranks.answers("here")):
            fault = difference(mine, dict(message.facts))
            if fault is not None:
                raise ConfigError(f"rank {number + 1} is not like rank 0: {fault}.")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wrap work that every rank does: a rank that fails in it is out of step with the
        others.
        """
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - it is raised anew.
            self.ranks.give_up(error)


class WindowedParallelExecutor(WindowedTorchExecutor, ParallelExecutor):
    """A ParallelExecutor whose limits have window pages: what it gives back, all ranks do."""


def parallel_executor(limits: ExecutorLimits) -> type[ParallelExecutor]:
    """Return the class of executors of several ranks with these limits."""
    return WindowedParallelExecutor if limits.window_pages else ParallelExecutor


class KeepsFeatures(Protocol):
    """Runs the target and stores features."""

    def request_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Implement TorchTarget.request_aux_hidden_states."""


class DraftTarget:
    """The target for draft models if several ranks share it: draft models run on rank 0 alone, and
    what they use of the target is whole there.

    keeper  stores features: the executor, or its rounds
    """

    def __init__(
        self, executor: ParallelExecutor, checkpoint: Checkpoint, keeper: "KeepsFeatures"
    ) -> None:
        self._keeper, self._checkpoint = keeper, checkpoint
        self.limits, self.device = executor.limits, executor.device
        self.dtype: torch.dtype = executor.dtype
        self.kernels: Kernels | None = executor.kernels

    @cached_property
    def decoder(self) -> Ends:
        """Embedding, norm and head of the whole model; read when a draft borrows one."""
        weights = Weights(self._checkpoint, self.device, self.dtype, Linear)
        return Ends(weights, self._checkpoint.architecture, parts_of(self.kernels))

    def request_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Have `keeper` store these hidden states, as TorchTarget.request_aux_hidden_states."""
        self._keeper.request_aux_hidden_states(layers)


def _devices(device: str, size: int) -> list[str]:
    """Return one device for each rank."""
    kind, _, first = device.partition(":")
    if kind != "cuda":
        return [device] * size
    return [f"cuda:{int(first or 0) + rank}" for rank in range(size)]
