"""JSON that stands inside of a text, as arguments of calls and schemas do: nobody has measured it when it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON writes one, be it half of a pair or not


def read(text: str) -> Any:
    """Raises ValueError that says what is wrong: no JSON, brackets in brackets in brackets, a number of thousands of
    digits, NaN, half of a surrogate pair."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(str(error).partition(";")[0]) from None  # Python goes on to say how it could be told otherwise
    if SURROGATE.search(text) and (found := find_lone_surrogate(document)) is not None:
        path, half = found
        raise ValueError(f"{path or 'it'} holds {half}, half of a surrogate pair, which is no text")
    return document


def find_lone_surrogate(document: Any) -> tuple[str, str] | None:
    """The way to a text that is none, and its first character that makes it so, both printable."""
    for path, text in _texts(document):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return path, ascii(text[error.start])[1:-1]
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _texts(document: Any) -> Iterator[tuple[str, str]]:
    """Every string, names of fields included, with the way to it."""
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            for name, inner in value.items():
                shown = name.encode("ascii", "backslashreplace").decode()
                yield (f"{path}.{shown}" if path else shown), name
                pending.append((f"{path}.{shown}" if path else shown, inner))
        elif isinstance(value, list):
            pending += ((f"{path}[{number}]", inner) for number, inner in enumerate(value))
