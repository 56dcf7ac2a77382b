"""Kernels that a captured round launches, counted without a GPU: the round's own program runs over
meta tensors, and every operation stands for as many launches as it makes on CUDA.

Our Triton kernels are one launch each, through the functions that launch them. Of torch's own the
counts are read off ATen's CUDA sources (MULTIPLICITY); an operation that is not listed is an error.
Bytes are those of every operation's tensors, as if nothing stayed in a cache; of keys and values
what is behind the rows.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.step_bench import random_draft
from forerun.build.shapes import SHAPES, PlannedCheckpoint, RandomCheckpoint
from forerun.checkpoints.prediction_naming import (
    EMBEDDING_NORM,
    FINAL_NORM,
    FUSE,
    HIDDEN_NORM,
)
from forerun.drafts.block_config import BlockHead, expected_block_tensors
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.prediction_layers import (
    PredictionLayers,
)
from forerun.drafts.standalone_draft import StandaloneDraft, equal_vocabulary
from forerun.executors.torch.attention.kv import KvShape, PagedCache
from forerun.executors.torch.attention.prompt_attention import flash
from forerun.executors.torch.attention.state_nodes import StateKernels
from forerun.executors.torch.attention.states import States
from forerun.executors.torch.captured import block_drafting
from forerun.executors.torch.captured.block_drafting import drafting_of
from forerun.executors.torch.captured.graphs import CudaRecorder
from forerun.executors.torch.captured.runner import CudaGraphRunner
from forerun.executors.torch.captured.states import RoundStates
from forerun.executors.torch.decoder import weights
from forerun.executors.torch.decoder.decoder import Decoder
from forerun.executors.torch.decoder.elementwise import Elementwise
from forerun.executors.torch.decoder.few_bits import FewBits, FewBitsProducts
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.weights import Weights
from forerun.executors.torch.drafts import block as block_model
from forerun.executors.torch.drafts import decoder_model, loading, prediction_model
from forerun.executors.torch.drafts import eagle as eagle_model
from forerun.executors.torch.drafts.block import BlockDrafter
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.executors.torch.features import TorchFeatureRing
from forerun.executors.torch.sizes import Size
from forerun.executors.torch.triton.kernels import Kernels
from forerun.interface.executor import ExecutorLimits
from forerun.networks.arch import Architecture, expected_tensors

META = torch.device("meta")
DRAFT_VOCAB = 32_000
SPLIT = 2**31
"""Bytes that one kernel of a TensorIterator reaches; larger ones are halved until they fit."""

SMALL_SORT, SMALL_SLICE = 4096, 20_000
"""ATen: sorts of at most so many use one kernel; topk of larger slices uses several blocks each."""


def tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def bytes_of(tensor):
    return tensor.numel() * tensor.itemsize


def halved(args, out):
    """A TensorIterator over something that may be larger than 32 bits reach."""
    largest = max(bytes_of(each) for each in args if isinstance(each, torch.Tensor))
    return 2 ** max(0, math.ceil(math.log2(largest / SPLIT)))


def sort(args, out):
    """Copy, number, sort; larger ones by segments: keys, then places."""
    return 3 if args[0].shape[-1] <= SMALL_SORT else 10


def topk(args, out):
    """One block each: gather, then a small sort. Several blocks: of each of four passes over 8
    bits a count and its sums, two prefix sums of two kernels each, gather, sort.
    """
    several = args[0].shape[-1] >= SMALL_SLICE
    return 1 + 3 + (1 + 4 * 2 + 4 if several else 0)


VIEWS = {
    *("view", "_unsafe_view", "reshape", "slice", "select", "split", "split_with_sizes"),
    *("transpose", "t", "permute", "expand", "unsqueeze", "squeeze", "alias", "detach"),
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "unfold"),
    *("unbind", "as_strided", "chunk", "lift_fresh"),
}
"""No launch."""

ONE = {
    *("mm", "addmm", "bmm", "_scaled_mm", "_flash_attention_forward", "embedding", "cat", "stack"),
    *("copy_", "clone", "_to_copy", "zero_"),
    *("arange", "full", "full_like", "new_full", "zeros", "new_zeros", "zeros_like", "ones_like"),
    *("add", "add_", "sub", "mul", "div", "neg", "abs", "where", "clamp", "clamp_min", "fill_"),
    *("clamp_max", "maximum", "minimum", "floor_divide", "remainder", "exp", "log", "cos", "sin"),
    *("eq", "ne", "lt", "le", "gt", "ge", "bitwise_or", "bitwise_and", "bitwise_and_"),
    *("bitwise_not", "logical_not", "__lshift__", "__rshift__", "isnan", "isinf", "rsub", "round"),
    *("bitwise_left_shift", "bitwise_right_shift", "logical_and", "constant_pad_nd", "isfinite"),
    *("any", "sum", "max", "amax", "argmax", "cumsum", "gather", "scatter_", "index_select"),
    *("index", "masked_fill", "repeat", "roll", "bitwise_xor", "tanh"),
    *("scalar_tensor", "sigmoid", "logaddexp", "reciprocal"),
}

MULTIPLICITY: dict[str, Callable] = {
    **dict.fromkeys(VIEWS, lambda args, out: 0),
    **dict.fromkeys(ONE, lambda args, out: 1),
    # Greatest, which of them are infinite, zero there, less, exponential, sum, logarithm, plus.
    "logsumexp": lambda args, out: 9,
    "index_copy_": halved,
    "sort": sort,
    "topk": topk,
}
"""By ATen's name: (arguments, result) -> launches."""


