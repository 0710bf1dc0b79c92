"""Authentication: a cluster secret, proved by both sides before anything else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quire.services.scheduler import main
from quire.shared.errors import InvalidArgument, Unauthenticated
from quire.shared.pb.common.v1 import handshake_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.shared.pb.worker.v1 import worker_pb2, worker_pb2_grpc
from quire.shared.process import lifecycle
from quire.shared.rpc.trust import Dialler
from quire.shared.security.secret_file import SecretFile
from quire.shared.settings import SchedulerSettings
from tests.services.scheduler.conftest import make_limits
from tests.services.scheduler.reference_worker import oracle
from tests.services.scheduler.scripted_peers import FRONTENDS, HEARTBEATS, WORKERS, FrontendPeer, WorkerPeer

LIMITS = make_limits(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200)
PROMPT = [7, 1, 3, 1, 2, 9, 2, 8, 1]
RIGHT, WRONG, NEXT = "r" * 40, "w" * 40, "n" * 40


@dataclass
class SecuredScheduler:
    """A scheduler with a secret."""

    address: str
    folder: Path

    def dialler(self, name: str, *secrets: str) -> Dialler:
        path = self.folder / f"{name}-{'-'.join(s[0] for s in secrets)}"
        _write(path, *secrets)
        return Dialler(name, secret=SecretFile(str(path), "cluster_secret_file"))

    async def worker(self, name: str = "w0", *secrets: str) -> tuple[WorkerPeer, asyncio.Task[None]]:
        """Returns an attached worker, or raises the error of the call."""
        dialler = self.dialler(f"worker {name}", *secrets) if secrets else Dialler()
        peer = WorkerPeer(self.address, LIMITS, id=name, dialler=dialler)
        task = asyncio.ensure_future(peer.run())
        attached = asyncio.ensure_future(peer.attached.wait())
        await asyncio.wait([task, attached], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        attached.cancel()
        if task.done():
            task.result()
        assert peer.attached.is_set()
        return peer, task


def _write(path: Path, *secrets: str) -> None:
    path.write_text("\n".join(secrets))
    path.chmod(0o600)


@contextlib.asynccontextmanager
async def scheduler(tmp_path: Path, *secrets: str, **fields: Any) -> AsyncIterator[SecuredScheduler]:
    if secrets:
        _write(tmp_path / "secret", *secrets)
        fields["cluster_secret_file"] = str(tmp_path / "secret")
    announced: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    values = {"id": "s0", "grpc_port": 0, "metrics_port": 0, "drain_timeout_s": 1, **HEARTBEATS}
    shutdown = lifecycle.Shutdown()
    settings = SchedulerSettings(**(values | fields))
    task = asyncio.ensure_future(
        main.serve(settings, shutdown, lambda _role, _name, **where: announced.set_result(where))
    )
    await asyncio.wait([task, announced], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    where = await announced
    try:
        yield SecuredScheduler(where["grpc"], tmp_path)
    finally:
        shutdown.request()
        await task


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[SecuredScheduler]:
    async with scheduler(tmp_path, RIGHT) as running:
        yield running


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _served(guarded: SecuredScheduler, *secrets: str) -> list[int]:
    frontend = FrontendPeer(guarded.address, dialler=guarded.dialler("frontend f0", *secrets))
    await frontend.open()
    try:
        await frontend.submit(0, PROMPT, max_tokens=12)
        await frontend.ended(0)
        return frontend.tokens[0]
    finally:
        await frontend.close()


async def test_services_with_the_same_secret_work_together(guarded: SecuredScheduler) -> None:
    _, task = await guarded.worker("w0", RIGHT)
    assert await _served(guarded, RIGHT) == oracle(PROMPT, len(PROMPT) + 12, eos=True)
    await _end(task)


async def test_callers_without_a_secret_are_refused_with_the_setting(guarded: SecuredScheduler) -> None:
    with pytest.raises(
        grpc.aio.AioRpcError, match="opened with hello: give the caller the same cluster_secret_file"
    ) as e:
        await guarded.worker("w0")
    assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED
    frontend = FrontendPeer(guarded.address)
    await frontend.open()
    with pytest.raises(grpc.aio.AioRpcError, match="scheduler s0 requires proof of its cluster secret") as e:
        await frontend.session
    assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await frontend.channel.close()


async def test_a_caller_with_another_secret_rejects_the_scheduler(guarded: SecuredScheduler) -> None:
    with pytest.raises(Unauthenticated, match=r"scheduler s0 at .* does not know the cluster secret of worker w0"):
        await guarded.worker("w0", WRONG)


async def test_a_caller_that_skips_verification_still_has_to_authenticate(
    guarded: SecuredScheduler,
) -> None:
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
        await call.write(_introduced("worker w0"))
        challenge = (await call.read()).handshake.challenge
        shown = handshake_pb2.Handshake(proof=handshake_pb2.Proof(proof=challenge.proof))  # the server's own, sent back
        await call.write(worker_pb2.AttachRequest(handshake=shown))
        with pytest.raises(grpc.aio.AioRpcError, match="worker w0 does not know the cluster secret of scheduler s0"):
            await call.read()


async def test_an_unauthenticated_caller_does_not_evict_a_worker(guarded: SecuredScheduler) -> None:
    peer, task = await guarded.worker("w0", RIGHT)
    for secrets in ((), (WRONG,)):
        with pytest.raises((grpc.aio.AioRpcError, Unauthenticated)):
            await guarded.worker("w0", *secrets)
    assert not task.done()
    assert await _served(guarded, RIGHT) == oracle(PROMPT, len(PROMPT) + 12, eos=True)
    assert peer.epoch > 0
    await _end(task)


async def test_an_authenticated_worker_supersedes_one_with_its_name(guarded: SecuredScheduler) -> None:
    first, old = await guarded.worker("w0", RIGHT)
    second, new = await guarded.worker("w0", RIGHT)
    with pytest.raises(grpc.aio.AioRpcError, match="attached again; this session has ended"):
        await asyncio.wait_for(old, 60)
    assert second.epoch > first.epoch
    await _end(new)


async def test_the_hello_must_have_the_authenticated_name(guarded: SecuredScheduler) -> None:
    dialler = guarded.dialler("worker other", RIGHT)
    peer = WorkerPeer(guarded.address, LIMITS, id="w0", dialler=dialler)
    with pytest.raises(grpc.aio.AioRpcError, match="worker other authenticated, but its hello names worker w0"):
        await peer.run()


async def test_a_replayed_session_is_refused(guarded: SecuredScheduler) -> None:
    recorded: list[Any] = []

    class Recorder:
        def __init__(self, call: Any) -> None:
            self._call = call

        async def write(self, message: Any) -> None:
            recorded.append(message)
            await self._call.write(message)

        async def read(self) -> Any:
            return await self._call.read()

    dialler = guarded.dialler("frontend f0", RIGHT)
    async with dialler.connect(guarded.address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
        await dialler.handshake(Recorder(call), scheduler_pb2.SessionRequest, FRONTENDS, guarded.address, known=True)
        call.cancel()
        assert [message.handshake.WhichOneof("step") for message in recorded] == ["introduction", "proof"]
        again = scheduler_pb2_grpc.SchedulerServiceStub(channel).Session()
        for message in recorded:
            await again.write(message)
        assert (await again.read()).HasField("handshake")
        with pytest.raises(grpc.aio.AioRpcError, match="does not know the cluster secret") as e:
            await again.read()
        assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_proof_is_valid_for_one_service_only(guarded: SecuredScheduler) -> None:
    dialler = guarded.dialler("worker w0", RIGHT)
    async with dialler.connect(guarded.address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
        with pytest.raises(Unauthenticated):
            await dialler.handshake(call, worker_pb2.AttachRequest, FRONTENDS, guarded.address, known=True)


async def test_a_relayed_proof_is_refused(guarded: SecuredScheduler) -> None:
    """The proof contains the address that the caller dialed, and the scheduler rejects one for another address."""
    dialler = guarded.dialler("worker w0", RIGHT)
    async with dialler.connect(guarded.address) as channel:
        for address, text in (
            (guarded.address, ""),
            ("127.0.0.1:9", "which is not the address of scheduler s0, .*: the connection may be intercep"),
        ):
            call = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
            if not text:
                await dialler.handshake(call, worker_pb2.AttachRequest, WORKERS, address, known=False)
                continue
            with pytest.raises(grpc.aio.AioRpcError, match=text):
                await dialler.handshake(call, worker_pb2.AttachRequest, WORKERS, address, known=False)


async def test_secrets_are_rotated_while_services_work(guarded: SecuredScheduler, tmp_path: Path) -> None:
    _, old = await guarded.worker("w0", RIGHT)
    _write(tmp_path / "secret", RIGHT, NEXT)  # accepted
    _, early = await guarded.worker("w1", NEXT, RIGHT)
    _write(tmp_path / "secret", NEXT, RIGHT)  # shown
    assert await _served(guarded, RIGHT, NEXT) == oracle(PROMPT, len(PROMPT) + 12, eos=True)
    _write(tmp_path / "secret", NEXT)  # the old one is gone
    with pytest.raises(Unauthenticated):
        await guarded.worker("w2", RIGHT)
    assert not old.done()
    assert not early.done()
    await _end(old, early)


async def test_a_caller_with_a_secret_rejects_a_scheduler_without_one(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as open_to_all:
        with pytest.raises(grpc.aio.AioRpcError, match="scheduler s0 has none: set its cluster_secret_file") as e:
            await open_to_all.worker("w0", RIGHT)
        assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_administration_calls_require_the_secret(guarded: SecuredScheduler) -> None:
    question = scheduler_pb2.AdministerRequest(get_status={})
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Administer()
        await call.write(question)
        with pytest.raises(grpc.aio.AioRpcError, match="opened with get_status"):
            await call.read()
        call = stub.Administer()
        dialler = guarded.dialler("frontend f0", RIGHT)
        await dialler.handshake(call, scheduler_pb2.AdministerRequest, FRONTENDS, guarded.address, known=True)
        await call.write(question)
        assert [service.id for service in (await call.read()).status.services] == ["s0"]


@pytest.mark.parametrize("fields", [{}, {"tls": {"ca": "/nowhere"}}])
async def test_a_scheduler_refuses_remote_addresses_without_authentication(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match=r"host: scheduler s0 would accept any caller on 0\.0\.0\.0"):
        async with scheduler(tmp_path, host="0.0.0.0", **fields):
            pass


@pytest.mark.parametrize("fields", [{"insecure": True}, {"secrets": (RIGHT,)}])
async def test_a_scheduler_listens_remotely_with_a_secret_or_an_explicit_setting(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    secrets = fields.get("secrets", ())
    others = {name: value for name, value in fields.items() if name != "secrets"}
    async with scheduler(tmp_path, *secrets, host="0.0.0.0", **others) as open_to_all:
        worker, task = await open_to_all.worker("w0", *secrets)
        assert worker.attached.is_set()
        task.cancel()
        await asyncio.wait([task])


def _introduced(name: str) -> worker_pb2.AttachRequest:
    introduction = handshake_pb2.Introduction(name=name, nonce=bytes(32))
    return worker_pb2.AttachRequest(handshake=handshake_pb2.Handshake(introduction=introduction))


@pytest.mark.parametrize("junk", [b"\xff\xff\xff", b"\x0a\x7f", b"\x0a\x02\x0a\xff"])
async def test_malformed_messages_are_no_proof(
    guarded: SecuredScheduler, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """They leave no stack traces in the log."""
    async with Dialler().connect(guarded.address) as channel:
        for method in ("worker.v1.WorkerService/Attach", "scheduler.v1.SchedulerService/Session"):
            call = channel.stream_stream(f"/quire.{method}")()
            await call.write(junk)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        administer = channel.stream_stream("/quire.scheduler.v1.SchedulerService/Administer")()
        await administer.write(junk)
        assert await administer.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not [record for record in caplog.records if record.exc_info]


async def test_unauthenticated_messages_are_limited_to_a_megabyte(guarded: SecuredScheduler) -> None:
    """This holds for every method of a service port, including those without a proof."""
    async with Dialler().connect(guarded.address) as channel:
        for method in ("quire.worker.v1.WorkerService/Attach", "quire.scheduler.v1.SchedulerService/Session"):
            call = channel.stream_stream(f"/{method}")()
            await call.write(bytes(2 * 2**20))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(bytes(2 * 2**20))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_authenticated_caller_may_send_millions_of_tokens(guarded: SecuredScheduler) -> None:
    _, task = await guarded.worker("w0", RIGHT)
    frontend = FrontendPeer(guarded.address, dialler=guarded.dialler("frontend f0", RIGHT))
    await frontend.open()
    try:
        await frontend.submit(1, [7] * 2_000_000)
        await frontend.submit(2, PROMPT, max_tokens=4)
        await frontend.ended(1, 2)
        assert "tokens" in frontend.finished[1].error.message
        assert not frontend.finished[2].HasField("error")
    finally:
        await frontend.close()
        await _end(task)
