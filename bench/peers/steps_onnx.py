"""t(k) of ONNX Runtime's MatMulNBits: the products of a step of k rows. JSON on stdout.

Run by bench/steps.py --peers in an environment with onnx and onnxruntime. Same shapes, bits
(4 with zero points in the layers, 8 in the head), groups of 32 and 8-bit activations as ours; the
numbers are random. Attention, norms and activations are left out.
"""

import argparse
import json
import sys
import time
from typing import Any


def arguments() -> dict[str, Any]:
    """The arguments of `main`, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "facts",
        type=json.loads,
        help='JSON: {"shapes": {...}, "threads": N, "rounds": N, "rows": [N, ...]}; shapes are the '
        "arguments of session() but for threads",
    )
    facts: dict[str, Any] = parser.parse_args().facts
    return facts


if __name__ == "__main__":
    arguments()  # --help needs none of the packages below, which the peer's environment has.

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper


def product(name: str, source: str, wide: int, out: int, bits: int) -> tuple[list[Any], object]:
    """Weights and node of one product [k,wide] x [wide,out]."""
    random = np.random.default_rng(0)
    groups, width = wide // 32, 32 * bits // 8
    weights = random.integers(0, 256, (out, groups, width), dtype=np.uint8)
    scales = (random.random(out * groups) / 100).astype(np.float32)
    zeros = np.full(out * ((groups * bits + 7) // 8), 0x88 if bits == 4 else 0x80, np.uint8)
    named = [(f"{name}.w", weights), (f"{name}.s", scales), (f"{name}.z", zeros)]
    tensors = [onnx.numpy_helper.from_array(array, label) for label, array in named]
    node = helper.make_node(
        "MatMulNBits",
        [source, *(label for label, _ in named)],
        [name],
        domain="com.microsoft",
        K=wide,
        N=out,
        bits=bits,
        block_size=32,
        accuracy_level=4,
    )
    return tensors, node


def session(layers: int, hidden: int, qkv: int, ffn: int, vocab: int, threads: int) -> Any:
    """All products of a step, one after the other as in the model."""
    tensors, nodes, outputs = [], [], []

    def add(name: str, source: str, wide: int, out: int, bits: int = 4) -> None:
        more, node = product(name, source, wide, out, bits)
        tensors.extend(more)
        nodes.append(node)
        outputs.append((name, out))

    for layer in range(layers):
        add(f"{layer}.qkv", "x", hidden, qkv)
        add(f"{layer}.o", "x", hidden, hidden)
        add(f"{layer}.gate_up", "x", hidden, 2 * ffn)
        add(f"{layer}.down", "y", ffn, hidden)
    add("head", "x", hidden, vocab, bits=8)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "products",
        [info("x", TensorProto.FLOAT, ["k", hidden]), info("y", TensorProto.FLOAT, ["k", ffn])],
        [info(name, TensorProto.FLOAT, ["k", out]) for name, out in outputs],
        tensors,
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return ort.InferenceSession(model.SerializeToString(), options)


def main(shapes: dict[str, int], threads: int, rounds: int, rows: list[int]) -> None:
    """Milliseconds per count of rows, `rounds` of each, counts in turn."""
    run = session(**shapes, threads=threads)
    random = np.random.default_rng(1)
    times: dict[int, list[float]] = {count: [] for count in rows}
    inputs = {
        count: {
            "x": random.standard_normal((count, shapes["hidden"])).astype(np.float32),
            "y": random.standard_normal((count, shapes["ffn"])).astype(np.float32),
        }
        for count in rows
    }
    for step in range(rounds + 1):
        for count in rows:
            begin = time.perf_counter()
            run.run(None, inputs[count])
            if step:  # The first also packs.
                times[count].append(1e3 * (time.perf_counter() - begin))
    sys.stdout.write(json.dumps(times) + "\n")


if __name__ == "__main__":
    main(**arguments())
