"""The processes of the other ranks, from rank 0's side: started, monitored, and ended together.

If a rank ends for any reason, or is stopped (SIGSTOP) for long, all of them are ended, because
their common step cannot continue without it. The system reports a child's end or stop to its parent
(child.py). The server monitors rank 0 in the same way, if it runs in a process of its own.
"""

import ctypes
import logging
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from typing import NoReturn

from forerun import child
from forerun.errors import (
    ConfigError,
    EngineError,
    ForerunError,
    MemoryPlanError,
    ModelError,
    RankError,
)
from forerun.executors.torch.group import Waits
from forerun.executors.torch.parallel.channel import Channel, RankMessage
from forerun.executors.torch.parallel.start import RankStart

log = logging.getLogger("forerun.executors.torch")

START_SECONDS = 1800.0
"""Seconds in which a rank must have read its weights, or it is given up."""
END_SECONDS = 5.0
"""Seconds within which a rank must end after the message that ends it."""
LOOK = 0.05
"""Seconds between two checks for an answer while ranks start."""
LOST_LOOKS = 6
"""A message that all ranks wait for counts as lost once each has polled this often (group.LOOK).
One rank sends it to another without computing anything: in 4,883 waits it took .18 seconds at
worst, mostly less than a millisecond.
"""

COMMAND = (sys.executable, "-m", "forerun.executors.torch.parallel.rank")

_ERRORS = {kind.__name__: kind for kind in (ConfigError, ModelError, MemoryPlanError, EngineError)}


class RankProcess:
    """One other rank, and the thread that starts it and waits for its end.

    ended   called once, on that thread, with the reason when it has ended
    shared  the descriptor of a file that it inherits; its number is the last argument of the
            rank's command
    failed  its last message, if it failed with an exception
    """

    def __init__(
        self,
        start: RankStart,
        command: Sequence[str],
        ended: Callable[["RankProcess", str], None],
        shared: int,
    ) -> None:
        self.rank, self._ended, self._shared = start.tp.rank, ended, shared
        self._start, self._command = start, command
        own, self._other = Pipe()
        self.channel, self._lock = Channel(own), threading.Lock()
        self._heard: list[RankMessage] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self.failed: RankMessage | None = None
        self._started = threading.Event()
        self._fault: OSError | None = None
        # Runs as long as the process: Linux ends a rank with the thread that started it.
        self._thread = threading.Thread(
            target=self._run, name=f"forerun-rank-{self.rank}", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._fault is not None:
            raise EngineError(f"rank {self.rank} cannot be started: {self._fault}")

    @property
    def pid(self) -> int:
        """Id of its process."""
        assert self._process is not None
        return self._process.pid

    def answer(self) -> RankMessage | None:
        """Return the oldest unread message of the rank; None if there is none. Does not wait."""
        with self._lock:
            self._hear()
            return self._heard.pop(0) if self._heard else None

    def kill(self) -> None:
        """End its process with SIGKILL, also a stopped one. Does nothing if it has ended."""
        if self._process is not None:
            child.kill(self._process)

    def close(self) -> None:
        """Send the rank the message to end, wait END_SECONDS, then kill it; close the channel.
        Idempotent.
        """
        self._closing = True
        with suppress(OSError):
            self.channel.send(RankMessage("end"))
        self._thread.join(END_SECONDS)
        self.kill()
        self._thread.join()
        self.channel.close()

    def _run(self) -> None:
        given = self._other.fileno(), self._shared
        command = [*self._command, *map(str, given)]
        try:
            # Rank 0 handles the signals of the terminal.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                start_new_session=True,
            )
        except OSError as error:
            self._fault = error
            return
        finally:
            self._other.close()
            self._started.set()
        with suppress(OSError):
            self.channel.send(RankMessage("start", self._start.facts()))
        why = self._until_it_ends(self._process)
        if not self._closing:
            self._ended(self, why)

    def _until_it_ends(self, process: "subprocess.Popen[bytes]") -> str:
        """Wait for the rank's end and return the reason."""
        stopped = child.wait(process)
        if stopped:
            return f"was stopped by {_signal(stopped)}"
        with self._lock:
            self._hear()
        if self.failed is not None:
            return f"failed: {self.failed.facts['message']}"
        if process.returncode >= 0:
            return f"ended with exit code {process.returncode}"
        return f"was ended by {_signal(-process.returncode)}"

    def _hear(self) -> None:
        with suppress(OSError, EOFError, ValueError):
            while (message := self.channel.poll()) is not None:
                if message.kind == "failed":
                    self.failed = message
                else:
                    self._heard.append(message)


