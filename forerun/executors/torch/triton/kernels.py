"""The kernels of a device; the only module that imports the Triton kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.attention.geometry import Attend
from forerun.executors.torch.attention.kv import CacheTensor, Move
from forerun.executors.torch.attention.prompt_attention import VariableLength, flash
from forerun.executors.torch.attention.state_nodes import StateKernels
from forerun.executors.torch.decoder.elementwise import PLAIN, AnyHeads, Elementwise, Rotary
from forerun.executors.torch.decoder.few_bits import FewBitsProducts
from forerun.executors.torch.shaping import Shape
from forerun.executors.torch.sizes import Record, Size
from forerun.executors.torch.triton.round_types import (
    Accepted,
    Extended,
    Frontier,
    FutureState,
    Levels,
    Prepared,
    RoundInputs,
    RoundShape,
    TreeStarts,
)

P = ParamSpec("P")
R = TypeVar("R")

Enter = Callable[[AnyHeads, tuple[CacheTensor, CacheTensor], Tensor], Tensor]
"""(heads of M nodes, keys and values of a layer, slots int32[M]) -> queries [M,A,E]: see kv.py."""

Prepare = Callable[[RoundInputs, RoundShape], Prepared]
"""(inputs of a round, constants of all rounds) -> positions, slots and noise of every node."""

Near = Callable[[Tensor, Tensor, Tensor, RoundShape, int], tuple[Tensor, Tensor]]
"""(positions int32[M], slots int32[M], window pages int32[R,W] of the rows' tables, constants of
all rounds, WindowCache.behind) -> slots and pages int32[M] of the same nodes in window pages, as in
Prepared.
"""

Accept = Callable[[Tensor, NodeNoise, RoundInputs, Tensor], Accepted]
"""(logits [M,V] of any dtype, sampling of each node, inputs, int32[M] of the record) -> each row's
accepted path; writes the choices on it to the record, NOTHING elsewhere.
"""

Choose = Callable[[Tensor, NodeNoise], Tensor]
"""(logits float32[M,V], sampling of each node) -> int32[M] tokens, or NOTHING."""

Best = Callable[[Tensor, NodeNoise, int], tuple[Tensor, Tensor]]
"""(logits [M,V] of any dtype, sampling of each node, the first of the V tokens) -> the greatest
score float32[M] and the lowest token int32[M] with it; NaN or infinity if a logit is.
"""

Keep = Callable[[Tensor, RoundInputs, Tensor], Accepted]
"""(choices int32[M], inputs, int32[M] of the record) -> as Accept."""

Rotation = Callable[[Tensor, Tensor, float], Rotary]
"""(positions int32[M], frequencies float32[E/2], factor) -> cos and sin: elementwise.rotation."""

Follow = Callable[[Extended, Accepted, Prepared, RoundInputs, Levels], TreeStarts]
"""(results of all nodes, accepted paths, prepared inputs, inputs, size) -> the ends of the rows'
accepted paths, which are also stored by slot.
"""

Grow = Callable[[Tensor, Tensor, NodeNoise, Levels, int, Tensor, Tensor | None], None]
"""(logits [n,Vd] of any dtype, target ids int32[Vd], noise, size, level, grown, chosen): append
`width` children to the nodes that a level expands.

grown   int32[3,R,K] tokens, parents and values' bits of the trees (draft_tree.py)
chosen  int[R,width] the numbers of the nodes in the level before; None: at the first level, which
        expands the rows' ends, and in chains
"""
Descend = Callable[[Tensor, Levels, int, Tensor, Tensor | None, bool], Frontier]
"""(grown int32[3,R,K], size, levels that are grown, hidden, above, roots) -> the `width` best nodes
of the newest level, ties to the earlier, on which the trees go on.

