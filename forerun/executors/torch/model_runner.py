"""ModelRunner: a target's weights and pages on a device, and the forward pass of a step, which is
all that the ranks of a group run. Acceptance is in executor.py.
"""

from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.quantised_matrices import quantised_matrices, quantised_sentence
from forerun.errors import ConfigError, EngineError
from forerun.executors.device_choice import DeviceNodes
from forerun.executors.host_choice import Logits
from forerun.executors.slot_adapters import SlotAdapters
from forerun.executors.state_slots import rows_of
from forerun.executors.torch.accept import NodeNoise, best, greatest
from forerun.executors.torch.attention.attention import KeyBlocks, attend
from forerun.executors.torch.attention.attention_shapes import widest_tile
from forerun.executors.torch.attention.geometry import StepNodes, geometry_of
from forerun.executors.torch.attention.kv import PagedCache, Slots, enter, indices
from forerun.executors.torch.attention.prompt_attention import PromptAttention, prompt_rows, takes
from forerun.executors.torch.attention.states import States, TorchStateStep
from forerun.executors.torch.attention.window_cache import target_cache
from forerun.executors.torch.decoder.decoder import Attend, Decoder, attention_over
from forerun.executors.torch.decoder.elementwise import PLAIN, AnyHeads, Elementwise, compiled
from forerun.executors.torch.decoder.float8 import FLOAT8
from forerun.executors.torch.decoder.layers import padded_rows
from forerun.executors.torch.decoder.recurrent import Recur, no_states
from forerun.executors.torch.features import TorchFeatureRing, TorchStepFeatures
from forerun.executors.torch.group import Group
from forerun.executors.torch.memory import (
    FILE,
    activations,
    check_fits,
    planned_bytes,
    target_kv_shape,
)
from forerun.executors.torch.triton.kernels import Best, Kernels, kernels_for, parts_of
from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import ExecutorLimits
from forerun.interface.hidden import hidden_nodes
from forerun.interface.plan import Outcome, Plan, Round, TokenLogprobs
from forerun.speculative.accept import NOTHING
from forerun.speculative.tree import NodeMasks, TreeBatch
from forerun.speculative.verify import positions
from forerun.types import AnyArray, Floats, Ints

KV_DTYPES = {"same": None, "float8": FLOAT8}
"""The dtype of pages by name; None: that of activations."""


@dataclass(eq=False)
class TorchRound(Round):
    """The result of one forward pass.

    logits    float32[n,V] of the n nodes that choose a token, on the device; with several ranks on
              rank 0, and only of nodes that need whole rows
    row_of    int32[M] a flat node's row in `logits`; -1 = none
    on_device  the nodes that the device decides
    choices   int32[n] of those, on the device; NOTHING if a node's logits are not finite
    places    int64[M] slots of the flat nodes' keys and values (kv.py)
    reported  [m,H] residual streams of the m nodes that only report log-probabilities, and
    reported_of  int32[M] a flat node's row there; -1 = none
    features  of the nodes, if a draft model reads any
    states    the step's recurrent states, if the model has any
    final     `hidden` on the device
    reports   log-probabilities by flat node, if the ranks computed them from their parts
    """

    logits: Tensor = field(kw_only=True)
    row_of: Ints = field(kw_only=True)
    on_device: DeviceNodes = field(kw_only=True)
    choices: Tensor = field(kw_only=True)
    places: Slots = field(kw_only=True)
    reported: Tensor = field(kw_only=True)
    reported_of: Ints = field(kw_only=True)
    features: TorchStepFeatures | None = None
    states: TorchStateStep | None = None
    final: Tensor | None = None
    reports: dict[int, TokenLogprobs] = field(default_factory=dict)

    def report(self, node: int, top: int) -> TokenLogprobs | None:
        """Return the log-probabilities of a flat node that the ranks computed from their parts,
        else None.
        """
        made = self.reports.get(node)
        return None if made is None else replace(made, top=made.top[:top])


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """The options of a model in torch.

    dtype    a name in memory.DTYPES, to which weights are converted, or FILE: they stay as stored
    compile  have torch.compile generate the kernels between the matrix products
    kv_dtype dtype of pages: "same" as activations, or "float8"
    prompts  attention of prompt chunks on CUDA: "triton", our kernels, or "torch_native"
             (prompt_attention.py)
    """

    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    kv_dtype: str = "same"
    prompts: str = "auto"


