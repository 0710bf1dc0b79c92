"""Checks TLS files: presence, matching keys, and expiry."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from quire.doctor.finding import Finding, error, ok, run_check, warning
from quire.shared.security.tls import server_context
from quire.shared.security.tls_files import Tls

SOON_S = 14 * 86400.0
UTC_TIME = 0x17  # two digits of the year; GeneralizedTime has four (X.690, 8.26)


def check(setting: str, tls: Tls) -> Iterator[Finding]:
    """Yields findings about the files of one TLS setting: certificate and key belong together, and none is expired."""
    if not tls.files:
        yield ok(setting, "TLS is not configured for these connections")
        return
    advice = "set cert=, key= and ca= to PEM files that this user can read and that match"
    yield from run_check(setting, lambda: _pair(setting, tls), advice)
    for path in dict.fromkeys(path for path in (tls.cert, tls.ca) if path):
        yield from _validity(setting, Path(path))


def _pair(setting: str, tls: Tls) -> Iterator[Finding]:
    if tls.serves:
        server_context(tls, setting)
        yield ok(setting, f"{tls.cert} matches its key")


def _validity(setting: str, path: Path) -> Iterator[Finding]:
    """Yields a finding about the common validity of all certificates in a PEM file; a warning if it ends soon."""
    try:
        blocks = _pem_blocks(path.read_text())
        spans = [validity(ssl.PEM_cert_to_DER_cert(block)) for block in blocks]
    except (OSError, ValueError, IndexError) as reason:
        yield error(setting, f"{path} cannot be read: {reason}", "name a PEM file with certificates")
        return
    if not spans:
        yield error(setting, f"{path} holds no certificate", "name a PEM file with certificates")
        return
    begin, end = max(span[0] for span in spans), min(span[1] for span in spans)
    now, day = time.time(), datetime.fromtimestamp(end, UTC).date()
    renew = "replace the file; services use it from the next handshake on, without a restart"
    if now < begin:
        yield error(setting, f"{path} is not valid yet", "check the clock of this machine")
    elif end <= now:
        yield error(setting, f"{path} expired on {day}", f"renew it; {renew}")
    elif end - now < SOON_S:
        yield warning(setting, f"{path} expires on {day}", f"renew it; {renew}")
    else:
        yield ok(setting, f"{path} is valid until {day}")


def validity(der: bytes) -> tuple[float, float]:
    """Returns (begin, end) of a certificate in seconds since 1970, from the fifth field of the signed part, or the
    fourth without a version (RFC 5280, 4.1)."""
    to_be_signed = _parts(_parts(der)[0][1])[0][1]
    fields = _parts(to_be_signed)
    (_, span) = fields[4 if fields[0][0] == 0xA0 else 3]
    begin, end = (_moment(tag, text.decode()) for tag, text in _parts(span))
    return begin, end


def _parts(data: bytes) -> list[tuple[int, bytes]]:
    """Returns (tag, content) of each of the concatenated DER values."""
    parts, at = [], 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(data[at : at + size], "big"), at + size
        parts.append((tag, data[at : at + length]))
        at += length
    return parts


def _moment(tag: int, text: str) -> float:
    if tag == UTC_TIME:
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _pem_blocks(text: str) -> list[str]:
    end = "-----END CERTIFICATE-----"
    return [part[part.index("-----BEGIN CERTIFICATE") :] + end for part in text.split(end)[:-1]]
