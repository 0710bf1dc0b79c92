"""What JSON can write and no text can hold: half of a surrogate pair, as in "\\ud83d"."""

from __future__ import annotations

import re
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.strict_json import find_lone_surrogate

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as JSON writes one, be it half of a pair or not
AS_BYTES = re.compile(rb"\xed[\xa0-\xbf]")  # what Python's JSON takes for one, though it is no UTF-8
OTHER_ENCODING = b"\0"  # of two or four bytes a character, in which neither can be seen


def check(body: bytes, document: Any) -> None:
    """Raises InvalidArgument that names the field of `document`, which `body` was read as. Costs a search in the bytes
    unless there is something to find."""
    if not (SURROGATE.search(body) or AS_BYTES.search(body) or OTHER_ENCODING in body):
        return
    found = find_lone_surrogate(document)
    if found is not None:
        path, half = found
        raise InvalidArgument(
            f"{path or 'the body'} holds {half}, half of a surrogate pair, which is no text.",
            field=re.split(r"[.\[]", path, maxsplit=1)[0],
        )
