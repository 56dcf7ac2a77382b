"""ParallelExecutor: the Executor interface for a model shared by several ranks, of which this
process is rank 0. Slots, acceptance, grammars, policy and draft models exist here alone; each step
is sent to the other ranks in one message, and the outcome is computed from the parts that they
return.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from forerun.checkpoints.adapter import LoraAdapter
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.tensor_parallel import RankCheckpoint, TensorParallel, check_divides
from forerun.errors import ConfigError
from forerun.executors.host_choice import echoed
from forerun.executors.host_sampler import HostSampler
from forerun.executors.torch.attention.geometry import StepNodes
from forerun.executors.torch.attention.kv import Slots
from forerun.executors.torch.attention.states import StateChanges, TorchStateStep
from forerun.executors.torch.decoder.decoder import Ends
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.weights import Weights
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.executor import TorchExecutor
from forerun.executors.torch.group import Group
from forerun.executors.torch.model_runner import ModelRunner, TorchOptions, TorchRound
from forerun.executors.torch.page_contents import TorchPages
from forerun.executors.torch.parallel.channel import RankMessage
from forerun.executors.torch.parallel.processes import COMMAND, Ranks
from forerun.executors.torch.parallel.rounds import SharedRunner
from forerun.executors.torch.parallel.start import RankStart, difference
from forerun.executors.torch.parallel.step import Arrays, SharedStep, Since, agree, complete_round
from forerun.executors.torch.sizes import Size
from forerun.executors.torch.triton.kernels import Kernels, parts_of
from forerun.executors.torch.windowed import WindowedTorchExecutor
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints


class ParallelExecutor(TorchExecutor):
    """Rank 0 of the ranks of `tp`; it starts, monitors and ends the others.

    port   of their rendezvous, on the loopback interface
    ranks  the others
    checkpoint  of which each has a part

    Raises the exceptions of the ranks, ConfigError if the model cannot be divided among them,
    RankError if a rank has ended or differs from the others. There must be as many devices
    (build/with_torch.py).
    """

    Runner = SharedRunner

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
        self.checkpoint = checkpoint
        # The system chooses its port, which is free again when this process ends.
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
        self._copies = [np.zeros((0, 3), np.int64)]
        # WindowCache.of, as the other ranks have it.
        self._linked: Ints = np.full(limits.pages, -1, np.int32)
        try:
            self._ranks_are_like(own)
            self.ranks.send(RankMessage("meet"))
            group = Group(
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

    def capture(self, overlap: bool = False) -> Self:
        """Replay steps from now on, on all ranks, if their devices support capture."""
        super().capture(overlap)
        if self.runner is not None:
            assert isinstance(self.runner, SharedRunner)
            self.runner.send_step = partial(self._send, overlap=overlap)
            self.runner.together = self.together
        return self

    def adapt(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Raise ConfigError, because ranks do not support adapters."""
        raise ConfigError(
            f"lora-modules needs tp-size 1, not {self.shared.tp.size}: ranks run no adapters; "
            "merge them into the weights."
        )

    def watch(self, failed: Callable[[str], None]) -> None:
        """Call `failed` with a sentence, once, from some thread, when a rank has ended."""
        self.ranks.watch(failed)

    def run(
        self,
        plan: Plan,
        trees: TreeBatch,
        nodes: StepNodes,
        masks: NodeMasks | None = None,
        step: TorchStateStep | None = None,
    ) -> TorchRound:
        """Run one forward pass, as ModelRunner.run, on all ranks. Raises RankError if one has
        ended: then no further step can run.
        """
        wide = np.setdiff1d(nodes.choosing, nodes.on_device.nodes)
        ends = np.array([] if step is None else list(step.ends.items()), np.int32)
        shared = SharedStep(plan, trees, nodes, wide, ends.reshape(-1, 2))
        if self.sampler.reports(plan.slots):
            shared = self._reporting(shared)
        self._send(None, shared.arrays(), top=shared.top)
        with self.together():
            round = super().run(plan, trees, nodes, masks, step)
            complete_round(self, self.shared, round, shared)
        return round

    def _reporting(self, step: SharedStep) -> SharedStep:
        """Return the step with the log-probabilities to compute: those of known tokens are computed
        by all ranks, the others from whole logits.
        """
        plan, pairs, tops = step.plan, list[tuple[int, int]](), [0]
        for row in range(plan.rows):
            slot_init = self.sampler.of_row(plan, row)
            pairs += echoed(plan, row, step.trees, slot_init)
            tops.append(slot_init.sampling.prompt_logprobs or 0)
        reports = np.array(pairs, np.int32).reshape(-1, 2)
        return replace(step, wide=step.nodes.choosing, reports=reports, top=max(tops))

    def _send(self, size: Size | None, arrays: Arrays, **facts: Any) -> None:
        """Send the message of a step, or of a round of this size, with all changes made since the
        previous one. Raises RankError if a rank has ended.
        """
        copies, self._copies = np.concatenate(self._copies), self._copies[:1]
        changes = None if self.states is None else self.states.changes
        done = np.zeros((0, 4), np.int32) if changes is None else changes.taken()
        since = Since(copies, done, self._links())
        named = None if size is None else list(size)
        self.ranks.send(RankMessage("step", {"size": named} | facts, arrays | since.arrays()))

    def move(self, source: Slots, target: Slots) -> None:
        """Copy keys and values between slots int64[n]: here at once, on the other ranks before
        their next step.
        """
        super().move(source, target)
        number = np.full(len(source), len(self._copies))
        self._copies.append(np.stack([number, source, target], 1))

    def copy_page(self, source: int, target: int) -> bool:
        """Copy a page as TorchPages does, of all ranks."""
        return TorchPages(self).copy_page(source, target)

    def _links(self) -> Ints:
        """Return Since.links."""
        if self.windows is None:
            return np.zeros((0, 2), np.int32)
        of = self.windows.of
        changed = np.flatnonzero(of != self._linked)
        self._linked[changed] = of[changed]
        links: Ints = np.stack([changed, of[changed]], 1).astype(np.int32)
        return links

    @property
    def draft_target(self) -> TorchTarget:
        """The target for draft models, which run only here: with whole embedding and head."""
        return DraftTarget(self, self.checkpoint)

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
        super().shutdown()

    def _ranks_are_like(self, own: RankStart) -> None:
        """Raise RankError if a rank's versions, options or files differ from this one's."""
        mine = own.identity()
        for number, message in enumerate(self.ranks.answers("here")):
            fault = difference(mine, dict(message.facts))
            if fault is not None:
                raise ConfigError(f"rank {number + 1} is not like rank 0: {fault}.")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Return a context manager for work that every rank does: if this rank fails in it, it is
        out of step with the others, and they are ended.
        """
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - it is raised anew.
            self.ranks.give_up(error)


class WindowedParallelExecutor(WindowedTorchExecutor, ParallelExecutor):
    """A ParallelExecutor whose limits have window pages: all ranks free the same ones."""


def parallel_executor(limits: ExecutorLimits) -> type[ParallelExecutor]:
    """Return the class of executors of several ranks with these limits."""
    return WindowedParallelExecutor if limits.window_pages else ParallelExecutor


class DraftTarget:
    """The target for draft models if several ranks share it: draft models run only on rank 0, which
    has the parts of the target that they use whole.
    """

    def __init__(self, executor: ParallelExecutor, checkpoint: Checkpoint) -> None:
        self._executor, self._checkpoint = executor, checkpoint
        self.limits, self.device = executor.limits, executor.device
        self.dtype: torch.dtype = executor.dtype
        self.kernels: Kernels | None = executor.kernels

    @cached_property
    def decoder(self) -> Ends:
        """Embedding, norm and head of the whole model; read when a draft model first uses one."""
        weights = Weights(self._checkpoint, self.device, self.dtype, Linear)
        return Ends(weights, self._checkpoint.architecture, parts_of(self.kernels))

    def request_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Make the executor store these hidden states."""
        self._executor.request_aux_hidden_states(layers)


def _devices(device: str, size: int) -> list[str]:
    """Return one device for each rank."""
    kind, _, first = device.partition(":")
    if kind != "cuda":
        return [device] * size
    return [f"cuda:{int(first or 0) + rank}" for rank in range(size)]
