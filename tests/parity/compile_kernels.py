"""Compiles our Triton kernels for NVIDIA's GPUs, which needs none; prints one JSON line each.

    python -m tests.parity.compile_kernels [--arch 80,90,100] [NAME ...]
    python -m tests.parity.compile_kernels --table docs/gpu-kernels.md

A process of its own: in the tests' process the same modules are interpreted.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forerun.executors.torch import triton_attention, triton_choice, triton_layers
from forerun.executors.torch.captured.sizes import NODES
from forerun.executors.torch.geometry import tile_nodes

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ARCHS = (80, 90, 100)
REGISTERS = 65_536
"""Of a multiprocessor, on all of them."""
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of a multiprocessor that programs may take, a kilobyte each beside."""


@dataclass(frozen=True)
class Kernel:
    """One binary: what the launcher would specialise, and how it would launch it."""

    function: object
    signature: dict
    constants: dict
    warps: int
    stages: int = 2

    def compiled(self, arch):
        """What the assembler says. Pointers and strides are multiples of 16, views are not."""
        names = self.function.arg_names
        views = {p.name for p in self.function.params if p.do_not_specialize_on_alignment}
        pointers = {n for n, kind in self.signature.items() if kind.startswith("*")} - views
        whole = [*pointers, *({"group_stride"} & self.signature.keys())]
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
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
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


def attention(dtype, gqa_group, size, lines, pages=None, special=False):
    number = f"*{dtype}"
    signature = {
        "queries": number,
        **dict.fromkeys(("keys", "values"), f"*{pages}" if pages else number),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32" if pages else number),
        **{"out": number, "found": "*fp32", "sums": "*fp32"},
        **dict.fromkeys(("tiles", "start", "kv_len", "table", "tree_intervals"), "*i32"),
        "position": "*i32",
        "group_stride": "i64",
        **dict.fromkeys(("table_stride", "scratch", "count", "nodes", "window"), "i32"),
        **{"scale": "fp32", "cap": "fp32"},
    }
    shape = triton_attention.shape_for(lines, 4 if dtype == "fp32" else 2)
    constants = {
        **{"GQA_GROUP": gqa_group, "E": size, "PAGE": 16, "LINES": lines},
        **{"NARROW": pages is not None, "WINDOWED": special, "CAPPED": special},
        "KEYS": shape.keys,
    }
    return Kernel(triton_attention._attend, signature, constants, 4, shape.stages)


def attention_lines(gqa_group):
    """Every count of lines that rows of any size need."""
    tiles = {tile_nodes(nodes, gqa_group) for nodes in (*NODES, 512)}
    return sorted({triton_attention.lines_for(tile * gqa_group) for tile in tiles})


def merge(dtype, size):
    signature = {
        **{"found": "*fp32", "sums": "*fp32", "out": f"*{dtype}"},
        **{"lines": "i32", "parts": "i32"},
    }
    constants = {"E": size, "PARTS": triton_attention.MOST_PARTS}
    return Kernel(triton_attention._merge, signature, constants, 2)


def choice():
    signature = {
        **{"logits": "*fp32", "seeds": "*i64", "positions": "*i32", "temperatures": "*fp32"},
        **{"best": "*fp32", "tokens": "*i32", "vocab": "i32", "chunks": "i32"},
    }
    return Kernel(triton_choice._choose, signature, {"CHUNK": triton_choice.CHUNK}, 8)


def pick(width):
    kinds = {
        **{"logits": "*fp32", "which": "*i64", "normalisers": "*fp32", "ids": "*i32"},
        **{"seeds": "*i64", "positions": "*i32", "temperatures": "*fp32"},
        **{"tokens": "*i32", "values": "*fp32", "count": "i32"},
    }
    return Kernel(triton_choice._pick, kinds, {"COUNT": 64, "WIDTH": width}, 1)


def layer(kernel, pointers, numbers, constants, warps, dtype="bf16"):
    signature = dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(numbers, "i32")
    fp32 = {name: "*fp32" for name in ("weight", "cos", "sin") if name in signature}
    fp32 |= {"eps": "fp32"} if "eps" in signature else {}
    return Kernel(kernel, signature | fp32, constants, warps)


def norm(wide, warps, dtype):
    numbers = ("row_stride", "head_stride", "width", "eps")
    pointers = ("x", "weight", "out")
    return layer(triton_layers._norm, pointers, numbers, {"WIDE": wide}, warps, dtype)


