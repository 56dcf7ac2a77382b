"""The operations between a decoder's products by torch.compile, without Triton kernels of ours."""

from dataclasses import fields, replace
from typing import Any

import torch

from forerun.executors.torch.decoder.elementwise import Elementwise


def compiled(parts: Elementwise) -> Elementwise:
    """By torch.compile, for any number of rows: one kernel each, made when it first runs."""

    def each(functions: Any) -> Any:
        made = {
            field.name: torch.compile(getattr(functions, field.name), dynamic=True)
            for field in fields(functions)
            if field.name not in ("float8", "grouped", "few_bits")
        }
        return replace(functions, **made)

    whole: Elementwise = replace(each(parts), float8=each(parts.float8))
    return whole