hidden  [R*width,W] outputs of the level that ran last, at level 1 of the rows' ends [R,W]
above   of the frontier before; None at level 1
roots   each row's root is run before its nodes
"""

Children = Callable[[Tensor, Tensor, Tensor, NodeNoise, int], tuple[Tensor, Tensor]]
"""(scores float32[n,K] of candidates of n nodes, as many in each of R rows; their target ids
int32[R,K]; the log-probability of all other tokens together, float32[R], -inf if there are none;
noise of rows; width) -> the `width` best children of each node, best first: int32[n,width], and
float32[n,width] as values of draft trees.
"""

Resume = Callable[[FutureState, Size, RoundInputs], RoundInputs]
"""(state by slot, size, inputs of the host) -> inputs, those of carried rows from the state."""

Leave = Callable[[FutureState, Size, RoundInputs, Accepted, Record], None]
"""(state by slot, size, inputs, accepted paths, record): store the rows' results by slot, and write
the nodes that ran to the record.
"""

Ahead = Callable[[Callable[[], None], Callable[[int, int], None]], None]
"""(work, progress): compile all that `work` would launch, reporting (done, total)."""


def nothing_to_compile(work: Callable[[], None], progress: Callable[[int, int], None]) -> None:
    """Do nothing: `Ahead` for kernels that are not compiled."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that never wait for the device, so that they can be captured."""

    attend: Attend
    varlen: VariableLength
    enter: Enter
    move: Move
    prepare: Prepare
    near: Near
    accept: Accept
    choose: Choose
    best: Best
    shape: Shape
    keep: Keep
    rotation: Rotation
    follow: Follow
    grow: Grow
    descend: Descend
    children: Children
    resume: Resume
    leave: Leave
    states: StateKernels
    parts: Elementwise
    ahead: Ahead = nothing_to_compile


def guarded(device: torch.device, launch: Callable[P, R]) -> Callable[P, R]:
    """Return `launch` wrapped so that `device` is the current one: Triton launches there, whatever
    the device of its arguments.
    """

    @wraps(launch)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(device):
            return launch(*args, **kwargs)

    return inside


def parts_of(kernels: Kernels | None) -> Elementwise:
    """Return the operations between products: the kernels' own, or torch operations."""
    return kernels.parts if kernels is not None else PLAIN


def kernels_for(device: torch.device) -> Kernels | None:
    """Return our Triton kernels on CUDA; None on other devices, where PyTorch's operations are
    used.
    """
    if device.type != "cuda":
        return None
    from forerun.executors.torch.triton import (  # noqa: PLC0415
        compile_ahead,
        triton_attention,
        triton_choice,
        triton_draft,
        triton_experts,
        triton_few_bits,
        triton_future,
        triton_layers,
        triton_round,
        triton_shaping,
        triton_states,
    )

    return Kernels(
        attend=guarded(device, triton_attention.attend),
        varlen=flash,
        enter=guarded(device, triton_layers.enter),
        move=guarded(device, triton_round.move),
        prepare=guarded(device, triton_round.prepare),
        near=guarded(device, triton_round.near),
        accept=guarded(device, triton_round.accept),
        choose=guarded(device, triton_choice.choose),
        best=guarded(device, triton_choice.best),
        shape=guarded(device, triton_shaping.shaped),
        keep=guarded(device, triton_round.keep),
        rotation=guarded(device, triton_draft.rotation),
        follow=guarded(device, triton_draft.follow),
        grow=guarded(device, triton_draft.grow),
        descend=guarded(device, triton_draft.descend),
        children=guarded(device, triton_draft.children),
        resume=guarded(device, triton_future.resume),
        leave=guarded(device, triton_future.leave),
        states=StateKernels(
            ancestors=guarded(device, triton_states.ancestors),
            score=guarded(device, triton_states.score),
            convolve=guarded(device, triton_states.convolve),
            advance=guarded(device, triton_states.advance),
            shift=guarded(device, triton_states.shift),
        ),
        parts=Elementwise(
            add_norm=guarded(device, triton_layers.add_norm),
            norm=guarded(device, triton_layers.norm),
            gate=guarded(device, triton_layers.gate),
            gelu_gate=guarded(device, triton_layers.gelu_gate),
            rotate=guarded(device, triton_layers.rotate),
            draft_inputs=guarded(device, triton_draft.draft_inputs),
            clamped_gate=guarded(device, triton_layers.clamped_gate),
            gated_norm=guarded(device, triton_layers.gated_norm),
            grouped=guarded(device, triton_experts.grouped),
            few_bits=FewBitsProducts(
                guarded(device, triton_few_bits.product),
                guarded(device, triton_few_bits.gated_product),
            ),
        ),
        ahead=compile_ahead.compile_ahead,
    )
