"""Documents are placed on the worker of their query: the same one each time, and, if it is lost, on others without
moving further queries."""

from __future__ import annotations

import hashlib

from prometheus_client import CollectorRegistry

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.sequences.sequence import LateQuery, Sequence
from quire.services.scheduler.placement.placement import STEPS_BEHIND, Placement
from quire.services.scheduler.replicas.block_changes import BlockChanges
from quire.services.scheduler.replicas.replica import Replica
from quire.services.scheduler.values.payload import Payload
from quire.shared.columns import i32_bytes
from quire.shared.kv.kv_specs import NOTHING
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.scheduler.conftest import make_limits, make_sequence

METRICS = SchedulerMetrics(CollectorRegistry())
STEP = 100  # tokens


def replica(name: str, num_query_vectors: int = 1000) -> Replica:
    sizes = {"num_blocks": 2, "max_model_len": STEP, "max_num_batched_tokens": STEP}
    limits = make_limits(kv_specs=(NOTHING,), num_query_vectors=num_query_vectors, **sizes)
    return Replica(
        pb.WorkerHello(
            worker_id=name, model=model_pb2.ModelIdentity(vocab_size=100), limits=pb.StepLimits(max_num_seqs=8)
        ),
        1,
        Core(limits),
        send=lambda _: None,
        deliver=lambda _: None,
        clock=lambda: 0.0,
        call_soon=lambda _: None,
        call_later=lambda _, call: None,
        metrics=METRICS,
        changes=BlockChanges(),
    )


def document(word: int, key: int = 1) -> Sequence:
    tokens = i32_bytes([word] * 4)
    query = LateQuery(hashlib.sha256(tokens).digest(), tokens, Payload(b""))
    return make_sequence(key, [5] * 50, 0, samples_nothing=True, query=query, payload=Payload(b""))


def homes(replicas: list[Replica]) -> list[str]:
    placement = Placement("prefix", lambda *_: 0)
    found = [placement.place(document(word), replicas) for word in range(60)]
    return [home.id for home in found if home is not None]


def test_attaching_or_losing_a_worker_moves_only_its_queries() -> None:
    replicas = [replica(f"w{number}") for number in range(4)]
    before = homes(replicas)
    assert {*before} == {"w0", "w1", "w2", "w3"}
    assert homes(replicas[::-1]) == before
    after = homes(replicas[1:])
    assert all(now != "w0" if was == "w0" else now == was for was, now in zip(before, after, strict=True))
    replicas[0].leaving = True
    assert homes(replicas) == after
    assert homes([replica("w0"), *replicas[1:]]) == before


def test_documents_avoid_a_much_more_loaded_worker() -> None:
    replicas = [replica("w0"), replica("w1")]
    before = homes(replicas)
    for key in range(STEPS_BEHIND * STEP // 50):
        replicas[0].core.add(make_sequence(100 + key, [5] * 50, 0, samples_nothing=True, payload=Payload(b"")))
    assert homes(replicas) == before
    replicas[0].core.add(make_sequence(200, [5], 0, samples_nothing=True, payload=Payload(b"")))
    assert {*homes(replicas)} == {"w1"}


def test_workers_without_capacity_for_the_query_get_no_documents() -> None:
    assert {*homes([replica("w0", 0), replica("w1", 3), replica("w2", 4)])} == {"w2"}
    assert homes([replica("w0", 0)]) == []


def test_pooling_prompts_are_distributed_over_workers() -> None:
    """The model only computes vectors."""
    replicas, placement = [replica("w0"), replica("w1")], Placement("prefix", lambda *_: 0)
    found = []
    for key in range(4):
        sequence = make_sequence(key, [5] * 50, 0, samples_nothing=True, payload=Payload(b""))
        home = placement.place(sequence, replicas)
        assert home is not None
        home.core.add(sequence)
        found.append(home.id)
    assert sorted(found) == ["w0", "w0", "w1", "w1"]
