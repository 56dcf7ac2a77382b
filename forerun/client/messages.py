"""Messages between a server and the process of its engine: typed values as msgpack.

One message is one frame of multiprocessing.connection: its length in four bytes, then msgpack. Only
these two processes read it, so the format has no version.
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
    """A ForerunError, or the ImportError of an extra that is not installed, as a message.

    kind    name of its class, or of the nearest base class that both sides know
    fields  its attributes other than the message
    """

    kind: str
    message: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: ForerunError | ImportError) -> "Problem":
        """Return the message for an error."""
        if isinstance(error, ImportError):
            return cls("ImportError", str(error), {"name": error.name})
        names = (kind.__name__ for kind in type(error).__mro__)
        kind = next(name for name in names if name in _KINDS)
        return cls(kind, str(error), dict(vars(error)))

    def error(self) -> ForerunError | ImportError:
        """Return the error, as an instance of the class that `kind` names."""
        if self.kind == "ImportError":
            return ImportError(self.message, name=self.fields["name"])
        error = _KINDS[self.kind](self.message)
        vars(error).update(self.fields)
        return error


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
    """The first message: which model to load. options: EngineProgram.options."""

    config: EngineConfig
    options: dict[str, Any]


class Submit(msgspec.Struct, tag=True):
    """Calls Engine.submit. In place of the request's grammar is the number of its `Compile`."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """Calls Engine.abort."""

    request: RequestId


class Compile(msgspec.Struct, tag=True):
    """Compile a grammar, and keep it under the number `call` until `Forget`."""

    call: int
    grammar: Grammar
    client: str


class Forget(msgspec.Struct, tag=True):
    """Discard a compiled grammar, which no further request will use."""

    grammar: int


class ForgetPrefixes(msgspec.Struct, tag=True):
    """Evict all cached pages that no running sequence holds."""


class Describe(msgspec.Struct, tag=True):
    """Calls Engine.stats and Engine.describe."""

    call: int


class Shutdown(msgspec.Struct, tag=True):
    """End all requests, release the model, and end the process."""


# --- from the engine -------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True):
    """The model is loaded. Fields as in Loaded; facts: about the model, as sentences for users."""

    name: str
    context: int
    config: EngineConfig
    info: dict[str, Any]
    sampling: dict[str, float]
    facts: dict[str, str]


class Loading(msgspec.Struct, tag=True, frozen=True):
    """The progress of loading: `done` of `total` bytes or items of `what`."""

    what: str
    done: int
    total: int

    def sentence(self) -> str:
        """Return the progress as text for users; without a percentage if the total is unknown."""
        return f"{self.what}, {100 * self.done // self.total} %" if self.total else self.what


class NotLoaded(msgspec.Struct, tag=True):
    """The model cannot be loaded; the process ends."""

    problem: Problem


class Condition(msgspec.Struct, frozen=True):
    """The state of an engine: Engine's properties of the same names.

    step_began  on the monotonic clock, which all processes of a machine share
    """

    alive: bool = True
    fault: str | None = None
    step_began: float | None = None


class Deltas(msgspec.Struct, tag=True):
    """The deltas of one step; a heartbeat if there are none.

    condition  the engine's state when this was sent
    """

    deltas: list[Delta]
    condition: Condition


class Refused(msgspec.Struct, tag=True):
    """Engine.submit raised `problem` for this request."""

    request: RequestId
    problem: Problem


class Compiled(msgspec.Struct, tag=True):
    """The result of Compile."""

    call: int
    unenforced: tuple[str, ...]


class Description(msgspec.Struct, tag=True):
    """The result of Describe: that of Engine.stats and, as `about`, that of Engine.describe."""

    call: int
    stats: Stats
    about: dict[str, Any]


class Lost(msgspec.Struct, tag=True):
    """A process that shares the model has ended: see Engine.on_rank_lost. problem: a RankError."""

    problem: Problem


class Failed(msgspec.Struct, tag=True):
    """The error that a call raised."""

    call: int
    problem: Problem


ToEngine = Start | Submit | Abort | Compile | Forget | ForgetPrefixes | Describe | Shutdown
FromEngine = Ready | Loading | NotLoaded | Deltas | Refused | Compiled | Description | Failed | Lost


def _plain(value: Any) -> Any:
    """Return token ids as bytes, and NumPy scalars as Python numbers, for msgpack."""
    if isinstance(value, np.ndarray):
        return np.asarray(value, np.int32).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not cross between processes")


def _array(kind: Any, value: Any) -> Ints:
    return np.frombuffer(value, np.int32)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
"""Encodes a message as bytes. Raises UnicodeEncodeError for a lone surrogate."""


def frame(message: ToEngine | FromEngine) -> bytes:
    """Return a message as it is sent. Raises as `encode`."""
    data = encode(message)
    return len(data).to_bytes(4) + data


to_engine = msgspec.msgpack.Decoder[ToEngine](ToEngine, dec_hook=_array).decode
from_engine = msgspec.msgpack.Decoder[FromEngine](FromEngine, dec_hook=_array).decode
