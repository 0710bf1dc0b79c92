"""Parser of multipart/form-data on disk, which finds the parts without reading them into memory (RFC 7578)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path

from quire.services.frontend.bounds.multipart import MAX_VALUE_BYTES, form_parts
from quire.shared.errors import InvalidArgument

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Upload:
    """Form with one file."""

    fields: dict[str, str]
    filename: str


def boundary_of(content_type: str) -> bytes:
    """Returns the form's boundary; raises InvalidArgument for a body that is no multipart/form-data."""
    header = BytesHeaderParser().parsebytes(b"content-type: " + content_type.encode("latin-1", "replace"))
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        kind = header.get_content_type()
        raise InvalidArgument(
            f"content-type is {kind[:64]!r}: files must be sent as multipart/form-data", field="content-type"
        )
    return boundary.encode("latin-1", "replace")


def parse_form(body: Path, boundary: bytes, target: Path) -> Upload:
    """Copies the part named `file` from the form at `body` to `target` and returns its name and the other fields;
    blocks. Raises InvalidArgument for an incomplete form, a field that is too long, or a form without file."""
    fields: dict[str, str] = {}
    filename: str | None = None
    with body.open("rb") as file:
        if not body.stat().st_size:
            raise InvalidArgument("the form must not be empty; send the parts purpose and file", field="file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as form:
            for name, part_filename, start, end in form_parts(form, boundary):
                if name == "file":
                    filename = part_filename
                    _copy(form, start, end, target)
                elif end - start > MAX_VALUE_BYTES:
                    raise InvalidArgument(f"{name[:64]}: at most {MAX_VALUE_BYTES} bytes are accepted", field=name[:64])
                else:
                    fields[name] = form[start:end].decode(errors="replace")
    if filename is None:
        raise InvalidArgument("the form must have a part named `file`", field="file")
    return Upload(fields, filename)


def _copy(form: mmap.mmap, start: int, end: int, target: Path) -> None:
    with target.open("wb") as out:
        for at in range(start, end, CHUNK_BYTES):
            out.write(form[at : min(at + CHUNK_BYTES, end)])
