"""Ranks on several hosts, as two addresses of this machine or two network namespaces; a lost host ends the replica."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

from quire.services.worker.building.rank_processes import start
from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.ranks import placement
from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.hosts import wire
from quire.services.worker.ranks.hosts.channel import Channel, HostHandshake
from quire.services.worker.ranks.replica_ranks import ReplicaRanks
from quire.shared.errors import FailedPrecondition, InvalidArgument, Unauthenticated, Unavailable
from quire.shared.security.secret_file import SecretFile, write
from quire.shared.security.tls import server_context
from quire.shared.security.tls_files import Tls
from quire.shared.settings import WorkerSettings
from tests.ports import quiet_port
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_weights import perturbed
from tests.services.worker.ranks.test_context import long_steps
from tests.services.worker.ranks.test_pipeline import SLOTS, by_turns, prefill
from tests.services.worker.ranks.test_sharding import RankedRig
from tests.services.worker.rig import Rig
from tests.waiting import until

Make = Callable[[str], Checkpoint]
MASTER = "127.0.0.2"
TWO = {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "h"}


@pytest.fixture
def secret(tmp_path: Path) -> str:
    write(tmp_path / "secret", "a" * 64)
    return str(tmp_path / "secret")


def node_command(folder: Path, **settings: Any) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "quire", "worker", f"--model={folder}", "--node-rank=1", *flags]


@contextmanager
def two_nodes(folder: Path, secret: str, **settings: Any) -> Iterator[tuple[RankedRig, subprocess.Popen[bytes]]]:
    """Runs rank 0 in this process and the other node in a separate one, which is given only rank 0's address."""
    where = {"nnodes": 2, "master_addr": MASTER, "master_port": quiet_port(MASTER), "cluster_secret_file": secret}
    worker = Rig.settings(folder, **settings, **where)
    node = subprocess.Popen(node_command(folder, **where))
    group = ReplicaRanks(
        worker.num_ranks,
        functools.partial(start.build_part, worker),
        worker.pipeline_parallel_size,
        start.open_nodes(worker),
        contexts=worker.context_parallel_size,
    )
    rig = None
    try:
        rig = RankedRig(folder, group, record_logits=False, **settings, **where)  # which others would take part in
        group.wait_ready()
        yield rig, node
    finally:
        group.stop(10.0)
        if rig is not None:
            rig.forget()
        placement.leave()
        assert not placement.INTERFACES & os.environ.keys(), "the interface is forgotten"
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) is not None


def children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            status = (folder / "stat").read_text()
            is_rank = b"spawn_main" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if is_rank and int(status.rpartition(")")[2].split()[1]) == parent:
            found.append(int(folder.name))
    return found


def await_that(condition: Callable[[], bool]) -> None:
    until(condition, what="it does not come to that")


@pytest.mark.slow
def test_a_rank_on_another_host_has_its_share_of_long_prompts(checkpoint: Make, secret: str) -> None:
    folder, room = checkpoint("llama").folder, {"num_blocks": 512}
    whole = Rig(folder, **room)
    long_steps(whole)
    with two_nodes(folder, secret, context_parallel_size=2, **room) as (rig, _):
        long_steps(rig)
        assert [rig.tokens(one) for one in SLOTS] == [whole.tokens(one) for one in SLOTS]


