"""Composition root of the worker; main.py imports it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import NoReturn

from prometheus_client import CollectorRegistry

from quire.services.worker.attach import hello
from quire.services.worker.attach.administration import WorkerAdministration
from quire.services.worker.attach.session import AttachmentLoop
from quire.services.worker.attach.status import WorkerStatus
from quire.services.worker.building.build import build_replica, open_grammars
from quire.services.worker.building.build_encode_worker import ENCODE
from quire.services.worker.building.rank_processes.start import start_ranks
from quire.services.worker.device.peaks import peak_of
from quire.services.worker.engine.engine import Engine
from quire.services.worker.engine.row_port import RowPort
from quire.services.worker.kv_transfer.fetcher import Fetcher
from quire.services.worker.kv_transfer.grpc_transport import SERVICE_NAME as KV_TRANSFER
from quire.services.worker.kv_transfer.grpc_transport import GrpcTransport
from quire.services.worker.kv_transfer.page_port import PagePort
from quire.services.worker.kv_transfer.page_service import PageService
from quire.services.worker.kv_transfer.pages import NoPages
from quire.services.worker.lora.open_adapters import adapter_reader, damaged_adapter_names
from quire.services.worker.lora.peft import peft_folder
from quire.services.worker.media.grpc_pixels import GrpcPixels
from quire.services.worker.media.grpc_rows import SERVICE_NAME as MEDIA_ROWS
from quire.services.worker.media.grpc_rows import GrpcRows
from quire.services.worker.media.pixels import NO_ROWS
from quire.services.worker.media.rows_service import RowsService
from quire.services.worker.models.loading import weight_samples
from quire.services.worker.models.loading.progress import Progress
from quire.services.worker.models.loading.weight_spool import WeightSpool
from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.placement import SINGLE_RANK
from quire.services.worker.replica.replica import Replica
from quire.services.worker.sampling import logits_processors
from quire.services.worker.structured.backends import backend_selection
from quire.services.worker.structured.compile_pool import CompilePool
from quire.services.worker.warmup.compile_process import CompileProcess
from quire.shared import logs, plugins
from quire.shared.kv import kv_wire
from quire.shared.metrics import base
from quire.shared.metrics.worker import EncoderCacheCollector, ExpertLoadCollector, StatusCollector, WorkerMetrics
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.worker.v1 import kv_transfer_pb2_grpc, media_rows_pb2_grpc
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process import lifecycle, numpy_buffers
from quire.shared.process.liveness import Liveness
from quire.shared.process.supervision import run_restarting, run_vital
from quire.shared.rpc.admin_port import AdminPort
from quire.shared.rpc.admin_service import AdminService
from quire.shared.rpc.server import Server
from quire.shared.rpc.trust import Dialler, HandshakeAcceptor
from quire.shared.settings import WorkerSettings

HEALTH_INTERVAL_S = 0.5
COMMAND_TIMEOUT_S = 120.0  # for one device command: four times the scheduler's timeout, which ends the attachment

# The device thread runs Python between kernels. With CPython's default of 5 ms the event loop would wait that long for
# the GIL, and two steps in flight would leave 230-260 µs of every step exposed instead of 17-62 (measured).
SWITCH_INTERVAL_S = 1e-4

log = logs.logger("worker")


async def serve(settings: WorkerSettings, shutdown: lifecycle.Shutdown, compiler: CompileProcess | None) -> None:
    """Serves gRPC, the admin port and metrics and runs the Worker until `shutdown` and the drain that follows; the
    scheduler migrates its sequences meanwhile. With several CUDA ranks it ends the process instead of returning.
    `compiler`: the running kernel compilation, if any."""
    logs.configure(settings.name, settings.log_level, settings.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings.cluster_secret()  # an unusable secret file is reported before the model is loaded
    registry = CollectorRegistry()
    server = Server(settings.host, settings.grpc_port, (KV_TRANSFER, MEDIA_ROWS), tls=settings.tls)
    base.add_process_collectors(registry)
    page = base.MetricsPage(
        settings.host, settings.metrics_port, base.of(registry), settings.tls, share=settings.share_ports
    )
    worker = Worker(settings, server, settings.reachable(page.port), registry, shutdown, compiler=compiler)
    admin = AdminPort(settings, AdminService(WorkerAdministration(worker.status), shutdown), server.port)
    worker.admin_address = admin.address
    await server.start()
    await admin.start()
    try:
        await worker.run()
    finally:
        await admin.stop()
        await server.stop(grace_s=0.2)
        page.close()
    if settings.num_ranks > 1 and settings.device == "cuda":
        _exit_now(0)


class Worker:
    """Owns the engine, the scheduler session, and the status, metrics and health that report on both."""

    def __init__(
        self,
        settings: WorkerSettings,
        server: Server,
        metrics_address: str,
        registry: CollectorRegistry,
        shutdown: lifecycle.Shutdown,
        *,
        compiler: CompileProcess | None,
    ) -> None:
        self._compiler = compiler
        self._settings = settings
        self._server = server
        self._metrics_address = metrics_address
        self._shutdown = shutdown
        self._address = settings.reachable(server.port)
        self.admin_address = ""
        self._announced = False
        self._metrics = WorkerMetrics(registry)
        door = HandshakeAcceptor(settings.cluster_secret(), settings.title)
        door.address = self._address
        self._pages = PageService(door, self._metrics)
        self._rows = RowsService(door)
        kv_transfer_pb2_grpc.add_KVTransferServiceServicer_to_server(self._pages, server.methods)
        media_rows_pb2_grpc.add_MediaRowsServiceServicer_to_server(self._rows, server.methods)
        self._progress = Progress()
        self.status = WorkerStatus(settings.name, self._address, shutdown, self._progress)
        registry.register(StatusCollector(self.status.read))
        registry.register(ExpertLoadCollector(self.status.expert_load))
        registry.register(EncoderCacheCollector(self.status.encoder_cache))

    async def run(self) -> None:
        """Builds the engine and its ranks, attaches to a scheduler and executes its plans until a drain has finished.
        Raises QuireError when this worker cannot start or continue; a failed rank ends the process at once."""
        settings = self._settings
        grammars = CompilePool(lambda: open_grammars(settings), self._metrics)
        if settings.role != ENCODE:
            grammars.open_backend_early()
        ranks = start_ranks(settings)
        placement = ranks.placements[0] if ranks else SINGLE_RANK
        engine = Engine(
            lambda: build_replica(
                settings, grammars, self._compiler, placement, disk_observer=self._metrics.disk, progress=self._progress
            ),
            self._metrics,
            grammars=grammars,
            synchronous=settings.device == "cpu",
            ranks=ranks,
            adapters=adapter_reader(settings),
            staged=settings.pipeline_parallel_size > 1,
        )
        watch = run_restarting("the watch over ranks", lambda: _watch_ranks(engine))
        try:
            await lifecycle.run_until_first(watch, engine.died, self._serve(engine))
        except RankFailure as failure:
            _exit_now(lifecycle.EXIT_FAILED, failure.message)
        finally:
            if engine.fetcher is not None:
                await engine.fetcher.close()
            if engine.media is not None:
                await engine.media.close()
            if not await engine.stop(settings.drain_timeout_s):
                log.warning("exiting during a step", waited_s=settings.drain_timeout_s)

    async def _serve(self, engine: Engine) -> None:
        """Waits until the engine has built the replica, computing the digest of the weights meanwhile, then runs
        attached; returns early if shutdown is requested first."""
        digest = await asyncio.to_thread(weight_samples.weights_digest_of, self._settings)  # concurrently with loading
        await lifecycle.run_until_first(engine.started, self._shutdown.wait())
        if not self._shutdown.requested:
            await self._run_attached(engine, engine.started.result(), digest)

    async def _run_attached(self, engine: Engine, replica: Replica, weights_digest: bytes) -> None:
        """Publishes the built replica in status and metrics, starts serving KV pages, then runs the scheduler session
        with the health and liveness reports until the session ends."""
        settings = self._settings
        self.status.set_engine(engine, replica.limits, settings)
        self._metrics.adapters_left_out.inc(len(damaged_adapter_names(settings, replica.adapters)))
        self._metrics.set_peak(peak_of(replica.device_name, settings.num_ranks))
        self._serve_kv_pages(engine, replica)
        self._exchange_media(engine, replica)
        numpy_buffers.preallocate()
        lifecycle.freeze_startup_objects()
        hello = _hello(settings, replica, self._address, weights_digest)
        spool = WeightSpool(2 * peft_folder.max_weight_bytes(Path(settings.model)), lambda: replica.orders.spooled)
        session = AttachmentLoop(settings, engine, hello, self, self._shutdown, spool=spool)
        attached = run_vital("the session with the scheduler", session.run(), may_end=lambda: self._shutdown.requested)
        liveness = Liveness()
        liveness.watch(engine.progress, COMMAND_TIMEOUT_S)
        await lifecycle.run_until_first(
            attached,
            run_restarting("health", lambda: self._report_health(engine)),
            run_restarting("liveness", lambda: liveness.run(self._server.set_alive)),
        )

    def _serve_kv_pages(self, engine: Engine, replica: Replica) -> None:
        """Starts serving and fetching KV pages, if other workers can use this worker's pages."""
        pages = replica.pages
        if isinstance(pages, NoPages):
            return
        port, num_blocks = PagePort(engine, pages), replica.limits.num_blocks
        piece_bytes = port.blocks_per_piece * port.page_bytes
        transport = GrpcTransport(Dialler.of(self._settings), piece_bytes, pinned=pages.wants_pinned, peers=pages.peers)
        self._pages.serve(port, num_blocks)
        engine.fetcher = Fetcher(port, transport, num_blocks, self._metrics)

    def _exchange_media(self, engine: Engine, replica: Replica) -> None:
        """Starts fetching media, and exchanging their rows with other workers, if the model has an encoder."""
        if not replica.media.capacity:
            return
        dialler, layout = Dialler.of(self._settings), replica.media.layout
        rows = GrpcRows(dialler, layout) if layout else NO_ROWS
        engine.use_media(GrpcPixels(dialler), most_items=int(self._settings.batch_invariant), rows=rows)
        if layout:
            self._rows.serve(RowPort(engine, layout))

    async def attached(self, welcome: pb.SchedulerWelcome) -> None:
        """Session callback: stores the welcome's epoch, sets gRPC health to serving and announces the worker on its
        first attachment."""
        self.status.epoch = welcome.epoch
        self._metrics.attached.inc()
        await self._server.set_serving(True)
        if not self._announced:
            self._announced = True
            lifecycle.announce_ready(
                "worker",
                self._settings.name,
                grpc=self._address,
                metrics=self._metrics_address,
                admin=self.admin_address,
            )

    def detached(self, *, broken: bool) -> None:
        """Session callback: clears the epoch, so that the next health report is "not serving". `broken`: counts the end
        as a broken session."""
        self.status.epoch = 0
        if broken:
            self._metrics.broken.inc()

    async def _report_health(self, engine: Engine) -> None:
        """Sets gRPC health every HEALTH_INTERVAL_S: serving in the states READY and DRAINING, not while STARTING or
        STALLED. Never returns."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._server.set_serving(self.status.state in (admin_pb2.STATE_READY, admin_pb2.STATE_DRAINING))


def _exit_now(status: int, reason: str = "") -> NoReturn:
    """Ends the process without cleanup. Destructors would wait forever for collectives, and for CUDA graphs with
    collectives, whose other ranks have ended."""
    logs.flush()
    if reason:
        logs.print_line(f"quire: {reason}", sys.stderr)
    os._exit(status)


async def _watch_ranks(engine: Engine) -> None:
    """Checks the other ranks every HEALTH_INTERVAL_S; a dead or stuck rank ends the engine. Never returns."""
    while True:
        await asyncio.sleep(HEALTH_INTERVAL_S)
        engine.check_ranks()


def _hello(settings: WorkerSettings, replica: Replica, address: str, weights_digest: bytes) -> pb.WorkerHello:
    """Returns the WorkerHello with the fields that stay the same for all attachments: base_hello() and what this
    replica's device, sampler, drafts, adapters, KV cache and weights can do."""
    message = hello.base_hello(settings, settings.name, address, replica.limits)
    message.MergeFrom(
        pb.WorkerHello(
            device=f"{settings.device} {replica.device_name}",
            role=settings.role,
            sampling=pb.SamplingSupport(
                max_logprobs=replica.vocab_size if settings.max_logprobs < 0 else settings.max_logprobs,
                logprobs_mode=settings.logprobs_mode,
                logits_processors=sorted(plugins.known(logits_processors.GROUP, {})),
                structured_output_backends=backend_selection.library_names(settings.structured_output_backend),
            ),
            parallelism=pb.Parallelism(
                num_ranks=settings.num_ranks,
                num_stages=settings.pipeline_parallel_size,
                num_contexts=settings.context_parallel_size,
            ),
            drafting=pb.Drafting(
                num_speculative_tokens=replica.speculation.num_speculative_tokens,
                fixed_length=replica.speculation.fixed_draft_length,
                constrained_only=replica.speculation.constrained_only,
            ),
            lora=pb.LoraAdapters(max_adapters=replica.adapters.max_adapters),
            kv_cache=pb.KVCache(
                num_host_blocks=replica.transfers.num_host_blocks,
                num_query_vectors=replica.num_query_vectors,
                num_disk_blocks=replica.transfers.num_disk_blocks,
                groups=kv_wire.to_proto(replica.limits.layout.groups),
            ),
            weights_state=pb.WeightsState(
                stages_beside_steps=replica.orders.stages_beside_steps, weights_digest=weights_digest
            ),
            kv_transfer=pb.KVTransferSource(
                address=address if replica.pages.block_bytes else "",
                layout=replica.pages.layout,
                block_bytes=replica.pages.block_bytes,
            ),
        )
    )
    if replica.media.capacity:
        message.encoder.capacity = replica.media.capacity
        message.encoder.modalities.extend(replica.media.modalities)
        message.encoder.whole_items = replica.media.whole_items
        message.encoder.layout = replica.media.layout
    return message