FEW_BYTES = {"index_select", "index_copy_", "embedding", "gather", "index"}
"""Operations that touch no more of a tensor than they need."""


class Launches(TorchDispatchMode):
    """Of what runs inside:

    launches  by name
    traffic   bytes read and written
    floor     bytes of weights, keys and values alone
    """

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.launches, self.traffic, self.floor = Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        assert name in MULTIPLICITY, f"how many kernels {func} launches is not listed"
        count = MULTIPLICITY[name](args, out)
        if count:
            self.launches[name] += count
            given, made = (sum(map(bytes_of, tensors(each))) for each in (args, out))
            if name in FEW_BYTES:
                given = made = bytes_of(args[3] if name == "index_copy_" else out)
            self.traffic += given + (0 if name.endswith("_") else made)
            if name in ("mm", "_scaled_mm"):
                self.floor += bytes_of(args[1])
        return out

    def launched(self, name, args, behind):
        """One of our kernels; behind: positions of keys and values that the rows have, in all."""
        self.launches[name] += 1
        # What stands for a tensor that a kernel does not read is one of the others.
        distinct = {id(each): each for each in tensors(args)}
        given = [args[place] for place in CACHES.get(name, ())]
        apart = {id(each) for each in given}
        moved = sum(bytes_of(each) for key, each in distinct.items() if key not in apart)
        if name == "_product":
            # What several programs found of a tile is read by the last of them.
            moved += bytes_of(args[6]) if args[6] is not args[8] else 0
            self.floor += sum(map(bytes_of, {id(each): each for each in args[1:4]}.values()))
        if name == "_attend":
            keys = given[0]
            cached = 2 * behind * keys.shape[0] * keys.shape[2] * keys.itemsize
            self.traffic += cached
            self.floor += cached
        self.traffic += moved


CACHES = {
    **{"_attend": (1, 2, 3, 4, 7), "_merge": (0,), "_enter": (7, 8, 9, 10), "_move": (0, 1)},
    **{"_inputs": (1,), "_product": (7,)},
}
"""Arguments that are a cache's or an embedding, or of which a step uses a few parts, by kernel."""


class Launched:
    """Stands for a Triton kernel."""

    def __init__(self, name, record):
        self._name, self._record = name, record

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            assert math.prod(grid), "a grid without a program"
            self._record(self._name, args)

        return launch


@contextmanager
def counted_kernels(record):
    """Our kernels tell their name and arguments instead of running."""
    with ExitStack() as stack:
        for module in modules():
            for name, value in list(vars(module).items()):
                if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
                    stack.enter_context(patch.object(module, name, Launched(name, record)))
        yield


