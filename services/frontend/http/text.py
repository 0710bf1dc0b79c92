"""What JSON can write and no text can hold: half of a surrogate pair, as in "\\ud83d"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shared.errors import InvalidArgument

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as JSON writes one, be it half of a pair or not


def check(body: bytes, document: Any) -> None:
    """Raises InvalidArgument that names the field of `document`, which `body` was read as. Costs a search in the bytes
    unless there is something to find."""
    if SURROGATE.search(body) is None:
        return
    for path, text in _texts(document):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])[1:-1]
            raise InvalidArgument(
                f"{path or 'the body'} holds {half}, half of a surrogate pair, which is no text.",
                field=re.split(r"[.\[]", path, maxsplit=1)[0],
            ) from None


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
