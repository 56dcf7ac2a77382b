"""What a round of a target has in pages of their own for layers that see a window."""

from dataclasses import replace

from torch import Tensor

from forerun.executors.torch.attention.geometry import positions_of
from forerun.executors.torch.attention.window_cache import WindowCache
from forerun.executors.torch.captured.entries import KindOfPages
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.round_types import RoundShape


def near_of(
    kernels: Kernels, shape: RoundShape, cache: WindowCache, table: Tensor, whole: KindOfPages
) -> KindOfPages:
    """Return what the window pages have of a round, given what all others have. table: int32[R,W]
    of its rows. Launches only.
    """
    position = positions_of(whole.geometry)
    slots, pages = kernels.near(position, whole.slots, table, shape, cache.behind)
    geometry = replace(whole.geometry, slots=slots, table=table)
    return KindOfPages(cache, geometry, slots, pages)
