"""The exceptions. A message says what was wrong, where, and what to do.

ForerunError
├── ModelError        a checkpoint, tokenizer or draft on disk cannot be used
│   └── DownloadError     it could not be fetched
├── RequestError      a request cannot be honoured; `field` names the culprit
│   ├── ContextError      it is longer than the model's context
│   └── BusyError         the queue is full; try again later
│       └── WorkerError       a process that worked for it was ended or stopped from outside
├── MemoryPlanError   weights, caches and scratch do not fit; with what to lower
├── ConfigError       flags that contradict each other or the machine
└── EngineError       the engine itself failed; never the request's fault
    ├── RankError         a process that shares the model is gone: no step can run any more
    └── EngineLostError   its process ended
"""

import errno

_OF_THE_SYSTEM = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}


class ForerunError(Exception):
    """Base of every error that Forerun raises on purpose."""


class ModelError(ForerunError):
    """A checkpoint, tokenizer or draft on disk cannot be used as it is."""


class DownloadError(ModelError):
    """A model could not be fetched (offline, no disk, checksum)."""


class RequestError(ForerunError):
    """A request cannot be run. `field` is the request field with the fault, if there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextError(RequestError):
    """Prompt plus requested tokens exceed the model's context. Clients that shorten and try again
    search for the words "This model's maximum context length is".

    prompt     tokens of the prompt, at least; 0 = not given
    requested  tokens requested beyond it
    context    most tokens of both
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        prompt: int = 0,
        requested: int = 0,
        context: int = 0,
    ) -> None:
        super().__init__(message, field)
        self.prompt, self.requested, self.context = prompt, requested, context


class BusyError(RequestError):
    """The queue is full, or the engine is shutting down: try again later."""


class WorkerError(BusyError):
    """A process that worked for the request was ended or stopped from outside."""


class MemoryPlanError(ForerunError):
    """The memory plan does not fit the machine; the message lists the parts in bytes."""


class ConfigError(ForerunError):
    """Options contradict each other or the machine."""


class EngineError(ForerunError):
    """The engine failed; the request was not the cause."""


class RankError(EngineError):
    """A process that shares the model with others has ended, or is out of step with them: no step
    can run any more.
    """


class EngineLostError(EngineError):
    """The engine's process was killed or ended by itself."""


def reason_of(error: Exception) -> str:
    """Return an error's text for a message that already names the file: for OSError "No such file
    or directory", without its number and path.
    """
    return getattr(error, "strerror", None) or str(error)


def unusable(error: Exception) -> ModelError | None:
    """Return the error that the system does not let this user use a file or folder; None for
    anything else, which was not foreseen.
    """
    if not isinstance(error, OSError) or error.errno not in _OF_THE_SYSTEM or not error.filename:
        return None
    return ModelError(
        f"{error.filename} cannot be used ({error.strerror}); give this user access to it, or "
        "name another"
    )
