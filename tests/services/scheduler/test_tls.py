"""TLS between services: only callers with certificates of the CA are accepted, also while certificates are rotated."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
import trustme

from quire.services.scheduler import main
from quire.shared.errors import InvalidArgument, Unavailable
from quire.shared.process import lifecycle
from quire.shared.rpc.trust import Dialler
from quire.shared.settings import SchedulerSettings, Tls
from tests.services.scheduler.reference_worker import oracle
from tests.services.scheduler.scripted_peers import HEARTBEATS, FrontendPeer, WorkerPeer
from tests.services.scheduler.test_trust import LIMITS, PROMPT

PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def written(folder: Path, name: str, ca: trustme.CA, *, expired: bool = False) -> Tls:
    """Writes the files of a service with a certificate of `ca`; the same name overwrites them."""
    issued = ca.issue_cert("127.0.0.1", "localhost", not_after=PAST if expired else None)
    paths = {kind: folder / f"{name}.{kind}" for kind in ("cert", "key", "ca")}
    paths["cert"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(paths["key"])
    ca.cert_pem.write_to_path(paths["ca"])
    return Tls(**{kind: str(path) for kind, path in paths.items()}, clients="require")


class TlsHarness:
    """A scheduler that requires client certificates."""

    def __init__(self, folder: Path, ca: trustme.CA, where: dict[str, str]) -> None:
        self.folder, self.ca, self.address, self.page = folder, ca, where["grpc"], where["metrics"]

    def own(self, name: str = "peer") -> Tls:
        return written(self.folder, name, self.ca)

    async def attach(self, tls: Tls, name: str = "w0") -> asyncio.Task[None]:
        """Attaches a worker; raises the error of the call if it ends before the welcome."""
        peer = WorkerPeer(self.address, LIMITS, id=name, step_s=0.005, dialler=Dialler(f"worker {name}", tls))
        task = asyncio.ensure_future(peer.run())
        attached = asyncio.ensure_future(peer.attached.wait())
        await asyncio.wait([task, attached], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        attached.cancel()
        if task.done():
            task.result()
        assert peer.attached.is_set()
        return task

    async def frontend(self, tls: Tls) -> FrontendPeer:
        peer = FrontendPeer(self.address, dialler=Dialler("frontend f0", tls))
        await peer.open()
        return peer


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[TlsHarness]:
    ca = trustme.CA()
    announced: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    settings = SchedulerSettings(
        id="s0",
        grpc_port=0,
        metrics_port=0,
        **HEARTBEATS,
        drain_timeout_s=1,
        tls=written(tmp_path, "scheduler", ca),
    )
    shutdown = lifecycle.Shutdown()
    task = asyncio.ensure_future(
        main.serve(settings, shutdown, lambda _role, _name, **where: announced.set_result(where))
    )
    yield TlsHarness(tmp_path, ca, await announced)
    shutdown.request()
    await task


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_services_with_certificates_of_the_ca_work(secured: TlsHarness) -> None:
    worker = await secured.attach(secured.own())
    frontend = await secured.frontend(secured.own())
    await frontend.submit(0, PROMPT, max_tokens=12)
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPT, len(PROMPT) + 12, eos=True)
    await frontend.close()
    await end(worker)


async def test_callers_without_a_certificate_of_the_ca_are_refused(secured: TlsHarness, tmp_path: Path) -> None:
    theirs = written(tmp_path, "stranger", trustme.CA())
    ours = secured.own()
    wrong = {
        "plain": Tls(),
        "no certificate": Tls(ca=ours.ca),
        "another's certificate": Tls(cert=theirs.cert, key=theirs.key, ca=ours.ca),
        "expired": written(tmp_path, "expired", secured.ca, expired=True),
    }
    for what, tls in wrong.items():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await secured.attach(tls)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, what


async def test_a_caller_refuses_a_scheduler_of_another_ca(secured: TlsHarness, tmp_path: Path) -> None:
    theirs, ours = written(tmp_path, "stranger", trustme.CA()), secured.own()
    with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
        await secured.attach(Tls(cert=ours.cert, key=ours.key, ca=theirs.ca))


async def test_certificates_are_rotated_under_open_streams(secured: TlsHarness, tmp_path: Path) -> None:
    old = secured.own("old")
    worker = await secured.attach(old)
    frontend = await secured.frontend(old)
    await frontend.submit(0, PROMPT, max_tokens=120, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    secured.ca = trustme.CA()
    written(tmp_path, "scheduler", secured.ca)
    new = secured.own("new")
    second = await secured.attach(new, "w1")
    with pytest.raises(grpc.aio.AioRpcError):
        await secured.attach(old, "w2")
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPT, len(PROMPT) + 120, eos=False)
    assert not worker.done()
    await frontend.close()
    await end(worker, second)


async def test_a_half_rotated_certificate_is_not_used(secured: TlsHarness, tmp_path: Path) -> None:
    (tmp_path / "scheduler.cert").write_text("not there yet")
    worker = await secured.attach(secured.own())
    assert not worker.done()
    await end(worker)


async def test_the_metrics_page_requires_a_certificate(secured: TlsHarness) -> None:
    ours = secured.own()
    context = ssl.create_default_context(cafile=ours.ca)
    async with httpx.AsyncClient(verify=context) as http:
        with pytest.raises((httpx.TransportError, ssl.SSLError)):  # which of the two depends on when the alert is read
            await http.get(f"https://{secured.page}/metrics")
    context.load_cert_chain(ours.cert, ours.key)
    async with httpx.AsyncClient(verify=context) as http:
        assert "vllm" in (await http.get(f"https://{secured.page}/metrics")).text


async def test_unusable_files_are_named() -> None:
    gone = Tls(cert="/no/cert", key="/no/key")
    with pytest.raises(InvalidArgument, match="tls: cannot use /no/cert, /no/key: No such file"):
        main.Server("127.0.0.1", 0, (), tls=gone)
    with pytest.raises(Unavailable, match="tls: cannot use /no/cert"):
        Dialler("worker w0", gone).connect("127.0.0.1:1")
