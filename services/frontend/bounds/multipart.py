"""Parts of multipart/form-data, found without reading them (RFC 7578)."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from email.parser import HeaderParser

from quire.shared.errors import InvalidArgument

MAX_PARTS = 16
MAX_HEADER_BYTES = 4096
MAX_VALUE_BYTES = 4096


def form_parts(form: bytes | mmap.mmap, boundary: bytes) -> Iterator[tuple[str, str, int, int]]:
    """Yields each part's name, file name, and the half-open range of its bytes; raises InvalidArgument for an
    incomplete form or too many parts."""
    mark = b"--" + boundary
    at = form.find(mark)
    for _ in range(MAX_PARTS):
        start = at + len(mark)
        if at < 0 or form[start : start + 2] != b"\r\n":
            break
        body = form.find(b"\r\n\r\n", start, start + MAX_HEADER_BYTES)
        end = form.find(b"\r\n" + mark, start)
        if body < 0 or end < 0 or body > end:
            raise InvalidArgument("the form is incomplete; send the whole body", field="file")
        header = HeaderParser().parsestr(form[start + 2 : body].decode(errors="replace"))  # browsers write UTF-8
        name = header.get_param("name", "", "content-disposition")
        yield str(name), header.get_filename() or "", body + 4, max(body + 4, end)
        at = end + 2
    if at < 0 or form[at + len(mark) : at + len(mark) + 2] != b"--":
        raise InvalidArgument(f"the form has no closing boundary, or more than {MAX_PARTS} parts", field="file")
