"""t(k) of llama.cpp or ik_llama.cpp, whichever this environment has: one llama_decode of k tokens
behind `context` cached ones. JSON on stdout.

Run by bench/steps.py --peers in the peer's own environment. ik_llama.cpp's wheel makes logits of
the last token alone where all are wanted, so that steps of several rows are a little
flattered.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any


def arguments() -> dict[str, Any]:
    """The arguments of `main`, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "facts",
        type=json.loads,
        help='JSON: {"path": GGUF, "context": N, "threads": N, "rounds": N, "rows": [N, ...]}',
    )
    facts: dict[str, Any] = parser.parse_args().facts
    return facts


if __name__ == "__main__":
    arguments()  # --help needs none of the packages below, which the peer's environment has.

try:
    import llama_cpp as lib
except ModuleNotFoundError:
    from ik_llama_cpp import _ctypes_api as lib


def forgetter(state: object) -> Callable[[int], None]:
    """What forgets all positions from one on."""
    if hasattr(lib, "llama_get_memory"):
        memory = lib.llama_get_memory(state)
        return lambda first: lib.llama_memory_seq_rm(memory, 0, first, -1)
    remove = lib._lib.llama_kv_cache_seq_rm
    remove.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
    return lambda first: remove(state, 0, first, -1)


def main(path: str, context: int, threads: int, rounds: int, rows: list[int]) -> None:
    """Milliseconds per count of rows, `rounds` of each, counts in turn."""
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
    params.n_threads = params.n_threads_batch = threads
    state = lib.llama_init_from_model(model, params)
    forget = forgetter(state)
    batch = lib.llama_batch_init(512, 0, 1)

    def decode(count: int, start: int, logits: bool) -> None:
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = 100 + i, start + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, logits
        if code := lib.llama_decode(state, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    decode(context, 0, False)
    times: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(rounds):
        for count in rows:
            begin = time.perf_counter()
            decode(count, context, True)
            lib.llama_get_logits_ith(state, count - 1)
            times[count].append(1e3 * (time.perf_counter() - begin))
            forget(context)
    sys.stdout.write(json.dumps(times) + "\n")


TELL = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
quiet = TELL(lambda *_: None)
"""llama.cpp tells much on stderr."""


if __name__ == "__main__":
    if hasattr(lib, "llama_log_set"):
        lib.llama_log_set(quiet, ctypes.c_void_p(0))
    main(**arguments())
