"""The process of a rank other than 0: runs the steps that rank 0's messages describe."""

import logging
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.tensor_parallel import RankCheckpoint
from forerun.errors import EngineError
from forerun.executors.state_steps import StateStep
from forerun.executors.torch.attention.states import TorchStateStep
from forerun.executors.torch.group import Group, Waits
from forerun.executors.torch.model_runner import ModelRunner, TorchRound
from forerun.executors.torch.parallel.channel import Channel, RankMessage
from forerun.executors.torch.parallel.processes import end_with_parent
from forerun.executors.torch.parallel.rounds import RankRounds
from forerun.executors.torch.parallel.start import RankStart
from forerun.executors.torch.parallel.step import SharedStep, Since, agree, complete_round
from forerun.executors.torch.sizes import Size


def opened(path: Path, context: int | None = None) -> Checkpoint:
    """Open the checkpoint at a path, for texts of up to `context` tokens. Raises ModelError if it
    is damaged or not supported.
    """
    return FolderCheckpoint(path, context) if path.is_dir() else GgufCheckpoint(path, context)


def main(argv: list[str]) -> int:
    """Serve rank 0 until it sends `end` or closes the connection. argv: the file descriptor of the
    socket to rank 0, and that of a file that all ranks share.
    """
    end_with_parent()
    channel = Channel(Connection(int(argv[1])))
    try:
        serve(channel, int(argv[2]))
    except EOFError:
        return 0
    except Exception as error:
        logging.getLogger("forerun").debug("a rank failed", exc_info=True)
        facts = {"error": type(error).__name__, "message": str(error) or "no memory"}
        channel.send(RankMessage("failed", facts))
        return 1
    return 0


def serve(channel: Channel, shared: int) -> None:
    """Start with rank 0's first message and run its steps until it sends `end`. shared: descriptor
    of Waits' file. Raises EOFError if rank 0 has ended, EngineError for an unknown message, and the
    exceptions of opening the checkpoint.
    """
    start = RankStart.of(channel.receive().facts)
    if start.threads:
        torch.set_num_threads(start.threads)
    checkpoint = opened(Path(start.path), start.limits.context)
    channel.send(RankMessage("here", start.identity()))
    _expect(channel, "meet")
    store = TCPStore("127.0.0.1", start.port, start.tp.size, is_master=False)
    waits = Waits(shared, start.tp)
    group = Group(store, start.tp, torch.device(start.options.device), waits)
    part = RankCheckpoint(checkpoint, start.tp)
    runner = ModelRunner(part, start.limits, start.options, group)
    channel.send(RankMessage("ready", {"device": str(runner.device)}))
    _expect(channel, "agree")
    agree(runner, group)
    last: TorchStateStep | None = None
    rounds: RankRounds | None = None
    while (message := channel.receive()).kind != "end":
        if message.kind != "step":
            raise EngineError(f"rank 0 asks for {message.kind!r}, which is unknown here")
        facts, arrays = message.facts, dict(message.arrays)
        Since.of(arrays).follow(runner, last)
        if facts["size"] is None:
            last = run(runner, group, SharedStep.of(arrays, facts["top"])).states
        else:
            rounds = rounds or RankRounds(runner, facts["overlap"])
            rounds.launch(Size(*facts["size"]), arrays)
    group.close()


def run(runner: ModelRunner, group: Group, step: SharedStep) -> TorchRound:
    """Run one step of rank 0's: the forward pass, and the parts of its results that rank 0 needs
    from all ranks.
    """
    way: TorchStateStep | None = None
    if runner.states is not None:
        ends = dict(step.ends.tolist())
        way = runner.states.way_of(StateStep(step.plan, step.trees, {}, ends))
    round = runner.run(step.plan, step.trees, step.nodes, step=way)
    complete_round(runner, group, round, step)
    return round


def _expect(channel: Channel, kind: str) -> None:
    message = channel.receive()
    if message.kind == "end":
        raise EOFError
    if message.kind != kind:
        raise EngineError(f"rank 0 says {message.kind!r} where {kind!r} is next")


if __name__ == "__main__":
    status = main(sys.argv)
    sys.stdout.flush()
    os._exit(status)  # Skips the cleanup of libraries, which takes seconds.
