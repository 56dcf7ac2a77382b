"""The small arrays of a step, at fixed addresses that the compiled core reads."""

import numpy as np

from forerun.errors import EngineError
from forerun.executors.cpu import native
from forerun.executors.device_choice import Choosing
from forerun.executors.state_steps import StateStep
from forerun.interface.plan import Plan
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.types import AnyArray, Floats, Ints

_WALK = ("slots", "samples", "choice")
_STEP = ("tokens", "parents", "depth", "start", "known", "kv_len", "scored_nodes", "logits_row")
_STATES = ("state_rows", "state_targets")


class StepBuffers:
    """Buffers that every step refills: cheaper than passing the core new addresses each time.

    token_rows  the address of tokens' own rows, as of TokenRows.address; None: they have none
    step  for forerun_forward, after `fill`
    walk  for forerun_forward, and for forerun_accept after `put_masks`
    path  address of the nodes from `put_path`
    """

    def __init__(
        self, max_nodes: int, choosing: Choosing, token_rows: native.AddressOf | None = None
    ) -> None:
        self._token_rows = token_rows or (lambda tokens: None)
        self._choosing = choosing  # The core reads all but `on_device` in place.
        self._max_nodes = max_nodes
        self._arrays: dict[str, AnyArray] = {
            **{name: np.zeros(max_nodes + 1, np.int32) for name in _STEP},
            "slots": np.zeros(max_nodes, np.int32),
            "samples": np.zeros(max_nodes, np.uint8),
            "choice": np.zeros(max_nodes, np.int32),
            "path": np.zeros(max_nodes, np.int32),
            "state_rows": np.zeros(max_nodes, np.int64),
            "state_targets": np.zeros(max_nodes, np.int64),
        }
        # They grow with the steps. `ctypes.data` of an array takes as long as filling five.
        self._pages, self._logits = np.zeros(0, np.int32), np.zeros((0, 0), np.float32)
        address = {name: array.ctypes.data for name, array in self._arrays.items()}
        self.path = address["path"]
        self.step = native.StepArrays(**{name: address[name] for name in (*_STEP, *_STATES)})
        self.walk = native.Walk(
            temperature=choosing.temperature.ctypes.data,
            seed=choosing.seed.ctypes.data,
            prompt_len=choosing.prompt_len.ctypes.data,
            all_slots=len(choosing.seed),
            **{name: address[name] for name in _WALK},
        )

    def fill(self, plan: Plan, trees: TreeBatch, scored: Ints, logits: Floats) -> None:
        """Write a step: its plan, its trees, and the rows of `logits` float32[.,V] that receive the
        logits of its nodes scored int32[n].

        Raises EngineError if it has too many nodes.
        """
        count = len(trees.tokens)
        if count > self._max_nodes:
            raise EngineError(
                f"a step was refused: more nodes than the step may have, {count}, not "
                f"{self._max_nodes}"
            )
        self._put("tokens", trees.tokens)
        self._put("parents", trees.parents)
        self._put("depth", trees.depth)
        self._put("start", trees.start)
        self._put("known", trees.known)
        self._put("kv_len", plan.kv_len)
        self._put("scored_nodes", scored)
        self._put("slots", plan.slots)
        self._put("samples", plan.samples & self._choosing.on_device[plan.slots])
        step = self.step
        step.token_rows = self._token_rows(trees.tokens)
        step.rows, step.nodes, step.scored = plan.rows, count, len(scored)
        self._put_pages(plan)
        if logits is not self._logits:
            self._logits, step.logits = logits, logits.ctypes.data

    def put_states(self, step: StateStep) -> None:
        """Write the rows of states that a step, which `fill` wrote, begins with, and those that its
        known nodes' states go to besides.
        """
        self._put("state_rows", step.plan.slots)
        targets = self._arrays["state_targets"][: self.step.nodes]
        targets[:] = -1
        slots = {*step.plan.slots.tolist()}
        for row, node in step.ends.items():
            if row not in slots:
                targets[node] = row

    def put_masks(self, masks: NodeMasks | None) -> None:
        """Write the grammars' masks. The core reads them in place: they must outlive its call."""
        walk = self.walk
        walk.mask_row = None if masks is None else masks.row.ctypes.data
        if masks is not None:
            walk.masks, walk.mask_words = masks.bits.ctypes.data, masks.bits.shape[1]

    def _put_pages(self, plan: Plan) -> None:
        pages, step = plan.page_table, self.step
        if pages.size > len(self._pages):
            self._pages = np.zeros(2 * pages.size, np.int32)
            step.pages = self._pages.ctypes.data
        self._pages[: pages.size], step.page_width = pages.ravel(), pages.shape[1]

    def put_path(self, plan: Plan, nodes: Ints) -> None:
        """Write accepted nodes of the step, and the pages of a plan of its rows."""
        self._put_pages(plan)
        self._put("path", nodes)

    @property
    def choice(self) -> Ints:
        """int32[M], a copy: the choices of forerun_accept (`Walk` of csrc/model.h)."""
        choice: Ints = self._arrays["choice"][: self.step.nodes].copy()
        return choice

    def _put(self, name: str, values: AnyArray) -> None:
        self._arrays[name][: len(values)] = values