@pytest.mark.slow
def test_stage_on_another_host_matches_one_process_and_ends_with_its_replica(checkpoint: Make, secret: str) -> None:
    made, whole = checkpoint("llama"), Rig(checkpoint("llama").folder)
    prefill(whole)
    for _ in range(4):
        whole.step()
    with two_nodes(made.folder, secret, pipeline_parallel_size=2) as (rig, node):
        prefill(rig)
        by_turns(rig, 8, 2)
        assert [rig.tokens(one) for one in SLOTS] == [whole.tokens(one) for one in SLOTS]
        rig.group.check()
        ranks = children(node.pid)
        assert ranks
        node.kill()

        def is_noticed() -> bool:
            try:
                rig.group.check()
            except RankFailure as failure:
                return "rank 1 on node 1 has disconnected" in failure.message
            return False

        await_that(is_noticed)
        await_that(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
        with pytest.raises(RankFailure, match="node 1"), torch.inference_mode():
            rig.group.collect(rig.group.broadcast(decode_plan(rig.scheduler.plan())), None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_of_a_host_end_with_rank_0_and_the_host_waits_for_the_next_one(checkpoint: Make, secret: str) -> None:
    folder = checkpoint("llama").folder
    with two_nodes(folder, secret, tensor_parallel_size=2) as (rig, node):
        prefill(rig)
        ranks = children(node.pid)
        assert ranks
        (remote,) = rig.group.nodes.ranks
        assert remote.node.channel is not None
        remote.node.channel.close()  # as when the host of rank 0 is gone
        await_that(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
        assert node.poll() is None


@contextmanager
def linked() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection, the dialling side first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = Channel(socket.create_connection(server.getsockname()))
        accepted = Channel(server.accept()[0])
    for channel in (dialled, accepted):
        channel.set_timeout(60)
    yield dialled, accepted
    dialled.close()
    accepted.close()


def meet_on(dialled: Channel, accepted: Channel, rank_0: HostHandshake, other: HostHandshake) -> int | Exception:
    """Runs both sides of a handshake; returns the node number that rank 0 received, or its error."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(rank_0.authenticate(accepted))
        except (Unauthenticated, Unavailable, OSError) as error:
            found.append(error)
            accepted.close()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        other.connect(dialled, 3)
    except (Unauthenticated, Unavailable, OSError) as error:
        found.append(error)
        dialled.close()
    asking.join(60)
    return found[0]


def meet(rank_0: HostHandshake, other: HostHandshake) -> int | Exception:
    with linked() as (dialled, accepted):
        return meet_on(dialled, accepted, rank_0, other)


def test_hosts_prove_the_clusters_secret_to_each_other(tmp_path: Path, secret: str) -> None:
    write(tmp_path / "other", "b" * 64)
    known = HostHandshake(SecretFile(secret, "cluster_secret_file"), "h:1")
    assert meet(known, known) == 3
    for wrong in (HostHandshake(SecretFile(str(tmp_path / "other"), "s"), "h:1"), HostHandshake(None, "h:1")):
        assert isinstance(meet(known, wrong), Unauthenticated)
    elsewhere = HostHandshake(SecretFile(secret, "cluster_secret_file"), "h:2")  # another address
    assert isinstance(meet(known, elsewhere), Unauthenticated)


@dataclass(frozen=True)
class Certified:
    """Certificates that an authority issues to services."""

    folder: Path
    authority: trustme.CA

    def files(self, role: str, *names: str) -> Tls:
        issued = self.authority.issue_cert(*(names or ("127.0.0.1",)))
        paths = {kind: str(self.folder / f"{role}.{kind}") for kind in ("cert", "key", "ca")}
        Path(paths["cert"]).write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(paths["key"])
        self.authority.cert_pem.write_to_path(paths["ca"])
        return Tls(**paths, clients="require")

    def rank_0(self, secret: SecretFile) -> HostHandshake:
        tls = self.files("rank-0")
        return HostHandshake(secret, "127.0.0.1:1", tls, server_context(tls, "tls"))


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    return Certified(tmp_path, trustme.CA())


def test_frames_go_through_tls_both_ways_at_once(certified: Certified, secret: str) -> None:
    known = SecretFile(secret, "cluster_secret_file")
    frames = [os.urandom(size) for size in (0, 1, 1 << 16, 3_000_000, 7)]
    with linked() as (dialled, accepted):
        other = HostHandshake(known, "127.0.0.1:1", certified.files("node"))
        assert meet_on(dialled, accepted, certified.rank_0(known), other) == 3
        senders = [
            threading.Thread(target=lambda to=channel: [to.send(frame) for frame in frames], daemon=True)
            for channel in (dialled, accepted)
        ]
        received: dict[str, list[bytes]] = {}

        def receive(name: str, channel: Channel) -> None:
            received[name] = [channel.receive() for _ in frames]

        readers = [threading.Thread(target=receive, args=pair) for pair in (("a", dialled), ("b", accepted))]
        for thread in (*senders, *readers):
            thread.start()
        for thread in (*senders, *readers):
            thread.join(60)
        assert received == {"a": frames, "b": frames}
        dialled.close()
        with pytest.raises((Unavailable, OSError)):
            accepted.receive()


def test_hosts_without_fitting_certificates_do_not_meet(certified: Certified, tmp_path: Path, secret: str) -> None:
    known = SecretFile(secret, "cluster_secret_file")
    stranger = Certified(tmp_path / "strange", trustme.CA())
    stranger.folder.mkdir()
    theirs, ours = stranger.files("node"), certified.files("node")
    nobody = Tls(ca=ours.ca)
    named_otherwise = ours.model_copy(update={"server_name": "rank-1.example"})
    for wrong in (theirs, nobody, named_otherwise):
        assert isinstance(meet(certified.rank_0(known), HostHandshake(known, "127.0.0.1:1", wrong)), OSError)
    plain = HostHandshake(known, "127.0.0.1:1")
    assert isinstance(meet(plain, HostHandshake(known, "127.0.0.1:1", ours)), (Unauthenticated, Unavailable, OSError))


def test_host_without_tls_gets_a_helpful_error(secret: str) -> None:
    known = SecretFile(secret, "cluster_secret_file")
    with linked() as (dialled, _):
        dialled.set_timeout(0.05)  # no greeting: rank 0 waits for a TLS handshake
        with pytest.raises(Unavailable, match="is `tls` set there and not here"):
            HostHandshake(known, "127.0.0.1:1").connect(dialled, 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {**TWO, "insecure": True, "tls": {"ca": "ca.pem"}},
            "tls: cert and key are required on node 0",
        ),
        ({"nnodes": 2, "node_rank": 2}, "node_rank: must be less than nnodes, 2"),
        ({"nnodes": 2, "master_addr": "h", "insecure": True}, "nnodes: must divide the number of ranks, 1"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "insecure": True}, "master_addr: must be set with nnodes above 1"),
        (TWO, "cluster_secret_file: required with nnodes above 1"),
        ({"node_rank": 1}, "node_rank: must be less than nnodes, 1"),
    ],
)
def test_invalid_nodes_are_refused_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        start.check_nodes(WorkerSettings(model="m", **settings))


def num_mapped() -> int:
    """Number of mappings of the ring buffer's memory in this process."""
    return sum("quire-ranks" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.slow
def test_a_host_that_has_seen_many_replicas_keeps_nothing_of_them(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """Replicas whose ranks fail at once."""
    lives, stopping, seen = 2, threading.Event(), []
    before, open_before = set(threading.enumerate()), descriptors()
    masters: list[threading.Thread] = []
    settings = WorkerSettings(model="m", node_rank=1, **TWO, cluster_secret_file=secret)
    welcome = start.Welcome("v", "m", "127.0.0.1", 1, 2, 1, 1, 1, {})
    with ExitStack() as links:

        def dial(*_: object) -> tuple[Channel, start.Welcome] | None:
            for master in masters:
                master.join()
            new = len(descriptors() - open_before), len(set(threading.enumerate()) - before)
            seen.append((num_mapped(), *new))
            if len(seen) > lives:
                return None
            dialled, accepted = links.enter_context(linked())
            masters.append(threading.Thread(target=_gone_when_told, args=(accepted,), daemon=True))
            masters[-1].start()
            return dialled, welcome

        monkeypatch.setattr(start.node, "dial", dial)
        monkeypatch.setattr(start, "part_builder", lambda *_: len)  # what no rank can be made with
        start.run_node(settings, stopping)
    stopping.set()
    mapped, opened, threads = zip(*seen, strict=True)
    assert mapped == (0,) * (lives + 1)
    assert len(set(opened[1:])) == 1, "the first has begun what watches over processes"
    assert len(set(threads)) == 1


def descriptors() -> set[tuple[int, str]]:
    """File descriptors of this process and their targets."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it was for listing them
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def _gone_when_told(channel: Channel) -> None:
    """A rank 0 that ends when it receives a failure."""
    with suppress(OSError, Unavailable):
        while not channel.receive().startswith(wire.FAILURE):
            pass
    channel.close()


def test_a_node_with_other_weights_is_refused(checkpoint: Make, tmp_path: Path) -> None:
    ours = checkpoint("llama").folder
    theirs = perturbed(ours, tmp_path / "theirs")
    welcome = start.welcome_for(Rig.settings(ours, tensor_parallel_size=2), placement.RankPlacement(0, 2))
    with pytest.raises(FailedPrecondition, match="node 0 serves other weights of the same model"):
        start.part_builder(WorkerSettings(model=str(theirs), node_rank=1, nnodes=2), welcome)


def test_a_node_with_another_model_is_refused(checkpoint: Make) -> None:
    ours, theirs = checkpoint("llama").folder, checkpoint("gpt2").folder
    welcome = start.welcome_for(Rig.settings(ours, tensor_parallel_size=2), placement.RankPlacement(0, 2))
    with pytest.raises(Exception, match="node 0 serves another model"):
        start.part_builder(WorkerSettings(model=str(theirs), node_rank=1, nnodes=2), welcome)
    build = start.part_builder(WorkerSettings(model=str(ours), node_rank=1, nnodes=2, threads=1), welcome)
    assert (build.args[0].block_size, build.args[0].tensor_parallel_size) == (4, 2)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a virtual cable."""
    names = (f"quire-a{os.getpid()}", f"quire-b{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "qa", "netns", names[0], "type", "veth", "peer", "name", "qb", "netns", names[1])
        for name, link, address in ((names[0], "qa", "10.77.0.1/24"), (names[1], "qb", "10.77.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_two_network_namespaces_are_two_hosts(
    checkpoint: Make, secret: str, namespaces: tuple[str, str], certified: Certified
) -> None:
    tls = ",".join(
        f"{name}={value}" for name, value in certified.files("rank", "10.77.0.1").model_dump().items() if value
    )
    folder = checkpoint("llama").folder
    where = {"nnodes": 2, "master_addr": "10.77.0.1", "master_port": 29500, "cluster_secret_file": secret}
    node = subprocess.Popen(["ip", "netns", "exec", namespaces[1], *node_command(folder, **where, tls=tls)])
    try:
        script = [sys.executable, "-m", "tests.services.worker.ranks.rank_0_host", str(folder), secret, tls]
        said = subprocess.run(
            ["ip", "netns", "exec", namespaces[0], *script], check=True, stdout=subprocess.PIPE, text=True, timeout=240
        ).stdout
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait(60)
    whole = Rig(folder)
    prefill(whole)
    for _ in range(4):
        whole.step()
    assert said.splitlines()[-1] == str([whole.tokens(one) for one in SLOTS])