KERNELS = (
    *("attention", "choice", "layers", "round", "draft"),
    *("future", "shaping", "experts", "merge", "few_bits", "states"),
)
"""Files of kernels, triton_*.py."""


def modules():
    return [import_module(f"forerun.executors.torch.triton.triton_{name}") for name in KERNELS]


def kernels():
    attention, choice, layers, around, draft, *others = modules()
    future, shaping, experts, _merge, few_bits, states = others
    compiling = import_module("forerun.executors.torch.triton.compile_ahead")
    return Kernels(
        attend=attention.attend,
        varlen=flash,
        enter=layers.enter,
        move=around.move,
        prepare=around.prepare,
        near=around.near,
        accept=around.accept,
        choose=choice.choose,
        best=choice.best,
        shape=shaping.shaped,
        keep=around.keep,
        rotation=draft.rotation,
        follow=draft.follow,
        grow=draft.grow,
        descend=draft.descend,
        children=draft.children,
        resume=future.resume,
        leave=future.leave,
        states=StateKernels(
            *(states.ancestors, states.score, states.convolve, states.advance, states.shift)
        ),
        parts=Elementwise(
            norm=layers.norm,
            add_norm=layers.add_norm,
            gate=layers.gate,
            rotate=layers.rotate,
            gelu_gate=layers.gelu_gate,
            draft_inputs=draft.draft_inputs,
            clamped_gate=layers.clamped_gate,
            gated_norm=layers.gated_norm,
            grouped=experts.grouped,
            few_bits=FewBitsProducts(few_bits.product, few_bits.gated_product),
        ),
        ahead=compiling.compile_ahead,
    )


class NoCapture(CudaRecorder):
    """Captures nothing."""

    def __init__(self):
        pass

    def forget(self):
        pass


@dataclass(frozen=True)
class Setting:
    """What is counted.

    method   of DRAFTS, where rounds draft
    numbers  of the layers' products: bfloat16, float8, or "4 bits" and "8 bits" (QUANTISED)
    carries  rounds leave on the device what the next one needs
    pages    of the cache, for the sake of its size
    """

    arch: Architecture
    drafts: bool = True
    method: str = "EAGLE-3"
    numbers: str = "bfloat16"
    carries: bool = False
    pages: int = 16 * 1024
    slots: int = 64
    context: int = 4096

    @property
    def limits(self):
        return ExecutorLimits(
            page_size=16,
            pages=self.pages,
            slots=self.slots,
            max_nodes=1024,
            context=self.context,
            vocab=self.arch.vocab,
        )


LLAMA = SHAPES["llama-3.1-8b"]
DTYPE = torch.bfloat16
BEHIND = 1024
"""Positions behind every row, for bytes."""


QUANTISED = {
    "4 bits": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "8 bits": {"quant_method": "gptq", "bits": 8, "group_size": 128},
}
"""`quantization_config` of a checkpoint: integers with a scale and a zero point for 128 columns."""


