"""The server's log on standard error: a line per event, as text or as JSON."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

FIELDS = "fields"
"""Attribute of a log record that has its values by name, for programs that read logs."""

_NAMES = {"uvicorn.error": "forerun.http", "uvicorn": "forerun.http"}
"""Libraries' loggers -> their names in our log."""


def configure_logs(level: str, kind: str) -> None:
    """Send all loggers to standard error. Uvicorn's lines about its own start and end are left out:
    the server logs its own.

    level  least level of a line
    kind   text or json
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if kind == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if logging.getLogger().level > logging.DEBUG:
        for name in ("uvicorn.error", "httpx", "httpcore", "asyncio"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(source)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        source = _NAMES.get(record.name, record.name)
        if record.levelno >= logging.WARNING:
            source = f"{source} {record.levelname.lower()}"
        record.__dict__["source"] = source
        return super().format(record)


class _Json(logging.Formatter):
    """Formats a line as one object: time (RFC 3339), level, logger, message, a traceback if there
    is one, and the record's fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": _NAMES.get(record.name, record.name),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        fields: dict[str, Any] = getattr(record, FIELDS, {})
        return json.dumps(line | fields, ensure_ascii=False, default=str)