def gate(dtype, gelu=False):
    numbers = ("gate_stride", "up_stride", "width")
    pointers, constants = ("gate", "up", "out"), {"BLOCK": 1024, "GELU": gelu}
    return layer(triton_layers._gate, pointers, numbers, constants, 4, dtype)


def rotate(half, dtype):
    pointers, numbers = ("x", "cos", "sin", "out"), ("row_stride", "head_stride")
    return layer(triton_layers._rotate, pointers, numbers, {"HALF": half}, 1, dtype)


def write(size, dtype, pages=None):
    signature = {
        **dict.fromkeys(("keys", "values"), f"*{dtype}"),
        **dict.fromkeys(("to_keys", "to_values"), f"*{pages or dtype}"),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32" if pages else f"*{dtype}"),
        **dict.fromkeys(("key_stride", "value_stride", "slots", "begin"), "i32"),
    }
    constants = {"E": size, "NARROW": pages is not None}
    return Kernel(triton_layers._write, signature, constants, 1)


def model(name, dtype, hidden, group, size, pages=None):
    """Every binary that a model's rounds need, by name."""
    cases = {
        f"attend {name}, {lines} lines": attention(dtype, group, size, lines, pages)
        for lines in attention_lines(group)
    }
    wide = triton.next_power_of_2(hidden)
    return cases | {
        f"merge {name}": merge(dtype, size),
        f"norm {name}": norm(wide, 8 if wide >= 4096 else 4, dtype),
        f"norm of heads {name}": norm(size, 1, dtype),
        f"gate {name}": gate(dtype),
        f"rotate {name}": rotate(size // 2, dtype),
        f"write {name}": write(size, dtype, pages),
    }


def matrix():
    """All binaries, by name: an 8B shape (its draft head has the same), the default model, float32,
    float8 pages, windows with a softcap; and what the choice needs.
    """
    return {
        **model("8b", "bf16", 4096, 4, 128),
        **model("8b float8 pages", "bf16", 4096, 4, 128, "fp8e4nv"),
        **model("135m", "bf16", 576, 3, 64),
        **model("135m float32", "fp32", 576, 3, 64),
        **{
            f"attend 8b with window and cap, {lines} lines": attention(
                "bf16", 4, 128, lines, special=True
            )
            for lines in attention_lines(4)
        },
        "gelu gate": gate("bf16", gelu=True),
        "choose": choice(),
        "pick chain": pick(1),
        "pick 4 wide": pick(4),
    }


HEAD = """# Kernels on a GPU, as compiled

Written by `python -m tests.parity.compile_kernels --table docs/gpu-kernels.md`; nothing here was
run on a device. Triton {version} compiles every binary that rounds of these models need, for
compute capabilities 8.0 (A100), 9.0 (H100, H200) and 10.0 (B200). Registers are a thread's, shared
memory a program's; programs are those that fit on a multiprocessor at once by both; a spill would
be a stack or local memory. Seconds are of one core of the machine that wrote this.

"""


def table():
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
    for name, kernel in matrix().items():
        for arch in archs_of(name, ARCHS):
            found = kernel.compiled(arch)
            total[arch] += found["seconds"]
            numbers = (
                *(found["REG"], found["STACK"] + found["LOCAL"], f"{found['shared'] / 1024:.1f}"),
                *(found["programs"], "yes" if found["tensor_cores"] else "", found["seconds"]),
            )
            lines.append(f"| {name} | {arch} | " + " | ".join(map(str, numbers)) + " |")
    sums = ", ".join(f"{seconds:.0f} s for sm_{arch}" for arch, seconds in total.items())
    text = HEAD.format(version=triton.__version__) + "\n".join(lines)
    return text + f"\n\nTogether {sums}.\n"


def archs_of(name, archs):
    """float8 (E4M3) came with compute capability 8.9."""
    return [arch for arch in archs if arch >= 89 or "float8" not in name]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--arch", default="90")
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        arguments.table.write_text(table())
        return
    cases, archs = matrix(), [int(arch) for arch in arguments.arch.split(",")]
    for name in arguments.names or list(cases):
        for arch in archs_of(name, archs):
            found = {"kernel": name, "arch": arch} | cases[name].compiled(arch)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
