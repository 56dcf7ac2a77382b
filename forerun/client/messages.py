"""Messages between a server and an engine in a process of its own: typed values as msgpack.

One message is one frame of multiprocessing.connection: four bytes of length, then msgpack. Only
Forerun's own two processes ever read it.
"""

from typing import Any

import msgspec
import numpy as np

from forerun.constrain.grammar import Grammar
from forerun.engine.request import Delta, Request
from forerun.engine.stats import Stats
from forerun.errors import (
    BusyError,
    ConfigError,
    ContextError,
    DownloadError,
    EngineError,
    ForerunError,
    MemoryPlanError,
    ModelError,
    RankError,
    RequestError,
    WorkerError,
)
from forerun.options.config import EngineConfig
from forerun.types import Ints, RequestId


class Problem(msgspec.Struct):
    """A ForerunError, or the ImportError of an extra that is not installed.

    kind    name of its class, or of the nearest above it that all know
    fields  its attributes beside the message
    """

    kind: str
    message: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: ForerunError | ImportError) -> "Problem":
        """Return the error as a value that crosses between processes: its nearest class that both
        sides know, its message and its attributes.
        """
        if isinstance(error, ImportError):
            return cls("ImportError", str(error), {"name": error.name})
        names = (kind.__name__ for kind in type(error).__mro__)
        kind = next(name for name in names if name in _KINDS)
        return cls(kind, str(error), dict(vars(error)))

    def error(self) -> ForerunError | ImportError:
        """Return the error again, of the class that `kind` names."""
        if self.kind == "ImportError":
            return ImportError(self.message, name=self.fields["name"])
        made = _KINDS[self.kind](self.message)
        vars(made).update(self.fields)
        return made


_KINDS: dict[str, type[ForerunError]] = {
    kind.__name__: kind
    for kind in (
        ForerunError,
        ModelError,
        DownloadError,
        RequestError,
        ContextError,
        BusyError,
        WorkerError,
        MemoryPlanError,
        ConfigError,
        EngineError,
        RankError,
    )
}


# --- to the engine ---------------------------------------------------------------------------


class Start(msgspec.Struct, tag=True):
    """The first message: what to load. options: of the program that loads it."""

    config: EngineConfig
    options: dict[str, Any]


class Submit(msgspec.Struct, tag=True):
    """Engine.submit. The request's grammar is the number of a `Compile`."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """Engine.abort."""

    request: RequestId


class Compile(msgspec.Struct, tag=True):
    """Compile a grammar and keep it under the number `call`, until `Forget`."""

    call: int
    grammar: Grammar
    client: str


class Forget(msgspec.Struct, tag=True):
    """The end of a grammar: no request will use it any more."""

    grammar: int


class ForgetPrefixes(msgspec.Struct, tag=True):
    """Forget all pages that no running sequence holds."""


class Describe(msgspec.Struct, tag=True):
    """Engine.stats and Engine.describe."""

    call: int


class Shutdown(msgspec.Struct, tag=True):
    """End all requests, release the model, end the process."""


# --- from the engine -------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True):
    """The model is loaded. Fields as in Loaded; facts: what runs, in sentences for people."""

    name: str
    context: int
    config: EngineConfig
    info: dict[str, Any]
    sampling: dict[str, float]
    facts: dict[str, str]


class Loading(msgspec.Struct, tag=True, frozen=True):
    """The progress of loading: `done` of `total`, in bytes or pieces, of `what` is named."""

    what: str
    done: int
    total: int

    def sentence(self) -> str:
        """Return the progress as text for users; without a share if the total is unknown."""
        return f"{self.what}, {100 * self.done // self.total} %" if self.total else self.what


class NotLoaded(msgspec.Struct, tag=True):
    """It cannot be loaded; the process ends."""

    problem: Problem


class Condition(msgspec.Struct, frozen=True):
    """The state of an engine. See the properties of Engine of the same names.

    step_began  on the monotonic clock, which all processes of a machine share
    """

    alive: bool = True
    fault: str | None = None
    step_began: float | None = None


class Deltas(msgspec.Struct, tag=True):
    """The deltas of one step, or of several where this side was behind; a sign of life where there
    are none.

    condition  of the engine when this was sent
    """

    deltas: list[Delta]
    condition: Condition


class Refused(msgspec.Struct, tag=True):
    """The exception of `Engine.submit`."""

    request: RequestId
    problem: Problem


class Compiled(msgspec.Struct, tag=True):
    """Answers Compile."""

    call: int
    unenforced: tuple[str, ...]


class Description(msgspec.Struct, tag=True):
    """Answers Describe: what Engine.stats and, as `about`, Engine.describe say."""

    call: int
    stats: Stats
    about: dict[str, Any]


class Lost(msgspec.Struct, tag=True):
    """A process that shares the model is gone: see Engine.on_rank_lost. problem: a RankError."""

    problem: Problem


class Failed(msgspec.Struct, tag=True):
    """Answers a call that raised."""

    call: int
    problem: Problem


ToEngine = Start | Submit | Abort | Compile | Forget | ForgetPrefixes | Describe | Shutdown
FromEngine = Ready | Loading | NotLoaded | Deltas | Refused | Compiled | Description | Failed | Lost


def _plain(value: Any) -> Any:
    """Return token ids as bytes, NumPy's numbers as Python's."""
    if isinstance(value, np.ndarray):
        return np.asarray(value, np.int32).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not cross between processes")


def _array(kind: Any, value: Any) -> Ints:
    return np.frombuffer(value, np.int32)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
"""Bytes of a message. Raises UnicodeEncodeError for a lone surrogate."""

to_engine = msgspec.msgpack.Decoder[ToEngine](ToEngine, dec_hook=_array).decode
from_engine = msgspec.msgpack.Decoder[FromEngine](FromEngine, dec_hook=_array).decode
