"""What JSON can write and no text can hold: half of a surrogate pair, as in "\\ud83d"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shared.errors import InvalidArgument

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as JSON writes one, be it half of a pair or not
AS_BYTES = re.compile(rb"\xed[\xa0-\xbf]")  # what Python's JSON takes for one, though it is no UTF-8
OTHER_ENCODING = b"\0"  # of two or four bytes a character, in which neither can be seen


def check(body: bytes, document: Any) -> None:
    """Raises InvalidArgument that names the field of `document`, which `body` was read as. Costs a search in the bytes
    unless there is something to find."""
    if not (SURROGATE.search(body) or AS_BYTES.search(body) or OTHER_ENCODING in body):
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
