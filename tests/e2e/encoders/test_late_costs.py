"""Processor time and traffic of comparing documents with a query, compared with sending vectors. `pytest -s` prints the
figures."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from tests.e2e.encoders import encoder_folder

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for bytes of sockets")]

SIZE, QUERY_LENGTH, DOCUMENT_LENGTH = 128, 32, 180
NUM_DOCUMENTS, NUM_CALLS = 100, 10
QUERY = "the sum of two and two"
DOCUMENTS = [" ".join([f"the sum of {number} and two"] * 40) for number in range(NUM_DOCUMENTS)]
SERVICES = ("frontend-0", "scheduler-0", "worker-0")
PIDFD_OPEN, PIDFD_GETFD = 434, 438  # system calls
BYTES_ACKED_AND_RECEIVED = 120  # of struct tcp_info
TICKS = os.sysconf("SC_CLK_TCK")


def carried(descriptor: int) -> int:
    """Bytes of a connection; 0 if it is not TCP."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        try:
            found = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:
            return 0
    return sum(struct.unpack_from("<2Q", found, BYTES_ACKED_AND_RECEIVED))


def num_bytes(pid: int) -> int:
    """Bytes that the open TCP connections of a process have carried in both directions."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    process = call(PIDFD_OPEN, pid, 0)
    total = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        copy = call(PIDFD_GETFD, process, int(name), 0)
        if copy < 0:
            continue
        try:
            if stat.S_ISSOCK(os.fstat(copy).st_mode):
                total += carried(copy)
        finally:
            os.close(copy)
    os.close(process)
    return total


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / TICKS


def costs(cluster: Cluster, run: Callable[[], object]) -> dict[str, float]:
    """Costs of one document: processor milliseconds in each service, and bytes that the worker exchanged."""
    pids = {name: pid for name in SERVICES if (pid := cluster.process(name).pid)}
    run()  # all is there
    before, carried = {name: cpu_s(pid) for name, pid in pids.items()}, num_bytes(pids["worker-0"])
    for _ in range(NUM_CALLS):
        run()
    num = NUM_CALLS * NUM_DOCUMENTS
    found = {name: 1000 * (cpu_s(pid) - before[name]) / num for name, pid in pids.items()}
    return {**found, "bytes": (num_bytes(pids["worker-0"]) - carried) / num}


def test_scores_are_cheaper_than_their_vectors(tmp_path: Path) -> None:
    encoder_folder.write_colbert(tmp_path, SIZE, QUERY_LENGTH, DOCUMENT_LENGTH, max_position_embeddings=256)
    settings = {"worker": {"threads": 1, "dtype": "float32"}}
    options = ClusterOptions(model=str(tmp_path), http_port=0, grpc_port=0, settings=settings)
    with Cluster(options) as cluster, Client(cluster.grpc_address) as client:
        scored = costs(cluster, lambda: client.score(QUERY, DOCUMENTS))
        told = costs(cluster, lambda: client.encode(DOCUMENTS, pooler="all", prompt_name="document"))
    for name, found in (("scores", scored), ("vectors", told)):
        print(f"\n{name}, a document:", ", ".join(f"{key} {value:.3f}" for key, value in found.items()))
    assert told["bytes"] > DOCUMENT_LENGTH * SIZE * 3, "a vector for each token"
    assert scored["bytes"] < 2500, "its tokens and the query's, and one number"
    assert sum(scored[name] for name in SERVICES[:2]) < sum(told[name] for name in SERVICES[:2])
