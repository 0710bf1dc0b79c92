"""Strict parsing of JSON that is embedded in a text field, such as tool-call arguments and schemas, without the size
checks of a request body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escaped surrogate, paired or not


def read(text: str) -> Any:
    """Parses JSON. Raises ValueError with the reason: malformed, nested too deeply, an integer of thousands of
    digits, NaN, or a lone surrogate."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(str(error).partition(";")[0]) from None  # without Python's advice on its digit limit
    if SURROGATE.search(text) and (found := find_lone_surrogate(document)) is not None:
        path, half = found
        raise ValueError(f"{path or 'it'} contains {half}, half of a surrogate pair, which is not valid text")
    return document


def find_lone_surrogate(document: Any) -> tuple[str, str] | None:
    """Returns the path of the first string with a lone surrogate and the escaped surrogate, both printable; None if
    there is none."""
    for path, text in _texts(document):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return path, ascii(text[error.start])[1:-1]
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _texts(document: Any) -> Iterator[tuple[str, str]]:
    """Yields every string, object keys included, with its path."""
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
