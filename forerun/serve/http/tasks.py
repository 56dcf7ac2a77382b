"""Background tasks whose errors are logged although they are not awaited."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger("forerun.serve")
Result = TypeVar("Result")


def start_task(work: Coroutine[Any, Any, Result], name: str) -> "asyncio.Task[Result]":
    """Start `work` as a task of the running event loop and return the task. An error is logged
    with `name`.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s has failed", task.get_name(), exc_info=task.exception())