def unread(matrices, device):
    """As few_bits.loaded, of which shapes alone matter."""
    first, outputs = matrices[0], sum(matrix.shape[0] for matrix in matrices)
    blocks = -(-first.shape[1] // first.block)
    size = first.block // (2 if first.kind == "int4" else 1)
    kind = torch.uint8 if first.kind == "int4" else torch.int8
    with device:
        numbers = torch.empty(blocks, outputs, size, dtype=kind)
        scales = torch.empty(first.groups, outputs, dtype=torch.float16)
        zeros = torch.empty(first.groups, outputs, dtype=kind)
        through = torch.empty(16 * outputs // 64, dtype=torch.int32)
    about = first.kind, (outputs, first.shape[1]), first.block, first.group
    return FewBits(*about, numbers, scales, zeros, None, through)


@cache
def decoder(arch, numbers):
    keep = numbers in QUANTISED
    settings = {"quantization_config": QUANTISED[numbers]} if keep else {}
    checkpoint = PlannedCheckpoint(arch, settings)
    with patch.object(weights, "loaded", unread):
        narrow = numbers == "float8"
        return Decoder(checkpoint, META, DTYPE, Linear, kernels().parts, keep=keep, narrow=narrow)


def count(setting: Setting, size: Size, rows: int = 0) -> Launches:
    """One round's, of which so many rows are real."""
    arch, limits = setting.arch, setting.limits
    shape = KvShape(arch.caches, arch.cache_places)
    cache = PagedCache(shape, limits, META, DTYPE)
    mode = Launches()
    runner = CudaGraphRunner(
        *(decoder(arch, setting.numbers), cache, limits, kernels(), NoCapture()),
        overlap=setting.carries,
    )
    if arch.recurrent is not None:
        states = States(arch, limits, META, kernels=kernels().states)
        runner.states = RoundStates(states, kernels().states, arch, limits)
    if setting.drafts:
        attach(runner, limits, setting.method)
    if setting.carries:
        runner.staging(size)

    def record(name, args):
        mode.launched(name, args, (rows or size.rows) * BEHIND)

    with counted_kernels(record), torch.no_grad():
        # What is made when a size first comes up is none of a replay's.
        runner.work(size)
        mode.clear()
        with mode:
            runner.work(size)
    return mode


@dataclass(frozen=True)
class TargetStub:
    """The methods of an executor that a draft model calls."""

    limits: ExecutorLimits
    decoder: Decoder
    kernels: Kernels
    runner: CudaGraphRunner
    device = META
    dtype = DTYPE

    def request_aux_hidden_states(self, layers):
        width = len(layers) * self.decoder.arch.hidden
        ring = TorchFeatureRing(self.limits.slots, width, DTYPE, META)
        self.runner.request_aux_hidden_states(layers, ring)


class ShapeOnlyWeights(Weights):
    """Of a draft: shapes alone."""

    def _fill(self, out, name):
        pass

    def _load(self, name):
        return torch.empty(self._checkpoint.shape(name), device=META)


def eagle(beside, arch):
    draft = random_draft(arch, DRAFT_VOCAB)
    with META:
        module = EagleHead(draft.head, kernels().parts).to(DTYPE).requires_grad_(False)
    loading.stack(module.layer)
    with patch.object(eagle_model, "for_serving", lambda *_: module):
        return eagle_model.TorchEagleModel(beside, RandomCheckpoint(arch), draft)


def prediction_layer(beside, arch):
    one = replace(arch, layer_specs=arch.layer_specs[-1:])
    shapes = {n: s for n, s in expected_tensors(one).items() if n.startswith("model.layers.")}
    draft = PredictionLayers(
        RandomCheckpoint(arch), {}, False, False, 1, np.arange(arch.vocab, dtype=np.int32)
    )
    parts = dict.fromkeys((EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM), (arch.hidden,))
    parts[FUSE] = arch.hidden, 2 * arch.hidden
    shapes |= {draft.own(0, part): shape for part, shape in parts.items()}
    held = {n: SimpleNamespace(piece=SimpleNamespace(shape=s)) for n, s in shapes.items()}
    draft = replace(draft, files=held)
    with patch.object(prediction_model, "Weights", ShapeOnlyWeights):
        return prediction_model.TorchPredictionModel(beside, draft)


def smaller(beside, arch):
    shape = SHAPES[SMALLER]
    vocabulary = equal_vocabulary(arch.vocab, shape.vocab)
    draft = StandaloneDraft(SMALLER, RandomCheckpoint(shape), vocabulary)
    return decoder_model.TorchDecoderModel(beside, draft)


class ShapeOnlyBlock(BlockFile):
    """Of a block drafter: what its pairs read has its shape alone."""

    def tensor(self, name):
        return np.broadcast_to(np.float32(0), expected_block_tensors(self.head)[name])


def block(beside, arch, **changes):
    head = BlockHead(
        layers=5,
        hidden=arch.hidden,
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        head_size=arch.head_size,
        ffn=12_288,
        vocab=arch.vocab,
        target_vocab=arch.vocab,
        target_hidden=arch.hidden,
        norm_eps=arch.norm_eps,
        rope=arch.rope,
        context=arch.context,
        features=(1, 9, 16, 23, 30),
        **{"places": 16, "mask": 0, **changes},
    )
    with META:
        module = BlockDrafter(head, kernels().parts).to(DTYPE).requires_grad_(False)
    for layer in module.layers:
        loading.stack(layer)
    draft = ShapeOnlyBlock(Path(), head, np.arange(arch.vocab, dtype=np.int32), (), {})
    with patch.object(block_model, "for_serving", lambda *_: module):
        return block_model.TorchBlockModel(beside, RandomCheckpoint(arch), draft)


def paired(beside, arch, **changes):
    """DSpark or DFlash2; the rank of tables changes no launch."""
    return block(beside, arch, **{"places": 8, "rank": 16, **changes})


def dspark(beside, arch, pair):
    confidence = arch.hidden + 16
    return paired(beside, arch, anchored=True, pair=pair, confidence=confidence)


SMALLER = "llama-3.2-1b"
DRAFTS = {
    "EAGLE-3": eagle,
    "NEXTN, one layer": prediction_layer,
    f"STANDALONE, {SMALLER}": smaller,
    "DFLASH, five layers, blocks of 16": block,
    "DSpark, vanilla": partial(dspark, pair="vanilla"),
    "DSpark, gated": partial(dspark, pair="gated"),
    "DSpark, rnn": partial(dspark, pair="rnn"),
    "DFlash2": partial(paired, pair="selector", top_k=16, convolved=16),
}
"""(what it is beside, the target's architecture) -> a draft model whose weights are not read."""


def attach(runner, limits, method):
    """A draft model."""
    beside = TargetStub(limits, runner._decoder, kernels(), runner)
    modules = loading, block_drafting
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "check_fits", lambda *_: None))
        model = DRAFTS[method](beside, runner._decoder.arch)
        runner.drafting = drafting_of(model, kernels(), limits)


