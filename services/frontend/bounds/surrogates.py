"""Rejects lone surrogates, as in "\ud83d": valid in JSON, but not in Unicode text."""

from __future__ import annotations

import re
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.strict_json import find_lone_surrogate

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON escape of a surrogate, lone or paired
AS_BYTES = re.compile(rb"\xed[\xa0-\xbf]")  # invalid UTF-8 that Python's json accepts as a surrogate
OTHER_ENCODING = b"\0"  # UTF-16 or UTF-32, which the patterns cannot search


def check(body: bytes, document: Any) -> None:
    """Raises InvalidArgument that names the field of `document` (the parsed `body`) with an unpaired surrogate, which
    is not valid Unicode. Costs one search in the bytes if nothing is found."""
    if not (SURROGATE.search(body) or AS_BYTES.search(body) or OTHER_ENCODING in body):
        return
    found = find_lone_surrogate(document)
    if found is not None:
        path, half = found
        raise InvalidArgument(
            f"{path or 'the body'} holds {half}, half of a surrogate pair, which is not valid text.",
            field=re.split(r"[.\[]", path, maxsplit=1)[0],
        )
