"""Starts the ranks of a worker on this host and on others."""

from __future__ import annotations

import functools
import socket
import threading
from pathlib import Path
from typing import Any

from quire.services.worker.building.build import build_replica, open_grammars
from quire.services.worker.models.loading import weight_samples
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.grammars import FollowerGrammars
from quire.services.worker.ranks.hosts import node
from quire.services.worker.ranks.hosts.channel import HostHandshake
from quire.services.worker.ranks.hosts.interfaces import interface_of
from quire.services.worker.ranks.hosts.nodes import SINGLE_HOST, Nodes
from quire.services.worker.ranks.hosts.wire import Welcome
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.ranks.replica_ranks import ReplicaRanks
from quire.services.worker.structured.compile_pool import CompilePool
from quire.shared import logs
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.models import model_identity
from quire.shared.security.tls import server_context
from quire.shared.settings import Settings, WorkerSettings
from quire.shared.settings.base import is_secret
from quire.shared.version import VERSION

log = logs.logger("worker.node")

# Worker settings that are specific to a host.
HOST_SETTINGS = frozenset(
    {"model", "revision", "scheduler", "grpc_port", "metrics_port", "share_ports", "threads"}
    | {"node_rank", "master_addr", "master_port", "nnodes", "weights_folders"}
)


def start_ranks(settings: WorkerSettings) -> ReplicaRanks | None:
    """Starts the processes of this host's other ranks and opens the port for other hosts to join; None for a replica of
    one rank. Raises InvalidArgument for inconsistent settings."""
    check_nodes(settings)
    if settings.num_ranks == 1:
        return None
    return ReplicaRanks(
        settings.num_ranks,
        functools.partial(build_part, settings),
        stages=settings.pipeline_parallel_size,
        nodes=open_nodes(settings),
        contexts=settings.context_parallel_size,
    )


def build_part(settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    """Builds a rank's part of the replica, in the rank's process: configures its logs and opens its own grammar
    backend."""
    logs.configure(f"{settings.name} rank {placement.rank}", settings.log_level, settings.log_format)
    pool = CompilePool(lambda: open_grammars(settings))
    pool.open_backend_early()
    replica = build_replica(settings, pool, placement=placement)
    return RankReplica(
        replica,
        FollowerGrammars(pool),
        synchronous=settings.device == "cpu",
        in_first_stage=placement.rank < placement.width,
    )


def run_node(settings: WorkerSettings, stopping: threading.Event) -> None:
    """Runs this host's ranks for a rank 0 on another host, whose settings it uses, and dials again when they end, until
    `stopping` is set. Blocks. Raises QuireError for incompatible nodes."""
    check_nodes(settings)
    present = node.CurrentRun(stopping)
    while not stopping.is_set():
        number = settings.node_rank
        found = node.dial(settings.master_addr, settings.master_port, _handshake(settings), number, stopping)
        if found is None:
            return
        ranks = node.NodeRanks(*found, number, functools.partial(part_builder, settings))
        log.info("joined node 0", master=f"{settings.master_addr}:{settings.master_port}", node=number)
        log.warning("the ranks of this host have ended", reason=present.run(ranks))
        del ranks


def check_nodes(settings: WorkerSettings) -> None:
    """Raises InvalidArgument for inconsistent multi-node settings."""
    if settings.nnodes == 1 and settings.node_rank == 0:
        return
    reasons = {
        "node_rank": settings.node_rank >= settings.nnodes
        and f"must be less than nnodes, {settings.nnodes}; got {settings.node_rank}",
        "nnodes": settings.node_rank == 0
        and settings.num_ranks % settings.nnodes
        and f"must divide the number of ranks, {settings.num_ranks}; got {settings.nnodes}",
        "master_addr": not settings.master_addr and "must be set with nnodes above 1: the address of node 0",
        "tls": settings.node_rank == 0
        and settings.tls.dials
        and not settings.tls.serves
        and "cert and key are required on node 0, which the other nodes dial",
        "cluster_secret_file": not (settings.cluster_secret_file or settings.insecure)
        and "required with nnodes above 1; set it, or insecure on a private network",
    }
    for field, reason in reasons.items():
        if reason:
            raise InvalidArgument(f"{field}: {reason}", field=field)


def _handshake(settings: WorkerSettings) -> HostHandshake:
    """Returns address, secret and TLS with which nodes authenticate to each other; node 0 also gets its server
    certificate."""
    place, tls = f"{settings.master_addr}:{settings.master_port}", settings.tls
    serving = server_context(tls, "tls") if settings.node_rank == 0 and tls.serves else None
    return HostHandshake(settings.cluster_secret(), place, tls, serving)


def open_nodes(settings: WorkerSettings) -> Nodes:
    """Returns the hosts of the replica as rank 0 addresses them, SINGLE_HOST for one. Raises InvalidArgument if
    master_addr cannot be resolved."""
    if settings.nnodes == 1:
        return SINGLE_HOST
    try:
        address = socket.gethostbyname(settings.master_addr)
    except OSError as error:
        raise InvalidArgument(f"master_addr: {settings.master_addr}: {error.strerror}", field="master_addr") from None
    welcome = functools.partial(welcome_for, settings)
    interface = interface_of(address)
    return Nodes(
        settings.nnodes, address, settings.master_port, interface, handshake=_handshake(settings), welcome=welcome
    )


def welcome_for(settings: WorkerSettings, placement: RankPlacement) -> Welcome:
    """Returns what rank 0 sends to a host that joins: version, model, placement and the settings that all hosts
    share."""
    return Welcome(
        VERSION,
        _model(settings),
        placement.host,
        placement.port,
        placement.size,
        placement.stages,
        placement.contexts,
        placement.per_host,
        _shared(settings),
    )


def _shared(settings: WorkerSettings) -> dict[str, Any]:
    """Returns the worker settings that all hosts use, without secrets and settings of a single host."""
    own = WorkerSettings.model_fields.keys() - Settings.model_fields.keys() - HOST_SETTINGS
    names = {name for name in own if not is_secret(WorkerSettings.model_fields[name])}
    return settings.model_dump(mode="json", include=names)


def _model(settings: WorkerSettings) -> str:
    """Returns the identity of the model, which has to be the same on all hosts, whatever the folders are called."""
    identity = model_identity.identity(Path(settings.model), "model").SerializeToString(deterministic=True)
    return f"{identity.hex()} {weight_samples.weights_digest_of(settings).hex()}"


def part_builder(own: WorkerSettings, welcome: Welcome) -> functools.partial[RankReplica]:
    """Returns the builder of this host's ranks: with its own settings, overridden by those that rank 0 sent in
    `welcome`. Raises FailedPrecondition for another version, model or weights."""
    if welcome.version != VERSION:
        raise FailedPrecondition(f"node 0 runs Quire {welcome.version}, this node {VERSION}")
    settings = WorkerSettings(**{**own.model_dump(), **welcome.settings})
    theirs, ours = welcome.model.split(), _model(settings).split()
    if theirs != ours:
        what = "other weights of the same model" if theirs[:1] == ours[:1] else "another model"
        raise FailedPrecondition(f"model: node 0 serves {what} than what is in {own.model}", field="model")
    return functools.partial(build_part, settings)
