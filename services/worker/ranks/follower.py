"""A rank that has no scheduler: takes commands from rank 0 and does them in their order."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from services.worker.ranks.wire import Command, Kind, Reply, fingerprint
from services.worker.replica import Replica
from shared.logs import logger
from shared.pb.worker.v1 import worker_pb2 as pb

log = logger("worker.ranks")


def run(link: Connection, rank: int, build: Callable[[int], Replica]) -> None:
    """A rank's process, from its start to its end: when rank 0 says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; rank 0 decides
    try:
        with torch.inference_mode():
            replica = build(rank)
            link.send_bytes(Reply(0, done=True).encode())
            follow(link, replica)
    except (EOFError, ConnectionError):
        log.warning("rank 0 is gone", rank=rank)
    except Exception as error:
        log.exception("the rank failed", rank=rank)
        link.send_bytes(Reply(0, done=False, text=f"{type(error).__name__}: {error}".encode()).encode())


def follow(link: Connection, replica: Replica) -> None:
    """Until it is told to stop. A command that fails is answered with its error: rank 0 decides what that means."""
    while (command := Command.decode(link.recv_bytes())).kind != Kind.STOP:
        try:
            text = _obey(replica, command)
        except Exception as error:
            reply = Reply(command.number, done=False, text=f"{type(error).__name__}: {error}".encode())
        else:
            reply = Reply(command.number, done=True, text=text)
        link.send_bytes(reply.encode())


def _obey(replica: Replica, command: Command) -> bytes:
    match command.kind:
        case Kind.REST:
            replica.rest()
        case Kind.FORGET_CACHE:
            replica.forget_cache()
        case Kind.PLAN:
            flight = replica.launch(pb.StepPlan.FromString(command.plan))
            replica.record(flight, flight.launch.wait())
            return fingerprint(flight.inputs)
    return b""