class ModelRunner:
    """A target in torch, or a rank's part of it.

    In float32 on the CPU a row's bits are the same alone, in any batch, in any tree, and in any
    chunks and pages, for a fixed number of torch threads. Elsewhere products run at any number of
    rows and their last bits may depend on the batch; `describe()` reports which applies.

    kernels  ours, if the device supports them
    states   of the layers with a recurrent state; None: there are none
    group    the ranks with the other parts of the model, if `checkpoint` is a part of one
    windows  the window pages of sliding-window layers; None: they keep every page

    Raises ConfigError for an unknown dtype or device or limits that are not the model's,
    MemoryPlanError if weights, cache and scratch do not fit.
    """

    windows: WindowPages | None = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        limits: ExecutorLimits,
        options: TorchOptions,
        group: Group | None = None,
    ) -> None:
        arch = checkpoint.architecture
        self.limits, self.group = limits, group
        self.device, self.options = _device(options.device), options
        self.dtype, keep = activations(options.dtype, self.device), options.dtype == FILE
        kept = quantised_matrices(checkpoint) if keep else {}
        self._numbers = quantised_sentence(kept) if keep else options.dtype
        limits.check(arch)
        pages = KV_DTYPES[options.kv_dtype] or self.dtype
        stored = tuple(kept.values())
        self._bytes = planned_bytes(arch, limits, self.device, options.dtype, stored)
        self._bytes["cache"] = target_kv_shape(arch, limits).bytes(limits, pages)
        if arch.recurrent is not None:
            self._bytes["states"] = rows_of(limits) * arch.state_bytes
        check_fits(self._bytes, self.device)
        self._aux_layers: tuple[int, ...] = ()
        self.ring = TorchFeatureRing(0, 0, self.dtype, self.device)
        kernels = self.kernels = kernels_for(self.device)
        self.prompts_natively = options.prompts == "torch_native"
        if options.prompts == "auto":  # FlashAttention needs 16 bits.
            self.prompts_natively = kernels is not None and self.dtype != torch.float32
        if self.prompts_natively and kernels is None:
            raise ConfigError(
                f"prefill-attention-backend {options.prompts} is for cuda, but device is "
                f"{options.device}, where attention keeps its bits whatever the chunks are; leave "
                "it out"
            )
        self.slot_adapters: SlotAdapters | None = None  # Set by `adapt`.
        self._decoder: Decoder | None = Decoder(
            checkpoint,
            self.device,
            self.dtype,
            parts=_parts(options, kernels),
            group=group,
            keep=keep,
            narrow=options.dtype == "float8",
        )
        self._cache: PagedCache | None = target_cache(
            target_kv_shape(arch, limits), limits, self.device, pages
        )
        self.states: States | None = None
        if arch.recurrent is not None:
            advancing = None if kernels is None else kernels.states
            self.states = States(arch, limits, self.device, kernels=advancing)

    @property
    def decoder(self) -> Decoder:
        """The target's weights. Raises EngineError after `shutdown`."""
        if self._decoder is None:
            raise EngineError("the executor was shut down")
        return self._decoder

    @property
    def cache(self) -> PagedCache:
        """The target's keys and values. Raises EngineError after `shutdown`."""
        if self._cache is None:
            raise EngineError("the executor was shut down")
        return self._cache

    def request_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Keep, from the next step on, the residual streams entering these layers, for a draft
        model (transformers' hidden_states indices; L = after the last layer, before its norm).

        Raises ConfigError if the model has no such layer, MemoryPlanError if they do not fit.
        """
        last = self.decoder.arch.layers
        if not all(0 <= layer <= last for layer in layers):
            raise ConfigError(f"features {layers} name a layer outside 0..{last}")
        self._aux_layers = layers
        slots, width = self.limits.slots, len(layers) * self.decoder.arch.hidden
        self._bytes["features"] = TorchFeatureRing.bytes(slots, width, self.dtype)
        check_fits({"features": self._bytes["features"]}, self.device)
        self.ring = TorchFeatureRing(slots, width, self.dtype, self.device)

    @torch.inference_mode()
    def run(
        self,
        plan: Plan,
        trees: TreeBatch,
        nodes: StepNodes,
        masks: NodeMasks | None = None,
        step: TorchStateStep | None = None,
    ) -> TorchRound:
        """Run one forward pass. Of the plan it reads only kv_len, samples, page_table and hidden.

        step  the inputs of `states`, if there are any
        """
        decoder, count, places = self.decoder, len(trees.tokens), nodes.places
        # Our kernels need no padding; with them the bits may depend on the batch.
        rows = padded_rows(count, () if self.kernels else decoder.row_sizes)
        tokens = self._padded(trees.tokens, rows)
        rotary = decoder.rotary(self._padded(positions(trees, plan.kv_len), rows))
        if self.slot_adapters is not None:
            of_rows = self.slot_adapters.of(plan.slots)
            decoder.adapters.begin(of_rows, trees, rows, self.device)
        attend = self._attention(plan, trees, places)
        recur: Recur = no_states
        if step is not None and self.states is not None:
            recur = partial(self.states.layer, step)
        last, streams = decoder.forward(tokens, rotary, attend, self._aux_layers, recur)
        features = None
        if streams:
            aligned, every = torch.cat([stream[:count] for stream in streams], -1), np.arange(count)
            features = TorchStepFeatures(aligned, every, every, plan, trees, self.ring)
        final = None
        if plan.hidden is not None:
            final = decoder.final_norm(last[indices(hidden_nodes(plan, trees), self.device)])
        logits = decoder.logits(last[indices(nodes.choosing, self.device)])
        row_of = _numbered(nodes.choosing, count)
        return TorchRound(
            plan,
            trees,
            masks,
            logits=logits,
            row_of=row_of,
            on_device=nodes.on_device,
            choices=self._choices(logits, row_of, nodes.on_device),
            places=places,
            reported=last[indices(nodes.reported, self.device)],
            reported_of=_numbered(nodes.reported, count),
            features=features,
            states=step,
            final=final,
        )

    def _choices(self, logits: Tensor, row_of: Ints, nodes: DeviceNodes) -> Tensor:
        """Return TorchRound.choices of the nodes that the device decides. Ranks that share the
        model compute them together.
        """
        if not len(nodes.nodes):
            return torch.zeros(0, dtype=torch.int32, device=self.device)
        logits = logits[indices(row_of[nodes.nodes], self.device)]
        noise, work = NodeNoise.of(nodes, self.device), _best_of(self.kernels, nodes)
        if self.group is not None:
            return chosen_together(logits, noise, self.group, work, self.limits.vocab)
        score, tokens = work(logits, noise, 0)
        return torch.where(score.isfinite(), tokens, NOTHING)

    def _attention(self, plan: Plan, trees: TreeBatch, places: Slots) -> Attend:
        """Return the attention of one step: it writes a layer's keys and values to `places`, then
        attends. Raises EngineError if a slot is in a page that was freed.
        """
        kernels, cache, arch = self.kernels, self.cache, self.decoder.arch
        specs = arch.attention_specs
        own = [(kind, kind.written(places)) for kind in cache.kinds]
        if kernels is None:
            blocks = [KeyBlocks.of(plan, trees, mine, kind) for kind, mine in own]
            each = [blocks[kind] for kind in cache.kind_of]
            return attention_over(cache.layers, specs, each, enter, attend)
        gqa_group = widest_tile(arch.heads, arch.cache_shapes)
        geometries = [
            geometry_of(plan, trees, mine, kind, gqa_group, self.device) for kind, mine in own
        ]
        seen = [geometries[kind] for kind in cache.kind_of]
        launched = attention_over(cache.layers, specs, seen, kernels.enter, kernels.attend)
        if not (self.prompts_natively and prompt_rows(trees, geometries[0].tile)):
            return launched
        prompts = [
            PromptAttention(kernels.attend, kernels.varlen, geometry, plan, trees, kind)
            for kind, geometry in zip(cache.kinds, geometries, strict=True)
        ]

        def native(layer: int, heads: AnyHeads) -> Tensor:
            held, spec, kind = cache.layers[layer], specs[layer], cache.kind_of[layer]
            if not takes(spec):
                return launched(layer, heads)
            queries = kernels.enter(heads, held, geometries[kind].slots)
            return prompts[kind](queries, *held, spec)

        return native

    def logits_of(self, round: TorchRound) -> Logits:
        """Return a function: flat node of `round` -> float32[V] on the host. Logits that only
        log-probabilities need are computed on demand, `limits.scored_nodes` rows at a time. The
        result is NaN if other ranks have parts of the row: then only a row without finite logits is
        requested.
        """
        size = self.limits.scored_nodes

        @cache
        def chosen() -> Floats:
            logits: Floats = round.logits.cpu().numpy()
            return logits

        @lru_cache(maxsize=1)
        @torch.inference_mode()
        def of_piece(piece: int) -> Floats:
            rows = round.reported[piece * size : (piece + 1) * size]
            logits: Floats = self.decoder.logits(rows).cpu().numpy()
            return logits

        def of_node(node: int) -> Floats:
            row = int(round.row_of[node])
            if row >= 0:
                logits: Floats = chosen()[row]
            elif round.reported_of[node] < 0:
                logits = np.full(self.limits.vocab, np.nan, np.float32)
            else:
                piece, row = divmod(int(round.reported_of[node]), size)
                logits = of_piece(piece)[row]
            return logits

        return of_node

    def move(self, source: Slots, target: Slots) -> None:
        """Copy keys and values of all layers between slots int64[n] of the cache (kv.py). Raises
        EngineError if a slot is in a page that was freed.
        """
        move = self.kernels.move if self.kernels else PagedCache.move
        for kind in self.cache.kinds:
            mine = (kind.written(slots) for slots in (source, target))
            begin, end = (torch.from_numpy(slots).to(self.device) for slots in mine)
            move(kind, begin, end, None)

    def keep(self, round: Round, outcome: Outcome, rows: AnyArray, places: Slots) -> None:
        """Copy the keys and values that the rows int[n], at least one, make permanent to their
        pages. places: int64[M], the slots of the step's nodes.
        """
        plan, trees = round.plan, round.trees
        paths = [outcome.permanent(trees, row) for row in rows.tolist()]
        nodes, row = np.concatenate(paths), np.repeat(rows, list(map(len, paths)))
        position = positions(trees, plan.kv_len)[nodes]
        source, target = places[nodes], self.cache.slots_of(plan.page_table, row, position)
        moved = source != target
        if moved.any():
            self.move(source[moved], target[moved])

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info. row_sizes: numbers of rows that matrix products are run
        at.
        """
        sizes = self._decoder.row_sizes if self._decoder else ()
        return {
            "device": str(self.device),
            "dtype": self._numbers,
            "kv_dtype": self.options.kv_dtype,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "batch_invariant": bool(sizes),
            "row_sizes": sizes,
            **{f"{part}_bytes": count for part, count in self._bytes.items()},
        }

    def shutdown(self) -> None:
        """Release weights, pages and states. Idempotent; `decoder` and `cache` raise EngineError
        afterwards.
        """
        self._decoder = self._cache = self.states = None

    def _padded(self, values: Ints, rows: int) -> Tensor:
        """Return int64[rows] on the device: `values` followed by zeros."""
        out = np.zeros(rows, np.int64)
        out[: len(values)] = values
        return torch.from_numpy(out).to(self.device)


def chosen_together(
    logits: Tensor, noise: NodeNoise, group: Group, best: Best, vocab: int
) -> Tensor:
    """Return int32[M] on every rank: the result of kernels.Choose for the concatenated logits of
    all ranks, of which `logits` [M,V/N] is this rank's part. Does not synchronise with the device.
    """
    own, ids = best(logits, noise, group.tp.span(vocab).start)
    parts = torch.stack(group.everywhere(torch.stack([own.view(torch.int32), ids])))
    scores, tokens = parts[:, 0].view(torch.float32), parts[:, 1]
    # NaN and infinity propagate to the maximum; of equal scores the lowest token wins.
    top = scores.amax(0)
    token = torch.where(scores == top, tokens, torch.iinfo(torch.int32).max).amin(0)
    return torch.where(top.isfinite(), token, NOTHING)


def _best_of(kernels: Kernels | None, nodes: DeviceNodes) -> Best:
    """Return the function that finds the best token of these nodes."""
    if kernels is not None:
        return kernels.best
    return best if nodes.temperatures.any() else greatest


def _numbered(nodes: Ints, count: int) -> Ints:
    """Return int32[count], the index in `nodes` of each flat node; -1 = none."""
    numbers = np.full(count, -1, np.int32)
    numbers[nodes] = np.arange(len(nodes), dtype=np.int32)
    return numbers


def _parts(options: TorchOptions, kernels: Kernels | None) -> Elementwise:
    """Return the elementwise operations, and the matrix product of quantised weights."""
    parts = parts_of(kernels)
    return replace(compiled(PLAIN), few_bits=parts.few_bits) if options.compile else parts


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"torch knows no device {name!r}: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name}, but torch sees no CUDA device here")
    return device
