"""The CPU executor with LoRA adapters."""

import numpy as np

from forerun.checkpoints.adapter import LoraAdapter
from forerun.executors.cpu.executor import CpuExecutor, CpuRound
from forerun.executors.slot_adapters import SlotAdapters
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import Ints


class AdaptedCpuExecutor(CpuExecutor):
    """A CpuExecutor whose slots may have adapters."""

    def adapt(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Copy the adapters into the core. Raises EngineError if the core rejects one."""
        self.model.adapt(adapters)
        self._slots = SlotAdapters(self.limits.slots)
        self._rows: Ints = np.zeros(self.limits.max_nodes, np.int32)

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot, with its adapter, as CpuExecutor does."""
        super().open(slot_init)
        self._slots.open(slot_init)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> CpuRound:
        """Run every node, as CpuExecutor does, with the adapter of its row's slot."""
        step, adapters = self._buffers.step, self._slots.of(plan.slots)
        step.adapters = None
        if adapters is not None:
            self._rows[: len(adapters)] = adapters
            step.adapters = self._rows.ctypes.data
        return super().begin(plan, trees, masks)
