"""Tests of forms with files, with the file names as clients encode them.

RFC 7578, RFC 5987, WHATWG's multipart/form-data (h3 PR 416, LibreChat code-interpreter PR 36; requests/toolbelt#271
sends filename*).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.services.frontend.offline.upload import boundary_of, parse_form


def form(disposition: bytes, more: bytes = b"") -> bytes:
    return (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; ' + disposition + b"\r\n" + more + b"\r\n"
        b"{}\n\r\n--b--\r\n"
    )


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        (b'filename="plain.jsonl"', "plain.jsonl"),
        ('filename="größe ✓.jsonl"'.encode(), "größe ✓.jsonl"),  # browsers, requests, httpx
        ('filename="批次.jsonl"'.encode(), "批次.jsonl"),
        (b"filename*=utf-8''gr%C3%B6%C3%9Fe.jsonl", "größe.jsonl"),  # RFC 5987: old versions of curl, urllib3 1
        (b"filename*=UTF-8'de'%E2%9C%93.jsonl", "✓.jsonl"),
        (b"filename*=iso-8859-1''gr%F6%DFe.jsonl", "größe.jsonl"),
        (b'filename="=?utf-8?q?no?="', "=?utf-8?q?no?="),
        (b"filename=bare.jsonl", "bare.jsonl"),
        (b'filename="a\\\\b \\"c\\".jsonl"', 'a\\b "c".jsonl'),
        (b'filename="\xff\xfe.jsonl"', "\ufffd\ufffd.jsonl"),
    ],
)
def test_file_names_are_decoded(tmp_path: Path, disposition: bytes, name: str) -> None:
    body, target = tmp_path / "body", tmp_path / "target"
    body.write_bytes(form(disposition, "Content-Type: text/plain; charset=ünï\r\n".encode()))
    taken = parse_form(body, boundary_of("multipart/form-data; boundary=b"), target)
    assert taken.filename == name
    assert taken.fields == {"purpose": "batch"}
    assert target.read_bytes() == b"{}\n"
