"""TLS sessions with client certificates: an invalid certificate is refused even on resumption."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
import trustme

from quire.shared.security.tls import server_context
from quire.shared.security.tls_files import Tls

VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)


def files(folder: Path, name: str, ca: trustme.CA) -> dict[str, str]:
    """Writes new files under the same names."""
    issued = ca.issue_cert("localhost")
    found = {}
    for kind, blobs in (
        ("cert", issued.cert_chain_pems),
        ("key", [issued.private_key_pem]),
        ("ca", [ca.cert_pem]),
    ):
        path = folder / f"{name}.{kind}"
        path.with_suffix(".new").write_bytes(b"".join(blob.bytes() for blob in blobs))
        os.replace(path.with_suffix(".new"), path)
        found[kind] = str(path)
    return found


def caller(own: dict[str, str], version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(own["cert"], own["key"])
    return context


def talk(server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLObject:
    """Returns the client's connection after one byte in each direction. Raises SSLError if the handshake fails."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(there, back, server_side=True)
    calling = client.wrap_bio(back, there, session=session)
    steps = (
        (calling.do_handshake, lambda: calling.write(b"?"), lambda: calling.read(1)),
        (serving.do_handshake, lambda: serving.read(1), lambda: serving.write(b"!")),
    )
    done = [0, 0]
    while done != [3, 3]:
        before = (*done, there.pending, back.pending)
        for end in (0, 1):
            with suppress(ssl.SSLWantReadError):
                while done[end] < 3:
                    steps[end][done[end]]()
                    done[end] += 1
        assert before != (*done, there.pending, back.pending), "they wait for each other"
    return calling


@pytest.mark.parametrize("version", VERSIONS)
def test_who_has_been_in_shows_a_certificate_again(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """A session that was begun under a CA that is gone, or with a certificate that has expired, is not gone on with."""
    old, new = trustme.CA(), trustme.CA()
    own = files(tmp_path, "caller", old)
    server = server_context(Tls(**files(tmp_path, "server", old), clients="require"), "tls")
    client = caller(own, version)
    try:
        session = talk(server, client, None).session
    except ssl.SSLError:
        assert version is ssl.TLSVersion.TLSv1_2, "which remembers sessions, whatever it is told"
        return
    assert not talk(server, client, session).session_reused
    files(tmp_path, "server", new)
    with pytest.raises(ssl.SSLError):
        talk(server, client, session)
    talk(server, caller(files(tmp_path, "caller", new), version), None)


def test_without_certificates_of_callers_sessions_go_on(tmp_path: Path) -> None:
    """Resumption saves a round trip, and there is no certificate to check."""
    ca = trustme.CA()
    server = server_context(Tls(**files(tmp_path, "server", ca)), "client_tls")
    for version in VERSIONS:
        client = caller(files(tmp_path, "caller", ca), version)
        assert talk(server, client, talk(server, client, None).session).session_reused
