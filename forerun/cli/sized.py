"""`forerun bench --random-weights`: steps at a model's size, without a server."""

import argparse
from dataclasses import replace
from pathlib import Path
from time import strftime

from forerun.build.device import choose_device
from forerun.cli.argument_types import GRID, refuse_beside, refuse_load
from forerun.cli.console import emit_json, out
from forerun.errors import ConfigError
from forerun.machine import stamp
from forerun.measure.files import check_folder, write
from forerun.measure.sized import StepSweep, lines, measure
from forerun.measure.workload import LEVELS
from forerun.options.config import NATIVE_DTYPES, EngineConfig
from forerun.options.flags import configured


def main(arguments: argparse.Namespace) -> int:
    """Run `forerun bench --random-weights`: 0, or 1 where it does not fit into memory. Raises
    ConfigError for another executor than torch.
    """
    if arguments.out:
        check_folder(Path(arguments.out))
    refuse_load(arguments, "--random-weights")
    others = {"prompts": None, "repeats": 3, **GRID}
    refuse_beside(arguments, "beside --random-weights", others)
    config = configured(EngineConfig, arguments)
    if config.executor not in ("auto", "torch"):
        raise ConfigError(
            f"--random-weights runs steps of the torch executor, not of {config.executor}: leave "
            f"--executor out, or measure a server with --launch --executor {config.executor}."
        )
    device, dtype = choose_device(replace(config, executor="torch")).device, config.dtype
    on_cuda = device != "cpu"
    if dtype in ("auto", *NATIVE_DTYPES):
        dtype = "bfloat16" if on_cuda else "float32"
    wanted = StepSweep(batches=tuple(sorted(arguments.concurrency or LEVELS)))
    if not on_cuda:  # A rehearsal: what it prints is the CPU's.
        wanted = replace(wanted, context=64, rounds=2, copy_bytes=1 << 24)
    shape = arguments.random_weights
    result = measure(shape, device, dtype, wanted)
    result |= {"machine": stamp(), "time": strftime("%Y-%m-%d %H:%M:%S")}
    if arguments.json:
        emit_json(result)
    else:
        for line in lines(result):
            out.print(line, soft_wrap=True)
    if arguments.out:
        write(Path(arguments.out), shape, result)
    return 1 if "error" in result else 0
