"""A TorchExecutor without its captured rounds: preparation, and eager steps, which are launched
operation by operation and decided on the host as far as the device has not decided them. The
reference for captured rounds (executor.py).
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from forerun.checkpoints.adapter import LoraAdapter
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.draft_shape import DraftShape
from forerun.errors import EngineError
from forerun.executors.device_choice import device_nodes
from forerun.executors.host_choice import put_path, reports_of
from forerun.executors.host_sampler import HostSampler
from forerun.executors.slot_adapters import SlotAdapters
from forerun.executors.torch.attention.geometry import StepNodes, choosing_nodes, places_of
from forerun.executors.torch.captured.block_drafting import drafting_of
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.captured.warm_up import prepare
from forerun.executors.torch.drafts.block import TorchBlockModel
from forerun.executors.torch.drafts.level_model import LevelModel
from forerun.executors.torch.drafts.target import TorchTarget
from forerun.executors.torch.model_runner import ModelRunner, TorchOptions, TorchRound
from forerun.executors.torch.sizes import LINES
from forerun.interface.executor import Capabilities, Executor, ExecutorLimits
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.accept import NOTHING, accept_row
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NO_DRAFT, NodeMasks, TreeBatch, batch
from forerun.types import Ints

log = logging.getLogger("forerun.executors.torch")


class EagerSteps(ModelRunner, Executor):
    """The part of TorchExecutor other than slots and rounds: preparation, and eager steps.

    sampler  which sequences are in which slots, and acceptance on the host
    rounds   steps that are replayed as captured programs (executor.py); None: none
    runner   the captured programs of `rounds`
    drafts   draft models that have entries in the same pages
    """

    name = "torch"
    capabilities = Capabilities()
    rounds: object | None = None
    runner: CudaGraphRunner | None = None

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
        self.drafts: list[LevelModel | TorchBlockModel] = []

    def adapt(self, adapters: tuple[LoraAdapter, ...]) -> None:
        """Run these adapters on top of the weights: a step in which a row has one is not
        captured.
        """
        self.decoder.adapt(adapters)
        self.slot_adapters = SlotAdapters(self.limits.slots)

    def reusable_prefix_len(
        self, tokens: Ints, salt: bytes = b"", pages: Ints | None = None
    ) -> int:
        """Return the number of the cached tokens int32[n] after which a sequence can continue: all,
        or with recurrent layers those up to the last checkpoint of a text of this salt.
        """
        return (
            len(tokens)
            if self.states is None
            else self.states.book.reusable_prefix_len(tokens, salt)
        )

    def request_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Keep the residual streams entering these layers in every step (ModelRunner); discards all
        captured programs.
        """
        super().request_aux_hidden_states(layers)
        if self.runner is not None:
            self.runner.request_aux_hidden_states(layers, self.ring)

    def draft_with(self, model: LevelModel | TorchBlockModel) -> None:
        """Attach a draft model: its entries become part of the pages' contents, and captured rounds
        that draft run it at their end. Other steps do not draft, nor do rounds of several ranks:
        for these the host runs every pass of the model.
        """
        self.drafts.append(model)
        if self.runner is not None and self.group is None:
            log.info("%s drafts within captured rounds", model.traits.name)
            self.runner.drafting = drafting_of(model, self.runner.kernels, self.limits)

    @torch.inference_mode()
    def warm_up(self, draft: DraftShape, progress: Callable[[str, int, int], None]) -> None:
        """Compile every kernel and capture the declared sizes of rounds for such drafts."""
        if self.runner is not None:
            rows = prepare(self.runner, self, draft, self.rehearse_prompts, progress)
            self.limits = replace(self.limits, row_nodes=rows)

    def begin(self, plan: Plan, trees: TreeBatch, masks: NodeMasks | None = None) -> Round:
        """Score every node of every tree in one forward pass, launched operation by operation.
        Writes scratch. Ignores draft requests.
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
        """Return which nodes of a step need which results. Raises EngineError if there are too
        many.
        """
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
        """Finish an eager step: keep one path per tree, and copy the keys and values of accepted
        draft tokens from scratch to pages. The target's tokens are chosen on the device if
        possible; logits are copied to the host only for the other nodes and for log-probabilities.
        """
        assert isinstance(round, TorchRound)
        if round.final is not None:
            round.hidden = round.final.float().cpu().numpy()
        logits = self.logits_of(round)
        reports = partial(reports_of, logits, made=round.report)
        outcome = self.sampler.finish(
            *(round, logits, masks or round.masks, _paths(round)), reports, round.features
        )
        if len(outcome.accepted):
            self.keep(round, outcome, np.arange(round.plan.rows), round.places)
            if self.states is not None and round.states is not None:
                self.states.accept(round.states, outcome)
        return outcome

    def rehearse_prompts(self) -> None:
        """Launch every kernel that prompts of any length need: prompts of 1, 2, 4, ... tokens up to
        a tile, limited by pages and scratch. Writes the first pages; slot 0 must be closed.
        """
        limits, nodes = self.limits, 1
        while nodes <= min(LINES, limits.max_nodes, limits.page_size * limits.pages):
            self.rehearse(nodes)
            nodes *= 2

    @torch.inference_mode()
    def rehearse(self, nodes: int) -> None:
        """Run a prompt of `nodes` tokens in the first pages, before the first request and not as a
        round. Only with our kernels: a library's attention needs no rehearsal.
        """
        tokens, one = np.zeros(nodes, np.int32), np.zeros(1, np.int32)
        pages = np.arange(-(-nodes // self.limits.page_size), dtype=np.int32)[None]
        no, yes = np.zeros(1, np.bool_), np.ones(1, np.bool_)
        plan = Plan(one, one, (tokens,), yes, one, one, pages, no)
        salt = b"\xff"  # Of no text, so that nothing continues it.
        greedy = Sampling(temperature=0.0)
        natively, rounds = self.prompts_natively, self.rounds
        self.prompts_natively, self.rounds = False, None
        try:
            self.open(SlotInit(0, TokenText(tokens), nodes, greedy, salt=salt))
            self.begin(plan, batch([tokens], [NO_DRAFT]))
        finally:
            self.prompts_natively, self.rounds = natively, rounds
        self.close(0)
        self.move(self.cache.scratch(one), one.astype(np.int64))

    @property
    def draft_target(self) -> TorchTarget:
        """The target for draft models: this executor."""
        return self

    def shutdown(self) -> None:
        """Release programs, weights, pages and states. Idempotent; no step may be begun
        afterwards.
        """
        self.rounds = self.runner = None
        super().shutdown()


def _paths(round: TorchRound) -> Ints:
    """Return int32[M] as of HostSampler.finish: the paths along the device's choices."""
    trees, nodes = round.trees, round.on_device.nodes.tolist()
    choice = np.full(len(trees.tokens), NOTHING, np.int32)
    chosen = dict(zip(nodes, round.choices.tolist(), strict=True))
    for row, root in enumerate(trees.roots.tolist()):
        if root in chosen:
            put_path(choice, root, accept_row(trees, row, lambda node, _: chosen[node]))
    return choice
