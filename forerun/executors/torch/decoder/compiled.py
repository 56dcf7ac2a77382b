"""The operations between a decoder's products by torch.compile, without Triton kernels of ours."""

from dataclasses import fields, replace
from typing import Any

import torch

from forerun.executors.torch.decoder.elementwise import Elementwise


def compiled(parts: Elementwise) -> Elementwise:
    """By torch.compile, for any number of rows: one kernel each, made when it first runs."""
    made: dict[str, Any] = {
        field.name: torch.compile(getattr(parts, field.name), dynamic=True)
        for field in fields(parts)
        if field.name not in ("grouped", "few_bits")
    }
    return replace(parts, **made)
