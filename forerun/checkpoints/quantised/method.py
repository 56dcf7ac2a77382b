"""What a storage method of quantised matrices is."""

from dataclasses import dataclass
from typing import Literal

Layout = Literal[
    "float8", "int8", "fp4", "packed", "gptq", "awq", "quark", "mlx", "blocks", "bnb4", "bnb8"
]
"""The layout of a matrix in its file: see `layouts`."""

Numbers = Literal["integers", "float8", "fp4", "table"]
Scale = Literal["", "E8M0", "E4M3"]


@dataclass(frozen=True, slots=True)
class Method:
    """One storage method for matrices of a checkpoint. w [N,K] is the matrix.

    title      for users: "AWQ, 4 bits in groups of 128"
    layout     which tensors a matrix consists of, and how they are packed
    bits       of one weight
    group      columns that share a scale; 0 = all of them
    rows       rows that share a scale: 1, a block's, or 0 = all of them
    zeros      there are zero points
    minus_one  zero points are stored minus one (GPTQ's first format)
    signed     4-bit integers are stored from -8 to 7, in two's complement
    numbers    what the numbers of a matrix are
    scale      what the bytes of scales are; "" = they are stored as floats
    modules    those that it applies to; () = all that no other method names
    """

    title: str
    layout: Layout
    bits: int
    group: int
    rows: int = 1
    zeros: bool = False
    minus_one: bool = False
    signed: bool = False
    numbers: Numbers = "integers"
    scale: Scale = ""
    modules: tuple[str, ...] = ()

    @property
    def offsets(self) -> bool:
        """Whether groups have offsets."""
        return self.layout == "mlx" and not self.scale

    @property
    def key(self) -> str:
        """The key of config.json that describes it."""
        return "quantization" if self.layout == "mlx" else "quantization_config"


FLOATS = {
    "nvfp4": Method(
        "NVFP4, floats of 4 bits in groups of 16", "packed", 4, 16, numbers="fp4", scale="E4M3"
    ),
    "mxfp4": Method(
        "MXFP4, floats of 4 bits in groups of 32", "blocks", 4, 32, numbers="fp4", scale="E8M0"
    ),
    "mxfp8": Method(
        "MXFP8, float8 in groups of 32", "float8", 8, 32, numbers="float8", scale="E8M0"
    ),
}
"""Floats of few bits whose scales are bytes, in one of their layouts."""
