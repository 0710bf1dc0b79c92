"""A frontend's TLS for clients, its admin port, and its refusal of unauthenticated schedulers."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import trustme

from quire.services.frontend.main import Frontend
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2, admin_pb2_grpc
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.process.lifecycle import Shutdown
from quire.shared.rpc.channel import connect
from quire.shared.settings import FrontendSettings, Tls
from tests.admin import admin_of
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.waiting import eventually

SECRET = "s" * 40


class FakeScheduler(ScriptedScheduler):
    """A scheduler without the cluster secret; records what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str | None] = []

    async def Session(self, requests: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self.heard.append(message.WhichOneof("message"))
            challenge = {"name": "scheduler s0", "nonce": bytes(32), "proof": bytes(32)}
            await context.write(scheduler_pb2.SessionResponse(handshake={"challenge": challenge}))


async def test_an_unauthenticated_scheduler_gets_no_hello_and_no_prompt(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    fake = FakeScheduler()
    async with (
        scheduler(fake),
        running(
            folder, fake.address, until_health=(503,), cluster_secret_file=str(secret), unavailable_after_s=0.5
        ) as frontend,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await frontend.inference.Generate(pb.GenerateRequest(text="a secret prompt")).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: len(fake.heard) >= 2)
    assert set(fake.heard) == {"handshake"}


async def test_the_admin_service_is_not_on_the_clients_port_and_wants_its_key(folder: Path) -> None:
    async with scheduler(ScriptedScheduler()) as script, running(folder, script.address) as frontend:
        admin = admin_pb2_grpc.AdminServiceStub(frontend.channel)
        for call in (admin.Drain(admin_pb2.DrainRequest()), admin.GetStatus(admin_pb2.GetStatusRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(frontend.frontend.admin.address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            for metadata, text in (((), "no key"), ((("authorization", "Bearer " + "x" * 64),), "a wrong key")):
                with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
                    await stub.Drain(admin_pb2.DrainRequest(), metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not frontend.shutdown.requested
        found = admin_of("frontend", frontend.frontend.grpc_address)
        assert (found.address, found.key) == (frontend.frontend.admin.address, frontend.frontend.admin.key)
        assert (await frontend.admin.GetStatus(admin_pb2.GetStatusRequest())).services


async def test_an_admin_service_for_other_machines_needs_a_key_of_its_own_and_a_certificate(
    folder: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    key.chmod(0o600)
    values = {"model": str(folder), "grpc_port": 0, "http_port": 0, "admin_host": "0.0.0.0"}
    with pytest.raises(InvalidArgument, match="admin_key_file: needed"):
        Frontend(FrontendSettings(**values), Shutdown())
    with pytest.raises(InvalidArgument, match="tls: an admin service beyond this machine needs a certificate"):
        Frontend(FrontendSettings(**values, admin_key_file=str(key)), Shutdown())


async def test_clients_are_served_under_tls_and_certificates_change_while_it_runs(folder: Path, tmp_path: Path) -> None:
    def files(name: str, ca: trustme.CA) -> Tls:
        issued = ca.issue_cert("127.0.0.1", "localhost")
        for kind, pem in (("cert", issued.cert_chain_pems[0]), ("key", issued.private_key_pem), ("ca", ca.cert_pem)):
            pem.write_to_path(tmp_path / f"{name}.{kind}")
        return Tls(cert=str(tmp_path / f"{name}.cert"), key=str(tmp_path / f"{name}.key"))

    def trusting(name: str) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=tmp_path / f"{name}.ca")

    async with (
        scheduler(ScriptedScheduler()) as script,
        running(folder, script.address, until_health=(), client_tls=files("first", trustme.CA())) as frontend,
    ):
        await asyncio.wait_for(frontend.frontend.http.server.listening(), 60)
        await frontend.until_sessions(1)
        url = f"https://{frontend.frontend.http_address}/v1/models"
        old = trusting("first")

        async def models(context: ssl.SSLContext) -> int:
            async with httpx.AsyncClient(verify=context) as http:
                return (await http.get(url)).status_code

        async def text(name: str) -> str:
            async with connect(frontend.frontend.grpc_address, Tls(ca=str(tmp_path / f"{name}.ca"))) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                return str((await stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), timeout=60)).text)

        assert await models(old) == 200
        before = await text("first")
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as http:
                await http.get(url.replace("https", "http"))
        files("first", trustme.CA())  # an unrelated CA
        assert await models(trusting("first")) == 200
        assert await text("first") == before
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await models(old)
