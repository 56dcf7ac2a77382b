"""Compiles our Triton kernels for Hopper, which needs no GPU; prints one JSON line per kernel.

A process of its own: in the tests' process the same modules are interpreted.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forerun.executors.torch import triton_attention, triton_choice, triton_layers

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(function, signature, constants, warps, stages):
    """What the assembler says of one kernel. Pointers and strides are multiples of 16."""
    names = function.arg_names
    whole = [n for n, kind in signature.items() if kind.startswith("*") or n == "group_stride"]
    source = ASTSource(
        function,
        signature | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    options = {"num_warps": warps, "num_stages": stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        output_tokens = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {
        key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", output_tokens)
    }
    return usage | {
        "shared": kernel.metadata.shared,
        "async_copies": len(re.findall(r"cp\.async\.c[ag]", kernel.asm["ptx"])),
        "tensor_cores": bool(re.search(r"wgmma|mma\.sync", kernel.asm["ptx"])),
    }


def attention(dtype, gqa_group, size, tile, parts, pages=None, special=False):
    number = f"*{dtype}"
    signature = {
        "queries": number,
        **dict.fromkeys(("keys", "values"), f"*{pages}" if pages else number),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32" if pages else number),
        "out": number if parts == 1 else "*fp32",
        "sums": number if parts == 1 else "*fp32",
        **dict.fromkeys(("tiles", "start", "kv_len", "table", "tree_intervals"), "*i32"),
        "position": "*i32",
        "group_stride": "i64",
        **dict.fromkeys(("table_stride", "scratch", "count", "window"), "i32"),
        **{"scale": "fp32", "cap": "fp32"},
    }
    narrow = dtype != "fp32"
    constants = {
        **{"GQA_GROUP": gqa_group, "E": size, "PAGE": 16, "TILE": tile, "PARTS": parts},
        **{"NARROW": pages is not None, "WINDOWED": special, "CAPPED": special},
        "LINES": max(16, triton.next_power_of_2(tile * gqa_group)),
        "KEYS": triton_attention.KEYS if narrow else triton_attention.KEYS // 2,
    }
    kernel = triton_attention._attend
    return compiled(kernel, signature, constants, 4, 3 if narrow else 2)


def merge(dtype):
    signature = {"parts": "*fp32", "sums": "*fp32", "out": f"*{dtype}", "lines": "i32"}
    return compiled(triton_attention._merge, signature, {"E": 128, "PARTS": 32}, 2, 2)


def choice():
    signature = {
        **{"logits": "*fp32", "seeds": "*i64", "positions": "*i32", "temperatures": "*fp32"},
        **{"best": "*fp32", "tokens": "*i32", "vocab": "i32", "chunks": "i32"},
    }
    return compiled(triton_choice._choose, signature, {"CHUNK": triton_choice.CHUNK}, 8, 2)


def pick():
    kinds = {
        **{"logits": "*fp32", "which": "*i64", "normalisers": "*fp32", "ids": "*i32"},
        **{"seeds": "*i64", "positions": "*i32", "temperatures": "*fp32"},
        **{"tokens": "*i32", "values": "*fp32", "count": "i32"},
    }
    return compiled(triton_choice._pick, kinds, {"COUNT": 64, "WIDTH": 4}, 1, 2)


def layer(kernel, pointers, numbers, constants, warps):
    signature = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(numbers, "i32")
    fp32 = {name: "*fp32" for name in ("weight", "cos", "sin") if name in signature}
    fp32 |= {"eps": "fp32"} if "eps" in signature else {}
    return compiled(kernel, signature | fp32, constants, warps, 2)


def norm():
    numbers = ("row_stride", "head_stride", "width", "eps")
    return layer(triton_layers._norm, ("x", "weight", "out"), numbers, {"WIDE": 4096}, 8)


def gate(gelu=False):
    numbers = ("gate_stride", "up_stride", "width")
    constants = {"BLOCK": 1024, "GELU": gelu}
    return layer(triton_layers._gate, ("gate", "up", "out"), numbers, constants, 4)


def rotate():
    pointers, numbers = ("x", "cos", "sin", "out"), ("row_stride", "head_stride")
    return layer(triton_layers._rotate, pointers, numbers, {"HALF": 64}, 1)


def write(pages="bf16"):
    narrow = pages != "bf16"
    signature = {
        **dict.fromkeys(("keys", "values"), "*bf16"),
        **dict.fromkeys(("to_keys", "to_values"), f"*{pages}"),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32" if narrow else "*bf16"),
        **dict.fromkeys(("key_stride", "value_stride", "slots", "begin"), "i32"),
    }
    return compiled(triton_layers._write, signature, {"E": 128, "NARROW": narrow}, 1, 2)


def main():
    cases = {
        "attend 8b, one node": lambda: attention("bf16", 4, 128, 1, 32),
        "attend 8b, tree": lambda: attention("bf16", 4, 128, 16, 1),
        "attend 135m": lambda: attention("bf16", 3, 64, 1, 32),
        "attend float32": lambda: attention("fp32", 3, 64, 2, 1),
        "attend 8b, float8 pages": lambda: attention("bf16", 4, 128, 1, 32, "fp8e4nv"),
        "attend 8b, tree, window and cap": lambda: attention("bf16", 4, 128, 16, 1, special=True),
        "gelu gate": lambda: gate(gelu=True),
        "write float8": lambda: write("fp8e4nv"),
        "merge": lambda: merge("bf16"),
        **{"choose": choice, "pick": pick},
        **{"norm": norm, "gate": gate, "rotate": rotate, "write": write},
    }
    wanted = sys.argv[1:] or list(cases)
    for name in wanted:
        sys.stdout.write(json.dumps({"kernel": name} | cases[name]()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
