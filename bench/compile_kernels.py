"""Compiles our Triton kernels for NVIDIA's GPUs, which needs none; prints one JSON line each.

    python -m bench.compile_kernels [--arch 80,90,100] [NAME ...]
    python -m bench.compile_kernels --table bench/out/gpu-kernels.md
    python -m bench.compile_kernels --check

`--check` says what is not as it should be (`wrong`), on every architecture, and fails then: before
kernels change, and with the slow tests. In the tests' process the same modules are interpreted.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.records import ended
from forerun.executors.torch.attention.attention_shapes import lines_for, shape_for
from forerun.executors.torch.captured.declared import NODES
from forerun.executors.torch.decoder.few_bits import COLUMNS
from forerun.executors.torch.sizes import MOST_PARTS, tile_nodes
from forerun.executors.torch.triton import (
    triton_attention,
    triton_choice,
    triton_draft,
    triton_experts,
    triton_few_bits,
    triton_future,
    triton_layers,
    triton_merge,
    triton_round,
    triton_shaping,
    triton_states,
)
from forerun.networks.layer_spec import CLAMP, CLAMP_SLOPE
from forerun.speculative.tree import full_size

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ARCHS = (80, 90, 100)
REGISTERS = 65_536
"""Of a multiprocessor, on all of them."""
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of a multiprocessor that programs may take, a kilobyte each beside."""


ALIGNED = {"group_stride", "vocab", "inputs", "outputs", "line_stride"}
"""Numbers that are multiples of 16."""


Constants = dict[str, Any]
Kind = str | tuple[str, int]
"""Of an argument, and how many such there are."""


@dataclass(frozen=True)
class Kernel:
    """One binary: what the launcher would specialise, and how it would launch it."""

    function: Any
    signature: dict[str, str]
    constants: Constants
    warps: int
    stages: int = 2

    def compiled(self, arch: int) -> dict[str, Any]:
        """What the assembler says. Pointers and strides are multiples of 16, views are not."""
        names = self.function.arg_names
        views = {p.name for p in self.function.params if p.do_not_specialize_on_alignment}
        pointers = {n for n, kind in self.signature.items() if kind.startswith("*")} - views
        varied = {p.name for p in self.function.params if p.do_not_specialize}
        whole = [*pointers, *(ALIGNED & self.signature.keys() - varied)]
        source = ASTSource(
            self.function,
            self.signature | dict.fromkeys(self.constants, "constexpr"),
            {(names.index(name),): value for name, value in self.constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole},
        )
        options = {"num_warps": self.warps, "num_stages": self.stages}
        begun = perf_counter()
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        seconds = perf_counter() - begun
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed)}
        shared, ptx = kernel.metadata.shared, kernel.asm["ptx"]
        threads = 32 * self.warps
        return usage | {
            "shared": shared,
            "programs": min(
                REGISTERS // (max(usage["REG"], 1) * threads),
                SHARED[arch] // (shared + 1024),
                2048 // threads,
                32,
            ),
            "async_copies": len(re.findall(r"cp\.async\.c[ag]", ptx)),
            "tensor_cores": bool(re.search(r"wgmma|mma\.sync|tcgen05\.mma", ptx)),
            "seconds": round(seconds, 2),
        }


