"""Logs: one line an event, a message and named values, as text for people or JSON for collectors."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class Logger:
    """log.info("worker attached", worker=id, blocks=n)"""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(f"quire.{name}")

    def debug(self, message: str, **values: Any) -> None:
        self._log.debug(message, extra={"values": values})

    def info(self, message: str, **values: Any) -> None:
        self._log.info(message, extra={"values": values})

    def warning(self, message: str, **values: Any) -> None:
        self._log.warning(message, extra={"values": values})

    def error(self, message: str, **values: Any) -> None:
        self._log.error(message, extra={"values": values})

    def exception(self, message: str, **values: Any) -> None:
        """An error with the traceback of the exception being handled."""
        self._log.exception(message, extra={"values": values})


def logger(name: str) -> Logger:
    return Logger(name)


class _Text(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        values = getattr(record, "values", {})
        tail = "".join(f" {k}={v}" for k, v in values.items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname[0]} {self._service} {record.getMessage()}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(service: str, level: str = "info", style: LogFormat = "text") -> None:
    """Sends the logs of this process to stderr; `service` names it in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(service) if style == "json" else _Text(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("quire").setLevel(level.upper())
    for noisy in ("asyncio", "uvicorn", "uvicorn.error", "uvicorn.access", "grpc"):
        logging.getLogger(noisy).setLevel("WARNING")
