"""How many values a JSON text holds and how deep they are nested, found out without parsing it.

Most texts have fewer commas and brackets than they may have values, strings included, and are let through for that.
For others the strings are taken out first. All of it in slices, between which the event loop may go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from quire.shared.errors import InvalidArgument
from quire.shared.settings.request_limits import RequestLimits

SLICE_BYTES = 1 << 18  # 0.2 ms to count, 1 to 5 ms without strings
# A whole string, or the quote that begins one which does not end, with all that follows: were only whole ones looked
# for, each quote within that last one would be tried as a beginning.
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(").*+', re.DOTALL)
IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
OPENING, CLOSING = b"[{", b"]}"


def check(text: bytes, limits: RequestLimits) -> Iterator[None]:
    """Yields now and then; raises InvalidArgument. Of what is no JSON it may say anything."""
    opened = values = keys = 0
    for start in range(0, len(text), SLICE_BYTES):
        brackets = sum(text.count(byte, start, start + SLICE_BYTES) for byte in (b"[", b"{"))
        opened += brackets
        values += brackets + text.count(b",", start, start + SLICE_BYTES)
        keys += text.count(b":", start, start + SLICE_BYTES)
        yield
    if values > limits.max_values or keys > limits.max_keys or opened > limits.max_depth:
        yield from _check_exactly(text, limits)


def _check_exactly(text: bytes, limits: RequestLimits) -> Iterator[None]:
    depth = values = keys = 0
    for piece in _without_strings(text):
        codes = np.frombuffer(piece, np.uint8)
        steps = np.isin(codes, [*OPENING]).astype(np.int32)
        values += int(steps.sum()) + piece.count(b",")
        keys += piece.count(b":")
        steps -= np.isin(codes, [*CLOSING])
        if values > limits.max_values:
            raise InvalidArgument(f"the body holds more than {limits.max_values} values (max_values).", field="body")
        if keys > limits.max_keys:
            raise InvalidArgument(f"the body holds more than {limits.max_keys} named fields (max_keys).", field="body")
        deepest = depth + int(np.cumsum(steps).max(initial=0))
        if deepest > limits.max_depth:
            found = f"the body is nested {deepest} levels deep or more"
            raise InvalidArgument(f"{found}; at most {limits.max_depth} are taken (max_depth).", field="body")
        depth += int(steps.sum())
        yield


def _without_strings(text: bytes) -> Iterator[bytes]:
    position, in_string = 0, False
    while position < len(text):
        end = min(position + SLICE_BYTES, len(text))
        if in_string:
            found = IN_STRING.match(text, position, end)
            assert found is not None
            position = found.end()
            if position < end:  # at the quote that ends it, or at an escape that the slice has cut
                in_string = text[position] != ord('"')
                position += 2 if in_string else 1
            yield b""
        else:
            piece = text[position:end]
            outside = STRING.sub(rb"\1", piece)
            in_string = outside.endswith(b'"')
            is_escaping = in_string and (len(piece) - len(piece.rstrip(b"\\"))) % 2
            position = end + is_escaping
            yield outside
