"""Reads the request lines of a batch file and writes the lines of its output, in OpenAI's format (also that of vLLM's
run-batch).

A request line is {"custom_id", "method": "POST", "url", "body"}; an output line is {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from quire.shared.errors import InvalidArgument

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
MAX_LINES = 50_000  # OpenAI's bound
MAX_LINE_BYTES = 1 << 20  # parsing takes at most 10 ms, which block the event loop
MAX_ID_CHARACTERS = 512
MAX_ERRORS = 50  # reported per file
RETRYABLE_STATUSES = frozenset({429, 502, 503})


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch."""

    number: int  # from 1
    custom_id: str
    url: str
    body: dict[str, Any]


class InvalidBatchLine(InvalidArgument):
    """A request line that cannot be processed; `number` is its line number, from 1."""

    def __init__(self, number: int, message: str, field: str = "") -> None:
        super().__init__(f"line {number}: {message}", field=field)
        self.number = number


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields the non-empty lines of a file with their line numbers. A line that exceeds MAX_LINE_BYTES is truncated
    to one byte more than that."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        if line.strip():
            yield number, line


def parse_line(number: int, line: bytes, endpoints: Sequence[str] = ENDPOINTS) -> BatchLine:
    """Parses and validates one request line; `number`: its line number, from 1. Raises InvalidBatchLine, naming the
    wrong field, also for a url outside of `endpoints` and for streaming."""
    if len(line) > MAX_LINE_BYTES:
        raise InvalidBatchLine(number, f"it has more than {MAX_LINE_BYTES} bytes")
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidBatchLine(number, f"it is not JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(asked, dict):
        raise InvalidBatchLine(number, "it is not a JSON object")
    custom_id, url, body = asked.get("custom_id"), asked.get("url"), asked.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARACTERS:
        raise InvalidBatchLine(number, f"custom_id must be a text of 1 to {MAX_ID_CHARACTERS} characters", "custom_id")
    if asked.get("method", "POST") != "POST":
        raise InvalidBatchLine(number, f"method must be POST, got {str(asked['method'])[:32]!r}", "method")
    if url not in endpoints:
        raise InvalidBatchLine(number, f"url must be {' or '.join(endpoints)}, got {str(url)[:64]!r}", "url")
    if not isinstance(body, dict):
        raise InvalidBatchLine(number, "body must be a JSON object", "body")
    if body.get("stream"):
        raise InvalidBatchLine(number, "stream must be false or left out: a batch has complete answers", "body")
    return BatchLine(number, custom_id, str(url), body)


def check_file(file: BinaryIO, endpoints: Sequence[str]) -> tuple[int, list[InvalidBatchLine]]:
    """Returns the number of lines read and the first MAX_ERRORS errors: malformed lines, repeated custom_ids, an
    empty file or too many lines. Stops reading at that many errors."""
    wrong: list[InvalidBatchLine] = []
    seen: set[str] = set()
    count = 0
    for number, line in numbered_lines(file):
        count += 1
        try:
            asked = parse_line(number, line, endpoints)
            if asked.custom_id in seen:
                raise InvalidBatchLine(
                    number, f"custom_id {asked.custom_id[:64]!r} is also used in an earlier line", "custom_id"
                )
            seen.add(asked.custom_id)
        except InvalidBatchLine as error:
            wrong.append(error)
        if count > MAX_LINES:
            wrong.append(InvalidBatchLine(number, f"a batch has at most {MAX_LINES} lines"))
        if len(wrong) >= MAX_ERRORS or count > MAX_LINES:
            break
    if not count:
        wrong.append(InvalidBatchLine(1, "the file has no lines"))
    return count, wrong


def output_line(answer_id: str, custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    """Returns an output line. A failed request has its error twice: in the server's wording and in OpenAI's format."""
    error = None
    if status // 100 != 2:
        failure = body.get("error") if isinstance(body, dict) else None
        message = failure.get("message") if isinstance(failure, dict) else failure
        error = {"code": str(status), "message": str(message or f"status {status}")}
    response = {"status_code": status, "request_id": request_id, "body": body}
    entry = {"id": answer_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"


def read_output(file: Iterable[bytes]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the entries of an existing output file, each with the offset of the end of its line; stops at a torn
    line."""
    end = 0
    for line in file:
        end += len(line)
        if not line.endswith(b"\n"):
            return
        try:
            found = json.loads(line)
        except ValueError:
            return
        if isinstance(found, dict):
            yield found, end
