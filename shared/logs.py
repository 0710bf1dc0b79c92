"""Structured logs: one line per event, with a message and named values, as text or JSON."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

MAX_LINES = 10_000  # waiting to be written
GATHER_S = 0.02  # lines of this period are written together
MAX_OWN_CHARACTERS = 200
NO_ROOM = "the reader of stderr is too slow, or the disk was full"
LAST_LINES_S = 1.0
PLAIN = re.compile(r"[\w\-.,:;/@+*<>()\[\]{}'!?%&#|~^$]*")
AS_JSON = json.JSONEncoder(default=str).encode
logging._srcfile = None  # skip the caller lookup: records carry no source location


class Logger:
    """Logger with named values: log.info("worker attached", worker=id, blocks=n)."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(f"quire.{name}")

    def debug(self, message: str, **values: Any) -> None:
        self._log.debug(message, extra={"values": values})

    @property
    def is_info_enabled(self) -> bool:
        """Whether info() has an effect, for values that are expensive to compute."""
        return self._log.isEnabledFor(logging.INFO)

    def info(self, message: str, **values: Any) -> None:
        self._log.info(message, extra={"values": values})

    def warning(self, message: str, **values: Any) -> None:
        self._log.warning(message, extra={"values": values})

    def error(self, message: str, **values: Any) -> None:
        self._log.error(message, extra={"values": values})

    def exception(self, message: str, **values: Any) -> None:
        """Logs an error with the traceback of the exception being handled."""
        self._log.exception(message, extra={"values": values})


def logger(name: str) -> Logger:
    return Logger(name)


class _Text(logging.Formatter):
    """Formats a record as one line of text."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Returns the local time, level, service, message and the values that are not None, then a traceback if
        there is one."""
        clock = _clock(int(record.created))
        values = getattr(record, "values", {})
        tail = "".join(f" {k}={_plain(v)}" for k, v in values.items() if v is not None)
        line = f"{clock}.{int(record.msecs):03d} {record.levelname[0]} {self._service} {record.getMessage()}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@functools.lru_cache(maxsize=1)
def _clock(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))


def _plain(value: Any) -> Any:
    """Quotes a text that could be mistaken for several values or for the end of a line."""
    if not isinstance(value, str):
        return value
    return value if PLAIN.fullmatch(value) else json.dumps(value)


class _Json(logging.Formatter):
    """Formats a record as one line of JSON."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as a JSON object with its values as further fields, and the traceback as `exception`."""
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
        return AS_JSON(entry)


class _Writer(logging.Handler):
    """Writes lines in a thread of its own, so that a slow or missing reader does not block the service. Lines beyond
    `max_lines`, or that cannot be written, are dropped and counted; writing is retried, because a full disk may have
    room again."""

    def __init__(self, stream: TextIO, max_lines: int) -> None:
        """Starts the thread that writes to `stream`; lines are gathered for GATHER_S before they are written."""
        self._max_lines = max_lines
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque()
        self._num_lost = 0
        self._failure = ""  # why the last write failed; empty: it did not
        self._is_torn = False  # the last line was written only in part
        self._has_news = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._gather_s = GATHER_S
        self._is_open = True
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record as a formatted line without blocking; counts it as lost if `max_lines` are queued."""
        if len(self._lines) >= self._max_lines:
            self._num_lost += 1
            return
        try:
            self._lines.append(self.format(record))
        except Exception as error:
            self._lines.append(self._own("a log line cannot be formatted", template=record.msg, reason=repr(error)))
        if not self._has_news.is_set():
            self._is_idle.clear()
            self._has_news.set()

    def flush(self) -> None:
        """Waits until everything is written, or until LAST_LINES_S have passed. From then on lines are written
        without delay."""
        self._gather_s = 0.0
        self._is_idle.wait(LAST_LINES_S)

    def close(self) -> None:
        self._is_open = False
        self._has_news.set()
        super().close()

    def _run(self) -> None:
        """Writes queued lines until close(), gathered for a moment, in the writer's thread; a failed write does not
        end it."""
        while self._is_open:
            self._has_news.wait()
            time.sleep(self._gather_s)
            self._has_news.clear()
            try:
                self._write()
            except Exception as error:  # later lines must still be written
                self._failure = repr(error)
            if not self._lines:
                self._is_idle.set()

    def _write(self) -> None:
        """Writes all queued lines, and one line about lost ones; lines that cannot be written completely count as
        lost."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        lost, self._num_lost = self._num_lost, 0
        num_lines = len(lines)
        if lost:
            lines.append(self._own(f"{lost} log lines were dropped", reason=self._failure or NO_ROOM))
        if not lines:
            return
        text = "\n".join(lines) + "\n"
        self._num_lost += num_lines + lost  # subtracted again when they are written
        num_written, num_left = _put(self._stream, f"\n{text}" if self._is_torn else text)
        if not num_left:
            self._num_lost -= num_lines + lost
            self._failure = ""
        if num_written:
            self._is_torn = num_left > 0

    def _own(self, message: str, **values: Any) -> str:
        """Returns a log line about the log itself."""
        entry = {"name": "quire.logs", "levelno": logging.WARNING, "levelname": "WARNING", "msg": message}
        shown = {name: str(value)[:MAX_OWN_CHARACTERS] for name, value in values.items()}
        return self.format(logging.makeLogRecord({**entry, "values": shown}))