def attention(
    dtype: str,
    gqa_group: int,
    size: int,
    lines: int,
    arch: int,
    pages: str | None = None,
    cap: bool = False,
    sinks: bool = False,
    values: int | None = None,
) -> Kernel:
    """cap, sinks: as Gemma and gpt-oss have them, beside a window; values: numbers of a value that
    is part of its key, None: keys and values are alike.
    """
    number = f"*{dtype}"
    signature = {
        "queries": number,
        **dict.fromkeys(("keys", "values"), f"*{pages}" if pages else number),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32" if pages else number),
        **{"sinks": "*fp32", "out": number, "found": "*fp32", "sums": "*fp32"},
        **dict.fromkeys(("tiles", "start", "kv_len", "table", "tree_intervals"), "*i32"),
        **dict.fromkeys(("slots", "position", "split"), "*i32"),
        "group_stride": "i64",
        **dict.fromkeys(("table_stride", "asked", "count", "nodes", "reach"), "i32"),
        **dict.fromkeys(("window", "since", "most_parts"), "i32"),
        **{"scale": "fp32", "cap": "fp32"},
    }
    shape = shape_for(lines, 4 if dtype == "fp32" else 2, size, arch // 10)
    constants = {
        **{"GQA_GROUP": gqa_group, "E": size, "PAGE": 16, "LINES": lines},
        **{"SHARING": 1 if values is None else 8, "V": values or size, "SINKS": sinks},
        **{"NARROW": pages is not None, "WINDOWED": cap or sinks, "CAPPED": cap},
        "KEYS": shape.keys,
    }
    return Kernel(triton_attention._attend, signature, constants, shape.warps, shape.stages)


def attention_lines(gqa_group: int) -> list[int]:
    """Every count of lines that rows of any size need."""
    tiles = {tile_nodes(nodes, gqa_group) for nodes in (*NODES, 512)}
    return sorted({lines_for(tile * gqa_group) for tile in tiles})


def merge(dtype: str, size: int) -> Kernel:
    signature = {
        **{"found": "*fp32", "sums": "*fp32", "out": f"*{dtype}"},
        **dict.fromkeys(("lines", "parts"), "i32"),
    }
    return Kernel(triton_merge._merge, signature, {"E": size, "PARTS": MOST_PARTS}, 2)


def kernel(function: Any, kinds: Sequence[Kind], constants: Constants, warps: int) -> Kernel:
    """kinds: of the arguments, in their order, as "type" or ("type", how many of them)."""
    spread = [
        kind
        for each in kinds
        for kind in ([each] if isinstance(each, str) else [each[0]] * each[1])
    ]
    names = [name for name in function.arg_names if name not in constants]
    return Kernel(function, dict(zip(names, spread, strict=True)), constants, warps)


def choice(dtype: str) -> Kernel:
    kinds = (f"*{dtype}", "*i64", "*i32", "*fp32", "*fp32", "*i32", ("i32", 4))
    return kernel(triton_choice._choose, kinds, {"CHUNK": triton_choice.CHUNK}, 8)


def cut() -> Kernel:
    kinds = ("*fp32", 3), ("*i32", 3), ("*fp32", 2), ("i32", 2)
    constants = {name: getattr(triton_shaping, name) for name in ("FEW", "ROWS", "LANES")}
    return kernel(triton_shaping._cut, kinds, constants, triton_shaping.WARPS)


def edit(masked: bool) -> Kernel:
    kinds = "*fp32", ("*i32", 2), ("*fp32", 4), ("*i32", 2), "*i1", "*i32"
    constants = {"COUNT": 4, "SEEN": 1, "STOP": 2, "MASKED": masked}
    constants["BLOCK"] = triton_shaping.EDITED
    rest = "*i1" if masked else "*fp32", "*fp32", ("i32", 2)
    return kernel(triton_shaping._edit, (*kinds, *rest), constants, 8)


def prepared(nodes: int, half: int) -> Kernel:
    kinds = ("*i32",) * 4 + ("*fp32", ("*i32", 5), ("*fp32", 2), ("*i32", 3), "*i64", "*i32")
    constants = {"PAGE": 16, "HALF": half, "NODES": triton.next_power_of_2(nodes)}
    return kernel(triton_round._prepare, (*kinds, ("*fp32", 2), ("i32", 4)), constants, 1)


def near() -> Kernel:
    constants = {"PAGE": 16, "BLOCK": triton_round.NEAR_BLOCK}
    return kernel(triton_round._near, (("*i32", 5), ("i32", 5)), constants, 1)


def walked(nodes: int, vocab: int) -> Kernel:
    kinds = "*fp32", ("*i32", 8), "*i8", ("*i32", 3), ("i32", 3)
    chunks = triton.next_power_of_2(triton.cdiv(vocab, triton_choice.CHUNK))
    constants = {"NODES": nodes, "CHUNKS": chunks, "NOTHING": -1}
    return kernel(triton_round._walk, kinds, constants, 4)


def moved(dtype: str, size: int, scaled: bool) -> Kernel:
    kinds = f"*{'u8' if scaled else dtype}", "*fp32" if scaled else "*i32", ("*i32", 2), "*i8"
    constants = {"E": size, "SCALED": scaled, "CHOSEN": True}
    return kernel(triton_round._move, (*kinds, ("i32", 2)), constants, 1)


def followed(dtype: str, askers: int) -> Kernel:
    kinds = (f"*{dtype}", 2), ("*i32", 4), "*i64", "*i32", "*fp32", (f"*{dtype}", 3), "*i32"
    constants = {"BLOCK": 1024, "ASKERS": askers}
    rest = "*i64", "*i32", "*fp32", "*i32", ("i32", 8)
    return kernel(triton_draft._follow, (*kinds, *rest), constants, 4)


def turned(half: int) -> Kernel:
    kinds = "*i32", ("*fp32", 3), "fp32"
    return kernel(triton_draft._rotation, kinds, {"HALF": half}, 1)


def candidates(dtype: str, chain: bool) -> Kernel:
    kinds = f"*{dtype}", "*fp32", "*i64", ("*fp32", 2), ("i32", 3)
    constants = {"CHUNK": triton_draft.CHUNK, "COUNT": 64, "CHAIN": chain}
    return kernel(triton_draft._candidates, kinds, constants, 4)


def grown(width: int, vocab: int) -> Kernel:
    chosen = "*i32" if width > 1 else "*i64"
    kinds = "*i64", ("*fp32", 2), "*i32", "*i64", "*i32", "*fp32", "*i32", chosen, ("i32", 8)
    chunks = triton.cdiv(vocab, triton_draft.CHUNK)
    constants = {
        **{"COUNT": 64, "CANDIDATES": 64, "ALL": triton.next_power_of_2(64 * chunks)},
        **{"CHUNKS": triton.next_power_of_2(chunks), "WIDTH": width, "CHOSEN": width > 1},
    }
    return kernel(triton_draft._grow, kinds, constants, 4)


def chosen_children(width: int) -> Kernel:
    kinds = "*fp32", "*i32", "*fp32", "*i64", "*i32", "*fp32", "*i32", "*fp32", ("i32", 3)
    return kernel(triton_draft._children, kinds, {"COUNT": 64, "WIDTH": width}, 1)


def descended(dtype: str, width: int) -> Kernel:
    kinds = "*i32", f"*{dtype}", ("*i32", 3), f"*{dtype}", ("*i32", 2), ("i32", 9)
    wide = triton.next_power_of_2(width)
    constants = {"WIDTH": width, "FULL": wide * wide, "BLOCK": max(1024 // wide, 64)}
    return kernel(triton_draft._descend, kinds, constants, 4)


def draft_inputs(dtype: str, wide: int) -> Kernel:
    kinds = "*i32", (f"*{dtype}", 2), ("*fp32", 2), f"*{dtype}", ("i32", 2), "fp32"
    constants = {"WIDE": wide, "HIDDEN_FIRST": False}
    return kernel(triton_draft._inputs, kinds, constants, triton_layers.warps_for(wide))


def warps_of(full: int, width: int) -> int:
    return 1 if width == 1 else 8 if full > 256 else 4


def resumed(nodes: int, width: int, levels: int) -> Kernel:
    full = full_size(width, levels)
    kinds = (("*i32", 14), "*fp32", ("*i32", 7), ("i32", 5))
    constants = {"NODES": nodes, "FULL": triton.next_power_of_2(full), "WIDTH": width}
    constants |= {"BLOCK": triton_future.BLOCK, "NOTHING": -1}
    return kernel(triton_future._resume, kinds, constants, warps_of(full, width))


def left(nodes: int, width: int, levels: int) -> Kernel:
    full = full_size(width, levels)
    kinds = (("*i32", 16), "*fp32", ("i32", 4))
    constants = {"NODES": nodes, "FULL": triton.next_power_of_2(full), "WIDTH": width}
    return kernel(triton_future._leave, kinds, constants, 1 if width == 1 else 4)


def layer(
    kernel: Any,
    pointers: Sequence[str],
    numbers: Sequence[str],
    constants: Constants,
    warps: int,
    dtype: str = "bf16",
) -> Kernel:
    signature = dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(numbers, "i32")
    fp32 = {"weight": "*fp32", "cos": "*fp32", "sin": "*fp32", "eps": "fp32"}
    fp32 = {name: kind for name, kind in fp32.items() if name in signature}
    return Kernel(kernel, signature | fp32, constants, warps)


def norm(wide: int, dtype: str) -> Kernel:
    numbers = ("row_stride", "head_stride", "width", "eps")
    pointers, warps = ("x", "weight", "out"), triton_layers.warps_for(wide)
    return layer(triton_layers._norm, pointers, numbers, {"WIDE": wide}, warps, dtype)


def gated_norm(wide: int, dtype: str) -> Kernel:
    numbers = ("row_stride", "head_stride", "width", "eps")
    made = layer(
        triton_layers._gated_norm, ("x", "weight", "gate", "out"), numbers, {"WIDE": wide}, 1, dtype
    )
    return replace(made, signature=made.signature | {"x": "*fp32"})


def gate(dtype: str, gelu: bool = False, clamped: bool = False) -> Kernel:
    numbers, pointers = ("gate_stride", "up_stride", "width"), ("gate", "up", "out")
    constants: Constants = {"BLOCK": 1024, "GELU": gelu}
    constants |= {"CLAMP": CLAMP, "SLOPE": CLAMP_SLOPE} if clamped else {"CLAMP": 0.0, "SLOPE": 1.0}
    return layer(triton_layers._gate, pointers, numbers, constants, 4, dtype)


def grouped(dtype: str, rows: int, stored: str | None = None, biased: bool = False) -> Kernel:
    kinds = (
        *(f"*{dtype}", f"*{stored or dtype}", "*fp32", f"*{dtype}", f"*{dtype}"),
        *("*i64", "*i64", ("i32", 4)),
    )
    constants = {"ROWS": rows, "COLUMNS": triton_experts.COLUMNS, "DEPTH": triton_experts.DEPTH}
    constants |= {"SCALED": stored is not None, "BIASED": biased}
    made = kernel(triton_experts._grouped, kinds, constants, 4)
    return replace(made, stages=3)


def few_bits(
    dtype: str,
    rows: int,
    kind: int,
    zeros: bool = False,
    block: int = 128,
    ordered: bool = False,
    splits: int = 8,
    gated: bool = False,
) -> Kernel:
    scale, number = "*fp16", "*i8" if kind == 8 else "*u8"
    kinds = f"*{dtype}", number, scale, "*fp32" if zeros else scale, "*i32", f"*{dtype}"
    columns = COLUMNS // 2 if gated else COLUMNS
    constants: Constants = {
        "ROWS": rows,
        "COLUMNS": columns,
        "BLOCK": block,
        "SPAN": 1,
        "KIND": kind,
    }
    constants |= {"ZEROS": zeros, "ORDERED": ordered, "BIASED": False, "SPLITS": splits}
    constants |= {
        "GATED": gated,
        "GELU": False,
        "CLAMP": 0.0,
        "SLOPE": 1.0,
        "PTX": True,
        "EVEN": True,
    }
    rest = "*fp32", "*i32", f"*{dtype}", ("i32", 7)
    return replace(kernel(triton_few_bits._product, (*kinds, *rest), constants, 4), stages=3)


def widened(dtype: str, kind: int, zeros: bool = False) -> Kernel:
    scale, number = "*fp16", "*i8" if kind == 8 else "*u8"
    constants = {"COLUMNS": COLUMNS, "BLOCK": 128, "SPAN": 1, "KIND": kind, "ZEROS": zeros}
    kinds = number, scale, number if zeros else scale, f"*{dtype}", ("i32", 4)
    return kernel(triton_few_bits._widen, kinds, constants, 4)


def rotate(half: int, dtype: str) -> Kernel:
    pointers, numbers = ("x", "cos", "sin", "out"), ("row_stride", "head_stride")
    return layer(triton_layers._rotate, pointers, numbers, {"HALF": half}, 1, dtype)


def add_norm(wide: int, dtype: str) -> Kernel:
    pointers = ("x", "more", "weight", "added", "out")
    numbers = ("x_stride", "more_stride", "width", "eps")
    warps = triton_layers.warps_for(wide)
    return layer(triton_layers._add_norm, pointers, numbers, {"WIDE": wide}, warps, dtype)


def scored(dtype: str, known: bool) -> Kernel:
    """Of Qwen3.5's heads. known: a prompt's tokens, which torch has convolved."""
    number, pointers = "*fp32" if known else f"*{dtype}", ("*i32", 9)
    kinds = number, f"*{dtype}", ("*fp32", 5), pointers, "*fp32", ("i32", 3)
    constants = NET | {"PASSED": known, "KNOWN": known}
    return kernel(triton_states._score, kinds, constants, 4)


def advanced(dtype: str) -> Kernel:
    kinds = (f"*{dtype}", 2), ("*fp32", 5), ("*i32", 3), "*i8", ("*i32", 3), ("i32", 6)
    return kernel(triton_states._advance, kinds, NET | {"PAGE": 16}, 4)


def shifted(dtype: str, width: int) -> Kernel:
    kinds = f"*{dtype}", "*fp32", ("*i32", 3), "*i8", ("*i32", 3), ("i32", 4)
    constants = {"W": width, "WIDE": triton.next_power_of_2(width - 1), "PAGE": 16}
    constants["BLOCK"] = triton_states.BLOCK
    return kernel(triton_states._shift, kinds, constants, 4)


def convolved(width: int) -> Kernel:
    kinds = ("*fp32", 4), ("*i32", 3), "*fp32", ("i32", 2)
    constants = {"W": width, "BIASED": False, "BLOCK": triton_states.BLOCK}
    return kernel(triton_states._convolve, kinds, constants, 4)


def windows(width: int) -> Kernel:
    kinds = ("*i32", 2), "i32"
    return kernel(triton_states._ancestors, kinds, {"W": width, "NODES": 16}, 1)


NET = {"DK": 128, "DV": 128, "W": 4, "COLUMNS": triton_states.COLUMNS, "TILED": False}
"""A gated delta net's constants."""


def enter(size: int, dtype: str, pages: str | None = None, normed: bool = False) -> Kernel:
    number, scale = f"*{dtype}", "*fp32" if pages else f"*{dtype}"
    norm = "*fp32" if normed else number
    kinds = number, (norm, 2), ("*fp32", 2), "*i32", number, (f"*{pages or dtype}", 2), (scale, 2)
    constants = {"HALF": size // 2, "NORMED": normed, "NARROW": pages is not None}
    return kernel(triton_layers._enter, (*kinds, ("i32", 4), "fp32"), constants, 1)


def model(
    name: str, arch: int, dtype: str, hidden: int, group: int, size: int, pages: str | None = None
) -> dict[str, Kernel]:
    """Every binary that a model's rounds need, by name."""
    cases = {
        f"attend {name}, {lines} lines": attention(dtype, group, size, lines, arch, pages)
        for lines in attention_lines(group)
    }
    wide = triton.next_power_of_2(hidden)
    return cases | {
        f"merge {name}": merge(dtype, size),
        f"norm {name}": norm(wide, dtype),
        f"norm of heads {name}": norm(size, dtype),
        f"gate {name}": gate(dtype),
        f"add and norm {name}": add_norm(wide, dtype),
        f"rotate {name}": rotate(size // 2, dtype),
        f"enter {name}": enter(size, dtype, pages),
        f"enter with norms {name}": enter(size, dtype, pages, normed=True),
        f"move {name}": moved(dtype, size, pages is not None),
    }


def matrix(arch: int) -> dict[str, Kernel]:
    """All binaries for an architecture, by name: an 8B shape (its draft head has the same), the
    default model, float32, float8 pages, windows with a softcap, Gemma's wide heads, gpt-oss's
    sinks; and what the choice needs.
    """
    return {
        **model("8b", arch, "bf16", 4096, 4, 128),
        **model("8b float8 pages", arch, "bf16", 4096, 4, 128, "fp8e4nv"),
        **model("135m", arch, "bf16", 576, 3, 64),
        **model("135m float32", arch, "fp32", 576, 3, 64),
        **{
            f"attend 8b with window and cap, {lines} lines": attention(
                "bf16", 4, 128, lines, arch, cap=True
            )
            for lines in attention_lines(4)
        },
        **{
            f"attend gemma, {lines} lines": attention("bf16", 4, 256, lines, arch, cap=True)
            for lines in attention_lines(4)
        },
        **{
            f"attend gpt-oss, {lines} lines": attention("bf16", 8, 64, lines, arch, sinks=True)
            for lines in attention_lines(8)
        },
        "gelu gate": gate("bf16", gelu=True),
        "clamped gate": gate("bf16", clamped=True),
        **{
            f"attend latents, {lines} lines": attention("bf16", 16, 576, lines, arch, values=512)
            for lines in (16, 32)
        },
        **{f"experts, tiles of {rows}": grouped("bf16", rows) for rows in (16, 32, 64)},
        "experts in float8, tiles of 16": grouped("bf16", 16, "fp8e4nv"),
        "experts with biases, tiles of 16": grouped("bf16", 16, biased=True),
        **{f"4 bits, {rows} rows": few_bits("bf16", rows, 4, zeros=True) for rows in (16, 32)},
        "float8 weights, 16 rows": few_bits("bf16", 16, 1),
        "4 bits without zero points, 16 rows": few_bits("bf16", 16, 4),
        "4 bits in float16, 32 rows": few_bits("fp16", 32, 4, zeros=True),
        "4 bits in an order, 32 rows": few_bits("bf16", 32, 4, zeros=True, ordered=True),
        "4 bits in groups of 32, 32 rows": few_bits("bf16", 32, 4, block=32),
        **{f"8 bits, {rows} rows": few_bits("bf16", rows, 8) for rows in (16, 32)},
        "8 bits with zero points, 32 rows": few_bits("bf16", 32, 8, zeros=True),
        "E4M3, 16 rows": few_bits("bf16", 16, 1),
        "E4M3, 32 rows": few_bits("bf16", 32, 1),
        "4 bits with a gate, 16 rows": few_bits("bf16", 16, 4, zeros=True, splits=1, gated=True),
        "8 bits with a gate, 16 rows": few_bits("bf16", 16, 8, zeros=True, splits=1, gated=True),
        "E4M3 with a gate, 16 rows": few_bits("bf16", 16, 1, splits=1, gated=True),
        "4 bits with a gate, split, 16 rows": few_bits("bf16", 16, 4, zeros=True, gated=True),
        "widen 4 bits": widened("bf16", 4, zeros=True),
        "widen 8 bits": widened("bf16", 8),
        "widen E4M3": widened("bf16", 1),
        **{f"choose {dtype}": choice(dtype) for dtype in ("bf16", "fp32")},
        "edit": edit(masked=False),
        "edit under a grammar": edit(masked=True),
        "cut": cut(),
        **{f"prepare {nodes} nodes": prepared(nodes, 64) for nodes in (1, 8, 64)},
        "near": near(),
        **{f"walk {nodes} nodes": walked(nodes, 128_256) for nodes in (1, 8, 64)},
        **{f"resume {n} nodes of a chain": resumed(n, 1, 8) for n in (1, 8)},
        **{f"resume {n} nodes of a tree {w} wide": resumed(n, w, 8) for n, w in ((16, 4), (64, 8))},
        "leave a chain": left(8, 1, 8),
        "leave a tree 8 wide": left(64, 8, 8),
        "follow": followed("bf16", 32),
        "rotation": turned(64),
        **{f"descend {width} wide": descended("bf16", width) for width in (4, 8, 16)},
        **{f"children {width} wide": chosen_children(width) for width in (1, 8)},
        "draft inputs": draft_inputs("bf16", 4096),
        "candidates chain": candidates("bf16", chain=True),
        "candidates 4 wide": candidates("bf16", chain=False),
        "score a gated delta net": scored("bf16", known=False),
        "a prompt through a gated delta net": scored("bf16", known=True),
        "advance a gated delta net": advanced("bf16"),
        "shift a gated delta net's window": shifted("bf16", 4),
        "short convolution": convolved(3),
        "shift a short convolution's window": shifted("fp32", 3),
        "windows of nodes": windows(4),
        "norm and gate of a gated delta net": gated_norm(128, "bf16"),
        "grow chain, 32k tokens": grown(1, 32_000),
        "grow 4 wide, 128k tokens": grown(4, 128_256),
    }


HEAD = """# Kernels on a GPU, as compiled

Written by `python -m bench.compile_kernels --table bench/out/gpu-kernels.md`; compiling needs no
device. Triton {version} compiles every binary that rounds of these models need, for
compute capabilities 8.0 (A100), 9.0 (H100, H200) and 10.0 (B200). Registers are a thread's, shared
memory a program's; programs are those that fit on a multiprocessor at once by both; a spill would
be a stack or local memory. Seconds are of one core of the machine that wrote this.

"""


def table() -> str:
    """The document: one line for each kernel and architecture."""
    heads = (
        "kernel",
        "sm",
        "registers",
        "spills",
        "shared, KB",
        "programs",
        "tensor cores",
        "seconds",
    )
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    total = dict.fromkeys(ARCHS, 0.0)
    cases = {arch: matrix(arch) for arch in ARCHS}
    for name in cases[ARCHS[0]]:
        for arch in archs_of(name, ARCHS):
            usage = cases[arch][name].compiled(arch)
            total[arch] += usage["seconds"]
            numbers = (
                *(usage["REG"], usage["STACK"] + usage["LOCAL"], f"{usage['shared'] / 1024:.1f}"),
                *(usage["programs"], "yes" if usage["tensor_cores"] else "", usage["seconds"]),
            )
            lines.append(f"| {name} | {arch} | " + " | ".join(map(str, numbers)) + " |")
    sums = ", ".join(f"{seconds:.0f} s for sm_{arch}" for arch, seconds in total.items())
    text = HEAD.format(version=triton.__version__) + "\n".join(lines)
    return text + f"\n\nTogether {sums}.\n"


def archs_of(name: str, archs: Iterable[int]) -> list[int]:
    """float8 (E4M3) came with compute capability 8.9."""
    return [arch for arch in archs if arch >= 89 or "float8" not in name]


TURNS = ("rotation", *(f"prepare {nodes} nodes" for nodes in (1, 8, 64)))
PARKED = {(name, arch): 32 for name in TURNS for arch in ARCHS}
PARKED["attend 8b with window and cap, 64 lines", 80] = 8
"""Bytes on the stack. What turns positions has the table of libdevice's cosine for angles above
105,615, a few of a context's first frequencies; 22 to 31 registers are taken, so nothing is spilt.
The cap at 64 lines spills two registers on sm_80; with half the keys a turn none, but then layers
without a cap, which spill none, would have half as well, and no such device was there to time it.
"""

LATENTS = "attend latents, 32 lines"
ALONE = {("attend 135m float32, 64 lines", 100), *((LATENTS, arch) for arch in ARCHS)}
"""One program of eight warps, not two of four: those spill 40 bytes, with more keys a turn more.
The 512 numbers of a latent's value leave 32 lines 180 registers.
"""

MODELS = "8b", "8b with window and cap", "135m", "135m float32"


def wrong(arch: int, usage: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What is not as it should be in one architecture's binaries, {name: what `compiled` says}.

    None spills beyond what is parked. A model has at most eight binaries of attention, for rows of
    any size (25 when tiles and parts were constants): two sets (a head of other heads than its
    target's, or layers with a window beside layers without) and one that merges for each. Attention
    fetches ahead and multiplies on tensor cores, two programs at a time.
    """
    if len(usage) <= 20:
        yield f"{len(usage)} binaries are too few"
    for name, line in usage.items():
        if (spilt := line["STACK"] + line["LOCAL"]) and PARKED.get((name, arch)) != spilt:
            yield f"{name} has {spilt} bytes on its stack"
    for model in MODELS:
        count = len([name for name in usage if name.startswith(f"attend {model},")])
        if 2 * (count + 1) > 8 or not count:
            yield f"{count} attention binaries of {model}"
    attention = {name: line for name, line in usage.items() if name.startswith("attend")}
    if len(attention) < 12:
        yield f"{len(attention)} attention binaries are too few"
    for name, line in attention.items():
        few_keys = "float32" in name or "gemma" in name or "latents" in name  # 16 of 576 numbers
        if line["programs"] < (1 if (name, arch) in ALONE else 2):
            yield f"{name}: {line['programs']} programs at a time"
        if not line["tensor_cores"] or line["async_copies"] < (20 if few_keys else 70):
            yield f"{name} does not fetch ahead, or multiplies without tensor cores"


def check() -> int:
    """0 where nothing is wrong; prints each architecture when it is done, minutes apart."""
    faults = 0
    for arch in ARCHS:
        cases = matrix(arch)
        usage = {name: cases[name].compiled(arch) for name in cases if archs_of(name, [arch])}
        found = [f"sm_{arch}: {what}" for what in wrong(arch, usage)]
        lines = [*found, f"sm_{arch}: {len(usage)} binaries, {len(found)} faults"]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        faults += len(found)
    return min(faults, 1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--arch", default="90")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--check", action="store_true", help="say what is wrong, and fail")
    arguments = parser.parse_args()
    if arguments.check:
        return check()
    if arguments.table:
        arguments.table.write_text(table())
        return 0
    cases = {arch: matrix(arch) for arch in map(int, arguments.arch.split(","))}
    for name in arguments.names or list(next(iter(cases.values()))):
        for arch in archs_of(name, cases):
            record = {"kernel": name, "arch": arch} | cases[arch][name].compiled(arch)
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    ended(main)
