"""How all workers of a cluster are to be: with which weights, awake or asleep. And which of them are not."""

from __future__ import annotations

from collections.abc import Iterable

from quire.services.scheduler.replicas.replica import Replica
from quire.services.scheduler.values.weights import AT_START
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import model_pb2

log = logger("operations")

WEIGHTS, KV_CACHE = "weights", "kv_cache"
# Numbers of updates are the time of day, of a machine whose clock may be wrong by days: only what leaves no room for
# updates to come makes no sense.
MOST_UPDATE = 1 << 62
LONGEST_NAME = 4096
ALL = frozenset({WEIGHTS, KV_CACHE})


class TargetState:
    """Of several weights, those of the greatest update are wanted: an update that one worker has was decided on."""

    def __init__(self) -> None:
        self.weights = model_pb2.WeightsIdentity(version=AT_START)
        self.asleep: frozenset[str] = frozenset()
        self.sleep_level = 0
        self._is_sleep_set = False  # whether they are to sleep: by an operator, or by the first worker

    def on_worker_attached(self, replica: Replica, others: Iterable[Replica]) -> None:
        """A worker is there. A scheduler that has just started learns from it what is wanted; whoever is otherwise is
        outdated, which does not end what it runs."""
        if not self._is_sleep_set and replica.asleep:
            log.info("workers sleep", worker=replica.id, level=replica.sleep_level)
        if not self._is_sleep_set:
            self.set_sleep(replica.asleep, replica.sleep_level)
        if replica.weights.update > self.weights.update:
            log.info("the cluster's weights are a worker's", worker=replica.id, version=replica.weights.version)
            self.weights = replica.weights
            for other in others:
                self.update_outdated(other)
        else:
            self.update_outdated(replica)

    def set_sleep(self, asleep: frozenset[str], level: int) -> None:
        """What is to sleep. Workers that come are brought there, also the first one behind a start."""
        self.asleep, self.sleep_level = asleep, level if asleep else 0
        self._is_sleep_set = True

    def clear_sleep(self, tags: frozenset[str]) -> None:
        """These are to sleep no more. Behind a start nobody knows yet what does: then only all of it changes that."""
        if self._is_sleep_set or tags == ALL:
            self.set_sleep(self.asleep - tags, self.sleep_level)

    def adopt_if_newer(self, weights: model_pb2.WeightsIdentity, replicas: Iterable[Replica]) -> None:
        """Another scheduler has them: this one has missed the decision. Nothing happens for what is older, or makes no
        sense."""
        sizes = len(weights.version), len(weights.path)
        if not self.weights.update < weights.update <= MOST_UPDATE or max(sizes) > LONGEST_NAME:
            return
        log.info("the cluster's weights are another scheduler's", version=weights.version)
        self.weights = weights
        for replica in replicas:
            self.update_outdated(replica)

    def has_right_weights(self, replica: Replica) -> bool:
        return (replica.weights.update, replica.weights.version) == (self.weights.update, self.weights.version)

    def update_outdated(self, replica: Replica) -> None:
        """What it is with what is wanted. Weights that sleep are looked at when they are awake."""
        has_right_weights = WEIGHTS in self.asleep or self.has_right_weights(replica)
        replica.outdated = not has_right_weights or replica.asleep != self.asleep
        if replica.outdated:
            log.warning(
                "a worker is not as its cluster is to be, and gets no sequences until it is",
                worker=replica.id,
                version=replica.weights.version,
                wanted=self.weights.version,
                asleep=sorted(replica.asleep),
            )
            replica.became_outdated.set()
