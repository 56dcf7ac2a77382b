"""TorchExecutor: the executor contract in torch, launched operation by operation: the reference for
captured rounds (captured/executor.py), which wrap it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from forerun.checkpoints.adapter import LoraAdapter
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.errors import EngineError
from forerun.executors.device_choice import device_nodes
from forerun.executors.host_choice import Logits, ReportsOf, put_path
from forerun.executors.host_sampler import HostSampler
from forerun.executors.slot_adapters import SlotAdapters
from forerun.executors.torch.attention.plan_geometry import StepNodes, choosing_nodes, places_of
from forerun.executors.torch.drafts.draft_cache import HasPages
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.model_runner import ModelRunner, TorchOptions, TorchRound
from forerun.interface.executor import Capabilities, Executor, ExecutorLimits
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.accept import NOTHING, accept_row
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NO_DRAFT, NodeMasks, TreeBatch, batch
from forerun.speculative.verify import positions
from forerun.types import Ints


class TorchExecutor(ModelRunner, Executor):
    """A target in torch, on any device it knows (ModelRunner, TorchOptions).

    sampler  which sequences are in which slots, and acceptance on the host
    drafts   models that have entries under its page ids
    """

    name = "torch"
    capabilities = Capabilities(hidden=True)

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        device: str = "cpu",
        dtype: str = "float32",
        compile: bool = False,
        kv_dtype: str = "same",
        prompts: str = "auto",
    ) -> None:
        options = TorchOptions(device, dtype, compile, kv_dtype, prompts)
        super().__init__(checkpoint, limits, options)
        self.sampler = HostSampler(limits.slots, limits.vocab)
        self.drafts: list[HasPages] = []

    def adapt(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Run these adapters beside the weights."""
        self.decoder.adapt(adapters)
        self.slot_adapters = SlotAdapters(self.limits.slots)

    def open(self, slot_init: SlotInit) -> None:
        """Bind a sequence to its slot, with its sampling; where layers are recurrent with the state
        of its cached tokens. Raises EngineError if that was not kept.
        """
        if self.states is not None:
            self.states.open(slot_init)
        self.sampler.open(slot_init)
        if self.slot_adapters is not None:
            self.slot_adapters.open(slot_init)

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return how many of the cached tokens int32[n] a sequence may continue behind: all, or if
        layers are recurrent, those up to the last checkpoint of a text of this salt.
        """
        return (
            len(tokens)
            if self.states is None
            else self.states.book.reusable_prefix_len(tokens, salt)
        )

    def close(self, slot: int) -> None:
        """Forget a slot's sequence. Its pages are the caller's."""
        self.sampler.close(slot)
        if self.states is not None:
            self.states.book.close(slot)

    def draft_with(self, model: HasPages) -> None:
        """Count a draft model's entries among what pages hold. No step drafts here: the host runs
        every pass of the model.
        """
        self.drafts.append(model)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> TorchRound:
        """Score every node of every tree in one forward pass. Writes scratch. Ignores draft
        requests.
        """
        nodes = self.nodes_of(plan, trees)
        if self.states is None:
            return self.run(plan, trees, nodes, masks)
        step = self.states.begin(plan, trees)
        try:
            round = self.run(plan, trees, nodes, masks, step)
        except BaseException:
            self.states.failed(step)
            raise
        self.states.known(step)
        return round

    def nodes_of(self, plan: Plan, trees: TreeBatch) -> StepNodes:
        """Return which nodes of a step need what. Raises EngineError if there are too many."""
        count, choosing = len(trees.tokens), choosing_nodes(plan, trees)
        if count > self.limits.max_nodes:
            raise EngineError(f"a step of {count} nodes; at most {self.limits.max_nodes} fit")
        if len(choosing) > self.limits.scored_nodes:
            raise EngineError(
                f"a step of which {len(choosing)} nodes choose a token; at most "
                f"{self.limits.scored_nodes} fit"
            )
        return StepNodes(
            choosing=choosing,
            reported=np.setdiff1d(self.sampler.scored(plan, trees), choosing),
            on_device=device_nodes(self.sampler.choosing, plan, trees),
            places=places_of(plan, trees, self.cache),
        )

    @torch.inference_mode()
    def finish(self, round: Round, masks: NodeMasks | None = None) -> Outcome:
        """Keep one path per tree, and copy the keys and values of accepted draft tokens from
        scratch into pages. The target's choices are made on the device where they can be; only
        where they cannot, and for reports, do logits cross to the host.
        """
        assert isinstance(round, TorchRound)
        plan, trees, cache = round.plan, round.trees, self.cache
        if round.final is not None:
            round.hidden = round.final.float().cpu().numpy()
        outcome = self.sampler.finish(
            round,
            self.whole_logits(round),
            masks or round.masks,
            self._chosen(round),
            self.reports_of(round),
            features=round.features,
        )
        nodes = outcome.accepted
        if len(nodes):
            row = np.searchsorted(trees.start, nodes, side="right") - 1
            position = positions(trees, plan.kv_len)[nodes]
            self.move(round.places[nodes], cache.slots_of(plan.page_table, row, position))
            if self.states is not None and round.states is not None:
                self.states.accept(round.states, outcome)
        return outcome

    def _chosen(self, round: TorchRound) -> Ints:
        """Return int32[M] as in host_sampler.Choices: the paths along the device's choices."""
        trees, on_device = round.trees, round.on_device
        choice = np.full(len(trees.tokens), NOTHING, np.int32)
        if len(on_device.nodes):
            chosen = dict(zip(on_device.nodes.tolist(), self.choices_of(round), strict=True))
            for row, root in enumerate(trees.roots.tolist()):
                if root in chosen:
                    put_path(choice, root, accept_row(trees, row, lambda node, _: chosen[node]))
        return choice

    def whole_logits(self, round: TorchRound) -> Logits:
        """Return float32[V], on the host, of a flat node whose row the host decides."""
        return self.logits_of(round)

    def reports_of(self, round: TorchRound) -> ReportsOf | None:
        """Return a way to log-probabilities that needs no logits on the host; None if there is
        none.
        """
        return None

    @property
    def draft_target(self) -> TorchTarget:
        """The target for draft models: this executor."""
        return self

    def keep(self, round: Round, outcome: Outcome, rows: Sequence[int], place: Ints) -> None:
        """Copy what was accepted of these rows, at least one, from scratch into their pages, known
        tokens included.

        place  int32[M] a flat node's number in scratch
        """
        plan, trees, cache = round.plan, round.trees, self.cache
        position = positions(trees, plan.kv_len)
        paths = [outcome.permanent(trees, row) for row in rows]
        nodes, row = np.concatenate(paths), np.repeat(rows, list(map(len, paths)))
        slots = cache.slots_of(plan.page_table, row, position[nodes])
        self.move(cache.scratch(place[nodes]), slots)

    @torch.inference_mode()
    def rehearse(self, nodes: int) -> None:
        """Launch what a prompt of so many tokens does, in the first pages: before the first
        request. By kernels alone: a library's attention needs no rehearsal.
        """
        tokens, one = np.zeros(nodes, np.int32), np.zeros(1, np.int32)
        pages = np.arange(-(-nodes // self.limits.page_size), dtype=np.int32)[None]
        no, yes = np.zeros(1, np.bool_), np.ones(1, np.bool_)
        plan = Plan(one, one, (tokens,), yes, one, one, pages, no)
        salt = b"\xff"  # That of no text: nothing continues behind this.
        greedy = Sampling(temperature=0.0)
        self.open(SlotInit(0, TokenText(tokens), nodes, greedy, salt=salt))
        natively, self.prompts_natively = self.prompts_natively, False
        try:
            self.begin(plan, batch([tokens], [NO_DRAFT]))
        finally:
            self.prompts_natively = natively
        self.close(0)
        self.move(self.cache.scratch(one), one.astype(np.int64))