def _put(stream: TextIO, text: str) -> tuple[int, int]:
    """Writes to the raw stream and returns the number of bytes written and not written. Bypasses Python's buffers,
    which would keep unwritable data and fail again when the process exits."""
    data = text.encode(stream.encoding or "utf-8", "backslashreplace")
    size = len(data)
    try:
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if raw is None:
            stream.write(text)
            stream.flush()
            return len(data), 0
        while data and (count := raw.write(data)):  # None: the write would block
            data = data[count:]
    except (OSError, ValueError):  # disk full, no reader, or closed
        pass
    return size - len(data), len(data)


def print_line(line: str, stream: TextIO) -> None:
    """Writes a line for the process that started this one. A full disk or a closed pipe is ignored, because a
    service must keep running."""
    _put(stream, f"{line}\n")


def flush() -> None:
    """Flushes all handlers before the process exits."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def is_json() -> bool:
    """Whether configure() selected JSON."""
    return any(isinstance(handler.formatter, _Json) for handler in logging.getLogger().handlers)


def as_json(service: str, message: str, level: str = "info", **values: Any) -> str:
    """Returns a line in the log's JSON format, for output outside of the log."""
    head = {"time": round(time.time(), 3), "level": level, "service": service, "logger": "quire", "message": message}
    return AS_JSON({**head, **values})


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Logs an uncaught exception before the process exits."""
    logging.getLogger("quire.fault").critical("uncaught", exc_info=(kind, error, trace))
    flush()


def configure(service: str, level: str = "info", style: LogFormat = "text", *, max_lines: int = MAX_LINES) -> None:
    """Sends the logs of this process to stderr, replacing earlier handlers, and raises the level of noisy libraries;
    `service` is included in every line; at most `max_lines` wait to be written. With JSON, warnings and uncaught
    exceptions are logged, too."""
    handler = _Writer(sys.stderr, max_lines)
    handler.setFormatter(_Json(service) if style == "json" else _Text(service))
    root = logging.getLogger()
    before, root.handlers[:] = root.handlers[:], [handler]
    for writer in before:
        if isinstance(writer, _Writer):
            writer.close()
    if style == "json":  # otherwise Python writes plain text between the JSON lines
        logging.captureWarnings(True)
        sys.excepthook = _on_uncaught
    root.setLevel(level.upper())
    logging.getLogger("quire").setLevel(level.upper())
    for noisy in ("asyncio", "uvicorn", "uvicorn.error", "uvicorn.access", "grpc"):
        logging.getLogger(noisy).setLevel("WARNING")