@dataclass(frozen=True)
class Budget:
    """Launches of a round: of a layer; of what is neither a layer nor drafts; of a draft head's
    first level, which first follows what was accepted; of a level more; those of `index_copy_`,
    which grow with the cache; and those of a round that is carried on from another.
    """

    layer: int
    outside: int
    first: int
    level: int
    moves: int
    carried: int


def budget(size: Size, **setting) -> Budget:
    """By differences: one layer fewer, one level more, state that is kept."""
    whole = Setting(LLAMA, drafts=size.levels > 0, **setting)
    fewer = replace(LLAMA, layer_specs=LLAMA.layer_specs[:-1])

    def launches(setting, size):
        counted = count(setting, size).launches
        return counted.total() - counted["index_copy_"], counted["index_copy_"]

    total, moves = launches(whole, size)
    layer = total - launches(replace(whole, arch=fewer), size)[0]
    first = level = 0
    if size.levels:
        level = launches(whole, size._replace(levels=size.levels + 1))[0] - total
        first = total - launches(whole, size._replace(levels=0))[0] - (size.levels - 1) * level
    outside = total - layer * LLAMA.layers - first - max(size.levels - 1, 0) * level
    carried = launches(replace(whole, carries=True), size)[0] - total
    return Budget(layer, outside, first, level, moves, carried)


AIMS = Budget(layer=10, outside=15, first=25, level=25, moves=0, carried=2)
COUNTED = {
    "plain": Size(1, 1),
    "verified": Size(64, 2),
    "drafted": Size(1, 4, 3, 1),
    "drafted in trees": Size(1, 16, 3, 4),
    "plain, float8": Size(1, 1),
    "verified, float8": Size(64, 2),
    "plain, 4 bits": Size(1, 1),
    "verified, 4 bits": Size(64, 2),
}
"""What budgets are kept of."""


def budget_of(kind: str) -> Budget:
    """Of one of COUNTED."""
    numbers = kind.partition(", ")[2] or "bfloat16"
    return budget(COUNTED[kind], numbers=numbers)