def _signal(number: int) -> str:
    return signal.Signals(number).name


class Ranks:
    """All ranks other than this one, which is rank 0.

    waits  of all ranks: which are within a collective
    fault  why they cannot continue, as a sentence; None = no fault
    """

    def __init__(self, starts: Sequence[RankStart], command: Sequence[str] = COMMAND) -> None:
        self._changed = threading.Condition()
        self.fault: str | None = None
        self._error: ForerunError | None = None
        self._failed: Callable[[str], None] = lambda _: None
        self._ranks: list[RankProcess] = []
        own = replace(starts[0].tp, rank=0)
        try:
            with tempfile.TemporaryFile() as file:
                file.write(bytes(Waits.size_of(own)))
                file.flush()
                self.waits = Waits(file.fileno(), own)
                for start in starts:
                    self._ranks.append(RankProcess(start, command, self._ended, file.fileno()))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ids of their processes, from rank 1 on."""
        return [rank.pid for rank in self._ranks]

    def watch(self, failed: Callable[[str], None]) -> None:
        """Call `failed` with the fault, once, from some thread, when there is one."""
        with self._changed:
            self._failed = failed
            fault = self.fault
        if fault is not None:
            failed(fault)

    def send(self, message: RankMessage) -> None:
        """Send a message to every rank. Raises RankError if one has ended; then all are ended."""
        self.check()
        try:
            for rank in self._ranks:
                rank.channel.send(message)
        except OSError as error:
            self.give_up(error)

    def answers(self, kind: str, seconds: float = START_SECONDS) -> list[RankMessage]:
        """Return each rank's answer, by rank. Raises a rank's own exception, and RankError if one
        has ended or sends nothing for `seconds`.
        """
        found = []
        for rank in self._ranks:
            for _ in range(int(seconds / LOOK) + 1):
                message = rank.answer()
                if message is not None and message.kind == kind:
                    found.append(message)
                    break
                self.check()
                with self._changed:
                    self._changed.wait(LOOK)
            else:
                self._end(
                    f"rank {rank.rank} did not come up within {seconds:g} seconds: see whether its "
                    "share of the weights can be read from where they are, and its device is free.",
                    None,
                )
                self.check()
        return found

    def check(self) -> None:
        """Raise RankError, or the exception of a rank, if a fault is known; does not search for
        one.
        """
        if self.fault is not None:
            raise self._error or RankError(self.fault)

    def check_waits(self) -> None:
        """Raise RankError if there is a fault, or all ranks wait for a message that was lost. A
        rank that is merely slow is not a fault.
        """
        self.check()
        if self.waits.silent() >= LOST_LOOKS:
            raise RankError(
                f"all {1 + len(self._ranks)} ranks of the tensor-parallel group wait for each "
                "other, and nothing comes: one of them has lost a message, perhaps for lack of "
                f"memory. Collectives that each has entered: {self.waits.entered()}."
            )

    def give_up(self, error: BaseException) -> NoReturn:
        """End the other ranks, since rank 0 is out of step with them, and raise RankError with the
        cause.
        """
        if isinstance(error, RankError):
            self._end(str(error), None)
        with self._changed:
            # If a rank ended, that is the cause of this one's error.
            self._changed.wait_for(lambda: self.fault is not None, 1.0)
        self._end(f"rank 0 failed: {error or type(error).__name__}", None)
        raise RankError(self.fault or "") from error

    def close(self) -> None:
        """End all ranks, by message or by SIGKILL. Idempotent."""
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()

    def _ended(self, rank: RankProcess, why: str) -> None:
        """Handle the end of a rank. Runs on its thread."""
        kind = _ERRORS.get(rank.failed.facts["error"]) if rank.failed else None
        fault = f"rank {rank.rank} of the tensor-parallel group {why.rstrip('.')}."
        self._end(fault, kind(fault) if kind else None)

    def _end(self, fault: str, error: ForerunError | None) -> None:
        with self._changed:
            first = self.fault is None
            if first:
                self.fault, self._error = fault, error
                log.error("%s", fault)
            failed = self._failed
            self._changed.notify_all()
        for rank in self._ranks:
            rank.kill()
        if first:
            failed(fault)


def end_with_parent() -> None:
    """Make this rank end when the thread that started it does, on Linux, at any point. On other
    systems it ends when it next sends or receives a message.
    """
    if sys.platform == "linux":
        die_with_parent = 1  # PR_SET_PDEATHSIG, prctl(2).
        ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
