"""Which weights a cluster is to compute with, and which of its workers have others."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.replicas.orders import AT_START
from services.scheduler.replicas.replica import Replica
from shared.logs import logger
from shared.pb.common.v1 import model_pb2

log = logger("weights")


class ClusterWeights:
    """Of several, those of the greatest update are wanted: an update that one worker has is one that was decided on."""

    def __init__(self) -> None:
        self.wanted = model_pb2.WeightsIdentity(version=AT_START)

    def attached(self, replica: Replica, others: Iterable[Replica]) -> None:
        """A worker is there. A scheduler that has just started learns from it what is wanted; whoever has less falls
        behind, which does not end what it runs."""
        if replica.weights.update > self.wanted.update:
            log.info("the cluster's weights are a worker's", worker=replica.id, version=replica.weights.version)
            self.decide(replica.weights, others)
        else:
            self.compare(replica)

    def decide(self, wanted: model_pb2.WeightsIdentity, replicas: Iterable[Replica]) -> None:
        """These from now on."""
        self.wanted = wanted
        for replica in replicas:
            self.compare(replica)

    def compare(self, replica: Replica) -> None:
        """What it has with what is wanted."""
        has, wanted = replica.weights, self.wanted
        replica.outdated = (has.update, has.version) != (wanted.update, wanted.version)
        if replica.outdated:
            log.warning(
                "a worker has other weights than its cluster, and gets no sequences until it has those",
                worker=replica.id,
                version=replica.weights.version,
                wanted=self.wanted.version,
            )
            replica.fell_behind.set()
